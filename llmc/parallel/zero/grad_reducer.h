// Reduces the gradients of a step over the ranks, bucket by bucket: each rank gets the sum of its block or, with
// --zero 0, of the whole bucket. With --zero 0 and 1 backward adds the gradients of all micro-batches, and they are
// reduced in the last one. With --zero 2 and 3 the gradients of each micro-batch are reduced and then added. If groups
// of ranks hold the same shard, their sums are added at the end. With overlap all this runs during the backward of the
// layers below. Does nothing with one rank.
#pragma once
#include "llmc/config/config.h"
#include "llmc/ops/ops.h"
#include "llmc/parallel/comm/comm_stream.h"
#include "llmc/parallel/groups.h"
#include "llmc/parallel/zero/sharded_state.h"

// The communication dtype of a bucket of gradients.
enum class GradCommDtype : uint8_t { kFp32, kBf16, kFp8 };

// Compares the gradients reduced in FP8 with the same sums in fp32, for this rank's blocks in the last reduction of a
// step.
struct GradCommReport {
    double sums[kParamForms][4];     // see compare_sums: a reduced in fp32, b in FP8
    Fp8Counts counts[kParamForms];   // of this rank's casts
};

// The place of a backward pass in its step, and what it does besides.
struct BackwardPass {
    bool first = true, last = true;   // whether it is that of the first, of the last micro-batch
    bool compare = false;   // gradients reduced in FP8 are reduced in fp32 as well, and the difference is reported
};

class GradReducer {
public:
    // Owns none of its arguments. Allocates communication buffers from the arena.
    GradReducer(const Config& config, const ShardedState& state, const Groups& groups, CommStream& stream,
                Arena& arena);

    // Called before each backward pass of the step. The gradients of any other backward pass are dropped.
    void begin(Ctx& ctx, const BackwardPass& pass);
    // Called around each layer of a backward pass.
    void before_layer(Ctx& ctx, int layer);
    void layer_ready(Ctx& ctx, int layer);
    // Makes ctx wait until all gradients are reduced.
    void finish(Ctx& ctx);
    // Sums loss_sum, sum_squares and bad_tokens over the ranks.
    void all_reduce_norm(Ctx& ctx, StepState* state);

    // The memory that is sent to other ranks and received from them during the matmuls of every micro-batch, with
    // --zero 2 or 3. It does not include what NCCL sums itself, because copy engines cannot add.
    std::vector<Tensor> exchanged() const;

    int64_t report_bytes() const { return report_ ? int64_t{sizeof(GradCommReport)} : 0; }
    void copy_report(Ctx& ctx, void* host) const;
    int64_t timer_spans() const;   // of one step, at most, without those of WeightGatherer; see CommTimer

private:
    GradCommDtype comm_dtype(const ParamGroup& bucket) const;
    void open(Ctx& ctx, int stage);
    void clear(Ctx& ctx, size_t bucket);
    void reduce_layer(Ctx& ctx, int layer);
    void reduce(Ctx& comm, const ParamGroup& bucket);
    void reduce_fp32(Ctx& comm, const ParamGroup& bucket);
    void reduce_bf16(Ctx& comm, const ParamGroup& bucket);
    void reduce_fp8(Ctx& comm, const ParamGroup& bucket);
    Tensor block_of(const ParamGroup& bucket, const Tensor& whole) const;
    void add_block(Ctx& comm, const ParamGroup& bucket, const Tensor& block);
    void sum_replicas(Ctx& comm, const ParamGroup& bucket);
    Dtype shard_dtype() const { return state_.reduced_block(buckets_.all()[0]).dtype; }
    // Whether reduced gradients are added to those of earlier micro-batches.
    bool adds() const { return state_.shares_grads() && !pass_.first; }

    const Config& config_;
    const ShardedState& state_;
    const Buckets& buckets_;
    const Groups& groups_;
    CommStream& stream_;

    // Communication buffers, each as long as the largest bucket that needs it.
    Tensor send_, receive_;                                             // in bf16
    Tensor send_codes_, receive_codes_, send_scales_, receive_scales_;   // in FP8
    Tensor exact_, compare_scratch_, report_;                           // the comparison with fp32
    Tensor wide_;   // fp32, of a block: a bf16 shard while it is summed over groups

    BackwardPass pass_;
    bool reducing_ = false, comparing_ = false;
    size_t reduced_buckets_ = 0;   // in this pass
    // Events of the side stream. If buckets share memory, one after the reduction of each.
    OwnedEvent reduced_;           // all of a step; null without a side stream
    std::vector<OwnedEvent> done_;   // by bucket: the latest reduction
    std::vector<int64_t> order_;   // by bucket: its number, see CommStream::record; 0: none yet
};
