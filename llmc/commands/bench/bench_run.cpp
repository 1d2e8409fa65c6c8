#include "llmc/commands/bench/bench_run.h"

#include <cstdio>
#include <filesystem>
#include <memory>
#include <utility>

#include "llmc/base/gpu.h"
#include "llmc/base/system/files.h"
#include "llmc/base/version.h"
#include "llmc/commands/train.h"
#include "llmc/config/config_value.h"
#include "llmc/config/schedule.h"
#include "llmc/fault/heartbeat.h"
#include "llmc/parallel/comm/comm_benchmark.h"
#include "llmc/parallel/rank_preflight.h"
#include "llmc/train/run/run_data.h"

namespace {

// Parses a count; exit 2 for another word.
int64_t count_of(const std::string& option, const std::string& value) {
    int64_t count = 0;
    REQUIRE(json_integer(parse_integer(value), &count) && count >= 1 && count <= 10000,
            "%s %s: must be a number from 1 to 10000", option.c_str(), value.c_str());
    return count;
}

// Exit 2 for training options that have no effect on a bench.
void refuse_options_without_effect(const Config& c) {
    const std::pair<bool, const char*> without_effect[] = {
        {c.dry_run, "dry-run"}, {!c.save.empty(), "save"}, {!c.load.empty(), "load"}, {!c.resume.empty(), "resume"},
        {!c.log_file.empty(), "log-file"}, {!c.valid_data.empty(), "valid-data"}, {c.sample_every > 0, "sample-every"},
        {!c.hellaswag_data.empty(), "hellaswag-data"}, {c.profile_first > 0, "profile"},
        {c.overfit_one_batch, "overfit-one-batch"}, {c.rampup_samples > 0, "rampup-batch-size"}};
    for (const auto& [set, name] : without_effect) REQUIRE(!set, "--%s has no effect: bench only times steps", name);
}

// Replaces a file atomically; if it is a link, the file that it leads to.
void replace_file(const std::string& path, const std::string& text) {
    std::error_code missing;
    const std::string target = std::filesystem::canonical(path, missing).string();
    ReplacementFile file(missing ? path : target);
    file.write(text);
    file.publish();
}

}  // namespace

BenchOptions take_bench_options(std::vector<const char*>& words) {
    BenchOptions options;
    std::vector<const char*> left = {words[0]};
    for (size_t i = 1; i < words.size(); i++) {
        const std::string word = words[i], name = word.substr(0, word.find('='));
        REQUIRE(name != "--train-iters" && name != "--epochs", "%s has no effect: bench takes --warm-up and --steps",
                name.c_str());
        if (name != "--json" && name != "--steps" && name != "--warm-up") {
            left.push_back(words[i]);
            continue;
        }
        std::string value;
        if (name.size() < word.size()) value = word.substr(name.size() + 1);
        else if (i + 1 < words.size()) value = words[++i];
        REQUIRE(!value.empty() && value.rfind("--", 0) != 0, "%s needs a value", name.c_str());
        if (name == "--json") options.json = value;
        else (name == "--steps" ? options.steps : options.warm_up) = count_of(name, value);
    }
    // More steps than any bench takes, so that no schedule ends during it.
    for (const char* implied : {"--synthetic-data", "--train-iters=1000000"}) left.push_back(implied);
    words = left;
    return options;
}

static std::string bench_help_text(const std::string& family) {
    const std::string name = "train_" + family;
    return "Usage: " + name + " bench [--json FILE] [--steps N] [--warm-up N] [training options]\n"
           "       mpirun -np N " + name + " bench ...      also exposed communication between ranks\n\n"
           "Times steps of a run on synthetic tokens and prints where the time goes: every operation, the least\n"
           "time it could take on this device (floor), and the difference.\n\n"
           "  --json FILE   also write the report as JSON\n"
           "  --steps N     steps to time, and again as many with events around every operation (default: 8)\n"
           "  --warm-up N   steps before the timed ones (default: 3)\n\n"
           "The training options are those of " + name + " --help that affect what a step computes.\n";
}

Job parse_bench(const Invocation& call, Comm& comm) {
    std::vector<const char*> words = call.words;
    const BenchOptions options = take_bench_options(words);
    ParsedConfig parsed = parse_training(call, words, comm);
    if (!parsed.help)
        return [run = std::make_shared<BenchRun>(std::move(parsed), options, comm)] { return run->run(); };
    const bool json = parsed.text.front() == '{';   // of --print-config or --print-options
    std::printf("%s", json ? parsed.text.c_str() : bench_help_text(call.family).c_str());
    return {};
}

BenchRun::BenchRun(ParsedConfig parsed, BenchOptions options, Comm& comm)
    : comm_(comm), config_(std::move(parsed.config)), options_(std::move(options)),
      notes_(std::move(parsed.notes)), table_(make_param_table(config_.shape)),
      loader_(data_config(config_, config_.train_data, true)) {
    refuse_options_without_effect(config_);
    for (const std::string& name : parsed.no_effect) notes_.push_back(name);
}

void BenchRun::open() {
    require_same_program(comm_);
    require_same(comm_, {{"set of options", config_to_json(config_)}});
    run_device_.open(notes_);
    if (comm_.world().ranks > 1)
        for (const std::string& line : check_comm(ctx_, comm_)) notes_.push_back(line);
    for (int64_t i = 0; i <= options_.steps; i++) ends_.push_back(OwnedEvent::create());
}

