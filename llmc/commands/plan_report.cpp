#include "llmc/commands/plan_report.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "llmc/base/check.h"
#include "llmc/base/peak_flops.h"
#include "llmc/base/system/host.h"
#include "llmc/base/system/side_process.h"
#include "llmc/base/text.h"
#include "llmc/perf/fp8_speedup.h"
#include "llmc/train/run/run_checkpoints.h"

namespace {

// The quantized Q, K and V of one layer, with their scales.
int64_t fp8_attention_bytes(const Config& c) {
    const int64_t ranks = c.context_parallel;
    const int64_t heads = c.shape.num_attention_heads / ranks + 2 * heads_of_rank(c.shape.num_query_groups, ranks);
    return c.micro_batch_size * heads * head_blocks(c.seq_length) * (kHeadBlock * c.shape.kv_channels + 4);
}

double gemm_tflop(const PlannedGemm& g) {
    return 2e-12 * static_cast<double>(g.shape.M) * static_cast<double>(g.shape.N) * static_cast<double>(g.shape.K)
           * static_cast<double>(g.count);
}

// The numbers in both text and JSON.
struct Figures {
    const Gpu& gpu;
    bool here;               // the GPU was found, and memory_bytes is what it has
    int64_t memory_bytes;
    StepTime time;
    double flops_per_token = 0, tokens = 0;   // tokens per step, all ranks
    bool rates_link = false;   // the rate of the host link was measured
    double ms = 0, tokens_per_second = 0, mfu = 0, hours = 0;

