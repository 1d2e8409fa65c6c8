// The store of ZeRO 0 and 1: every rank has all weights and gradients in memory. A layer waits until its weights are
// gathered, and its gradients are reduced as soon as the last backward of the step has completed them.
#pragma once
#include <vector>

#include "llmc/model/param_store.h"
#include "llmc/parallel/zero.h"

class ZeroStore : public ParamStore {
public:
    // Nothing is owned.
    ZeroStore(const ParamTable& table, const std::vector<Tensor>& weights, const Tensor& grads, Zero& zero)
        : table_(table), weights_(weights), grads_(grads), zero_(zero) {}

    void before_layer(Ctx& ctx, int layer, Pass) override { zero_.before_layer(ctx, layer); }
    void after_layer(Ctx& ctx, int layer, Pass pass) override {
        if (pass == Pass::kBackward) zero_.grads_ready(ctx, layer);
    }
    Tensor weight(int param) const override { return weights_[static_cast<size_t>(param)]; }
    Tensor grad(int param) const override {
        const Param& p = table_.params[static_cast<size_t>(param)];
        return grads_.slice(p.offset, p.elems());
    }

private:
    const ParamTable& table_;
    const std::vector<Tensor>& weights_;
    const Tensor grads_;
    Zero& zero_;
};
