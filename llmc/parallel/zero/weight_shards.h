// The way of new weights from this rank's masters to all ranks of its shard group, the same in every form and at every
// level that shards state: the rank writes its shard of a bucket (in the working type the optimizer has written it, in
// FP8 quantize() does), then gather() all-gathers the shards. WeightGatherer and LayerGatherer say when.
#pragma once
#include "llmc/model/parameters/fp8_state.h"
#include "llmc/parallel/comm/comm_stream.h"
#include "llmc/parallel/groups.h"
#include "llmc/parallel/zero/gradients.h"
#include "llmc/parallel/zero/sharded_state.h"

class WeightShards {
public:
    // Owns none of its arguments. layer_buffers: null without --zero 3.
    WeightShards(const ShardedState& state, Fp8State& fp8, const Gradients& grads, const LayerBuffers* layer_buffers,
                 const Groups& groups, CommStream& stream)
        : state_(state), buckets_(state.buckets()), fp8_(fp8), grads_(grads), layer_buffers_(layer_buffers),
          groups_(groups), stream_(stream) {}

    // FP8 weights are quantized once all masters are new and their amaxes are all-reduced. Offloaded masters are no
    // longer on the device then: keep_master() copies the master of a range of each_range() to the memory of the
    // range's gradient, rounded if that is bf16; FP8 bytes are the same. new_master() returns this copy, or the master
    // itself. The copy is valid until gradients are cleared.
    void keep_master(Ctx& ctx, const ShardRange& range) const;
    Tensor new_master(const ShardRange& range) const;

    // Quantizes the new masters of this rank's shard of a kFp8Linear bucket.
    void quantize(Ctx& ctx, int bucket) const;
    // All-gathers a bucket's weights to where passes read them.
    void gather(Ctx& ctx, const ParamGroup& bucket) const;

private:
    Tensor shard(const ParamGroup& bucket) const;
    Tensor whole(const ParamGroup& bucket) const;

    const ShardedState& state_;
    const Buckets& buckets_;
    Fp8State& fp8_;
    const Gradients& grads_;
    const LayerBuffers* const layer_buffers_;
    const Groups& groups_;
    CommStream& stream_;
};