    explicit Figures(const PlannedRun& run)
        : gpu(planned_gpu(run.config, run.device)),
          here(run.device.sm > 0 && (run.config.gpu.empty() || find_gpu(run.device.name) == &gpu)),
          memory_bytes(here ? run.device.memory_bytes : static_cast<int64_t>(gpu.memory_gib * kGiB)),
          time(predict_step(run.config, run.plan, gpu)), flops_per_token(model_flops_per_token(run.config, run.table)),
          tokens(static_cast<double>(run.config.global_batch_size * run.config.seq_length)), ms(time.total_ms()) {
        if (const Rates* rates = find_rates(gpu.name)) rates_link = rates->host_link > 0;
        if (ms <= 0) return;
        tokens_per_second = tokens / (1e-3 * ms);
        const double peak = peak_flops(gpu.device, run.config.dtype) * run.plan.ranks;
        mfu = peak > 0 ? tokens_per_second * flops_per_token / peak : 0;
        hours = 1e-3 * ms * static_cast<double>(run.config.train_iters) / 3600;
    }
    bool fits(const MemoryPlan& plan) const { return plan.arena_bytes <= memory_bytes; }
};

// "170.940 GiB of 139.0 GiB on H200 (not here)"
std::string need_text(const PlannedRun& run, const Figures& figures) {
    return strf("%.3f GiB of %.1f GiB on %s", gib(run.plan.arena_bytes), gib(figures.memory_bytes),
                figures.here ? run.device.name.c_str() : strf("%s (not here)", figures.gpu.name).c_str());
}

// Whether a rank may have 1 / `parts` of the tokens and heads of this run's sequences.
bool splits(const Config& c, int64_t parts) {
    const int64_t NKV = c.shape.num_query_groups;
    return c.seq_length % parts == 0 && c.shape.num_attention_heads % parts == 0
           && (NKV % parts == 0 || parts % NKV == 0);
}

// Options that change the memory of a run, and the plan of the run with these options.
struct Change {
    std::string options;
    int64_t arena_bytes;
};

std::string offload_text(const Config& config) {
    std::string text;
    for (const std::string& word : config.offload) text += (text.empty() ? "--offload " : ",") + word;
    return text;
}

// The --loss-chunk that is proposed, 0: none. Smaller chunks read and write the weight gradient more often than its
// matmul hides: at 8192 tokens of a vocabulary of 128,256 in FP32 that is about a tenth of the matmul's time.
int64_t proposed_loss_chunk(const Config& config) {
    const int64_t rows = config.micro_batch_size * config.part_length();
    int64_t chunk = 8192;
    while (chunk * 2 > rows) chunk /= 2;
    return chunk >= 1024 ? chunk : 0;
}

// The configuration with another level of --zero, without options that have no effect at that level.
Config at_level(Config config, int64_t level) {
    if (config.zero == 3 && level < 3) config.param_comm_dtype = Dtype::kBf16;
    if (level == 3 && config.fp8_recipe != Fp8Recipe::kNone) config.param_comm_dtype = Dtype::kE4m3;
    if (level < 2) config.grad_shard_dtype = Dtype::kFp32;
    config.zero = level;
    return config;
}

// Empty if the run is not possible.
std::optional<int64_t> arena_bytes_of(Config config, const ParamTable& table, int ranks) {
    const int64_t unit = config.micro_batch_size * config.data_ranks(ranks);
    config.global_batch_size = round_up(config.global_batch_size, unit);
    try {
        return plan_memory(config, table, fp8_plan_of(config, table), ranks).arena_bytes;
    } catch (const Error&) {
        return std::nullopt;
    }
}

// The lowest level of --zero, from the default 1 on, with which the run fits on as many ranks; 0: none.
int64_t lowest_zero(const Config& config, const ParamTable& table, int ranks, const Figures& figures) {
    for (int64_t level = 1; level <= 3; level++) {
        const std::optional<int64_t> bytes = arena_bytes_of(at_level(config, level), table, ranks);
        if (bytes && *bytes <= figures.memory_bytes) return level;
    }
    return 0;
}

// The least --offload-fraction of offloaded optimizer state, in steps of 1/20, with which the run fits beside the CUDA
// context and libraries; 0: none.
double least_offload_fraction(Config config, const ParamTable& table, int ranks, const Figures& figures) {
    constexpr int64_t kBeside = int64_t{2} << 30;
    for (int n = 1; n <= 20; n++) {
        config.offload_fraction = n / 20.0;
        const std::optional<int64_t> bytes = arena_bytes_of(config, table, ranks);
        if (bytes && *bytes + kBeside <= figures.memory_bytes) return config.offload_fraction;
    }
    return 0;
}

Config offloading_state(Config config) {
    const bool all = offloads(config, "activations");
    config.offload = {"moments", "masters"};
    if (all) config.offload.push_back("activations");
    config.offload_fraction = 1;
    return config;
}

// The memory with --zero, --recompute, --grad-dtype, --grad-shard-dtype, --moment-dtype, --offload, --micro-batch-size,
// --loss-chunk, --ranks and, for long sequences, --context-parallel, each changed alone, then all but --zero and the
// ranks together, if need be at the lowest level of --zero that fits, or on more ranks. A change that is not possible
// is left out.
std::vector<Change> changes_of_memory(const PlannedRun& run, const Figures& figures) {
    std::vector<Change> changes;
    const auto add = [&](const std::string& options, int ranks, const Config& config) {
        const std::optional<int64_t> bytes = arena_bytes_of(config, run.table, ranks);
        if (bytes) changes.push_back({options, *bytes});
        return bytes && *bytes <= figures.memory_bytes;
    };
    const int ranks = run.plan.ranks;
    Config least = run.config;
    std::string options;
    const auto change = [&](const std::string& option, auto&& set) {
        Config config = run.config;
        set(config);
        set(least);
        options += (options.empty() ? "" : " ") + option;
        add(option, ranks, config);
    };
    for (int64_t level = run.config.zero + 1; ranks > 1 && level <= 3; level++)
        add(strf("--zero %lld", ll(level)), ranks, at_level(run.config, level));
    if (run.config.recompute == Recompute::kNone) {
        Config config = run.config;
        config.recompute = Recompute::kNormAct;
        add("--recompute norm-act", ranks, config);
    }
    if (run.config.recompute != Recompute::kBlock)
        change("--recompute block", [](Config& c) { c.recompute = Recompute::kBlock; });
    if (run.config.grad_dtype == Dtype::kFp32 && run.config.dtype == Dtype::kBf16)
        change("--grad-dtype bf16", [](Config& c) {
            c.grad_dtype = Dtype::kBf16;
            if (c.grad_comm_dtype == Dtype::kFp32) c.grad_comm_dtype = Dtype::kBf16;
        });
    if (shards_grads(run.config, ranks) && run.config.grad_shard_dtype == Dtype::kFp32)
        change("--grad-shard-dtype bf16", [](Config& c) { c.grad_shard_dtype = Dtype::kBf16; });
    if (run.config.moment_dtype == Dtype::kFp32)
        change("--moment-dtype bf16", [](Config& c) { c.moment_dtype = Dtype::kBf16; });
    if (!offloads(run.config, "moments") || !offloads(run.config, "masters")) {
        change(offload_text(offloading_state(run.config)), [](Config& c) { c = offloading_state(c); });
        Config config = offloading_state(run.config);
        config.offload_fraction = least_offload_fraction(config, run.table, ranks, figures);
        if (config.offload_fraction > 0 && config.offload_fraction < 1)
            add(strf("%s --offload-fraction %g", offload_text(config).c_str(), config.offload_fraction), ranks, config);
    }
    if (!offloads(run.config, "activations") && run.config.shape.num_layers > kResidentLayers) {
        Config config = run.config;
        config.offload.push_back("activations");
        add(offload_text(config), ranks, config);
    }
    if (run.config.micro_batch_size > 1)
        change("--micro-batch-size 1", [](Config& c) { c.micro_batch_size = 1; });
    const int64_t chunk = proposed_loss_chunk(least);
    if (run.config.loss_chunk == 0 && chunk > 0)
        change(strf("--loss-chunk %lld", ll(chunk)), [&](Config& c) { c.loss_chunk = chunk; });
    for (int more = 2; more <= 8; more *= 2) add(strf("--ranks %d", ranks * more), ranks * more, run.config);
    constexpr int64_t kLong = 16384;
    for (int parts = 2; parts <= 8 && run.config.seq_length >= kLong && run.config.context_parallel == 1; parts *= 2) {
        Config config = run.config;
        config.context_parallel = parts;
        const int on = std::max(ranks, parts);
        if (splits(config, parts) && on % parts == 0
            && add(strf("--ranks %d --context-parallel %d", on, parts), on, config))
            break;
    }
    if (options.empty() || add(options, ranks, least)) return changes;
    for (int more = 1; more <= 64; more *= 2) {
        if (more > 1 && add(strf("%s --ranks %d", options.c_str(), ranks * more), ranks * more, least)) break;
        const int64_t level = ranks * more > 1 ? lowest_zero(least, run.table, ranks * more, figures) : 0;
        if (level <= run.config.zero) continue;   // already added
        const std::string on = more > 1 ? strf(" --ranks %d", ranks * more) : "";
        add(strf("%s%s --zero %lld", options.c_str(), on.c_str(), ll(level)), ranks * more, at_level(least, level));
        break;
    }
    return changes;
}

// Which level of --zero the ranks need; empty with one rank, or if the run has that level.
std::string zero_text(const PlannedRun& run, const Figures& figures) {
    if (run.plan.ranks == 1) return "";
    const int64_t lowest = lowest_zero(run.config, run.table, run.plan.ranks, figures);
    if (lowest == 0) return strf("  no level of --zero fits on %d ranks without other changes\n", run.plan.ranks);
    if (lowest == run.config.zero || (run.config.zero == 0 && figures.fits(run.plan))) return "";
    return strf("  the lowest level that fits is --zero %lld%s\n", ll(lowest),
                lowest < run.config.zero ? ", which communicates less" : "");
}

// The fraction of the optimizer state that must be offloaded, if it is less than the run's.
std::string offload_fraction_text(const PlannedRun& run, const Figures& figures) {
    if (!offloads_state(run.config) || !figures.fits(run.plan)) return "";
    const double least = least_offload_fraction(run.config, run.table, run.plan.ranks, figures);
    if (least == 0 || least >= run.config.offload_fraction) return "";
    return strf("  --offload-fraction %g fits as well, and copies less\n", least);
}

// Whether the run fits, and for one that does not, what would make it fit.
std::string verdict_text(const PlannedRun& run, const Figures& figures) {
    std::string text = (figures.fits(run.plan) ? "fits: " : "does not fit: ") + need_text(run, figures) + "\n";
    text += zero_text(run, figures) + offload_fraction_text(run, figures);
    if (figures.fits(run.plan)) return text;
    for (const Change& change : changes_of_memory(run, figures))
        text += strf("  %9.3f GiB%s with %s\n", gib(change.arena_bytes),
                     change.arena_bytes <= figures.memory_bytes ? ", fits," : "", change.options.c_str());
    return text;
}

std::string memory_text(const PlannedRun& run) {
    const MemoryPlan& plan = run.plan;
    std::string text = "memory, of every rank\n";
    for (int i = 0; i < kPurposes; i++) {
        const int64_t bytes = plan.purpose_bytes[static_cast<size_t>(i)];
        if (static_cast<Purpose>(i) == Purpose::kOffload && bytes == 0) continue;
        text += strf("  %-22s %16lld bytes %9.3f GiB\n", purpose_name(static_cast<Purpose>(i)), ll(bytes), gib(bytes));
    }
    text += strf("  %-22s %16lld bytes %9.3f GiB\n", "arena", ll(plan.arena_bytes), gib(plan.arena_bytes));
    if (run.config.fp8_attention)
        text += strf("  %-22s %16lld bytes %9.3f GiB of the scratch, shared by all layers\n", "FP8 attention",
                     ll(fp8_attention_bytes(run.config)), gib(fp8_attention_bytes(run.config)));
    text += "host memory, of the rank that takes most\n"
           + strf("  %-22s %16lld bytes %9.3f GiB, while --load or --resume reads\n", "loading",
                  ll(plan.host.load_bytes), gib(plan.host.load_bytes))
           + strf("  %-22s %16lld bytes %9.3f GiB, pinned; %lld bytes %.3f GiB with --save-async\n", "saving",
                  ll(plan.host.save_bytes), gib(plan.host.save_bytes), ll(plan.host.save_async_bytes),
                  gib(plan.host.save_async_bytes));
    const std::pair<const char*, int64_t> offloaded[] = {{"offloaded state", plan.state_host_bytes},
                                                         {"offloaded activations", plan.activation_host_bytes}};
    for (const auto& [name, bytes] : offloaded)
        if (bytes > 0) text += strf("  %-22s %16lld bytes %9.3f GiB, pinned\n", name, ll(bytes), gib(bytes));
    if (run.config.offload.empty()) return text;
    const int local = std::min(plan.ranks, kRanksPerHost);
    text += strf("  %.3f GiB pinned by %s of a host", gib(plan.host_bytes() * local),
                 count_text(local, "rank").c_str());
    const int64_t available = meminfo_bytes("MemAvailable");
    return text + (available < 0 ? "\n" : strf("; this machine has %.1f GiB available\n", gib(available)));
}

std::string matmul_text(const MemoryPlan& plan) {
    std::string text = "matmuls of one step (rows are the outputs)\n";
    text += strf("  %-8s %10s %10s %10s  %-5s %-5s %-4s %8s %12s\n", "pass", "M", "N", "K", "in", "out", "beta",
                 "count", "TFLOP");
    for (const PlannedGemm& g : plan.step_gemms) {
        const GemmArgs& s = g.shape;
        text += strf("  %-8s %10lld %10lld %10lld  %-5s %-5s %-4d %8lld %12.3f\n", layout_name(s.layout), ll(s.M),
                     ll(s.N), ll(s.K), dtype_name(s.A.dtype), dtype_name(s.D.dtype), s.accumulate ? 1 : 0, ll(g.count),
                     gemm_tflop(g));
    }
    return text;
}

// The origin of the rates.
std::string rates_origin(const Gpu& gpu) {
    if (find_rates(gpu.name)) return "rates measured on it";
    return strf("SCALED, not measured: rates of an %s; matmuls and attention are scaled by the ratio of peaks, the "
                "rest by that of memory bandwidths", measured_gpu().name);
}

std::string time_text(const PlannedRun& run, const Figures& figures) {
    if (figures.ms <= 0) return "time              not predicted for this --dtype\n";
    std::string text = strf("time of a step    predicted for %s; %s\n", figures.gpu.name,
                            rates_origin(figures.gpu).c_str());
    text += strf("  %-26s %10s %7s\n", "", "ms", "share");
    for (int i = 0; i < kStepParts; i++) {
        const double ms = figures.time.ms[static_cast<size_t>(i)];
        if (ms > 0)
            text += strf("  %-26s %10.3f %6.1f%%\n", step_part_name(static_cast<StepPart>(i)), ms,
                         100 * ms / figures.ms);
    }
    text += strf("  %-26s %10.3f\n", "all", figures.ms);
    if (run.plan.ranks > 1) {
        const char* rate = run.plan.ranks > kRanksPerHost ? "nominal rate of a network adapter of 400 Gb/s per GPU"
                           : &figures.gpu == &measured_gpu() ? "measured between two GPUs of one host"
                                                          : "scaled from two H200 of one host by nominal rates";
        const StepTime& time = figures.time;
        text += strf("  communication takes %.3f ms, hidden or exposed: gradients %.3f, weights %.3f%s; %s\n",
                     time.reduce_ms + time.gather_ms + time.exchange_ms, time.reduce_ms, time.gather_ms,
                     time.exchange_ms > 0 ? strf(", heads %.3f (not hidden)", time.exchange_ms).c_str() : "", rate);
    }
    if (figures.time.host_link_ms > 0)
        text += strf("  copies from and to host memory take %.3f ms each way, hidden or exposed; %s\n",
                     figures.time.host_link_ms,
                     figures.rates_link ? "rate measured" : "nominal rate of PCIe Gen5 x16, 50 GB/s each way");
    text += strf("predicted         %.4g s/it, %.0f tokens/s, %.0f per GPU, MFU %.1f %%\n", 1e-3 * figures.ms,
                 figures.tokens_per_second, figures.tokens_per_second / run.plan.ranks, 100 * figures.mfu);
    if (run.config.reset_attention_mask)
        text += "  attention time is that of one document per sequence (--reset-attention-mask skips tiles between "
                "documents)\n";
    if (run.config.train_iters > 0)
        text += strf("  %s in %.4g hours, without evaluation and checkpoints\n",
                     count_text(run.config.train_iters, "step").c_str(), figures.hours);
    return text;
}

std::string checkpoint_text(const PlannedRun& run) {
    const int64_t bytes = run.plan.host.checkpoint_bytes, count = planned_checkpoints(run.config);
    std::string text = strf("checkpoint        %lld bytes, %.3f GiB on disk", ll(bytes), gib(bytes));
    if (count > 1) text += strf("; %lld of them at the end, %.3f GiB", ll(count), gib(bytes * count));
    return text + "\n";
}

}  // namespace

