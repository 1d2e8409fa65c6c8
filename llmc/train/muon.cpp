#include "llmc/train/muon.h"

#include <algorithm>
#include <cmath>

#include "llmc/base/rng.h"

double muon_scale(MuonScale scale, int64_t rows, int64_t cols) {
    if (scale == MuonScale::kMatchRms) return 0.2 * std::sqrt(static_cast<double>(std::max(rows, cols)));
    return std::sqrt(std::max(1.0, static_cast<double>(rows) / static_cast<double>(cols)));
}

void Muon::update(Ctx& ctx, const ShardUpdate& shard, const StepState* state) const {
    ops::muon_momentum(ctx, {.m = shard.state(StateKind::kMomentum),
                             .m_scale_inv = shard.state(StateKind::kMomentumScale), .grad = shard.grad, .state = state,
                             .beta = static_cast<float>(config_.muon_momentum),
                             .rng_key = rng_key(config_.seed, "moments." + shard.param.name),
                             .element_offset = shard.first_elem()});
}

void Muon::finish(Ctx& ctx, const ShardUpdate& shard, const StepState* state) const {
    const int64_t end = shard.begin + shard.grad.elems;
    const double lr_scale = lr_scale_of(config_, shard.param);
    int64_t matrix_begin = 0;
    for (int64_t rows : shard.param.stacked) {
        const int64_t matrix_end = matrix_begin + rows * shard.param.cols;
        const int64_t first = std::max(shard.begin, matrix_begin), last = std::min(end, matrix_end);
        const auto part = [&](const Tensor& all) {
            return all ? all.slice(first - shard.begin, last - first) : Tensor{};
        };
        if (first < last)
            ops::muon_update(ctx, {.param = part(shard.weight), .master = part(shard.state(StateKind::kMaster)),
                                   .direction = part(shard.grad), .state = state,
                                   .scale = static_cast<float>(
                                       lr_scale * muon_scale(config_.muon_scale, rows, shard.param.cols)),
                                   .weight_decay = static_cast<float>(lr_scale * weight_decay_of(config_, shard.param)),
                                   .entry = shard.amax});
        matrix_begin = matrix_end;
    }
}
