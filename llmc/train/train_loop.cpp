#include "llmc/train/train_loop.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>

#include "llmc/base/gpu.h"
#include "llmc/base/version.h"
#include "llmc/checkpoint/huggingface/hf_config.h"
#include "llmc/checkpoint/load.h"
#include "llmc/config/environment.h"
#include "llmc/config/schedule.h"
#include "llmc/data/shard_meta.h"
#include "llmc/fault/shutdown.h"
#include "llmc/fault/watchdog.h"
#include "llmc/parallel/rank_preflight.h"
#include "llmc/train/run/rank_consistency.h"
#include "llmc/train/run/run_summary.h"

TrainLoop::TrainLoop(ParsedConfig parsed, const Fp8Plan& fp8_plan, std::string command, Predict predict, Comm& comm)
    : parsed_(std::move(parsed)), command_(std::move(command)), predict_(std::move(predict)), comm_(comm),
      table_(make_param_table(config_)), fp8_plan_(fp8_plan),
      device_(config_, table_, fp8_plan_, comm) {}

void TrainLoop::run() {
    try {
        start();
        while (evaluations_->data_error().empty() && progress_.step < config_.train_iters && train_step()) {}
        finish();
    } catch (const Error& failure) {
        if (log_) log_->failed(failure);
        throw;
    }
}

// ---- start ----

void TrainLoop::start() {
    start_.done("launch");
    if (const std::string line = environment_difference(comm_, own_environment()); !line.empty())
        parsed_.notes.push_back(line);
    require_same_program(comm_);
    const std::string place = comm_.gather(comm_.root() ? log_place_error(config_.log_file, config_.save) : "")[0];
    REQUIRE(place.empty(), "%s", place.c_str());
    open_data();
    save_folder_.emplace(config_, comm_, parsed_.notes);
    start_.done("data");
    open_device();
    start_.done("device");
    start_state();
    start_.done("weights");
    open_log();
    evaluations_->warm_up(evaluation_place(), resumed_);
    if (resumed_ && evaluations_->data_error().empty())
        progress_.missed = evaluations_->make_up(evaluation_place(), progress_.missed);
    start_.done("evaluation");
}

void TrainLoop::open_data() {
    data_.open(config_, parsed_.notes);
    evaluations_.emplace(config_, comm_, *data_.train, data_.valid ? &*data_.valid : nullptr);
    require_same(comm_, {{"set of options", config_to_json(config_)},
                         {"training data", data_.train->fingerprint_json()},
                         {"validation data", data_.valid ? data_.valid->fingerprint_json() : ""},
                         {"HellaSwag file or prompt", evaluations_->fingerprint()}});
}

void TrainLoop::open_device() {
    device_.open(parsed_.notes);
    device_.prepare(parsed_.notes);
    checkpoints_.emplace(config_, table_, *data_.train, comm_, device_.ctx, *device_.trainer, save_folder_->lock());
}

void TrainLoop::start_state() {
    post_phase(Phase::kLoad);
    if (config_.resume.empty()) checkpoints_->begin();
    else if (resume()) return;
    begin_at(0);
    Trainer& trainer = *device_.trainer;
    trainer.initialise(device_.ctx);
    if (config_.load.empty()) return;
    load_hf_weights(config_.load, config_.shape, table_, trainer.state_access(device_.ctx), comm_);
    trainer.weights_from_masters(device_.ctx, true);
    trainer.start_ema(device_.ctx);
    const std::string dropout = dropout_note(config_.load);
    if (!dropout.empty()) parsed_.notes.push_back(dropout);
}