std::string plan_text(const PlannedRun& run) {
    const Figures figures(run);
    const Config& config = run.config;
    const MemoryPlan& plan = run.plan;
    std::string text = verdict_text(run, figures);
    text += strf("parameters        %lld (%.3f B; stored with padding: %lld)\n", ll(run.table.param_elems),
                 static_cast<double>(run.table.param_elems) * 1e-9, ll(plan.flat_elems));
    const char* rounded = config.grad_shard_dtype == Dtype::kBf16 && shards_grads(config, plan.ranks)
                              ? " (shards in bf16)" : "";
    text += strf("precision         %s weights, %s gradients%s, fp32 master weights, %s moments\n",
                 dtype_name(config.dtype), dtype_name(config.grad_dtype), rounded, dtype_name(config.moment_dtype));
    text += memory_text(run);
    text += strf("model FLOPs       %.4g per token, %.4g per step\n", figures.flops_per_token,
                 figures.flops_per_token * figures.tokens);
    const int data_ranks = config.data_ranks(plan.ranks);
    text += strf("ranks             %d, %s of %lld x %lld tokens per step and rank%s\n", plan.ranks,
                 count_text(config.global_batch_size / (config.micro_batch_size * data_ranks), "micro-batch",
                            "micro-batches").c_str(), ll(config.micro_batch_size), ll(config.part_length()),
                 config.context_parallel > 1 ? strf("; %lld ranks share each sequence of %lld tokens",
                                                    ll(config.context_parallel), ll(config.seq_length)).c_str() : "");
    text += strf("tokens            %.0f per step, %s, %.4g in all\n", figures.tokens,
                 count_text(config.train_iters, "step").c_str(),
                 figures.tokens * static_cast<double>(config.train_iters));
    return text + matmul_text(plan) + communication_text(config, plan.collectives, plan.ranks, plan.buckets)
           + fp8_dry_run_text(config, run.table, run.device) + time_text(run, figures) + checkpoint_text(run);
}

