// Statistics of the routers of a mixture of experts over the steps: what is logged, and the load of experts in the step
// before, which the auxiliary loss takes, so that its gradient depends neither on micro-batches nor on ranks.
#pragma once
#include <string>
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

    // What is wrong if a rank's experts had more rows than there is memory for, "" otherwise. layer: of those with
    // experts.
    std::string capacity_error(int64_t rows, int layer) const;
    // The same of the evaluations since the last call of guard. Collective, blocking.
    std::string evaluation_error(Ctx& ctx, Comm& world) const;

    // Rows of every expert in every layer in the latest step; empty without experts.
    Tensor load() const { return load_; }
    std::vector<double> read_load(Ctx& ctx) const;   // blocking
    void set_load(Ctx& ctx, const std::vector<double>& load) const;   // exit 5 if it is of another number

private:
    int64_t capacity() const {
        return config_.expert_rows_of_token() * config_.micro_batch_size * config_.part_length();
    }

    const Config& config_;
    const double aux_, z_;   // weights of the losses
    const Tensor stats_, load_, rows_;
};
