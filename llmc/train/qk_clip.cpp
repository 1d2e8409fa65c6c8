#include "llmc/train/qk_clip.h"

namespace {

int64_t if_on(const Config& config, int64_t heads) { return config.qk_clip > 0 ? config.shape.num_layers * heads : 0; }

}  // namespace

QkClip::QkClip(const Config& config, const ParamTable& table, Arena& arena)
    : config_(config), table_(table),
      max_logits_(arena.take(Purpose::kScratch, Dtype::kFp32, if_on(config, config.shape.num_attention_heads))),
      factors_(arena.take(Purpose::kScratch, Dtype::kFp32,
                          if_on(config, config.shape.num_attention_heads + config.shape.num_query_groups))) {}

void QkClip::clear(Ctx& ctx) const {
    if (max_logits_) device::fill_bytes(ctx, max_logits_.data, 0, max_logits_.bytes());
}

void QkClip::all_reduce(Ctx& ctx, CommStream& stream, Comm& world, StepState* state) const {
    if (!max_logits_) return;
    const CollectivePurpose purpose(ctx, "largest attention logits");
    if (world.world().ranks > 1)   // not negative, so their bits are in the order of the values
        stream.timed(ctx, [&] { world.max(ctx, static_cast<uint32_t*>(max_logits_.data), max_logits_.elems); });
    ops::qk_clip_factors(ctx, {.factors = factors_, .max_logits = max_logits_, .NH = config_.shape.num_attention_heads,
                               .NKV = config_.shape.num_query_groups, .tau = static_cast<float>(config_.qk_clip),
                               .state = state});
}

bool QkClip::scales(const Param& param) const {
    if (!max_logits_ || param.layer < 0) return false;
    const LayerParams& layer = table_.layers[static_cast<size_t>(param.layer)];
    return &param == &table_.params[static_cast<size_t>(layer.qkv_weight)]
           || (layer.qkv_bias >= 0 && &param == &table_.params[static_cast<size_t>(layer.qkv_bias)]);
}

void QkClip::apply(Ctx& ctx, const ShardUpdate& shard, const StepState* state) const {
    const int64_t heads = factors_.elems / config_.shape.num_layers;
    ops::qk_clip(ctx, {.param = shard.weight, .master = shard.state(StateKind::kMaster),
                       .factors = factors_.slice(shard.param.layer * heads, heads), .begin = shard.begin,
                       .head_elems = config_.shape.kv_channels * shard.param.cols, .state = state,
                       .entry = shard.amax});
}
