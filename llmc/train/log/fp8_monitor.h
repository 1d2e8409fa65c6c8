// Monitors FP8 during a run: whether the planned matmuls ran in FP8, and the statistics of FP8 tensors.
#pragma once
#include <string>
#include <vector>

#include "llmc/model/parameters/fp8_state.h"
#include "llmc/train/log/run_log.h"
#include "llmc/train/trainer.h"

// The block scales of a tensor, all powers of two, over all casts of a step. Blocks of zeros have none.
struct BlockScales {
    int64_t blocks = 0;
    double min = 1, median = 1, max = 1;   // median: the lower one of an even number; 1 if all blocks are zeros
    double at_ends = 0;                    // share that has the smallest or the largest scale there is
    double zeros = 0;                      // share without a scale
};

class Fp8Monitor {
public:
    // plan: the plan that the options ask for.
    Fp8Monitor(const Config& config, const Fp8Plan& plan) : config_(config), plan_(plan) {}

    // Before and after the first step of this process, and the first after each switch of the precision.
    // after_first_step returns a line for the log; exit 3 if the number of executed FP8 matmuls is not that of `plan`,
    // the steps' own.
    void before_first_step(const Ctx& ctx) { count_before_ = device::fp8_matmuls(ctx); }
    std::string after_first_step(const Ctx& ctx, const Fp8Plan& plan, int64_t micro_batches);

    // Merges the counts and amaxes of all ranks into this rank's report of a step. Collective.
    void gather(Comm& comm, const Fp8State& state, const StagedStep& staged) const;
    // Logs the report of a finished step: the records, if the step counted, and a warning if a value was not finite or
    // a tensor saturates or flushes too many values.
    void report(RunLog& log, const Fp8State& state, const StagedStep& staged, int64_t step) const;

private:
    const Config& config_;
    const Fp8Plan plan_;
    int64_t count_before_ = 0;
};

// The distribution of the block scales of an operand in this format; bins: see CountScalesArgs. Absent without a block.
std::optional<BlockScales> block_scales_of(const std::vector<uint64_t>& bins, Dtype format);
// "x 2^-2 to 2^9, median 2^4; dy ...; weights ...": the scales of all blocks of a role; "" without block scales.
std::string block_scales_line(const std::vector<Fp8State::TensorReport>& reports);
// One line that names the tensors that saturate or flush too many values, or whose block scales are at an end of their
// range, and what to do; "" if there are none.
std::string fp8_health_line(const std::vector<Fp8State::TensorReport>& reports, const Fp8Plan& plan);