// Enqueues a step that ends with ends_[number]; the steps before it may still run.
void BenchRun::enqueue(OpTimer* timer, size_t number) {
    const int64_t samples = config_.global_batch_size;
    post_step(step_ + 1);
    Staging::Buffer& buffer = run_device_.staging->read(loader_, step_, step_ * samples, samples);
    buffer.staged.count_fp8 = false;   // most steps have no reports
    const std::vector<int64_t> counted = comm_.sum({buffer.staged.counted_tokens});
    run_device_.staging->set_inputs(buffer, counted[0], learning_rate(config_, step_));
    if (timer) timer->restart();
    buffer.staged.on_phase = [&](Phase phase) { buffer.passes.enter(ctx_, phase); };
    ctx_.timer = timer;
    run_device_.trainer->step(ctx_, buffer.staged);
    ctx_.timer = nullptr;
    device::event_record(ctx_, ends_[number]);
    step_++;
}

// Exit 1 unless the step ran the operations of its rehearsal, each as often.
void BenchRun::check_calls(OpTimer& timer) const {
    StepRecorder ran;
    const auto& calls = timer.read();
    for (size_t i = 0; i < timer.calls(); i++) ran.add(calls[i].work);
    const std::string more = ran.difference({run_device_.plan.step_gemms, run_device_.plan.step_ops});
    CHECK(more.empty(), "a step ran other operations than its rehearsal: %s", more.c_str());
}

// Times steps after one that is not counted. As in training, the host prepares a step while the last one runs.
void BenchRun::run_steps(BenchRows* rows, StepBench& bench) {
    const int64_t first = step_;
    auto elapsed = [](Event* from, Event* to) { return static_cast<double>(device::event_elapsed_ms(from, to)); };
    auto collect = [&](int64_t step) {
        const auto number = static_cast<size_t>(step - first);
        device::event_wait(ends_[number]);
        const Staging::Buffer& buffer = run_device_.staging->buffer(step);
        REQUIRE(!buffer.staged.result->skip, "step %lld: loss or gradient norm not finite", ll(step + 1));
        if (step == first) return;
        const double ms = elapsed(ends_[number - 1], ends_[number]);
        if (rows) {
            OpTimer& timer = timers_[static_cast<size_t>(step % 2)];
            if (comm_.root()) check_calls(timer);
            rows->add_step(timer.read(), timer.calls());
            bench.timed_step_ms.push_back(ms);
            return;
        }
        bench.step_ms.push_back(ms);
        bench.exposed_ms.push_back(buffer.comm_timer ? 1e3 * buffer.comm_timer->seconds() : 0);
        bench.forward_ms.push_back(buffer.passes.forward_ms());
        bench.backward_ms.push_back(buffer.passes.backward_ms());
        bench.micro_batch_ms.push_back(buffer.passes.micro_batches_ms()
                                       / static_cast<double>(buffer.staged.micro_batches));
    };
    for (int64_t i = 0; i <= options_.steps; i++) {
        enqueue(rows ? &timers_[static_cast<size_t>(step_ % 2)] : nullptr, static_cast<size_t>(i));
        if (i > 0) collect(step_ - 2);
    }
    run_device_.trainer->gatherer().wait(ctx_);   // the last step's weights; no forward pass follows that would wait
    device::synchronize(ctx_);
    collect(step_ - 1);
}

int BenchRun::run() {
    const std::string folder = std::filesystem::path(options_.json).parent_path().string();
    REQUIRE(folder.empty() || is_directory(folder), "--json %s: there is no folder '%s'", options_.json.c_str(),
            folder.c_str());
    open();
    StepBench bench;
    bench.ceilings = measure_ceilings(ctx_, {run_device_.plan.step_gemms, run_device_.plan.step_ops});
    run_device_.prepare(notes_);
    run_device_.trainer->initialise(ctx_);
    for (int64_t i = 0; i < options_.warm_up; i++) {
        enqueue(nullptr, 0);
        device::event_wait(ends_[0]);
        if (i == 0) post_first_step();
    }
    BenchRows rows(bench.ceilings);
    GpuSampler sampler(run_device_.info.bus);
    run_steps(nullptr, bench);
    run_steps(&rows, bench);
    bench.clocks = sampler.stop();
    device::synchronize(ctx_);
    bench.rows = rows.rows();
    bench.micro_batches = static_cast<double>(config_.global_batch_size / config_.micro_batch_size)
                          / config_.data_ranks(comm_.world().ranks);
    bench.tokens = static_cast<double>(config_.global_batch_size * config_.seq_length);
    bench.flops_per_token = model_flops_per_token(config_, table_);
    bench.peak_flops = peak_flops(run_device_.info.name, config_.dtype) * comm_.world().ranks;
    const BenchSubject subject{config_, kBuildCommit, run_device_.info, comm_.world().ranks, notes_};
    std::printf("%s", bench_text(subject, bench).c_str());
    if (comm_.root() && !options_.json.empty()) replace_file(options_.json, bench_json(subject, bench));
    return kExitOk;
}
