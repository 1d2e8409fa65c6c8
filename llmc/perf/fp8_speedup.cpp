#include "llmc/perf/fp8_speedup.h"

#include "llmc/base/check.h"
#include "llmc/perf/rates.h"

namespace {

double traffic_us(double bytes, double kernels) {
    return 1e6 * bytes / measured_rates().copy_rate + kKernelUs * kernels;
}

// What quantization adds to the time of one linear layer for one micro-batch. In BF16 a kernel writes its output in 2
// bytes per element, in FP8 as two quantized tensors of 1 byte each. FP8 takes an additional BF16 tensor if another
// kernel reads it, and a second pass (2 bytes read, 2 written) if scales need the amax of the whole tensor.
double fp8_extra_us(const Config& c, const Fp8Plan& plan, const LinearPlan& linear) {
    const bool blocks = plan.row().x != Granularity::kTensor, head = linear.kind == LinearKind::kHead;
    const bool second = plan.row().scaling == Scaling::kCurrent && !blocks;
    const auto bytes_of = [&](bool bf16_is_read) {
        return (second ? 4.0 : bf16_is_read ? 2.0 : 0.0) + (blocks ? 2.0 * 4 / 128 : 0.0);
    };
    // The attention backward reads the BF16 input of proj; the residual stream reads the BF16 dy of proj and down. The
    // classifier overwrites the logits with their gradients, which a separate pass quantizes; with tensorwise scaling,
    // another pass before it computes the amax.
    const double x_bytes = bytes_of(linear.kind == LinearKind::kProj);
    const double dy_bytes = head ? (second ? 6 : 4)
                                 : bytes_of(linear.kind == LinearKind::kProj || linear.kind == LinearKind::kDown);
    const double kernels = (second ? 2 : 0) + (head ? 1 : 0);
    // Weights are quantized once per optimizer step: masters are read again; two FP8 tensors replace the BF16 one.
    const double tokens = real(c.micro_batch_size * c.part_length()), in = real(linear.in), out = real(linear.out);
    const double share = real(c.micro_batch_size) / real(c.global_batch_size);
    return traffic_us(tokens * (x_bytes * in + dy_bytes * out) + 4 * in * out * share, kernels + share);
}

// In BF16 the kernel that writes dy also sums the bias gradient; in FP8 the quantization does. For qkv the sum is a
// separate kernel. The other kernels take longer by `reads` times the time that a read of dy takes: the norm by 8.5 of
// 23.7 us at GPT-2 124M and 13 of 24.7 at 1558M, gelu by 12 of 94.7 (dev/results/2026-11-22-h200-1558M.md).
double bf16_extra_us(const Config& c, const LinearPlan& linear) {
    const bool own = linear.kind == LinearKind::kQkv, proj = linear.kind == LinearKind::kProj;
    const bool bias = own ? c.shape.qkv_bias() : proj ? c.shape.proj_bias() : c.shape.mlp_bias();
    if (!bias || linear.kind == LinearKind::kHead) return 0;
    const double reads = own ? 1 : linear.kind == LinearKind::kUp ? 0.13 : 0.45;
    return traffic_us(reads * 2 * real(c.micro_batch_size * c.part_length()) * real(linear.out), own ? 1 : 0);
}

GemmMode fp8_mode(const Fp8Plan& plan, GemmLayout pass) {
    if (plan.row().x != Granularity::kTensor) return GemmMode::kFp8Block;
    const bool fast = pass == GemmLayout::kForward ? plan.fast_fprop : plan.fast_backward;
    return fast ? GemmMode::kFp8Fast : GemmMode::kFp8Precise;
}

}  // namespace

LinearSpeedup predict_speedup(const Config& config, const Fp8Plan& plan, const LinearPlan& linear) {
    const int64_t in = linear.in, out = linear.out, chunks = linear.kind == LinearKind::kHead ? loss_chunks(config) : 1;
    const int64_t N = chunks > 1 ? config.loss_chunk : config.micro_batch_size * config.part_length();
    const Rates& rates = measured_rates();
    auto all_three = [&](auto mode_of) {
        return rates.gemm_us(mode_of(GemmLayout::kForward), GemmLayout::kForward, N, out, in)
               + rates.gemm_us(mode_of(GemmLayout::kDgrad), GemmLayout::kDgrad, N, in, out)
               + rates.gemm_us(mode_of(GemmLayout::kWgrad), GemmLayout::kWgrad, out, in, N);
    };
    const double bf16_us = all_three([](GemmLayout) { return GemmMode::kBf16; });
    const double fp8_us = all_three([&](GemmLayout pass) { return fp8_mode(plan, pass); });
    return {.bf16_ms = 1e-3 * (real(chunks) * bf16_us + bf16_extra_us(config, linear)),
            .fp8_ms = 1e-3 * (real(chunks) * fp8_us + fp8_extra_us(config, plan, linear))};
}

Fp8Plan fp8_plan_of(const Config& config, const ParamTable& table) {
    return make_fp8_plan(config, table, [](const Config& c, const Fp8Plan& plan, const LinearPlan& linear) {
        return predict_speedup(c, plan, linear).speedup();
    });
}

std::string fp8_speedup_text(const Config& config, const ParamTable& table, const DeviceInfo& device) {
    if (config.fp8_recipe == Fp8Recipe::kNone) return "";
    const Fp8Plan plan = fp8_plan_of(config, table);
    std::string text = fp8_plan_text(plan, config);
    const std::string lacks = fp8_device_error(plan, device);
    if (!lacks.empty()) text += "  NOT SUPPORTED HERE: " + lacks + "\n";
    text += strf("FP8 against BF16, predicted from rates measured on an %s: ms of the three matmuls and of "
                 "quantization,\nfor one micro-batch of %lld tokens\n", measured_rates().gpu.c_str(),
                 ll(config.micro_batch_size * config.part_length()));
    text += strf("  %-7s %10s %10s %9s %9s %9s %7s\n", "linear", "out", "in", "in FP8", "BF16 ms", "FP8 ms", "speedup");
    LinearSpeedup sum;
    for (size_t k = 0; k <= kLinearsPerLayer; k++) {
        const LinearPlan& first = k < kLinearsPerLayer ? plan.linears[k] : plan.linears.back();
        const LinearSpeedup one = predict_speedup(config, plan, first);
        int count = 0, fp8 = 0;
        for (const LinearPlan& linear : plan.linears) {
            if (linear.kind != first.kind) continue;
            count++;
            if (!linear.fp8) continue;
            fp8++;
            sum.bf16_ms += one.bf16_ms;
            sum.fp8_ms += one.fp8_ms;
        }
        text += strf("  %-7s %10lld %10lld %9s %9.3f %9.3f %7.2f%s\n", linear_kind_name(first.kind), ll(first.out),
                     ll(first.in), strf("%d of %d", fp8, count).c_str(), one.bf16_ms, one.fp8_ms, one.speedup(),
                     one.speedup() < 1 ? "  FP8 is slower" : "");
    }
    return text + strf("  all that run in FP8 %29s %9.3f %9.3f %7.2f\n", "", sum.bf16_ms, sum.fp8_ms, sum.speedup());
}
