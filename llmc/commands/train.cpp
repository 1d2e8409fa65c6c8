#include "llmc/commands/train.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "llmc/base/fault_injection.h"
#include "llmc/base/peak_flops.h"
#include "llmc/base/text.h"
#include "llmc/base/version.h"
#include "llmc/checkpoint/huggingface/hf_config.h"
#include "llmc/checkpoint/load.h"
#include "llmc/commands/plan_report.h"
#include "llmc/commands/run_summary.h"
#include "llmc/config/environment.h"
#include "llmc/config/schedule.h"
#include "llmc/fault/alert_process.h"
#include "llmc/fault/shutdown.h"
#include "llmc/fault/watchdog.h"
#include "llmc/parallel/comm/comm.h"
#include "llmc/parallel/comm/comm_benchmark.h"
#include "llmc/parallel/rank_preflight.h"
#include "llmc/perf/fp8_speedup.h"
#include "llmc/train/log/alert_config.h"
#include "llmc/train/log/fp8_monitor.h"
#include "llmc/train/log/gpu_monitor.h"
#include "llmc/train/log/log.h"
#include "llmc/train/log/log_exporter.h"
#include "llmc/train/log/startup_timer.h"
#include "llmc/train/log/step_record.h"
#include "llmc/train/run/rank_consistency.h"
#include "llmc/train/run/run_checkpoints.h"
#include "llmc/train/run/run_data.h"
#include "llmc/train/run/run_evaluations.h"
#include "llmc/train/run/run_setup.h"

namespace {

class TrainLoop {
public:
    TrainLoop(ParsedConfig parsed, const Invocation& call, Comm& comm)
        : comm_(comm), config_(std::move(parsed.config)), command_(call.line), idle_(std::move(parsed.idle)),
          changed_(std::move(parsed.changed)), fp8_given_(parsed.fp8_given), notes_(std::move(parsed.notes)),
          table_(make_param_table(config_.shape)), fp8_plan_(fp8_plan_of(config_, table_)) {}

    int run() {
        if (config_.dry_run) return plan();
        if (const std::string error = tell_alert_process(config_, command_, comm_); !error.empty())
            notes_.push_back("alerts: " + error);
        try {
            train();
        } catch (const Error& failure) {
            if (log_) log_->failed(failure);
            throw;
        }
        return kExitOk;
    }

private:
    int plan() {
        if (config_.train_iters == 0 && !config_.train_data.empty()) open_data();
        const int ranks = config_.ranks > 0 ? static_cast<int>(config_.ranks) : comm_.world().ranks;
        const DeviceInfo info = device::device_info(device::device_count() > 0 ? 0 : -1);
        const MemoryPlan memory = plan_memory(config_, table_, fp8_plan_, ranks);
        const PlannedRun run{config_, table_, memory, info, notes_, changed_};
        if (comm_.root()) print_plan(run);
        return plan_fits(run) ? kExitOk : kExitBadInput;
    }

    void train() {
        start_.done("launch");
        for (const std::string& fault : config_.inject) notes_.push_back("FAULT INJECTION: --inject " + fault);
        for (const std::string& line : environment_differences(comm_)) notes_.push_back(line);
        require_same_program(comm_);
        const std::string place = comm_.gather(comm_.root() ? log_place_error(config_.log_file, config_.save) : "")[0];
        REQUIRE(place.empty(), "%s", place.c_str());
        open_data();
        require_same(comm_, {{"set of options", config_to_json(config_)},
                             {"training data", train_->fingerprint_json()},
                             {"validation data", valid_ ? valid_->fingerprint_json() : ""},
                             {"HellaSwag file or prompts", evaluations_->fingerprint()}});
        save_folder_.emplace(config_, comm_);
        start_.done("data");
        open_device();
        start_.done("device");
        start_state();
        start_.done("weights");
        open_log();
        evaluations_->warm_up(evaluation_place(), resumed_);
        if (resumed_ && evaluations_->data_error().empty())
            missed_ = evaluations_->make_up(evaluation_place(), missed_);
        start_.done("evaluation");
        while (evaluations_->data_error().empty() && step_ < config_.train_iters && train_step()) {}
        finish();
    }

