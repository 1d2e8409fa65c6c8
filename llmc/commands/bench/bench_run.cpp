#include "llmc/commands/command.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "llmc/base/gpu.h"
#include "llmc/base/system/nvml.h"
#include "llmc/base/text.h"
#include "llmc/base/version.h"
#include "llmc/commands/bench/bench_table.h"
#include "llmc/config/schedule.h"
#include "llmc/fault/heartbeat.h"
#include "llmc/parallel/comm/comm_benchmark.h"
#include "llmc/parallel/rank_preflight.h"
#include "llmc/perf/fp8_speedup.h"
#include "llmc/train/run/run_data.h"
#include "llmc/train/run/run_device.h"

namespace {

constexpr int kWarmUp = 3, kSteps = 8;   // timed without events, and as many with events

// Exit 2 for training options that have no effect on a bench; `changed`: "--lr 0.001".
void refuse_options_without_effect(const std::vector<std::string>& changed) {
    for (const std::string& option : changed)
        for (const char* name : {"--dry-run", "--save", "--load", "--resume", "--log-file", "--sample-every",
                                 "--profile", "--rampup-batch-size", "--fp8-first-bf16", "--fp8-final-bf16"})
            REQUIRE(option.substr(0, option.find(' ')) != name, "%s has no effect: bench only times steps", name);
}

std::string clocks_text(const GpuSamples& c) {
    const double mhz = c.mean(&GpuState::sm_mhz);
    if (std::isnan(mhz)) return "clocks are not known" + (c.error.empty() ? "" : ": " + c.error);
    return strf("SM clock %.0f MHz, %.0f W, throttled by: %s", mhz, 1e-3 * c.mean(&GpuState::milliwatts),
                throttle_text(static_cast<uint64_t>(std::max<int64_t>(c.throttle(), 0))).c_str());
}

class BenchRun {
public:
    // comm is not owned. Exit 2 for training options that have no effect on a bench.
    BenchRun(ParsedConfig parsed, bool json, Comm& comm)
        : comm_(comm), parsed_(std::move(parsed)), json_(json),
          loader_(data_config(config_, config_.train_data, true)) {
        refuse_options_without_effect(parsed_.changed);
        notes_.insert(notes_.end(), parsed_.no_effect.begin(), parsed_.no_effect.end());
    }

    int run() {
        require_same_program(comm_);
        require_same(comm_, {{"set of options", config_to_json(config_)}});
        run_device_.open(notes_);
        if (comm_.world().ranks > 1)
            for (const std::string& line : check_comm(ctx_, comm_)) notes_.push_back(line);
        for (OwnedEvent& end : ends_) end = OwnedEvent::create();
        BenchTable table(measure_ceilings(ctx_, {run_device_.plan.step_gemms, run_device_.plan.step_ops}));
        run_device_.prepare(notes_);
        run_device_.trainer->initialise(ctx_);
        for (int i = 0; i < kWarmUp; i++) {
            enqueue(nullptr, 0);
            device::event_wait(ends_[0]);
            if (i == 0) post_first_step();
        }
        GpuSampler sampler(run_device_.info.bus);
        run_steps(false, table);
        run_steps(true, table);
        notes_.push_back(clocks_text(sampler.stop()));
        if (comm_.root()) std::printf("%s", json_ ? json(table).c_str() : text(table).c_str());
        return kExitOk;
    }

private:
    // Enqueues a step that ends with ends_[number]; the steps before it may still run.
    void enqueue(OpTimer* timer, size_t number) {
        const int64_t samples = config_.global_batch_size;
        post_step(step_ + 1);
        Staging::Buffer& buffer = run_device_.staging->read(loader_, step_, step_ * samples, samples);
        buffer.staged.count_fp8 = false;   // most steps have no reports
        const std::vector<int64_t> counted = comm_.sum({buffer.staged.counted_tokens});
        run_device_.staging->set_inputs(buffer, counted[0], learning_rate(config_, step_));
        if (timer) timer->restart();
        ctx_.timer = timer;
        run_device_.trainer->step(ctx_, buffer.staged);
        ctx_.timer = nullptr;
        device::event_record(ctx_, ends_[number]);
        step_++;
    }

    // Times steps after one that is not counted, with events around the operations if `timed`. As in training, the host
    // prepares a step while the last one runs.
    void run_steps(bool timed, BenchTable& table) {
        const int64_t first = step_;
        auto collect = [&](int64_t step) {
            const auto number = static_cast<size_t>(step - first);
            device::event_wait(ends_[number]);
            const Staging::Buffer& buffer = run_device_.staging->buffer(step);
            REQUIRE(!buffer.staged.result->skip, "step %lld: loss or gradient norm not finite", ll(step + 1));
            if (step == first) return;
            const auto ms = static_cast<double>(device::event_elapsed_ms(ends_[number - 1], ends_[number]));
            if (!timed) return table.add_step(ms, buffer.comm_timer ? 1e3 * buffer.comm_timer->seconds() : 0);
            OpTimer& timer = timers_[static_cast<size_t>(step % 2)];
            table.add_timed_step(ms, timer.read(), timer.calls());
        };
        for (size_t i = 0; i <= kSteps; i++) {
            enqueue(timed ? &timers_[static_cast<size_t>(step_ % 2)] : nullptr, i);
            if (i > 0) collect(step_ - 2);
        }
        // The last step's weights; no forward pass follows that would wait for them.
        run_device_.trainer->gatherer().wait(ctx_);
        device::synchronize(ctx_);
        collect(step_ - 1);
    }

