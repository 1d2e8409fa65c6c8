// The gradients of a step, from the backward pass to the optimizer. This class owns their memory on the whole way:
//   backward writes or adds to grad(param), this rank's gradient of a whole parameter;
//   after_layer() reduces the buckets that this layer completes: this rank gets the sum over the ranks of its shard or,
//     with --zero 0, of the whole bucket;
//   norm_shards() are what this rank adds to the gradient norm;
//   the optimizer reads reduced(range).
// With --zero 0 and 1 backward adds the gradients of all micro-batches, and they are reduced in the last one. With
// --zero 2 and 3 the gradients of each micro-batch are reduced and then added. If groups of ranks hold the same shard,
// their sums are added at the end. With overlap the reduction runs during the backward of the layers below. With one
// rank reduced(range) is a part of grad(param), and nothing is reduced.
#pragma once
#include "llmc/ops/arena.h"
#include "llmc/ops/ops.h"
#include "llmc/parallel/comm/comm_stream.h"
#include "llmc/parallel/groups.h"
#include "llmc/parallel/zero/grad_placement.h"

// The communication dtype of a bucket of gradients.
enum class GradCommDtype : uint8_t { kFp32, kBf16, kFp8 };

// Compares the gradients reduced in FP8 with the same sums in fp32, for this rank's shards in the last reduction of a
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

class Gradients {
public:
    // Owns none of its arguments. Allocates gradients and communication buffers from the arena.
    Gradients(const Config& config, const ParamTable& table, const Buckets& buckets, const Groups& groups,
              CommStream& stream, Arena& arena);

    // Whether buckets share memory, so that it has only a few buckets of one micro-batch at a time.
    bool shares_memory() const { return !placement_.first_stage.empty(); }
    const Tensor& memory() const { return grads_; }   // of all grad(param)
    // This memory between steps, for weights of a type that is not wider: of a whole bucket, and, if buckets share
    // memory, of this rank's shard, which is apart.
    Tensor idle(const ParamGroup& bucket, Dtype dtype) const { return {grads(bucket).data, dtype, bucket.elems}; }
    Tensor idle_shard(const ParamGroup& bucket, Dtype dtype) const {
        return {reduced_shard(bucket).data, dtype, buckets_.shard_elems(bucket)};
    }
    // Zeroes what is not shared. A bucket in shared memory is cleared before backward writes it.
    void zero(Ctx& ctx);
    bool zeroes() const { return placement_.elems > placement_.shared; }

    // ---- backward
    Tensor grad(int param) const;
    // Whether backward adds to the gradient. It overwrites gradients of linears' weights in shared memory.
    bool accumulates(int param) const {
        return !shares_memory() || is_alone(layout().group_of(param)) || layout().form(param) == ParamForm::kOther;
    }

    // ---- reduction
    // Called before each backward pass of the step. The gradients of any other backward pass are dropped.
    void begin(Ctx& ctx, const BackwardPass& pass);
    // Called around each layer of a backward pass.
    void before_layer(Ctx& ctx, int layer);
    void after_layer(Ctx& ctx, int layer);
    // Makes ctx wait until all gradients are reduced.
    void finish(Ctx& ctx);

    // ---- reduced gradients
    // With --zero 0 and 1 the same elements, so that the norms have equal bits.
    std::vector<Tensor> norm_shards() const;
    // Sums loss_sum, sum_squares and bad_tokens over the ranks.
    void all_reduce_norm(Ctx& ctx, StepState* state);
    Tensor reduced(const ShardRange& range) const;

    // The memory that is sent to other ranks and received from them during the matmuls of every micro-batch, with
    // --zero 2 or 3. It does not include what NCCL sums itself, because copy engines cannot add.
    std::vector<Tensor> exchanged() const;

    int64_t report_bytes() const { return report_ ? int64_t{sizeof(GradCommReport)} : 0; }
    void copy_report(Ctx& ctx, void* host) const;

private:
    void take_comm_buffers(Arena& arena);
    GradCommDtype comm_dtype(const ParamGroup& bucket) const;
    const FlatLayout& layout() const { return buckets_.layout(); }
    // All gradients of a bucket; this rank's shard of such a tensor.
    Tensor grads(const ParamGroup& bucket) const;
    Tensor shard_of(const ParamGroup& bucket, const Tensor& whole) const;
    // The memory of the sums: this rank's shard, and (--zero 0) the whole bucket.
    Tensor reduced_shard(const ParamGroup& bucket) const;
    Tensor reduced_whole(const ParamGroup& bucket) const;
    // Whether no other rank has gradients of a bucket, as of experts: the sums are grads_ itself, to which every
    // micro-batch adds.
    bool is_alone(const ParamGroup& bucket) const { return alone_[buckets_.number(bucket)]; }
    int64_t place_reduced();

    void prepare_stage(Ctx& ctx, int stage);
    void clear(Ctx& ctx, size_t bucket);
    void reduce_layer(Ctx& ctx, int layer);
    void reduce(Ctx& comm, const ParamGroup& bucket);
    void reduce_fp32(Ctx& comm, const ParamGroup& bucket);
    void reduce_bf16(Ctx& comm, const ParamGroup& bucket);
    void reduce_fp8(Ctx& comm, const ParamGroup& bucket);
    void add_shard(Ctx& comm, const ParamGroup& bucket, const Tensor& shard);
    void sum_replicas(Ctx& comm, const ParamGroup& bucket);
    Dtype shard_dtype() const { return (reduced_ ? reduced_ : grads_).dtype; }
    // Whether reduced gradients are added to those of earlier micro-batches.
    bool adds() const { return shares_memory() && !pass_.first; }

    const Config& config_;
    const Buckets& buckets_;
    const Groups& groups_;
    CommStream& stream_;
    const bool sharded_;   // this rank owns shards, not everything
    const std::vector<bool> alone_;   // by bucket
    const GradPlacement placement_;

    Tensor grads_;     // (GradPlacement::elems) grad, of this rank's micro-batches
    Tensor reduced_;   // the sums that this rank owns, if grads_ is bf16 (then fp32) or shared by buckets
    std::vector<int64_t> reduced_begin_;   // by bucket: of its part in it

    // Communication buffers, each as long as the largest bucket that needs it.
    Tensor send_, receive_;                                             // in bf16
    Tensor send_codes_, receive_codes_, send_scales_, receive_scales_;   // in FP8
    Tensor exact_, compare_scratch_, report_;                           // the comparison with fp32
    Tensor wide_;   // fp32, of a shard: a bf16 shard while it is summed over groups

    BackwardPass pass_;
    bool reducing_ = false, comparing_ = false;
    size_t reduced_buckets_ = 0;   // in this pass
    // Events of the side stream. If buckets share memory, one after the reduction of each.
    OwnedEvent all_reduced_;         // all of a step; null without a side stream
    std::vector<OwnedEvent> done_;   // by bucket: the latest reduction
    std::vector<int64_t> order_;     // by bucket: its number, see CommStream::record; 0: none yet
};