    // ---- start ----

    void open_data() {
        data_.open(config_, notes_);
        evaluations_.emplace(config_, comm_, *train_, valid_ ? &*valid_ : nullptr, faults_);
    }

    void open_device() {
        run_device_.open(notes_);
        gpu_monitor_.start(info_.bus);
        if (config_.check_comm)
            for (const std::string& line : check_comm(ctx_, comm_)) answers_.push_back(line);
        run_device_.prepare(notes_);
        checkpoints_ = std::make_unique<RunCheckpoints>(config_, table_, *train_, comm_, ctx_, *trainer_, faults_,
                                                        save_folder_->lock());
    }

    void start_state() {
        post_phase(Phase::kLoad);
        if (config_.resume.empty()) checkpoints_->begin();
        else if (resume()) return;
        trainer_->initialise(ctx_);
        if (!config_.load.empty()) {
            load_hf_weights(config_.load, config_.shape, table_, trainer_->state_access(ctx_), comm_);
            trainer_->weights_from_masters(ctx_, true);
        }
    }

    // Returns false if --resume auto finds nothing to resume.
    bool resume() {
        const std::optional<Progress> found = checkpoints_->resume(fp8_given_, notes_);
        if (!found) return false;
        step_ = found->step;
        samples_ = found->samples;
        adam_step_ = found->adam_step;
        skips_ = found->skips;
        consecutive_skips_ = found->consecutive_skips;
        missed_ = evaluations_->possible(found->missed);
        loss_watch_ = found->loss_watch;
        resumed_ = true;
        if (step_ > config_.train_iters)
            notes_.push_back(strf("nothing is left to train: the checkpoint is of step %lld, --train-iters is %lld",
                                  ll(step_), ll(config_.train_iters)));
        return true;
    }

    void open_log() {
        plan_check_ = check_of(config_, plan_, info_);
        const std::string summary =
            summary_text({config_, changed_, table_, fp8_plan_, plan_, info_, comm_.world(), *train_,
                          valid_ ? &*valid_ : nullptr, plan_check_.predicted_ms()});
        std::printf("%s", summary.c_str());
        const std::string fp8_text = fp8_plan_.on() ? fp8_plan_text(fp8_plan_, config_) : "";
        if (config_.verbose)
            std::printf("%s%s%s", config_to_text(config_).c_str(), fp8_text.c_str(),
                        communication_text(config_, plan_.collectives, plan_.ranks, plan_.buckets).c_str());
        const std::string path = comm_.root() ? config_.log_file : "";
        const bool other = resumed_ && (config_.resume != "auto" || !log_saves_in(path, config_.save));
        log_ = std::make_unique<RunLog>(path, resumed_, step_, missed_, other);
        flops_per_token_ = model_flops_per_token(config_, table_);
        log_->header({.command = command_, .commit = kBuildCommit, .config_json = config_to_json(config_),
                      .gemm_plan_note = config_.gemm_search ? "searched" : "library's first answer",
                      .fp8_plan = fp8_text, .device = info_, .world = comm_.world().ranks,
                      .synthetic_data = config_.synthetic_data, .communication = plan_.collectives,
                      .params = table_.param_elems, .arena_bytes = plan_.arena_bytes,
                      .purpose_bytes = plan_.purpose_bytes, .flops_per_token = flops_per_token_, .changed = changed_});
        notes_.push_back(attention_note());
        if (!evaluations_->tokenizer_note().empty()) notes_.push_back(evaluations_->tokenizer_note());
        if (!log_->earlier_log().empty()) notes_.push_back("the earlier log is kept: " + log_->earlier_log());
        if (hf_class(config_.shape) == HfClass::kOwn && !config_.save.empty())
            notes_.push_back("no transformers class has this shape: checkpoints bring a modeling_llmfp8.py");
        notes_.insert(notes_.end(), idle_.begin(), idle_.end());
        post_record(strf(R"({"type":"start","checkpoint_bytes":%lld})", ll(plan_.host.checkpoint_bytes)));
        write_notes(summary);
        if (comm_.root()) exporter_.start(config_);
    }

