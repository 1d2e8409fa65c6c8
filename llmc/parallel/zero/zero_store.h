// The store of all levels of ZeRO. Before a layer it waits for the all-gather of the layer's weights. After the layer's
// last backward of the step (ZeRO-2 and 3: after each backward) it starts to reduce the layer's gradients.
#pragma once
#include "llmc/model/parameters/param_store.h"
#include "llmc/parallel/zero/gradients.h"
#include "llmc/parallel/zero/weight_gatherer.h"

class ZeroStore : public ParamStore {
public:
    // Owns none of its arguments.
    ZeroStore(const ShardedState& state, Gradients& grads, WeightGatherer& gatherer)
        : state_(state), grads_(grads), gatherer_(gatherer) {}

    void before_layer(Ctx& ctx, int layer, Pass pass) override {
        gatherer_.before_layer(ctx, layer, pass);
        if (pass == Pass::kBackward) grads_.before_layer(ctx, layer);
    }
    void after_layer(Ctx& ctx, int layer, Pass pass) override {
        gatherer_.after_layer(ctx, layer, pass);
        if (pass == Pass::kBackward) grads_.after_layer(ctx, layer);
    }
    Tensor weight(int param) const override { return state_.weight(param); }
    Tensor grad(int param) const override { return grads_.grad(param); }
    bool accumulates(int param) const override { return grads_.accumulates(param); }

private:
    const ShardedState& state_;
    Gradients& grads_;
    WeightGatherer& gatherer_;
};