// Returns false if --resume auto finds nothing to resume.
bool TrainLoop::resume() {
    std::optional<Progress> found = checkpoints_->resume(parsed_.fp8_given, parsed_.notes,
                                                           [this](int64_t step) { begin_at(step); });
    if (!found) return false;
    progress_ = std::move(*found);
    progress_.missed = evaluations_->possible(progress_.missed);
    resumed_ = true;
    if (progress_.step > config_.train_iters)
        parsed_.notes.push_back(strf("nothing is left to train: the checkpoint is of step %lld, --train-iters is %lld",
                                     ll(progress_.step), ll(config_.train_iters)));
    return true;
}

// Makes the trainer of a run that has done `step` steps, in the precision of the last of them; at a switch the next
// step makes another. One of the precision that the run comes to is made and tried before, so that the switch finds
// kernels loaded, matmul algorithms chosen and host memory allocated.
void TrainLoop::begin_at(int64_t step) {
    const Fp8Steps fp8 = fp8_steps(config_);
    const bool bf16 = !fp8.has(std::max<int64_t>(0, step - 1));
    if (fp8.switches_after(step)) {
        device_.make_trainer(!bf16);
        warm_up_other();
    } else if (!bf16) {
        return;
    }
    device_.make_trainer(bf16);
}

// Any weights and the first batch will do.
void TrainLoop::warm_up_other() {
    Ctx& ctx = device_.ctx;
    device_.trainer->initialise(ctx);
    Staging::Buffer& batch = device_.staging->buffer(0);
    const std::string error = first_error(comm_, reading_error([&] {
        device_.staging->read(*data_.train, 0, 0, batch_size_at(config_, 0));
    }));
    REQUIRE(error.empty(), "%s", error.c_str());
    device_.staging->set_inputs(batch, std::max<int64_t>(1, batch.staged.counted_tokens), 0);
    device_.trainer->warm_up(ctx, batch.staged);
    RunLog none("", false, 0);   // a resumed run logs nothing
    evaluations_->warm_up({.ctx = ctx, .evaluator = device_.trainer->evaluator(),
                           .bf16 = device_.trainer->bf16_evaluation(), .staging = batch.staged, .log = none,
                           .step = 0}, true);
    post_phase(Phase::kLoad);
}

PredictedStep TrainLoop::predicted_step(bool bf16) const {
    return bf16 ? predict_(in_bf16(config_), device_.plan.bf16[0], device_.info)
                : predict_(config_, device_.plan, device_.info);
}

void TrainLoop::open_log() {
    const MemoryPlan& plan = device_.plan;
    PredictedStep predicted = predicted_step(device_.bf16());
    const double ms = predicted_step(false).ms, bf16_ms = switches_precision(config_) ? predicted_step(true).ms : 0;
    const std::string summary =
        summary_text({config_, parsed_.changed, table_, fp8_plan_, plan, device_.info, comm_.world(), *data_.train,
                      data_.valid ? &*data_.valid : nullptr, ms, all_steps_ms(config_, ms, bf16_ms)});
    std::printf("%s", summary.c_str());
    const std::string path = comm_.root() ? config_.log_file : "";
    const bool other = resumed_ && (config_.resume != "auto" || !log_saves_in(path, config_.save));
    log_ = std::make_unique<RunLog>(path, resumed_, progress_.step, progress_.missed, other);
    log_->header(header());
    std::vector<std::string>& notes = parsed_.notes;
    notes.push_back(attention_note());
    if (config_.shape.has_experts())
        notes.push_back(std::string("experts: ") + device::experts_kernel(device_.ctx, config_.dtype));
    if (!evaluations_->tokenizer_note().empty()) notes.push_back(evaluations_->tokenizer_note());
    if (!log_->earlier_log().empty()) notes.push_back("the earlier log is kept: " + log_->earlier_log());
    if (hf_class(config_.shape) == HfClass::kOwn && !config_.save.empty())
        notes.push_back("no transformers class has this shape: checkpoints bring a modeling_llmfp8.py");
    if (!config_.save.empty() && !facts_of(data_.train->shards()).chat_template.empty())
        notes.push_back("checkpoints have the chat template of the training data");
    notes.insert(notes.end(), parsed_.no_effect.begin(), parsed_.no_effect.end());
    write_notes(summary);
    reporter_.emplace(config_, table_, fp8_plan_, comm_, device_, *log_, *checkpoints_, std::move(predicted),
                      progress_);
}