// ---- JSON ----

namespace {

using OrderedJson = nlohmann::ordered_json;

OrderedJson memory_json(const PlannedRun& run, const Figures& figures) {
    OrderedJson purposes = OrderedJson::object();
    for (int i = 0; i < kPurposes; i++)
        purposes[purpose_name(static_cast<Purpose>(i))] = run.plan.purpose_bytes[static_cast<size_t>(i)];
    OrderedJson memory = {{"arena_bytes", run.plan.arena_bytes}, {"purpose_bytes", purposes},
                   {"gpu_bytes", figures.memory_bytes}, {"fits", figures.fits(run.plan)},
                   {"pinned_host_bytes", run.plan.host_bytes()},
                   {"host_bytes", {{"loading", run.plan.host.load_bytes}, {"saving", run.plan.host.save_bytes},
                                   {"saving_async", run.plan.host.save_async_bytes}}}};
    if (run.plan.ranks > 1) {
        const int64_t lowest = lowest_zero(run.config, run.table, run.plan.ranks, figures);
        memory["lowest_zero"] = lowest > 0 ? OrderedJson(lowest) : OrderedJson(nullptr);
    }
    if (offloads_state(run.config))
        memory["least_offload_fraction"] = least_offload_fraction(run.config, run.table, run.plan.ranks, figures);
    if (figures.fits(run.plan)) return memory;
    for (const Change& change : changes_of_memory(run, figures))
        memory["changes"].push_back({{"options", change.options}, {"arena_bytes", change.arena_bytes},
                                     {"fits", change.arena_bytes <= figures.memory_bytes}});
    return memory;
}

OrderedJson linears_json(const PlannedRun& run) {
    OrderedJson list = OrderedJson::array();
    if (run.config.fp8_recipe == Fp8Recipe::kNone) return list;
    const Fp8Plan plan = fp8_plan_of(run.config, run.table);
    for (const LinearPlan& linear : plan.linears) {
        const LinearSpeedup speedup = predict_speedup(run.config, plan, linear);
        list.push_back({{"name", linear.name}, {"out", linear.out}, {"in", linear.in}, {"fp8", linear.fp8},
                        {"bf16_ms", speedup.bf16_ms}, {"fp8_ms", speedup.fp8_ms}, {"gain", speedup.speedup()}});
    }
    return list;
}

OrderedJson communication_json(const PlannedRun& run, const Figures& figures) {
    OrderedJson calls = OrderedJson::array();
    for (const PlannedCollective& c : run.plan.collectives)
        calls.push_back({{"collective", c.name}, {"dtype", dtype_name(c.dtype)}, {"ranks", c.ranks},
                         {"heads", c.exchange}, {"calls", c.calls}, {"bytes", c.bytes},
                         {"sent_bytes", c.sent_bytes}});
    return {{"collectives", calls}, {"gradients_ms", figures.time.reduce_ms}, {"weights_ms", figures.time.gather_ms},
            {"heads_ms", figures.time.exchange_ms}};
}

OrderedJson matmuls_json(const MemoryPlan& plan) {
    OrderedJson list = OrderedJson::array();
    for (const PlannedGemm& g : plan.step_gemms)
        list.push_back({{"pass", layout_name(g.shape.layout)}, {"M", g.shape.M}, {"N", g.shape.N}, {"K", g.shape.K},
                        {"in", dtype_name(g.shape.A.dtype)}, {"out", dtype_name(g.shape.D.dtype)},
                        {"count", g.count}, {"tflop", gemm_tflop(g)}});
    return list;
}

OrderedJson time_json(const PlannedRun& run, const Figures& figures) {
    if (figures.ms <= 0) return nullptr;
    OrderedJson parts = OrderedJson::object();
    for (int i = 0; i < kStepParts; i++)
        parts[step_part_name(static_cast<StepPart>(i))] = figures.time.ms[static_cast<size_t>(i)];
    OrderedJson time = {{"step_ms", figures.ms}, {"parts_ms", parts}, {"tokens_per_second", figures.tokens_per_second},
                 {"tokens_per_second_per_gpu", figures.tokens_per_second / run.plan.ranks}, {"mfu", figures.mfu},
                 {"hours", nullptr}};
    if (run.config.train_iters > 0) time["hours"] = figures.hours;
    return time;
}

}  // namespace