    // All notes go to the log file, and as many to the screen as it has room for, details last.
    void write_notes(const std::string& summary) {
        std::stable_partition(notes_.begin(), notes_.end(), [](const std::string& note) {
            const char* const details[] = {"training data: ", "validation data: ", "attention: ", "ranks of host ",
                                           "environment: "};
            return std::none_of(std::begin(details), std::end(details),
                                [&](const char* detail) { return note.rfind(detail, 0) == 0; });
        });
        for (const std::string& answer : answers_) log_->event("note", answer);
        const size_t shown = config_.verbose ? notes_.size() : notes_that_fit(summary, notes_.size());
        for (size_t i = 0; i < notes_.size(); i++) log_->event("note", notes_[i], i < shown);
        if (shown == notes_.size()) return;
        const std::string place = config_.log_file.empty() ? "--verbose prints them" : "in " + config_.log_file;
        std::printf("note: %zu more notes: %s\n", notes_.size() - shown, message_line(place).c_str());
    }

    std::string attention_note() const {
        const int64_t head_dim = config_.shape.kv_channels;
        const bool modes = device::attention_has_modes(ctx_, config_.dtype, head_dim);
        std::string text = "attention: ";
        if (config_.fp8_attention) text += "QK^T and PV of the forward in E4M3; dV, dP, dQ and dK in BF16; ";
        text += device::attention_kernel(ctx_, config_.dtype, head_dim);
        if (modes) text += config_.attention_fast ? ", backward fast" : ", backward deterministic";
        else if (config_.attention_fast) text += "; --attention fast has no effect on it";
        const int64_t window = config_.shape.sliding_window;
        return text + (window > 0 && window < config_.seq_length ? strf(", a window of %lld tokens", ll(window)) : "");
    }

    // ---- steps ----

    // Returns false, on all ranks and without a step, if one of them was asked to stop.
    bool train_step() {
        post_step(step_ + 1);
        post_phase(Phase::kData);
        if (!pending_) gpu_monitor_.restart();
        const bool profiled = step_ + 1 >= config_.profile_first && step_ + 1 <= config_.profile_last;
        if (profiled && step_ + 1 == config_.profile_first) device::profiler_start();
        device::event_record(ctx_, staging_->slot(step_).begin);
        Staging::Slot* const read = next_batch();
        if (!read) return false;
        Staging::Slot& slot = *read;
        slot.staged.corrupt_gradient = faults_.corrupts_gradient(step_ + 1);
        slot.staged.on_phase = [this, &slot](Phase phase) {
            if (pending_ && device::event_reached(pending_->done)) gpu_monitor_.end_step();
            slot.passes.enter(ctx_, phase);
            if (phase == Phase::kBackward) faults_.in_backward(step_ + 1);
        };
        if (fp8_plan_.on() && sealed_allocations_ < 0) fp8_watch_.before_first_step(ctx_);
        device::range_push("step");
        trainer_->step(ctx_, slot.staged);
        device::range_pop();
        device::event_record(ctx_, slot.done);
        if (profiled && step_ + 1 == config_.profile_last) {
            device::synchronize(ctx_);
            device::profiler_stop();
        }
        step_++;
        samples_ += slot.samples;
        slot.samples_after = samples_;
        // Reports the step before this one, so that the device never waits for the host.
        drain();
        pending_ = &slot;
        calibrate_again_after_skip(slot);
        seal_or_check_memory();
        boundary();
        return true;
    }

