#include "llmc/commands/plan_report.h"

#include <nlohmann/json.hpp>

#include "llmc/base/check.h"
#include "llmc/base/text.h"
#include "llmc/commands/memory_changes.h"
#include "llmc/config/schedule.h"
#include "llmc/perf/fp8_speedup.h"
#include "llmc/train/plan.h"

namespace {

using OrderedJson = nlohmann::ordered_json;

// The numbers in both text and JSON.
struct Figures {
    const PlannedRun& run;
    const Gpu& gpu = planned_gpu(run.config, run.device);
    const Rates* rates = find_rates(gpu.name);   // null: scaled from another GPU's
    // Whether the GPU was found, and memory_bytes is what it has.
    const bool here = run.device.sm > 0 && (run.config.gpu.empty() || find_gpu(run.device.name) == &gpu);
    const int64_t memory_bytes = here ? run.device.memory_bytes : static_cast<int64_t>(gpu.memory_gib * kGiB);
    const bool fits = run.plan.arena_bytes <= memory_bytes;
    const StepTime time = predict_step(run.config, run.plan, gpu);
    const double bf16_ms =
        run.plan.bf16.empty() ? 0 : predict_step(in_bf16(run.config), run.plan.bf16[0], gpu).total_ms();
    const double ms = time.total_ms(), flops_per_token = model_flops_per_token(run.config, run.table);
    const double tokens = real(run.config.global_batch_size * run.config.seq_length);   // per step, all ranks
    const double tokens_per_second = ms > 0 ? tokens / (1e-3 * ms) : 0;
    const double mfu = tokens_per_second * flops_per_token / (gpu.peak_flops(run.config.dtype) * run.plan.ranks);
};

// "fits: 33.456 GiB of 139.0 GiB on H200 (not here)", and what else would fit.
std::string verdict_text(const Figures& f) {
    const PlannedRun& run = f.run;
    std::string text = strf("%s: %.3f GiB of %.1f GiB on %s\n", f.fits ? "fits" : "does not fit",
                            gib(run.plan.arena_bytes), gib(f.memory_bytes),
                            f.here ? run.device.name.c_str() : strf("%s (not here)", f.gpu.name).c_str());
    for (const MemoryChange& change : memory_changes(f.run, f.memory_bytes))
        text += strf("  %9.3f GiB%s with %s%s\n", gib(change.arena_bytes), change.fits ? ", fits," : "",
                     change.options.c_str(), f.fits ? ", which communicates or copies less" : "");
    return text;
}

std::string bytes_text(const char* what, int64_t bytes, const std::string& more = "") {
    return strf("  %-22s %16lld bytes %9.3f GiB%s\n", what, ll(bytes), gib(bytes), more.c_str());
}

std::string memory_text(const PlannedRun& run) {
    const MemoryPlan& plan = run.plan;
    std::string text = "memory, of every rank\n";
    for (int i = 0; i < kPurposes; i++) {
        const int64_t bytes = plan.purpose_bytes[static_cast<size_t>(i)];
        const auto purpose = static_cast<Purpose>(i);
        if ((purpose == Purpose::kOffload || purpose == Purpose::kEma) && bytes == 0) continue;
        text += bytes_text(purpose_name(purpose), bytes);
    }
    const std::string precisions =
        plan.bf16.empty() ? "" : strf(": FP8 takes %.3f GiB, BF16 %.3f", gib(plan.peak_bytes),
                                      gib(plan.bf16[0].peak_bytes));
    text += bytes_text("arena", plan.arena_bytes, precisions) + "host memory, of the rank that takes most\n"
            + bytes_text("loading", plan.host.load_bytes, ", while --load or --resume reads")
            + bytes_text("saving", plan.host.save_bytes,
                         strf(", pinned; %lld bytes %.3f GiB with --save-async", ll(plan.host.save_async_bytes),
                              gib(plan.host.save_async_bytes)));
    const int64_t offloaded = plan.state_host_bytes + plan.activation_host_bytes;
    return offloaded > 0 ? text + bytes_text("offloaded", offloaded, ", pinned") : text;
}

std::string time_text(const Figures& f) {
    const StepTime& time = f.time;
    const Config& config = f.run.config;
    const int ranks = f.run.plan.ranks;
    if (f.ms <= 0) return "time              not predicted for this --dtype\n";
    const std::string origin =
        f.rates ? "rates measured on it"
                : strf("SCALED, not measured: rates of an %s; matmuls and attention are scaled by the ratio of peaks, "
                       "the rest by that of memory bandwidths", measured_gpu().name);
    std::string text = strf("time of a step    predicted for %s; %s\n  %-26s %10s %7s\n", f.gpu.name, origin.c_str(),
                            "", "ms", "share");
    for (const auto& [name, ms] : time.named_ms())
        text += strf("  %-26s %10.3f %6.1f%%\n", name.c_str(), ms, 100 * ms / f.ms);
    text += strf("  %-26s %10.3f\n", "all", f.ms);
    if (config.shape.has_experts()) {
        const auto rate = [&](GemmLayout pass) {
            const auto i = static_cast<size_t>(pass);
            return 1e-9 * time.expert_flop[i] / time.expert_ms[i];
        };
        text += strf("  matmuls of experts take %.3f ms: %.0f TFLOP/s forward, %.0f dgrad, %.0f wgrad\n",
                     time.expert_ms[0] + time.expert_ms[1] + time.expert_ms[2], rate(GemmLayout::kForward),
                     rate(GemmLayout::kDgrad), rate(GemmLayout::kWgrad));
    }
    if (ranks > 1)
        text += strf("  communication takes %.3f ms, hidden or exposed: gradients %.3f, weights %.3f, heads %.3f, "
                     "matrices %.3f, tokens of experts %.3f (%.3f exposed)\n", time.communication_ms(), time.reduce_ms,
                     time.gather_ms, time.exchange_ms, time.matrices_ms, time.tokens_ms, time.exposed_tokens_ms);
    if (time.host_link_ms > 0)
        text += strf("  copies from and to host memory take %.3f ms each way, hidden or exposed\n", time.host_link_ms);
    text += strf("predicted         %.4g s/it, %.0f tokens/s, %.0f per GPU, MFU %.1f %%\n", 1e-3 * f.ms,
                 f.tokens_per_second, f.tokens_per_second / ranks, 100 * f.mfu);
    if (config.fp8_recipe != Fp8Recipe::kNone) {
        Config bf16 = config;
        bf16.fp8_recipe = Fp8Recipe::kNone;
        const MemoryPlan plan = plan_memory(bf16, f.run.table, fp8_plan_of(bf16, f.run.table), ranks);
        const double bf16_ms = predict_step(bf16, plan, f.gpu).total_ms();
        text += strf("  in BF16 %.4g s/it: FP8 is %.2f times as fast\n", 1e-3 * bf16_ms, bf16_ms / f.ms);
    }
    if (switches_precision(config))
        text += strf("  %s: %.4g s/it\n", config.train_iters > 0 ? bf16_steps_text(config).c_str()
                                                                  : "the steps in BF16", 1e-3 * f.bf16_ms);
    if (config.reset_attention_mask)
        text += "  attention time is that of one document per sequence (--reset-attention-mask skips tiles between "
                "documents)\n";
    if (config.train_iters > 0)
        text += strf("  %s in %.4g hours, without evaluation and checkpoints\n",
                     count_text(config.train_iters, "step").c_str(),
                     1e-3 * all_steps_ms(config, f.ms, f.bf16_ms) / 3600);
    return text;
}

OrderedJson memory_json(const Figures& f) {
    const MemoryPlan& plan = f.run.plan;
    OrderedJson purposes = OrderedJson::object();
    for (int i = 0; i < kPurposes; i++)
        purposes[purpose_name(static_cast<Purpose>(i))] = plan.purpose_bytes[static_cast<size_t>(i)];
    OrderedJson memory = {{"arena_bytes", plan.arena_bytes}, {"purpose_bytes", purposes},
                          {"gpu_bytes", f.memory_bytes}, {"fits", f.fits}, {"pinned_host_bytes", plan.host_bytes()},
                          {"host_bytes", {{"loading", plan.host.load_bytes}, {"saving", plan.host.save_bytes},
                                          {"saving_async", plan.host.save_async_bytes}}}};
    for (const MemoryChange& change : memory_changes(f.run, f.memory_bytes))
        memory["changes"].push_back({{"options", change.options}, {"arena_bytes", change.arena_bytes},
                                     {"fits", change.fits}});
    return memory;
}

}  // namespace