nlohmann::ordered_json TrainLoop::header() const {
    using OrderedJson = nlohmann::ordered_json;
    const DeviceInfo& d = device_.info;
    const MemoryPlan& plan = device_.plan;
    const OrderedJson device = {
        {"name", d.name}, {"sm", d.sm}, {"sm_count", d.sm_count}, {"memory_bytes", d.memory_bytes},
        {"driver", d.driver}, {"toolkit", d.toolkit}, {"matmul_library", d.matmul_library},
        {"peak_flops_bf16", peak_flops(d.name, Dtype::kBf16)}, {"peak_flops_fp8", peak_flops(d.name, Dtype::kE4m3)},
        {"peak_flops_fp32", peak_flops(d.name, Dtype::kFp32)}};
    OrderedJson communication = OrderedJson::array(), purposes;
    for (const PlannedCollective& c : plan.collectives)
        communication.push_back({{"collective", c.name}, {"dtype", dtype_name(c.dtype)}, {"ranks", c.ranks},
                                 {"heads", c.exchange && !c.tokens}, {"calls", c.calls}, {"bytes", c.bytes},
                                 {"sent_bytes", c.sent_bytes}});
    for (int i = 0; i < kPurposes; i++)
        purposes[purpose_name(static_cast<Purpose>(i))] = plan.purpose_bytes[static_cast<size_t>(i)];
    // What is in the files that these options name.
    OrderedJson identity = {{"train-data", OrderedJson::parse(data_.train->identity_json())}};
    if (data_.valid) identity["valid-data"] = OrderedJson::parse(data_.valid->identity_json());
    if (comm_.root() && !config_.load.empty() && !resumed_)
        identity["load"] = {{"fingerprint", hf_weights_fingerprint(config_.load)}};
    return {{"command", command_}, {"commit", kBuildCommit}, {"device", device}, {"world", comm_.world().ranks},
            {"synthetic_data", config_.synthetic_data}, {"identity", identity}, {"communication", communication},
            {"params", table_.param_elems}, {"arena_bytes", plan.arena_bytes}, {"purpose_bytes", purposes},
            {"flops_per_token", model_flops_per_token(config_, table_)},
            {"gemm_plan_note", config_.gemm_search ? "searched" : "library's first answer"},
            {"fp8_plan", fp8_plan_.on() ? fp8_plan_text(fp8_plan_, config_) : ""}, {"changed", parsed_.changed},
            {"config", OrderedJson::parse(config_to_json(config_))}};
}

// All notes go to the log file, and as many to the screen as it has room for, details last.
void TrainLoop::write_notes(const std::string& summary) {
    std::vector<std::string>& notes = parsed_.notes;
    std::stable_partition(notes.begin(), notes.end(), [](const std::string& note) {
        const char* const details[] = {"training data: ", "validation data: ", "attention: ", "experts: one after",
                                       "experts: all", "ranks of host ", "environment: "};
        return std::none_of(std::begin(details), std::end(details),
                            [&](const char* detail) { return note.rfind(detail, 0) == 0; });
    });
    const size_t shown = notes_that_fit(summary, notes.size());
    for (size_t i = 0; i < notes.size(); i++) log_->event("note", notes[i], i < shown);
    if (shown == notes.size()) return;
    const std::string place = config_.log_file.empty() ? "--log-file FILE keeps them" : "in " + config_.log_file;
    std::printf("note: %zu more notes: %s\n", notes.size() - shown, message_line(place).c_str());
}