    // Returns the inputs of the next step, or null if a rank has been asked to stop or cannot read its data. A batch in
    // which loss masks leave no target is ignored, since its mean loss would be 0 / 0, and the step takes the next one.
    Staging::Slot* next_batch() {
        int64_t ignored = 0;
        for (;;) {
            const int64_t count = batch_size_at(config_, samples_);
            Staging::Slot& slot = staging_->slot(step_);
            const std::string error = reading_error([&] {
                staging_->read(*train_, step_, config_.overfit_one_batch ? 0 : samples_, count);
            });
            const std::vector<int64_t> total =
                comm_.sum({slot.staged.counted_tokens, stop_wanted() || !error.empty(), !error.empty()});
            stopping_ = total[1] > 0;
            if (total[2] > 0) data_error_ = first_error(comm_, error);
            if ((stopping_ || total[0] > 0) && ignored > 0)
                log_->event("note", strf("step %lld: none of %s has a target that counts, %s ignored", ll(step_ + 1),
                                         count_text(ignored, "sample").c_str(), ignored == 1 ? "it is" : "they are"));
            if (stopping_) return nullptr;
            if (total[0] > 0) {
                staging_->set_inputs(slot, total[0], learning_rate(config_, step_));
                return &slot;
            }
            ignored += count;   // two epochs of samples contain every sample of a single source, in any order
            REQUIRE(ignored / 2 < train_->samples_per_epoch() && !config_.overfit_one_batch,
                    "step %lld: none of %s has a target that counts (loss masks)", ll(step_ + 1),
                    count_text(ignored, "sample").c_str());
            samples_ += count;
        }
    }

    // Infinite amaxes of a calibration micro-batch would stay in the histories and prevent valid scales.
    void calibrate_again_after_skip(const Staging::Slot& slot) {
        if (trainer_->executed_micro_batches() == slot.staged.micro_batches) return;
        drain();
        if (!slot.staged.result->skip) return;
        trainer_->weights_from_masters(ctx_, true);
        log_->event("note", "FP8: the calibration step was skipped, the next step calibrates again");
    }

    // After the first step all memory is allocated, and the arena has exactly its planned size.
    void seal_or_check_memory() {
        if (sealed_allocations_ < 0) {
            drain();
            if (fp8_plan_.on())
                log_->event("note", fp8_watch_.after_first_step(ctx_, trainer_->executed_micro_batches()));
            CHECK(arena_.peak_bytes() == plan_.arena_bytes, "the plan says %lld bytes, the arena used %lld",
                  ll(plan_.arena_bytes), ll(arena_.peak_bytes()));
            sealed_allocations_ = device::allocation_count();
            const std::string refused = share_matmul_plans(ctx_, comm_);
            if (!refused.empty()) log_->event("warning", "matmul algorithms: " + refused);
            if (const std::string text = run_device_.memory_text(); !text.empty()) log_->event("note", text, false);
            start_.done("step");
            log_->event("note", start_.text());
            post_first_step();
        } else if (sealed_free_bytes_ < 0) {
            sealed_free_bytes_ = device::device_free_bytes();   // the second step has loaded rank 0's matmul algorithms
        }
        CHECK(device::allocation_count() == sealed_allocations_, "memory was allocated after the first step");
    }

    void drain() {
        if (pending_) report(*std::exchange(pending_, nullptr));
    }

    static bool due(int64_t step, int64_t interval) { return interval > 0 && step % interval == 0; }

    void boundary() {
        const bool last = step_ == config_.train_iters;
        missed_.clear();
        if (evaluations_->due(step_)) {
            drain();
            missed_ = evaluations_->run(evaluation_place());
        }
        if (!config_.save.empty() && (due(step_, config_.save_interval) || last)) {
            drain();
            save();
        }
        checkpoints_->poll();
    }

    void report(const Staging::Slot& slot) {
        post_phase(Phase::kDevice);
        device::event_wait(slot.done);
        const StepState& result = *slot.staged.result;
        REQUIRE(result.bad_tokens == 0, "step %lld: %d token ids lie outside the vocabulary of %lld",
                ll(slot.step + 1), result.bad_tokens, ll(config_.shape.vocab_size));
        const double peak = peak_flops(info_.name, config_.dtype) * comm_.world().ranks;
        StepRecord r = step_record(config_, slot);
        r.mfu = peak > 0 ? r.tokens_per_second * flops_per_token_ / peak : -1;
        r.memory_gib = gib(used_bytes_);
        adam_step_ = result.adam_step;
        consecutive_skips_ = r.skipped ? consecutive_skips_ + 1 : 0;
        skips_ += r.skipped ? 1 : 0;
        r.skips = skips_;
        r.eta_seconds = seconds_per_step(r.step_seconds) * static_cast<double>(config_.train_iters - r.step);
        if (slot.staged.check_fp8) check_scales(comm_, trainer_->fp8(), slot.staged.fp8_report, r.step);
        if (slot.staged.count_fp8 || r.skipped) fp8_watch_.gather(comm_, trainer_->fp8(), slot.staged);
        report_grad_comm(*log_, comm_, slot.staged, r.step);
        fp8_watch_.report(*log_, trainer_->fp8(), slot.staged, r.step);
        r.gpu = gpu_monitor_.report(static_cast<double>(slot.samples * config_.seq_length));
        if (const std::string note = gpu_monitor_.note(); !note.empty()) log_->event("note", note);
        log_->step(r, r.skipped || r.step == 1 || r.step == config_.train_iters || due(r.step, config_.log_interval));
        for (const std::string& line : exporter_.warnings()) log_->event("warning", line);
        check_plan(slot, 1e3 * r.step_seconds);
        if (!r.skipped) watch_loss(r);
        if (consecutive_skips_ > config_.max_skips)
            diverged(strf("step %lld: loss or gradient norm not finite for %s in a row (--max-skips %lld); lower --lr, "
                          "or start from an earlier checkpoint's weights (--load) with another --seed",
                          ll(r.step), count_text(consecutive_skips_, "step").c_str(), ll(config_.max_skips)));
    }