std::string plan_text(const PlannedRun& run) {
    const Figures figures{run};
    const Config& config = run.config;
    const MemoryPlan& plan = run.plan;
    const int64_t micro_batches = config.global_batch_size / (config.micro_batch_size * config.data_ranks(plan.ranks));
    std::string text = verdict_text(figures);
    const std::string active = config.shape.has_experts()
                                   ? strf("; a token uses %.3f B", 1e-9 * used_params(config.shape, run.table)) : "";
    text += strf("parameters        %lld (%.3f B%s; stored with padding: %lld)\n", ll(run.table.param_elems),
                 1e-9 * real(run.table.param_elems), active.c_str(), ll(plan.flat_elems));
    text += strf("precision         %s weights, %s gradients, fp32 master weights, %s moments\n",
                 dtype_name(config.dtype), dtype_name(config.grad_dtype), moment_dtype_name(config));
    text += memory_text(run);
    text += strf("model FLOPs       %.4g per token, %.4g per step\n", figures.flops_per_token,
                 figures.flops_per_token * figures.tokens);
    text += strf("ranks             %d, %s of %lld x %lld tokens per step and rank%s\n", plan.ranks,
                 count_text(micro_batches, "micro-batch", "micro-batches").c_str(), ll(config.micro_batch_size),
                 ll(config.part_length()),
                 config.context_parallel > 1 ? strf("; %lld ranks share each sequence of %lld tokens",
                                                    ll(config.context_parallel), ll(config.seq_length)).c_str() : "");
    text += strf("tokens            %.0f per step", figures.tokens);
    if (config.train_iters > 0)
        text += strf(", %s, %.4g in all", count_text(config.train_iters, "step").c_str(),
                     figures.tokens * real(config.train_iters));
    text += "\n" + communication_text(config, plan.collectives, plan.ranks, plan.buckets)
            + fp8_speedup_text(config, run.table, run.device) + time_text(figures);
    const int64_t bytes = plan.host.checkpoint_bytes, count = planned_checkpoints(config);
    text += strf("checkpoint        %lld bytes, %.3f GiB on disk", ll(bytes), gib(bytes));
    if (count > 1) text += strf("; %lld of them at the end, %.3f GiB", ll(count), gib(bytes * count));
    return text + "\n";
}