std::string TrainLoop::attention_note() const {
    const int64_t head_dim = config_.shape.kv_channels;
    std::string text = "attention: ";
    if (config_.fp8_attention) text += "QK^T of the forward in INT8, PV in E4M3; dV, dP, dQ and dK in BF16; ";
    text += device::attention_kernel(device_.ctx, config_.dtype, head_dim, config_.shape.attention_softcap > 0);
    const bool hides = config_.shape.hides_keys(config_.seq_length);
    return text + (hides ? strf(", a window of %s tokens", config_.shape.window_text().c_str()) : "");
}

// ---- steps ----

// Returns false, on all ranks and without a step, if one of them was asked to stop.
bool TrainLoop::train_step() {
    Ctx& ctx = device_.ctx;
    const int64_t number = progress_.step + 1;
    const bool first = !device_.sealed(), switches = fp8_steps(config_).has(progress_.step) == device_.bf16();
    post_step(number);
    post_phase(Phase::kData);
    reporter_->begin(first || switches);
    if (number == config_.profile_first) device::profiler_start();
    device::event_record(ctx, device_.staging->buffer(progress_.step).begin);
    Staging::Buffer* const batch = next_batch();
    if (!batch) return false;
    if (switches) switch_precision();
    batch->staged.on_phase = [this, batch](Phase phase) {
        reporter_->enter_phase();
        batch->passes.enter(device_.ctx, phase);
    };
    device::range_push("step");
    device_.trainer->step(ctx, batch->staged);
    device::range_pop();
    device::event_record(ctx, batch->done);
    if (number == config_.profile_last) {
        device::synchronize(ctx);
        device::profiler_stop();
    }
    progress_.step = number;
    progress_.samples += batch->samples;
    batch->samples_after = progress_.samples;
    reporter_->enqueued(*batch);
    calibrate_again_after_skip(*batch);
    if (first || switches) {
        reporter_->drain();
        reporter_->check_fp8_matmuls();
    }
    device_.check_memory();
    if (first) after_first_step();
    evaluate_and_save();
    return true;
}

// Returns the inputs of the next step, or null if a rank has been asked to stop or cannot read its data. A batch in
// which loss masks leave no target is ignored, since its mean loss would be 0 / 0, and the step takes the next one.
Staging::Buffer* TrainLoop::next_batch() {
    int64_t ignored = 0;
    for (;;) {
        const int64_t step = progress_.step, first = progress_.samples;
        const int64_t count = batch_size_at(config_, progress_.samples);
        Staging::Buffer& batch = device_.staging->buffer(step);
        const std::string error = reading_error([&] { device_.staging->read(*data_.train, step, first, count); });
        const std::vector<int64_t> total =
            comm_.sum({batch.staged.counted_tokens, stop_wanted() || !error.empty(), !error.empty()});
        stopping_ = total[1] > 0;
        if (total[2] > 0) data_error_ = first_error(comm_, error);
        if ((stopping_ || total[0] > 0) && ignored > 0)
            log_->event("note", strf("step %lld: none of %s has a target that counts, %s ignored", ll(step + 1),
                                     count_text(ignored, "sample").c_str(), ignored == 1 ? "it is" : "they are"));
        if (stopping_) return nullptr;
        if (total[0] > 0) {
            device_.staging->set_inputs(batch, total[0], learning_rate(config_, step));
            return &batch;
        }
        ignored += count;   // two epochs of samples contain every sample of a single source, in any order
        REQUIRE(ignored / 2 < data_.train->samples_per_epoch(), "step %lld: none of %s has a target that counts (loss "
                "masks)", ll(step + 1), count_text(ignored, "sample").c_str());
        progress_.samples += count;
    }
}

// Infinite amaxes of a calibration micro-batch would stay in the histories and prevent valid scales.
void TrainLoop::calibrate_again_after_skip(const Staging::Buffer& step) {
    if (device_.trainer->executed_micro_batches() == step.staged.micro_batches) return;
    reporter_->drain();
    if (!step.staged.result->skip) return;
    device_.trainer->weights_from_masters(device_.ctx, true);
    log_->event("note", "FP8: the calibration step was skipped, the next step calibrates again");
}