    void watch_loss(const StepRecord& r) {
        const LossWatch::Verdict verdict = loss_watch_.add(config_, r.loss);
        if (verdict == LossWatch::Verdict::kFine) return;
        const std::string text = loss_watch_.text(config_, r.step, verdict);
        if (verdict == LossWatch::Verdict::kStop) diverged(text);
        log_->event("warning", text);
    }

    // Ends the run with exit code 4. The state is not saved, since --resume auto would go on with it; a checkpoint that
    // is being written is completed.
    [[noreturn]] void diverged(const std::string& text) {
        checkpoints_->finish();
        const std::string line = text + "; " + checkpoints_->newest_text();
        log_->event("diverged", line, false);
        FAIL(kExitDiverged, "%s", line.c_str());
    }

    // Logs predicted and measured time and memory; ignores the smaller batches of a ramp-up.
    void check_plan(const Staging::Slot& slot, double ms) {
        if (slot.samples != config_.global_batch_size || !plan_check_.add(slot.step + 1, ms)) return;
        log_->plan({.step = slot.step + 1, .predicted_ms = plan_check_.predicted_ms(),
                    .measured_ms = plan_check_.measured_ms(), .planned_bytes = plan_.arena_bytes,
                    .used_bytes = used_bytes_, .predicted_parts_ms = plan_check_.parts(), .text = plan_check_.text()});
    }

    // Mean of the last 20 steps, for the ETA.
    double seconds_per_step(double latest) {
        recent_.push_back(latest);
        if (recent_.size() > 20) recent_.pop_front();
        return std::accumulate(recent_.begin(), recent_.end(), 0.0) / static_cast<double>(recent_.size());
    }

    // ---- evaluation, checkpoints ----

    // Evaluations use the staging slot of the next step; the pending step was drained before.
    RunEvaluations::Place evaluation_place() {
        return {.ctx = ctx_, .trainer = *trainer_, .staging = staging_->slot(step_).staged, .log = *log_,
                .step = step_};
    }

    void save() {
        checkpoints_->save({.step = step_, .samples = samples_, .adam_step = adam_step_, .skips = skips_,
                            .consecutive_skips = consecutive_skips_, .missed = missed_, .loss_watch = loss_watch_},
                           *log_);
    }

    // Warns if another process or a library has allocated device memory, but not for kernels that first run late.
    void report_memory_growth() {
        const int64_t grown = sealed_free_bytes_ - device::device_free_bytes();   // below 0 before the second step
        if (info_.sm > 0 && grown > (16 << 20))
            log_->event("warning", strf("free device memory fell by %lld bytes since the second step", ll(grown)));
    }

