#include "llmc/perf/fp8_speedup.h"

#include <map>

#include "llmc/base/check.h"
#include "llmc/perf/step_time.h"

namespace {

// Milliseconds of a step of one rank and one layer like that of `linear`, whose linears of this kind run as in `plan`,
// and all others in BF16. Without a plan, all run in BF16.
double step_ms(Config config, const Fp8Plan* plan, const LinearPlan& linear) {
    const LinearKind kind = linear.kind;
    config.shape.ffn_hidden_size = config.shape.ffn_size(linear.layer);
    if (!config.shape.has_experts(linear.layer)) config.shape.num_experts = config.shape.shared_experts = 0;
    config.shape.num_layers = 1, config.shape.dense_layers = 0, config.seq_length = config.part_length();
    config.context_parallel = config.expert_parallel = 1;   // its rows are those of a balanced load
    config.moe_capacity = 0;
    config.recompute = Recompute::kNone;
    config.offload.clear();
    config.fp8_recipe = Fp8Recipe::kNone;
    const ParamTable table = make_param_table(config);
    Fp8Plan run = make_fp8_plan(config, table);
    if (plan) {
        std::vector<LinearPlan> linears = std::move(run.linears);
        for (LinearPlan& l : linears) l.fp8 = l.kind == kind;
        run = *plan;
        run.linears = std::move(linears);
        config.fp8_recipe = plan->recipe;
    }
    return predict_step(config, plan_memory(config, table, run), measured_gpu()).total_ms();
}

}  // namespace

double predict_speedup(const Config& config, const Fp8Plan& plan, const LinearPlan& linear) {
    const int64_t in = linear.in, out = linear.out, chunks = linear.kind == LinearKind::kHead ? loss_chunks(config) : 1;
    const int64_t tokens = chunks > 1 ? config.loss_chunk : config.micro_batch_size * config.part_length();
    const int64_t N = tokens * (linear.experts > 1 ? config.shape.experts_per_token : 1);   // rows of all experts
    const Rates& rates = measured_rates();
    const double us = rates.gemm_us(GemmMode::kBf16, GemmLayout::kForward, N, out, in)
                      + rates.gemm_us(GemmMode::kBf16, GemmLayout::kDgrad, N, in, out)
                      + rates.gemm_us(GemmMode::kBf16, GemmLayout::kWgrad, out, in, N);
    const double bf16_ms = 1e-3 * us * real(chunks);
    const double gain_ms = step_ms(config, nullptr, linear) - step_ms(config, &plan, linear);
    return bf16_ms / (bf16_ms - gain_ms * real(config.micro_batch_size) / real(config.global_batch_size));
}

Fp8Plan fp8_plan_of(const Config& config, const ParamTable& table) {
    std::map<std::pair<LinearKind, bool>, double> known;   // linears of a kind have the same shape, or one of experts
    return make_fp8_plan(config, table, [&known](const Config& c, const Fp8Plan& plan, const LinearPlan& linear) {
        const std::pair key(linear.kind, c.shape.has_experts(linear.layer));
        if (!known.count(key)) known[key] = predict_speedup(c, plan, linear);
        return known[key];
    });
}

std::string fp8_speedup_text(const Config& config, const ParamTable& table, const DeviceInfo& device) {
    if (config.fp8_recipe == Fp8Recipe::kNone) return "";
    const Fp8Plan plan = fp8_plan_of(config, table);
    std::string text = fp8_plan_text(plan, config);
    const std::string lacks = fp8_device_error(plan, device);
    if (!lacks.empty()) text += "  NOT SUPPORTED HERE: " + lacks + "\n";
    text += strf("FP8 against BF16, predicted from rates measured on an %s, with quantization\n", measured_rates().gpu);
    text += strf("  %-7s %10s %10s %9s %7s\n", "linear", "out", "in", "in FP8", "speedup");
    for (int k = 0; k <= kLinearsPerLayer; k++) {
        const auto kind = static_cast<LinearKind>(k);
        int count = 0, fp8 = 0;
        const LinearPlan* last = nullptr;
        for (const LinearPlan& linear : plan.linears) {
            if (linear.kind != kind) continue;
            count++;
            fp8 += linear.fp8;
            last = &linear;
        }
        // Of linears in BF16, the head is predicted, for --fp8-lm-head.
        const bool fits = last->in % kScaleBlock == 0 && config.loss_chunk % kScaleBlock == 0;
        if (fp8 == 0 && (kind != LinearKind::kHead || !fits)) continue;
        const double speedup = predict_speedup(config, plan, *last);
        text += strf("  %-7s %10lld %10lld %9s %7.2f%s\n", linear_kind_name(kind), ll(last->out), ll(last->in),
                     strf("%d of %d", fp8, count).c_str(), speedup, speedup < 1 ? "  FP8 is slower" : "");
    }
    return text;
}
