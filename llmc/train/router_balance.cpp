#include "llmc/train/router_balance.h"

#include <algorithm>

#include "llmc/config/config_value.h"
#include "llmc/ops/ops_moe.h"
#include "llmc/ops/owned.h"

namespace {

Tensor take(const Config& config, Arena& arena, int64_t elems, Dtype dtype = Dtype::kFp64) {
    return arena.take(Purpose::kScratch, dtype, config.shape.moe_layers() * elems);
}

}  // namespace

RouterBalance::RouterBalance(const Config& config, Arena& arena)
    : config_(config), aux_(config.shape.sigmoid_router() ? 0 : config.moe_aux_loss_coeff),
      z_(config.shape.sigmoid_router() ? 0 : config.moe_z_loss_coeff),
      stats_(take(config, arena, router_stats_elems(config.shape.num_experts))),
      load_(take(config, arena, config.shape.num_experts)),
      rows_(take(config, arena, config.expert_parallel > 1 ? 1 : 0, Dtype::kInt32)) {}

void RouterBalance::set_options(DecoderOptions& options) const {
    options.aux_loss = aux_;
    options.router_z_loss = z_;
    options.expert_load = load_;
    options.router_stats = stats_;
    options.expert_rows = rows_;
    options.rows_of_token = config_.expert_rows_of_token();
}

void RouterBalance::start(Ctx& ctx) const {
    for (const Tensor& memory : {load_, rows_})
        if (memory) device::fill_bytes(ctx, memory.data, 0, memory.bytes());
}

void RouterBalance::clear(Ctx& ctx) const {
    if (stats_) device::fill_bytes(ctx, stats_.data, 0, stats_.bytes());
}

// Rows of evaluations count, too: they are in the next call, and after the last step in evaluation_error.
void RouterBalance::guard(Ctx& ctx, CommStream& stream, Comm& world, StepGuardArgs args) const {
    if (!rows_) return ops::step_guard(ctx, args);
    const CollectivePurpose purpose(ctx, "rows of experts");
    stream.timed(ctx, [&] { world.max(ctx, static_cast<uint32_t*>(rows_.data), rows_.elems); });
    args.expert_rows = rows_;
    args.capacity = capacity();
    ops::step_guard(ctx, args);
    device::fill_bytes(ctx, rows_.data, 0, rows_.bytes());
}

std::string RouterBalance::capacity_error(int64_t rows, int layer) const {
    if (rows <= capacity()) return "";
    return strf("the experts of one rank had %lld rows in layer %d, but --moe-capacity %s has memory for %lld: raise "
                "it, or leave it out", ll(rows), layer + static_cast<int>(config_.shape.dense_layers),
                number_text(config_.moe_capacity).c_str(), ll(capacity()));
}

std::string RouterBalance::evaluation_error(Ctx& ctx, Comm& world) const {
    if (!rows_) return "";
    world.max(ctx, static_cast<uint32_t*>(rows_.data), rows_.elems);
    const std::vector<int32_t> rows = read_back<int32_t>(ctx, rows_);
    const auto fullest = std::max_element(rows.begin(), rows.end());
    return capacity_error(*fullest, static_cast<int>(fullest - rows.begin()));
}

void RouterBalance::finish(Ctx& ctx, CommStream& stream, Comm& world, StepState* state) const {
    if (!stats_) return;
    const CollectivePurpose purpose(ctx, "load of experts");
    if (world.world().ranks > 1) stream.timed(ctx, [&] { world.sum(ctx, stats_); });
    ops::router_summary(ctx, {.state = state, .stats = stats_, .load = load_, .layers = config_.shape.moe_layers(),
                              .E = config_.shape.num_experts, .K = config_.shape.experts_per_token,
                              .aux = static_cast<float>(aux_), .z = static_cast<float>(z_)});
}

std::vector<double> RouterBalance::read_load(Ctx& ctx) const {
    return load_ ? read_back<double>(ctx, load_) : std::vector<double>{};
}

void RouterBalance::set_load(Ctx& ctx, const std::vector<double>& load) const {
    start(ctx);
    if (static_cast<int64_t>(load.size()) != load_.elems)
        FAIL(kExitNoCheckpoint, "the checkpoint's state.json has %lld numbers in \"expert_load\", the model has %lld "
             "experts in all layers", ll(load.size()), ll(load_.elems));
    if (load_) write_out(ctx, load_, load);
}