    void finish() {
        drain();
        report_memory_growth();
        if (step_ > 0) save();
        checkpoints_->finish();
        const std::string lost = data_error_ + evaluations_->data_error();   // one of them
        if (!lost.empty()) {
            const std::string line = lost + strf("; the run stops after step %lld, %s", ll(step_),
                                                        checkpoints_->newest_text().c_str());
            log_->event("stop", line, false);
            FAIL(kExitBadInput, "%s", line.c_str());
        }
        const std::string why = stop_wanted() ? stop_reason() : "a stop of another rank";
        if (!missed_.empty() && !config_.save.empty())
            log_->event("note", strf("step %lld: its evaluation was cut short, a resumed run repeats it", ll(step_)));
        log_->event("stop", stopping_ ? strf("%s after step %lld", why.c_str(), ll(step_))
                                      : "finished " + count_text(step_, "step"));
        exporter_.finish(LogExporter::kEndSeconds);
    }

    Comm& comm_;
    Config config_;
    const std::string command_;
    const std::vector<std::string> idle_, changed_;
    const bool fp8_given_;
    std::vector<std::string> notes_, answers_;   // answers: results of checks such as --check-comm
    const ParamTable table_;
    Faults faults_{config_.inject, comm_.world().rank};
    const Fp8Plan fp8_plan_;              // what the options ask for
    Fp8Monitor fp8_watch_{config_, fp8_plan_};
    GpuMonitor gpu_monitor_{comm_};
    RunDevice run_device_{config_, table_, fp8_plan_, comm_};
    Ctx& ctx_ = run_device_.ctx;
    const DeviceInfo& info_ = run_device_.info;
    const MemoryPlan& plan_ = run_device_.plan;
    const Arena& arena_ = run_device_.arena;
    const int64_t& used_bytes_ = run_device_.used_bytes;
    std::unique_ptr<Trainer>& trainer_ = run_device_.trainer;
    std::unique_ptr<Staging>& staging_ = run_device_.staging;
    RunData data_;
    std::optional<DataLoader>&train_ = data_.train, &valid_ = data_.valid;
    std::optional<RunEvaluations> evaluations_;
    std::unique_ptr<RunLog> log_;
    std::optional<SaveFolder> save_folder_;
    LogExporter exporter_;
    std::unique_ptr<RunCheckpoints> checkpoints_;   // after log_: its destructor may finish a save and log it
    double flops_per_token_ = 0;
    StepTimeCheck plan_check_;
    bool resumed_ = false, stopping_ = false;
    std::string data_error_;              // why data cannot be read any more, on all ranks the same
    int64_t step_ = 0;                    // steps enqueued
    int64_t samples_ = 0;                 // the data cursor
    int64_t adam_step_ = 0, skips_ = 0, consecutive_skips_ = 0;
    std::vector<std::string> missed_;     // evaluations of step_ that a stop interrupted
    LossWatch loss_watch_;
    int64_t sealed_allocations_ = -1;     // allocation count after the first step
    int64_t sealed_free_bytes_ = -1;      // free device memory after the second one
    const Staging::Slot* pending_ = nullptr;   // the step that is enqueued and not reported yet
    StartTimes start_;
    std::deque<double> recent_;
};

}  // namespace

ParsedConfig parse_training(const Invocation& call, const std::vector<const char*>& words, Comm& comm) {
    const int ranks = comm.world().ranks;
    const Machine machine{.gpu = device::device_info(-1).toolkit != "", .ranks = ranks,
                          .read_shape = model_config_from_hf};
    ParsedConfig parsed = parse_config(static_cast<int>(words.size()), words.data(), call.family, machine);
    if (parsed.help) return parsed;
    parsed.notes.insert(parsed.notes.begin(), call.notes.begin(), call.notes.end());
    for (const std::string& line : environment_lines(own_environment(), ranks, machine.gpu))
        parsed.notes.push_back(line);
    set_comm_timeout(parsed.config.comm_timeout);
    stop_after(parsed.config.exit_duration_in_mins);
    return parsed;
}

Job parse_train(const Invocation& call, Comm& comm) {
    ParsedConfig parsed = parse_training(call, call.words, comm);
    if (!parsed.help)
        return [loop = std::make_shared<TrainLoop>(std::move(parsed), call, comm)] { return loop->run(); };
    std::printf("%s", parsed.text.c_str());
    return {};
}

Job parse_plan(const Invocation& call, Comm& comm) {
    Invocation dry = call;
    dry.words.insert(dry.words.begin() + 1, "--dry-run");
    return parse_train(dry, comm);
}
