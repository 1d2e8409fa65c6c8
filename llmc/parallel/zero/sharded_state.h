// The flat buffers of a rank: weights, gradients, and the optimizer state slots (state_slots.h) of the shard ranges
// that the rank owns. With --zero 0 or one rank it owns everything.
#pragma once
#include <memory>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/model/parameters/weight_slots.h"
#include "llmc/ops/arena.h"
#include "llmc/parallel/zero/grad_placement.h"
#include "llmc/parallel/zero/offloaded_slots.h"

// Whether the optimizer state is sharded over `ranks` ranks, whether the sums of gradients are, and whether the weights
// are, so that a layer's are gathered before it runs.
inline bool shards_state(const Config& config, int ranks) { return config.zero >= 1 && ranks > 1; }
inline bool shards_grads(const Config& config, int ranks) { return config.zero >= 2 && ranks > 1; }
inline bool shards_weights(const Config& config, int ranks) { return config.zero == 3 && ranks > 1; }

class ShardedState {
public:
    // Allocates the buffers from the arena. Owns none of its arguments. weight_slots (optional): where whole
    // weights are gathered by layer.
    ShardedState(const Config& config, const ParamTable& table, const Buckets& buckets, int rank, Arena& arena,
                 const WeightSlots* weight_slots = nullptr);

    const Buckets& buckets() const { return buckets_; }
    bool sharded() const { return sharded_; }
    // Whether buckets share the memory of grads(), which then has only a few buckets of one micro-batch at a time.
    bool shares_grads() const { return !placement_.opens.empty(); }
    const GradPlacement& grad_placement() const { return placement_; }
    const StateDtypes& dtypes() const { return dtypes_; }
    // The ranges that this rank owns, in the order of the flat buffers: all, or those of one bucket or parameter (null:
    // none).
    const std::vector<ShardRange>& ranges() const { return ranges_; }
    const std::vector<ShardRange>& ranges_in(int bucket) const { return in_bucket_[static_cast<size_t>(bucket)]; }
    const ShardRange* range_of(int param) const;

    // Whether this rank has the weights of a bucket always, not only its block of them.
    bool holds_whole(const ParamGroup& bucket) const { return !weight_slots_ || !WeightSlots::gathers(bucket); }

    // ---- whole parameters: weights in the working type, empty if stored in FP8 only; gradients
    Tensor weight(int param) const;
    Tensor grad(int param) const;
    // Whether backward adds to the gradient. It overwrites gradients of linears' weights in shared memory.
    bool accumulates(int param) const { return !shares_grads() || layout().form(param) == ParamForm::kOther; }
    // ---- shard ranges
    Tensor weight(const ShardRange& range) const;
    // The slot's elements on the device; for an offloaded slot only within each_range().
    Tensor slot(StateKind slot, const ShardRange& range) const;
    Tensor master(const ShardRange& range) const { return slot(StateKind::kMaster, range); }
    Tensor reduced_grad(const ShardRange& range) const;

    // ---- --offload
    bool offloads(StateKind kind) const { return offloaded_ && offloaded_->has(kind); }
    int64_t host_bytes() const { return offloaded_ ? offloaded_->host_bytes() : 0; }
    // Calls use() for the ranges that this rank owns, in order, cut where chunks of offloaded slots begin. What use()
    // enqueues on ctx may access the slots of its range, as `access` says.
    void each_range(Ctx& ctx, SlotAccess access, const std::function<void(const ShardRange&)>& use);
    // Begins to copy the first offloaded slots of the next update to the device.
    void prefetch(Ctx& ctx) { if (offloaded_) offloaded_->prefetch(ctx); }
    // FP8 weights are quantized from the masters once all masters are new. If masters are offloaded, keep_master stores
    // the master of a range of each_range() in the memory of the range's gradient, rounded if that is bf16. new_master
    // returns this copy, or the master itself; it is valid until gradients are cleared.
    void keep_master(Ctx& ctx, const ShardRange& range);
    Tensor new_master(const ShardRange& range) const;
    // ---- buckets
    const Tensor& grads() const { return grads_; }
    // The weights of a bucket in the working type: all of them, in a slot if they are gathered, and this rank's block.
    Tensor weights(const ParamGroup& bucket) const;
    Tensor weight_block(const ParamGroup& bucket) const;
    Tensor grads(const ParamGroup& bucket) const;
    // The reduced gradients of the step: this rank's block, and (--zero 0) the whole bucket.
    Tensor reduced_block(const ParamGroup& bucket) const;
    Tensor reduced_whole(const ParamGroup& bucket) const;
    // The gradients that this rank adds to the norm: the same blocks with --zero 0 and 1, so that the bits are equal.
    std::vector<Tensor> norm_blocks() const;

    // Initialises masters by a pure function of seed, parameter name and element, so the bits do not depend on the
    // sharding; padded vocabulary rows, the gaps between parameters and moments are 0.
    void initialise(Ctx& ctx, uint64_t seed);
    // Does nothing if buckets share the memory, which GradReducer clears before each use.
    void zero_grads(Ctx& ctx) {
        if (!shares_grads()) device::fill_bytes(ctx, grads_.data, 0, grads_.bytes());
    }
    void zero_weights(Ctx& ctx) { device::fill_bytes(ctx, weights_.data, 0, weights_.bytes()); }

    // Blocking copies of this rank's range of a slot: reading other elements is a bug, writing them does nothing.
    void read(Ctx& ctx, StateKind kind, int param, int64_t begin, int64_t count, void* host) const;
    void write(Ctx& ctx, StateKind kind, int param, int64_t begin, int64_t count, const void* host);

private:
    // Elements of a weight or a slot that are stored together.
    struct Held {
        int64_t begin = 0;   // in the parameter
        Tensor elems;
        bool on_host = false;
    };
    std::vector<Held> held(StateKind kind, int param) const;
    void make_slots(const Config& config, int64_t own, Arena& arena);
    void initialise_master(Ctx& ctx, uint64_t seed, const ShardRange& range);
    const FlatLayout& layout() const { return buckets_.layout(); }
    int64_t weight_begin(const ParamGroup& bucket) const {
        return weight_begin_[static_cast<size_t>(&bucket - buckets_.all().data())];
    }
    Tensor& buffer(StateKind slot) { return slots_[static_cast<size_t>(slot)]; }

    const ParamTable& table_;
    const Buckets& buckets_;
    const int rank_;
    const bool sharded_;
    const StateDtypes dtypes_;
    const GradPlacement placement_;
    std::vector<ShardRange> ranges_;
    std::vector<std::vector<ShardRange>> in_bucket_;
    std::vector<int> range_of_;   // by parameter: index in ranges_, -1: other ranks own it

    const WeightSlots* const weight_slots_;   // null: all weights are in weights_
    std::vector<int64_t> weight_begin_;       // by bucket: of its first element in weights_

    Tensor weights_;   // T: whole weights in the working type, but only this rank's blocks of those gathered in slots
    Tensor grads_;     // (GradPlacement::elems) grad, of this rank's micro-batches
    // The reduced gradients that this rank owns, if grads_ is bf16 (then fp32) or shared by buckets.
    Tensor reduced_;
    std::array<Tensor, kStateKinds> slots_;   // of what this rank owns; the first elements if the rest is offloaded
    std::unique_ptr<OffloadedSlots> offloaded_;
};
