#include "llmc/train/plan.h"

#include "llmc/checkpoint/checkpoint_saver.h"
#include "llmc/checkpoint/load.h"
#include "llmc/config/schedule.h"
#include "llmc/train/trainer.h"

namespace {

HeldByRank planned_held(const Config& config, const ParamTable& table, const Buckets& buckets, int ranks) {
    HeldByRank held = held_whole(table, ranks);
    const bool sharded = shards_state(config, buckets.ranks());
    const Buckets whole(buckets.layout(), 1);
    for (int rank = 0; rank < ranks && (sharded || config.expert_parallel > 1); rank++) {
        auto& mine = held[static_cast<size_t>(rank)];
        mine.assign(table.params.size(), {});
        for (const ShardRange& range : sharded ? buckets.shard_ranges(rank % buckets.ranks()) : whole.shard_ranges(0)) {
            const int64_t part = rank % buckets.layout().group_of(range.param).parts;
            mine[static_cast<size_t>(range.param)].push_back({part * buckets.layout().elems(range.param) + range.begin,
                                                              range.elems});
        }
    }
    return held;
}

HostPlan plan_host(const Config& config, const ParamTable& table, const Buckets& buckets, int ranks) {
    const HeldByRank held = planned_held(config, table, buckets, ranks);
    const SaveLayout layout = make_save_layout(table, {config.dtype, config.moment_dtype}, held);
    SaveOptions sync, async;
    async.async = true;
    HostPlan plan{.load_bytes = load_staging_bytes(table), .checkpoint_bytes = layout.bytes()};
    for (int rank = 0; rank < ranks; rank++) {
        plan.save_bytes = std::max(plan.save_bytes, save_buffer_bytes(layout, sync, rank));
        plan.save_async_bytes = std::max(plan.save_async_bytes, save_buffer_bytes(layout, async, rank));
    }
    return plan;
}

MemoryPlan rehearse(const Config& config, const ParamTable& table, const Fp8Plan& fp8_plan, int ranks) {
    StepRecorder recorder;
    if (config.expert_parallel > 1)
        recorder.expert_rows = static_cast<double>(config.shape.experts_per_token)
                               / static_cast<double>(config.expert_rows_of_token());
    Ctx ctx;
    ctx.rehearsal = true;
    Arena arena;
    RehearsalComm comm(ranks);
    const Groups groups(comm, group_sizes(config, ranks));
    Trainer trainer(config, table, fp8_plan, arena, groups);
    trainer.initialise(ctx);   // a step begins with gathered weights
    ctx.recorder = &recorder;
    StagedStep staged;
    staged.micro_batches = config.global_batch_size / (config.micro_batch_size * groups.data_ranks);
    trainer.step(ctx, staged);
    ctx.recorder = nullptr;
    const auto evaluate = [&](Evaluator& evaluator) {
        evaluator.evaluate(ctx, nullptr, 1, staged);
        evaluator.generate(ctx, std::vector<int32_t>(static_cast<size_t>(config.seq_length)), {.tokens = 1}, 0, staged);
    };
    evaluate(trainer.evaluator());
    if (Bf16Evaluation* bf16 = trainer.bf16_evaluation()) evaluate(bf16->begin(ctx));

    MemoryPlan plan;
    plan.arena_bytes = plan.peak_bytes = arena.peak_bytes();
    for (int i = 0; i < kPurposes; i++)
        plan.purpose_bytes[static_cast<size_t>(i)] = arena.purpose_bytes(static_cast<Purpose>(i));
    plan.host = plan_host(config, table, trainer.buckets(), ranks);
    if (!config.save.empty()) plan.pinned_bytes = config.save_async ? plan.host.save_async_bytes : plan.host.save_bytes;
    plan.state_host_bytes = trainer.sharded_state().host_bytes();
    plan.activation_host_bytes = trainer.decoder().offload().host_bytes();
    int64_t edge = 0;
    for (const ParamGroup& bucket : trainer.buckets().all())
        if (bucket.first_layer < 0) edge += bucket.elems;
    plan.flat_elems = trainer.buckets().layout().flat_elems();
    plan.edge_share = static_cast<double>(edge) / static_cast<double>(plan.flat_elems);
    plan.step_gemms = std::move(recorder.gemms);
    plan.step_ops = std::move(recorder.ops);
    plan.exchanges = std::move(recorder.exchanges);
    plan.ranks = ranks;
    plan.buckets = static_cast<int64_t>(trainer.buckets().all().size());
    plan.collectives = std::move(comm.calls);
    return plan;
}

}  // namespace

MemoryPlan plan_memory(const Config& config, const ParamTable& table, const Fp8Plan& fp8_plan, int ranks) {
    MemoryPlan plan = rehearse(config, table, fp8_plan, ranks);
    if (!switches_precision(config)) return plan;
    const MemoryPlan& bf16 = plan.bf16.emplace_back(rehearse(in_bf16(config), table, fp8_plan.in_bf16(), ranks));
    if (bf16.arena_bytes > plan.arena_bytes) {
        plan.arena_bytes = bf16.arena_bytes;
        plan.purpose_bytes = bf16.purpose_bytes;
    }
    plan.activation_host_bytes = std::max(plan.activation_host_bytes, bf16.activation_host_bytes);
    return plan;
}

int64_t planned_checkpoints(const Config& config) {
    if (config.save.empty()) return 0;
    const bool once = config.save_interval == 0 || config.train_iters == 0;
    const int64_t saves = once ? 1 : ceil_div(config.train_iters, config.save_interval);
    return config.keep == 0 ? saves : std::min(saves, config.keep);
}

double used_elems(const ModelConfig& shape, const Param& param) {
    const auto elems = static_cast<double>(param.elems());
    const auto experts = static_cast<double>(param.experts);
    return param.experts == 1 ? elems : elems / experts * static_cast<double>(shape.experts_per_token);
}

double used_params(const ModelConfig& shape, const ParamTable& table) {
    auto used = static_cast<double>(table.param_elems);
    for (const Param& param : table.params) used -= static_cast<double>(param.elems()) - used_elems(shape, param);
    return used;
}

double model_flops_per_token(const Config& config, const ParamTable& table) {
    double matmul_params = static_cast<double>(config.shape.vocab_size * config.shape.hidden_size);   // the head
    for (const Param& p : table.params)
        if (p.layer >= 0 && !p.is_vector()) matmul_params += used_elems(config.shape, p);
    double keys = 0;   // of a query on average, over all layers
    for (int64_t l = 0; l < config.shape.num_layers; l++)
        keys += PlannedAttention{.T = config.seq_length, .window = config.shape.window(l)}.share()
                * static_cast<double>(config.seq_length) / 2;
    return 6.0 * matmul_params + 12.0 * static_cast<double>(config.shape.q_width()) * keys;
}
