// The flat buffers of a rank: weights, gradients, and what the optimizer keeps (state_slots.h) of the shard ranges that
// the rank owns. Without --zero 1, or alone, it owns everything.
#pragma once
#include <vector>

#include "llmc/config/config.h"
#include "llmc/ops/arena.h"
#include "llmc/parallel/buckets.h"

// Whether each rank owns a part of the optimizer's state, and not all of it.
inline bool shards_state(const Config& config, int ranks) { return config.zero == 1 && ranks > 1; }

class ShardedState {
public:
    // Takes the buffers from the arena. Nothing else is owned.
    ShardedState(const Config& config, const ParamTable& table, const Buckets& buckets, int rank, Arena& arena);

    const Buckets& buckets() const { return buckets_; }
    bool sharded() const { return sharded_; }
    const StateDtypes& dtypes() const { return dtypes_; }
    // What this rank owns, in the order of the flat buffers; of all, of one bucket, of one parameter (null: nothing).
    const std::vector<ShardRange>& ranges() const { return ranges_; }
    const std::vector<ShardRange>& ranges_in(int bucket) const { return in_bucket_[static_cast<size_t>(bucket)]; }
    const ShardRange* range_of(int param) const;

    // ---- whole parameters: weights in the working type, empty where only FP8 weights hold them; gradients
    Tensor weight(int param) const;
    Tensor grad(int param) const { return layout().view(grads_, param); }
    // ---- shard ranges
    Tensor weight(const ShardRange& range) const;
    Tensor slot(StateKind slot, const ShardRange& range) const;
    Tensor master(const ShardRange& range) const { return slot(StateKind::kMaster, range); }
    Tensor reduced_grad(const ShardRange& range) const;
    // ---- buckets
    const Tensor& grads() const { return grads_; }
    Tensor weights(const ParamGroup& bucket) const { return weights_.slice(bucket.weight_begin, bucket.elems); }
    Tensor grads(const ParamGroup& bucket) const { return grads_.slice(bucket.begin, bucket.elems); }
    // This rank's block of the sums over the ranks, and the sums as the ranks have them all (--zero 0).
    Tensor reduced_block(const ParamGroup& bucket) const;
    Tensor reduced_whole(const ParamGroup& bucket) const;
    // Gradients that this rank adds to the norm. A sum over them depends on the cut, so that is the same with --zero 0.
    std::vector<Tensor> norm_blocks() const;

    // Masters from the keyed generator, a pure function of seed, parameter name and element, so that any cut makes the
    // same bits; padded vocabulary rows and the gaps between parameters are 0. Moments 0.
    void initialise(Ctx& ctx, uint64_t seed);
    void zero_moments(Ctx& ctx);
    void zero_grads(Ctx& ctx) { device::fill_bytes(ctx, grads_.data, 0, grads_.bytes()); }
    void zero_weights(Ctx& ctx) { device::fill_bytes(ctx, weights_.data, 0, weights_.bytes()); }

    // Blocking copies of what this rank holds of a parameter: its whole weight, or its range of a slot. Elements beyond
    // that are a bug when they are read, and left out when they are written.
    void read(Ctx& ctx, StateKind kind, int param, int64_t begin, int64_t count, void* host) const;
    void write(Ctx& ctx, StateKind kind, int param, int64_t begin, int64_t count, const void* host);

private:
    struct Held {
        int64_t begin = 0;   // in the parameter
        Tensor elems;
    };
    Held held(StateKind kind, int param) const;
    const FlatLayout& layout() const { return buckets_.layout(); }
    Tensor& buffer(StateKind slot) { return slots_[static_cast<size_t>(slot)]; }

    const ParamTable& table_;
    const Buckets& buckets_;
    const int rank_;
    const bool sharded_;
    const StateDtypes dtypes_;
    std::vector<ShardRange> ranges_;
    std::vector<std::vector<ShardRange>> in_bucket_;
    std::vector<int> range_of_;   // by parameter, -1: other ranks have it

    Tensor weights_;   // (FlatLayout::weight_elems) T, of all ranks
    Tensor grads_;     // (flat_elems) grad, += of this rank's micro-batches
    Tensor reduced_;   // fp32: sums over the ranks of what this rank owns, where grads cannot hold them (bf16)
    std::array<Tensor, kStateKinds> slots_;   // of what this rank owns
};
