#include "llmc/commands/command.h"

#include <cstdio>
#include <memory>
#include <utility>

#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/checkpoint/load.h"
#include "llmc/commands/plan_report.h"
#include "llmc/config/environment.h"
#include "llmc/fault/shutdown.h"
#include "llmc/fault/watchdog.h"
#include "llmc/parallel/comm/comm.h"
#include "llmc/perf/fp8_speedup.h"
#include "llmc/perf/step_time.h"
#include "llmc/train/train_loop.h"

namespace {

int run_plan(ParsedConfig& parsed, Comm& comm) {
    Config& config = parsed.config;
    if (config.train_iters == 0 && !config.train_data.empty()) RunData().open(config, parsed.notes);
    const ParamTable table = make_param_table(config);
    const int ranks = config.ranks > 0 ? static_cast<int>(config.ranks) : comm.world().ranks;
    const DeviceInfo info = device::device_info(device::device_count() > 0 ? 0 : -1);
    const MemoryPlan memory = plan_memory(config, table, fp8_plan_of(config, table), ranks);
    const PlannedRun run{config, table, memory, info, parsed.notes, parsed.changed};
    if (comm.root()) std::printf("%s", plan_output(run).c_str());
    return plan_fits(run) ? kExitOk : kExitBadInput;
}

}  // namespace

ParsedConfig parse_training(const Invocation& call, const std::vector<const char*>& words, Comm& comm) {
    const int ranks = comm.world().ranks;
    const Machine machine{.gpu = device::device_info(-1).toolkit != "", .ranks = ranks,
                          .read_shape = model_config_from_hf, .read_saved = saved_options};
    ParsedConfig parsed = parse_config(static_cast<int>(words.size()), words.data(), call.family, machine);
    const int64_t printing = comm.sum(std::vector<int64_t>{parsed.help})[0];
    REQUIRE(printing == 0 || printing == ranks, "%lld of %d ranks print help (--help, --print-config) and would keep "
            "the others waiting: give all ranks the same options", ll(printing), ranks);
    if (parsed.help) return parsed;
    parsed.notes.insert(parsed.notes.begin(), call.notes.begin(), call.notes.end());
    for (const std::string& line : environment_lines(own_environment(), ranks, machine.gpu))
        parsed.notes.push_back(line);
    set_comm_timeout(parsed.config.comm_timeout);
    stop_after(parsed.config.exit_duration_in_mins, !parsed.config.save.empty());
    return parsed;
}

Job parse_train(const Invocation& call, Comm& comm) {
    ParsedConfig parsed = parse_training(call, call.words, comm);
    if (parsed.help) {
        std::printf("%s", parsed.text.c_str());
        return {};
    }
    if (parsed.config.dry_run) {
        die_of_stop_signals();
        return [parsed, &comm]() mutable { return run_plan(parsed, comm); };
    }
    const Fp8Plan fp8_plan = fp8_plan_of(parsed.config, make_param_table(parsed.config.shape));
    // The job owns the loop, which outlives an error: unwinding would wait for collectives of ranks that are gone.
    const auto loop = std::make_shared<TrainLoop>(std::move(parsed), fp8_plan, call.line, predicted_step, comm);
    return [loop] {
        loop->run();
        return kExitOk;
    };
}

Job parse_plan(const Invocation& call, Comm& comm) {
    Invocation dry = call;
    dry.words.insert(dry.words.begin() + 1, "--dry-run");
    return parse_train(dry, comm);
}
