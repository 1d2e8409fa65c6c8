#include "llmc/train/adamw.h"

#include "llmc/base/rng.h"

void AdamW::update(Ctx& ctx, const ShardUpdate& shard, const StepState* state) const {
    ops::adamw(ctx, {.param = shard.weight, .master = shard.state(StateKind::kMaster),
                     .m = shard.state(StateKind::kExpAvg), .v = shard.state(StateKind::kExpAvgSq),
                     .m_scale_inv = shard.state(StateKind::kExpAvgScale),
                     .v_scale_inv = shard.state(StateKind::kExpAvgSqScale), .grad = shard.grad,
                     .state = state, .lr_scale = static_cast<float>(lr_scale_of(config_, shard.param)),
                     .beta1 = static_cast<float>(config_.adam_beta1), .beta2 = static_cast<float>(config_.adam_beta2),
                     .eps = static_cast<float>(config_.adam_eps),
                     .weight_decay = static_cast<float>(weight_decay_of(config_, shard.param)),
                     .moments_begin = shard.moments_begin,
                     .rng_key = rng_key(config_.seed, "moments." + shard.param.name),
                     .element_offset = shard.first_elem(), .entry = shard.amax});
}
