// Statistics of the routers of a mixture of experts over the steps: what is logged, and the load of experts in the step
// before, which the auxiliary loss takes, so that its gradient depends neither on micro-batches nor on ranks.
#pragma once
#include <vector>

#include "llmc/config/config.h"
#include "llmc/model/decoder.h"
#include "llmc/parallel/comm/comm.h"
#include "llmc/parallel/comm/comm_stream.h"

class RouterBalance {
public:
    // Takes its memory from the arena; none without experts.
    RouterBalance(const Config& config, Arena& arena);

    void set_options(DecoderOptions& options) const;
    void start(Ctx& ctx) const;   // of a new run
    void clear(Ctx& ctx) const;   // before the micro-batches of a step
    // After them: step_guard, with the rows of ranks in the micro-batches since the last call.
    void guard(Ctx& ctx, CommStream& stream, Comm& world, StepGuardArgs args) const;
    // After them and step_guard: adds up the statistics of all ranks, see RouterSummaryArgs.
    void finish(Ctx& ctx, CommStream& stream, Comm& world, StepState* state) const;

    // Rows of every expert in every layer in the latest step; empty without experts.
    Tensor load() const { return load_; }
    std::vector<double> read_load(Ctx& ctx) const;   // blocking
    void set_load(Ctx& ctx, const std::vector<double>& load) const;   // exit 5 if it is of another number

private:
    const Config& config_;
    const double aux_, z_;   // weights of the losses
    const Tensor stats_, load_, rows_;
};
