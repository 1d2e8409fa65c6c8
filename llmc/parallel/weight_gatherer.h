// Brings new weights to all ranks and quantizes them: after each step, and after masters were loaded. With --zero 1 a
// rank has new masters of its shard ranges, and buckets of weights are all-gathered, with overlap under the forward of
// the layers before; a rank that has all masters makes all weights from them.
#pragma once
#include <vector>

#include "llmc/model/fp8_state.h"
#include "llmc/parallel/comm_stream.h"
#include "llmc/parallel/groups.h"
#include "llmc/parallel/sharded_state.h"

// Whether weights travel in FP8, quantized by the ranks that own them, and not in bf16.
bool gathers_fp8(const Config& config, const Buckets& buckets);

class WeightGatherer {
public:
    // Nothing is owned. Takes buffers for what is on its way from the arena.
    WeightGatherer(const Config& config, ShardedState& state, Fp8State& fp8, const Groups& groups, CommStream& stream,
                   Arena& arena);
    ~WeightGatherer();
    WeightGatherer(const WeightGatherer&) = delete;
    WeightGatherer& operator=(const WeightGatherer&) = delete;

    // The largest amaxes of all ranks, from which all make the same scales.
    void all_reduce_amaxes(Ctx& ctx);
    // Masters, weights of the working type in this rank's blocks, and amaxes of all ranks are new: makes every other
    // weight. FP8 weights do not change where step->skip, if step is given.
    void gather(Ctx& ctx, const StepState* step);
    // All of that from masters alone. fresh: they are not of a checkpoint of a run in the same recipe.
    void from_masters(Ctx& ctx, bool fresh);

    // Makes ctx wait until the weights of layers <= `layer`, or all, are gathered.
    void wait(Ctx& ctx, int layer);
    void wait(Ctx& ctx);
    int64_t timer_spans() const;   // of one step, at most; see CommTimer

    // Between steps, on every rank: a weight in FP8 alone as bf16, whole, from the masters of all ranks. It lies in the
    // memory of the gradients, until those are cleared.
    void gather_for_checkpoint(Ctx& ctx, int param);
    Tensor gathered_for_checkpoint(int param) const;
    void forget_gathered() { gathered_.assign(buckets_.all().size(), false); }

private:
    const ParamGroup& bucket(int number) const { return buckets_.all()[static_cast<size_t>(number)]; }
    Tensor bf16_of_grads(const ParamGroup& bucket) const;
    void round_masters(Ctx& ctx, int number, const Tensor& whole);
    void gather_bucket(Ctx& comm, int number, const StepState* step);
    void gather_fp8_bucket(Ctx& comm, int number);

    const Config& config_;
    ShardedState& state_;
    const Buckets& buckets_;
    Fp8State& fp8_;
    const Groups& groups_;
    CommStream& stream_;
    Tensor rounded_;                     // a bucket of masters of weights in FP8 alone, bf16, on its way
    std::vector<Event*> done_;           // by bucket: its weights are gathered; empty until a comm stream is open
    size_t next_;                        // first bucket that the compute stream has not waited for
    std::vector<bool> gathered_;         // by bucket, for a checkpoint
};
