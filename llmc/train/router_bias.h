// The bias of a router that balances its experts without an auxiliary loss (Wang et al., arXiv 2408.15664); the
// operation is ops::router_bias.
#pragma once
#include "llmc/train/optimizer.h"

class RouterBias : public Optimizer {
public:
    // load: (layers, E) fp64, the rows of every expert in this step, see RouterBalance; empty without experts.
    RouterBias(const Config& config, Tensor load) : config_(config), load_(load) {}
    void update(Ctx& ctx, const ShardUpdate& shard, const StepState* state) const override {
        const int64_t E = config_.shape.num_experts, layer = shard.param.layer - config_.shape.dense_layers;
        ops::router_bias(ctx, {.bias = shard.weight, .master = shard.state(StateKind::kMaster),
                               .load = load_.slice(layer * E, E), .state = state, .first = shard.begin,
                               .rate = static_cast<float>(config_.moe_router_bias_update_rate)});
    }

private:
    const Config& config_;
    const Tensor load_;
};
