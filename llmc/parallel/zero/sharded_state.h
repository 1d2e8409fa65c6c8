// The weights of a rank, and the optimizer states (optimizer_state.h) of the shard ranges that it owns. With --zero 0
// or one rank it owns everything.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/model/parameters/layer_buffers.h"
#include "llmc/ops/arena.h"
#include "llmc/parallel/zero/buckets.h"
#include "llmc/parallel/zero/offloaded_state.h"
#include "llmc/parallel/zero/state_places.h"

class ShardedState {
public:
    // Allocates states and weights from the arena, the states first. Owns none of its arguments. layer_buffers: those
    // of --zero 3, where whole weights are gathered layer by layer; the constructor does not use them yet.
    ShardedState(const Config& config, const ParamTable& table, const Buckets& buckets, int rank, Arena& arena,
                 const std::optional<LayerBuffers>& layer_buffers);

    const Buckets& buckets() const { return buckets_; }
    int shard_of(const ParamGroup& bucket) const { return buckets_.shard_of(bucket, rank_); }   // of this rank
    bool sharded() const { return sharded_; }
    const StateDtypes& dtypes() const { return dtypes_; }
    // The ranges that this rank owns, in the order of the flat buffers: all, or those of one bucket or parameter (null:
    // none).
    const std::vector<ShardRange>& ranges() const { return ranges_; }
    const std::vector<ShardRange>& ranges_in(int bucket) const { return in_bucket_[static_cast<size_t>(bucket)]; }
    const ShardRange* range_of(int param) const;

    // ---- weights in the working type; those stored in FP8 only are in Fp8State
    // Whether this rank has the whole weights of a bucket at any time, not only its shard of them.
    bool holds_whole(const ParamGroup& bucket) const { return !gathers_layers_ || !LayerBuffers::gathers(bucket); }
    Tensor weight(int param) const;                // empty if stored in FP8 only
    Tensor weight(const ShardRange& range) const;
    // The weights of a bucket: all of them, in a layer buffer unless this rank holds them whole, and this rank's shard.
    Tensor weights(const ParamGroup& bucket) const;
    Tensor weight_shard(const ParamGroup& bucket) const;
    void zero_weights(Ctx& ctx) { device::fill_bytes(ctx, weights_.data, 0, weights_.bytes()); }

    // ---- optimizer states
    // The state's elements on the device; for an offloaded state only within each_range().
    Tensor state(StateKind kind, const ShardRange& range) const;
    Tensor master(const ShardRange& range) const { return state(StateKind::kMaster, range); }
    // A state by row, of which every rank has all: of all parameters that have it, in table order.
    Tensor row_state(StateKind kind) const { return resident(kind); }
    int64_t row_begin(int param) const { return row_begin_[static_cast<size_t>(param)]; }   // within it
    // The state from which weights are made: the masters, or within an evaluation of it the EMA.
    void set_source(StateKind kind) { source_ = kind; }
    StateKind source_kind() const { return source_; }
    Tensor source(const ShardRange& range) const { return state(source_, range); }
    bool offloads(StateKind kind) const { return offloaded_ && offloaded_->has(kind); }
    int64_t host_bytes() const { return offloaded_ ? offloaded_->host_bytes() : 0; }
    // Calls use() for the ranges that this rank owns, in order, cut where chunks of offloaded states begin. What use()
    // enqueues on ctx may access the states of its range, as `access` says.
    void each_range(Ctx& ctx, OffloadAccess access, const std::function<void(const ShardRange&)>& use);
    // Begins to copy the first offloaded states of the next update to the device.
    void prefetch(Ctx& ctx) { if (offloaded_) offloaded_->prefetch(ctx); }
    // Initialises masters by a pure function of seed, parameter name and element, so the bits do not depend on the
    // sharding; padded vocabulary rows, the gaps between parameters and moments are 0.
    void initialise(Ctx& ctx, uint64_t seed);

    // Blocking copies of this rank's range of a state, numbered as OptimizerState::values does: reading other elements
    // is a bug, writing them does nothing.
    void read(Ctx& ctx, StateKind kind, int param, int64_t begin, int64_t count, void* host) const;
    void write(Ctx& ctx, StateKind kind, int param, int64_t begin, int64_t count, const void* host);

private:
    // Values of a parameter's state that are stored together.
    struct Part {
        int64_t begin = 0;   // number of the first in the parameter
        Tensor elems;
        bool on_host = false;
    };
    std::vector<Part> parts(StateKind kind, int param) const;
    const StatePlaces& places(StateKind kind) const { return places_[static_cast<size_t>(kind)]; }
    void take_states(const Config& config, int64_t own, Arena& arena);
    void initialise_master(Ctx& ctx, uint64_t seed, const ShardRange& range);
    const FlatLayout& layout() const { return buckets_.layout(); }
    int64_t weight_begin(const ParamGroup& bucket) const { return weight_begin_[buckets_.number(bucket)]; }
    const Tensor& resident(StateKind kind) const { return states_[static_cast<size_t>(kind)]; }

    const ParamTable& table_;
    const Buckets& buckets_;
    const int rank_;
    const bool sharded_;
    const StateDtypes dtypes_;
    std::vector<ShardRange> ranges_;
    std::vector<std::vector<ShardRange>> in_bucket_;
    std::vector<int> range_of_;   // by parameter: index in ranges_, -1: other ranks own it

    const bool gathers_layers_;             // --zero 3; else all weights are in weights_
    const std::optional<LayerBuffers>& layer_buffers_;
    std::vector<int64_t> weight_begin_;     // by bucket: of its first element in weights_

    // T: whole weights in the working type, but only this rank's shards of those that are gathered layer by layer.
    Tensor weights_;
    std::vector<StatePlaces> places_;          // by StateKind
    std::vector<int64_t> row_begin_;           // by parameter; of the one state by row
    std::array<Tensor, kStateKinds> states_;   // of what this rank owns; the first elements if the rest is offloaded
    std::unique_ptr<OffloadedState> offloaded_;
    StateKind source_ = StateKind::kMaster;
};
