#include "llmc/plan.h"

#include <algorithm>

#include "llmc/gain.h"
#include "llmc/run_checkpoints.h"
#include "llmc/trainer.h"

namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

bool same_kind(const GemmArgs& a, const GemmArgs& b) {
    return a.M == b.M && a.N == b.N && a.K == b.K && a.layout == b.layout && a.epilogue == b.epilogue
           && a.accumulate == b.accumulate && a.A.dtype == b.A.dtype && a.D.dtype == b.D.dtype;
}

const char* layout_name(GemmLayout layout) {
    switch (layout) {
        case GemmLayout::kForward: return "forward";
        case GemmLayout::kDgrad: return "dgrad";
        case GemmLayout::kWgrad: return "wgrad";
    }
    return "?";
}

// The FP8 copies of one layer's queries, keys and values, with their factors.
int64_t fp8_attention_bytes(const Config& c) {
    const int64_t heads = c.shape.num_attention_heads + 2 * c.shape.num_query_groups;
    return c.micro_batch_size * heads * head_blocks(c.seq_length) * (kHeadBlock * c.shape.kv_channels + 4);
}

}  // namespace

void StepRecorder::add(const GemmArgs& args) {
    auto known = std::find_if(gemms.begin(), gemms.end(),
                              [&](const PlannedGemm& g) { return same_kind(g.shape, args); });
    if (known != gemms.end()) known->count++;
    else gemms.push_back({args, 1});
}

void rehearse_op(Ctx& ctx, const GemmArgs& args) {
    if (ctx.recorder) ctx.recorder->add(args);
}

MemoryPlan plan_memory(const Config& config, const ParamTable& table, int ranks) {
    StepRecorder recorder;
    Ctx ctx;
    ctx.rehearsal = true;
    ctx.recorder = &recorder;
    Arena arena;
    RehearsalComm comm(ranks);
    Trainer trainer(config, table, arena, comm);
    StagedStep staged;
    staged.micro_batches = config.global_batch_size / (config.micro_batch_size * ranks);
    trainer.step(ctx, staged);
    ctx.recorder = nullptr;
    trainer.evaluate(ctx, nullptr, 1, staged);
    trainer.generate(ctx, std::vector<int32_t>(static_cast<size_t>(config.seq_length)), {.tokens = 1}, 0, staged);

    MemoryPlan plan;
    plan.arena_bytes = arena.peak_bytes();
    for (int i = 0; i < kPurposes; i++)
        plan.purpose_bytes[static_cast<size_t>(i)] = arena.purpose_bytes(static_cast<Purpose>(i));
    plan.save_bytes = planned_save_bytes(config, table, trainer.buckets());
    for (const Bucket& bucket : trainer.buckets().all()) plan.flat_elems += bucket.elems;
    plan.step_gemms = std::move(recorder.gemms);
    plan.ranks = ranks;
    plan.buckets = static_cast<int64_t>(trainer.buckets().all().size());
    plan.collectives = std::move(comm.calls);
    return plan;
}

double model_flops_per_token(const Config& config, const ParamTable& table) {
    double matmul_params = static_cast<double>(config.shape.vocab_size * config.shape.hidden_size);   // the head
    for (const Param& p : table.params)
        if (p.layer >= 0 && !p.is_vector()) matmul_params += static_cast<double>(p.elems());
    const double attention = static_cast<double>(config.shape.num_layers * config.shape.q_width() * config.seq_length);
    return 6.0 * matmul_params + 6.0 * attention;
}

std::string plan_text(const Config& config, const ParamTable& table, const MemoryPlan& plan, const DeviceInfo& device) {
    auto ll = [](int64_t x) { return static_cast<long long>(x); };
    std::string text;
    text += strf("parameters        %lld (%.3f B; stored with padding: %lld)\n", ll(table.param_elems),
                 static_cast<double>(table.param_elems) * 1e-9, ll(plan.flat_elems));
    text += strf("numbers           %s weights, %s gradients, fp32 masters, %s moments\n", dtype_name(config.dtype),
                 dtype_name(config.grad_dtype), dtype_name(config.moment_dtype));
    text += "memory\n";
    for (int i = 0; i < kPurposes; i++) {
        const int64_t bytes = plan.purpose_bytes[static_cast<size_t>(i)];
        text += strf("  %-22s %16lld bytes %9.3f GiB\n", purpose_name(static_cast<Purpose>(i)), ll(bytes),
                     static_cast<double>(bytes) / kGiB);
    }
    text += strf("  %-22s %16lld bytes %9.3f GiB", "arena", ll(plan.arena_bytes),
                 static_cast<double>(plan.arena_bytes) / kGiB);
    if (device.memory_bytes > 0) {
        text += strf(" of %.1f GiB on %s%s", static_cast<double>(device.memory_bytes) / kGiB, device.name.c_str(),
                     plan.arena_bytes > device.memory_bytes ? ": DOES NOT FIT" : "");
    } else {
        text += " (no GPU here; an H100 has 80, an H200 141 GB)";
    }
    text += "\n";
    if (config.fp8_attention)
        text += strf("  %-22s %16lld bytes %9.3f GiB of the scratch, for every layer in turn\n", "FP8 attention",
                     ll(fp8_attention_bytes(config)), static_cast<double>(fp8_attention_bytes(config)) / kGiB);
    if (plan.save_bytes > 0)
        text += strf("  %-22s %16lld bytes %9.3f GiB a rank, pinned in host memory\n", "checkpoints",
                     ll(plan.save_bytes), static_cast<double>(plan.save_bytes) / kGiB);
    const double flops = model_flops_per_token(config, table);
    const int64_t tokens = config.global_batch_size * config.seq_length;
    text += strf("model FLOPs       %.4g per token, %.4g per step\n", flops, flops * static_cast<double>(tokens));
    text += strf("ranks             %d, %lld micro-batches of %lld x %lld tokens a step and rank\n", plan.ranks,
                 ll(config.global_batch_size / (config.micro_batch_size * plan.ranks)), ll(config.micro_batch_size),
                 ll(config.seq_length));
    text += strf("tokens            %lld per step, %lld steps, %.4g in all\n", ll(tokens), ll(config.train_iters),
                 static_cast<double>(tokens) * static_cast<double>(config.train_iters));
    text += "matmuls of one step (rows are the outputs)\n";
    text += strf("  %-8s %10s %10s %10s  %-5s %-5s %-4s %8s %12s\n", "pass", "M", "N", "K", "in", "out", "beta",
                 "count", "TFLOP");
    for (const PlannedGemm& g : plan.step_gemms) {
        const GemmArgs& s = g.shape;
        text += strf("  %-8s %10lld %10lld %10lld  %-5s %-5s %-4d %8lld %12.3f\n", layout_name(s.layout), ll(s.M),
                     ll(s.N), ll(s.K), dtype_name(s.A.dtype), dtype_name(s.D.dtype), s.accumulate ? 1 : 0, ll(g.count),
                     2e-12 * static_cast<double>(s.M) * static_cast<double>(s.N) * static_cast<double>(s.K)
                         * static_cast<double>(g.count));
    }
    return text + communication_text(config, plan.collectives, plan.ranks, plan.buckets)
           + fp8_dry_run_text(config, table, device);
}