std::string plan_json(const PlannedRun& run) {
    const Figures figures(run);
    const Config& config = run.config;
    const OrderedJson json = {
        {"type", "plan"},
        {"config", OrderedJson::parse(config_to_json(config))},
        {"gpu", {{"name", figures.gpu.name}, {"rates_measured", find_rates(figures.gpu.name) != nullptr},
                 {"found", figures.here}, {"rates", rates_origin(figures.gpu)}}},
        {"params", run.table.param_elems},
        {"ranks", run.plan.ranks},
        {"tokens_per_step", config.global_batch_size * config.seq_length},
        {"train_iters", config.train_iters},
        {"flops_per_token", figures.flops_per_token},
        {"memory", memory_json(run, figures)},
        {"time", time_json(run, figures)},
        {"communication", communication_json(run, figures)},
        {"linears", linears_json(run)},
        {"matmuls", matmuls_json(run.plan)},
        {"notes", run.notes},
        {"checkpoint", {{"bytes", run.plan.host.checkpoint_bytes}, {"kept", planned_checkpoints(config)}}},
    };
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

void print_plan(const PlannedRun& run) {
    std::printf("%s", plan_output(run).c_str());
    if (run.config.html.empty()) return;
    const std::string error = SideProcess::feed("report", {"-", "--out", run.config.html}, plan_json(run));
    REQUIRE(error.empty(), "--html %s: %s", run.config.html.c_str(), error.c_str());
}

bool plan_fits(const PlannedRun& run) { return Figures(run).fits(run.plan); }