// The step before may still run. The weights of the next one come from the masters, and amax histories start again.
void TrainLoop::switch_precision() {
    reporter_->drain();
    const bool bf16 = !device_.bf16();
    device_.make_trainer(bf16);
    device_.trainer->set_state(device_.ctx, progress_.adam_step, progress_.norms, progress_.moments_begin);
    device_.trainer->weights_from_masters(device_.ctx, true);
    reporter_->switched(predicted_step(bf16));
    log_->event("precision", strf("%s from step %lld on", bf16 ? "BF16" : "FP8", ll(progress_.step + 1)));
}

void TrainLoop::after_first_step() {
    const std::string refused = share_matmul_plans(device_.ctx, comm_);
    if (!refused.empty()) log_->event("warning", "matmul algorithms: " + refused);
    if (const std::string text = device_.memory_text(); !text.empty()) log_->event("note", text, false);
    start_.done("step");
    const double search = device::gemm_search_seconds(device_.ctx);
    log_->event("note", start_.text() + (search > 0 ? strf(" (%.1f of it to time matmul algorithms)", search) : ""));
    post_first_step();
}

void TrainLoop::evaluate_and_save() {
    const int64_t step = progress_.step;
    progress_.missed.clear();
    if (!evaluations_->due(step).empty()) {
        reporter_->drain();
        progress_.missed = evaluations_->run(evaluation_place());
        if (const auto load = device_.trainer->router_balance().read_load(device_.ctx); !load.empty())
            log_->record("experts", step, {{"load", load}});
    }
    if (!config_.save.empty() && (is_due(step, config_.save_interval) || step == config_.train_iters)) {
        reporter_->drain();
        checkpoints_->save(progress_, *log_);
    }
    checkpoints_->poll();
}

// Evaluations use the staging buffer of the next step; the step before has been reported.
RunEvaluations::Place TrainLoop::evaluation_place() {
    Trainer& trainer = *device_.trainer;
    return {.ctx = device_.ctx, .evaluator = trainer.evaluator(), .bf16 = trainer.bf16_evaluation(),
            .staging = device_.staging->buffer(progress_.step).staged, .log = *log_, .step = progress_.step,
            .use_ema = [this, &trainer](bool ema) { trainer.use_ema(device_.ctx, ema); }};
}

void TrainLoop::finish() {
    reporter_->drain();
    if (const std::string text = device_.growth_text(); !text.empty()) log_->event("warning", text);
    if (progress_.step > 0) checkpoints_->save(progress_, *log_);
    checkpoints_->finish();
    std::string lost = data_error_ + evaluations_->data_error();   // one of them
    if (lost.empty()) lost = device_.trainer->router_balance().evaluation_error(device_.ctx, comm_);
    if (!lost.empty()) {
        const std::string line = lost + strf("; the run stops after step %lld, %s", ll(progress_.step),
                                             checkpoints_->newest_text().c_str());
        log_->event("stop", line, false);
        FAIL(kExitBadInput, "%s", line.c_str());
    }
    if (!progress_.missed.empty() && !config_.save.empty())
        log_->event("note", strf("step %lld: its evaluation was cut short, a resumed run repeats it",
                                 ll(progress_.step)));
    const std::string why = stop_wanted() ? stop_reason() : "a stop of another rank";
    const std::string skips = progress_.skips == 0 ? "" : strf(", %lld skipped", ll(progress_.skips))
        + (progress_.norm_skips == 0 ? "" : strf(" (%lld by --skip-grad-norm)", ll(progress_.norm_skips)));
    log_->event("stop", (stopping_ ? strf("%s after step %lld", why.c_str(), ll(progress_.step))
                                   : "finished " + count_text(progress_.step, "step")) + skips);
}