    std::string text(const BenchTable& table) const {
        const DeviceInfo& info = run_device_.info;
        std::string text = strf("bench of --model %s %s on %s, %s, %s, commit %s\n", config_.model.c_str(),
                                list_text(parsed_.changed, " ").c_str(),
                                count_text(comm_.world().ranks, "rank").c_str(), info.name.c_str(),
                                info.matmul_library.c_str(), kBuildCommit);
        text += strf("%-12s %-70s %6s %10s %10s %10s %6s %15s\n", "part", "name", "calls", "ms", "floor", "lost", "%",
                     "rate");
        const double ms = table.step_ms();
        for (const BenchRow& row : table.rows()) {
            text += strf("%-12s %-70s %6lld %10.3f %10.3f %10.3f %6.1f", row.part.c_str(), row.name.c_str(),
                         ll(row.calls), row.ms, row.floor_ms, row.ms - row.floor_ms, 100 * row.ms / ms);
            if (row.ms <= 0 || row.bytes + row.flop == 0) text += "\n";
            else if (row.flop > 0) text += strf(" %7.1f TFLOP/s\n", 1e-9 * row.flop / row.ms);
            else text += strf(" %10.0f GB/s\n", 1e-6 * row.bytes / row.ms);
        }
        const auto [least, most] = std::minmax_element(table.steps_ms().begin(), table.steps_ms().end());
        const double tokens_per_second = 1e3 * real(config_.global_batch_size * config_.seq_length) / ms;
        const double peak = peak_flops(info.name, config_.dtype) * comm_.world().ranks;
        text += strf("%.4g s/it (%.4g to %.4g), %.0f tokens/s", 1e-3 * ms, 1e-3 * *least, 1e-3 * *most,
                     tokens_per_second);
        if (peak > 0)
            text += strf(", MFU %.1f %%", 100 * tokens_per_second * model_flops_per_token(config_, params_) / peak);
        for (const std::string& note : notes_) text += "\nnote: " + note;
        return text + "\n";
    }

    std::string json(const BenchTable& table) const {
        nlohmann::ordered_json json = {
            {"type", "bench"}, {"config", nlohmann::ordered_json::parse(config_to_json(config_))},
            {"device", run_device_.info.name}, {"matmul_library", run_device_.info.matmul_library},
            {"commit", kBuildCommit}, {"ranks", comm_.world().ranks}, {"steps_ms", table.steps_ms()},
            {"notes", notes_}};
        for (const BenchRow& row : table.rows())
            json["rows"].push_back({{"part", row.part}, {"name", row.name}, {"calls", row.calls}, {"ms", row.ms},
                                    {"floor_ms", row.floor_ms}, {"bytes", row.bytes}, {"flop", row.flop}});
        return json.dump(1) + "\n";
    }

    Comm& comm_;
    const ParsedConfig parsed_;
    const bool json_;
    const Config& config_ = parsed_.config;
    std::vector<std::string> notes_ = parsed_.notes;
    const ParamTable params_ = make_param_table(config_);
    const DataLoader loader_;
    const Fp8Plan fp8_plan_ = fp8_plan_of(config_, params_);
    RunDevice run_device_{config_, params_, fp8_plan_, comm_};
    Ctx& ctx_ = run_device_.ctx;
    std::array<OpTimer, 2> timers_{OpTimer(ctx_), OpTimer(ctx_)};   // for even and odd steps, like the staging slots
    std::array<OwnedEvent, kSteps + 1> ends_;   // of the steps of run_steps
    int64_t step_ = 0;
};

}  // namespace

Job parse_bench(const Invocation& call, Comm& comm) {
    std::vector<const char*> words = call.words;
    const bool json = std::erase_if(words, [](const char* word) { return std::string("--json") == word; }) > 0;
    // More steps than any bench takes, so that no schedule ends during it.
    for (const char* implied : {"--synthetic-data", "--train-iters=1000000"}) words.push_back(implied);
    ParsedConfig parsed = parse_training(call, words, comm);
    if (!parsed.help)
        return [run = std::make_shared<BenchRun>(std::move(parsed), json, comm)] { return run->run(); };
    const std::string name = "train_" + call.family;
    const std::string help = "Usage: " + name + " bench [--json] [training options]\n"
        "       mpirun -np N " + name + " bench ...      also exposed communication between ranks\n\n"
        "Times steps of a run on synthetic tokens and prints where the time goes: every operation, the least\n"
        "time it could take on this device (floor), and what it loses. --json prints the same table as JSON.\n\n"
        "The training options are those of " + name + " --help that affect what a step computes.\n";
    std::printf("%s", parsed.text.front() == '{' ? parsed.text.c_str() : help.c_str());   // of --print-config or --help
    return {};
}