std::string plan_json(const PlannedRun& run) {
    const Figures figures{run};
    const Config& config = run.config;
    OrderedJson json = {
        {"type", "plan"},
        {"config", OrderedJson::parse(config_to_json(config))},
        {"gpu", {{"name", figures.gpu.name}, {"rates_measured", figures.rates != nullptr}, {"found", figures.here}}},
        {"params", run.table.param_elems},
        {"ranks", run.plan.ranks},
        {"tokens_per_step", config.global_batch_size * config.seq_length},
        {"flops_per_token", figures.flops_per_token},
        {"memory", memory_json(figures)},
        {"time", nullptr},
        {"notes", run.notes},
        {"checkpoint", {{"bytes", run.plan.host.checkpoint_bytes}, {"kept", planned_checkpoints(config)}}},
    };
    if (figures.ms > 0) {
        json["time"] = {{"step_ms", figures.ms}, {"tokens_per_second", figures.tokens_per_second},
                        {"mfu", figures.mfu}};
        if (switches_precision(config)) json["time"]["bf16_step_ms"] = figures.bf16_ms;
        for (const auto& [name, ms] : figures.time.named_ms()) json["time"]["parts_ms"][name] = ms;
    }
    for (const PlannedGemm& g : run.plan.step_gemms)
        json["matmuls"].push_back({{"pass", layout_name(g.shape.layout)}, {"M", g.shape.M}, {"N", g.shape.N},
                                   {"K", g.shape.K}, {"in", dtype_name(g.shape.A.dtype)},
                                   {"out", dtype_name(g.shape.D.dtype)}, {"matrices", g.shape.count()},
                                   {"count", g.count}});
    return json.dump() + "\n";
}

std::string plan_output(const PlannedRun& run) {
    if (run.config.json) return plan_json(run);
    std::string text = plan_text(run);
    for (const std::string& note : run.notes) text += message_line("note: " + note) + "\n";
    std::string changed;
    for (const std::string& option : run.changed) changed += " " + option;
    return text + (changed.empty() ? "" : message_line("options          " + changed) + "\n");
}

bool plan_fits(const PlannedRun& run) { return Figures{run}.fits; }
