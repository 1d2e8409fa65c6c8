// `train_llama bench`: builds the trainer of a run, times steps on synthetic tokens, then steps with events around
// every operation, and compares each operation with the least time that it could take on this device.
#pragma once
#include <array>
#include <string>
#include <vector>

#include "llmc/commands/bench/step_bench.h"
#include "llmc/commands/command.h"
#include "llmc/perf/fp8_speedup.h"
#include "llmc/train/run/run_device.h"

struct BenchOptions {
    std::string json;         // a file; "": none
    int64_t steps = 8;        // timed without events, and as many with events
    int64_t warm_up = 3;
};
// Removes bench's own options from `words`, a command line, and adds the training options that bench implies.
BenchOptions take_bench_options(std::vector<const char*>& words);
Job parse_bench(const Invocation& call, Comm& comm);

class BenchRun {
public:
    // comm is not owned. Exit 2 for training options that have no effect on a bench.
    BenchRun(ParsedConfig parsed, BenchOptions options, Comm& comm);
    int run();

private:
    void open();
    void enqueue(OpTimer* timer, size_t number);
    // Times steps, with events around the operations if there are `rows`.
    void run_steps(BenchRows* rows, StepBench& bench);
    void check_calls(OpTimer& timer) const;

    Comm& comm_;
    const Config config_;
    const BenchOptions options_;
    std::vector<std::string> notes_;
    const ParamTable table_;
    const DataLoader loader_;
    const Fp8Plan fp8_plan_ = fp8_plan_of(config_, table_);
    RunDevice run_device_{config_, table_, fp8_plan_, comm_};
    Ctx& ctx_ = run_device_.ctx;
    std::array<OpTimer, 2> timers_{OpTimer(ctx_), OpTimer(ctx_)};   // for even and odd steps, like the staging slots
    std::vector<OwnedEvent> ends_;   // of the steps of run_steps
    int64_t step_ = 0;
};
