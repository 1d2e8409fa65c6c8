// Checks of `doctor` that compute: casts and matmuls in FP8 with each recipe, and attention, each on the device and on
// the CPU. Casts give equal bytes; other results may differ by the rounding of BF16 operands and by the sums of tensor
// cores, which stay far below the share of the largest value that is allowed here.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "llmc/base/check.h"
#include "llmc/commands/doctor/doctor.h"
#include "llmc/model/parameters/fp8_recipe.h"
#include "llmc/ops/ops.h"
#include "llmc/ops/ops_moe.h"
#include "llmc/ops/owned.h"

namespace {

using enum Status;

constexpr double kEqual = 0, kShare = 1.0 / 16;

enum class Side { kDevice, kCpu };

// A tensor on both sides: normal numbers, which depend on `key`, or zeros for key 0.
class TwoTensors {
public:
    TwoTensors(Ctx& ctx, Dtype dtype, int64_t elems, uint64_t key = 0, float mean = 0, float std = 1)
        : ctx_(ctx), dtype_(dtype), elems_(elems), host_(static_cast<size_t>(elems * dtype_bytes(dtype))),
          memory_(device::device_alloc(bytes())) {
        Ctx cpu;
        if (key > 0)
            cpu::fill_normal(cpu, {.out = on(Side::kCpu), .key = key, .element_offset = 0, .mean = mean, .std = std});
        upload();
    }
    TwoTensors(Ctx& ctx, const std::vector<int32_t>& values)
        : TwoTensors(ctx, Dtype::kInt32, static_cast<int64_t>(values.size())) {
        std::memcpy(host_.data(), values.data(), host_.size());
        upload();
    }
    Tensor on(Side side) { return {side == Side::kCpu ? host_.data() : memory_.get(), dtype_, elems_}; }
    // As result_difference; kEqual: the bytes are equal.
    std::string difference(const char* name, double share) {
        std::vector<char> got(host_.size());
        device::copy_to_host(ctx_, got.data(), memory_.get(), bytes());
        device::synchronize(ctx_);
        if (share == kEqual) return got == host_ ? "" : std::string(name) + " differs from the CPU's bytes";
        return result_difference(name, floats({got.data(), dtype_, elems_}), floats(on(Side::kCpu)), share);
    }

private:
    int64_t bytes() const { return elems_ * dtype_bytes(dtype_); }
    void upload() {
        device::copy_to_device(ctx_, memory_.get(), host_.data(), bytes());
        device::synchronize(ctx_);
    }
    static std::vector<float> floats(const Tensor& tensor) {
        std::vector<float> values(static_cast<size_t>(tensor.elems));
        Ctx cpu;
        cpu::cast(cpu, {.out = {values.data(), Dtype::kFp32, tensor.elems}, .in = tensor});
        return values;
    }

    Ctx& ctx_;
    const Dtype dtype_;
    const int64_t elems_;
    std::vector<char> host_;
    const DevicePtr<> memory_;
};

// Runs an operation on the device and on the CPU; args_of(side) returns its arguments.
template <typename Args> void on_both(Ctx& ctx, void (*on_device)(Ctx&, const Args&), void (*on_cpu)(Ctx&, const Args&),
                                      auto args_of) {
    on_device(ctx, args_of(Side::kDevice));
    Ctx cpu;
    on_cpu(cpu, args_of(Side::kCpu));
}

// An (R, K) operand of an FP8 matmul, cast also as its transpose.
struct CastOperand {
    TwoTensors in, entry, codes, transposed, scales, transposed_scales;
    Granularity granularity;

    CastOperand(Ctx& ctx, Scaling scaling, Granularity of, Dtype format, int64_t R, int64_t K, uint64_t key)
        : in(ctx, Dtype::kBf16, R * K, key),
          entry(ctx, Dtype::kFp32, sizeof(ScaleEntry) / 4, 1, 32, 0),   // a scale, and an amax, of 32
          codes(ctx, format, R * K), transposed(ctx, format, R * K),
          scales(ctx, Dtype::kFp32, scale_inv_elems(of, R, K)),
          transposed_scales(ctx, Dtype::kFp32, scale_inv_elems(of, K, R)), granularity(of) {
        on_both<QuantizeArgs>(ctx, ops::quantize, cpu::quantize, [&](Side side) {
            QuantOut quant{.rowwise = codes.on(side), .transposed = transposed.on(side), .granularity = of,
                           .scaling = scaling, .entry = static_cast<ScaleEntry*>(entry.on(side).data)};
            if (of != Granularity::kTensor) {
                quant.rowwise_scale_inv = scales.on(side);
                quant.transposed_scale_inv = transposed_scales.on(side);
            }
            return QuantizeArgs{.quant = quant, .in = in.on(side), .N = R, .C = K};
        });
    }
    Tensor scale_inv(Side side) {
        return granularity == Granularity::kTensor ? entry.on(side).slice(0, 1) : scales.on(side);
    }
};

// What is wrong with a matmul of a recipe, as fprop (x w^T) or wgrad (dy^T x, added to FP32); "" if nothing.
std::string fp8_matmul_error(Ctx& ctx, const RecipeRow& row, bool wgrad) {
    constexpr int64_t M = 80, N = 144, K = 272;   // multiples of 16, as FP8 matmuls need, but not of 128
    CastOperand a(ctx, row.scaling, wgrad ? row.dy : row.x, wgrad ? row.dy_format : Dtype::kE4m3, M, K, 1);
    CastOperand b(ctx, row.scaling, wgrad ? row.x : row.weight, Dtype::kE4m3, N, K, 2);
    for (CastOperand* operand : {&a, &b})
        for (TwoTensors* cast : {&operand->codes, &operand->transposed, &operand->entry, &operand->scales,
                                 &operand->transposed_scales})
            if (const std::string wrong = cast->difference("a cast to FP8", kEqual); !wrong.empty()) return wrong;
    TwoTensors result(ctx, wgrad ? Dtype::kFp32 : Dtype::kBf16, M * N, 3);
    const int64_t before = device::fp8_matmuls(ctx);
    on_both<GemmArgs>(ctx, ops::gemm, cpu::gemm, [&](Side side) {
        return GemmArgs{.D = result.on(side), .A = a.codes.on(side), .B = b.codes.on(side),
                        .M = M, .N = N, .K = K, .layout = wgrad ? GemmLayout::kWgrad : GemmLayout::kForward,
                        .accumulate = wgrad, .A_granularity = a.granularity, .B_granularity = b.granularity,
                        .A_scale_inv = a.scale_inv(side), .B_scale_inv = b.scale_inv(side),
                        .fast_accumulation = row.fast_accumulation && !wgrad};   // as with --fp8-fast-accum fprop
    });
    if (device::fp8_matmuls(ctx) == before) return "a matmul did not run in FP8";
    return result.difference(wgrad ? "wgrad" : "fprop", kShare);
}

// An operand of an INT8 matmul of C columns.
struct Int8Operand {
    TwoTensors in, codes, scales;

    Int8Operand(Ctx& ctx, int64_t rows, int64_t C, uint64_t key)
        : in(ctx, Dtype::kBf16, rows * C, key), codes(ctx, Dtype::kInt8, rows * C), scales(ctx, Dtype::kFp32, rows) {
        on_both<QuantizeInt8Args>(ctx, ops::quantize_int8, cpu::quantize_int8, [&](Side side) {
            return QuantizeInt8Args{.out = codes.on(side), .scale_inv = scales.on(side), .in = in.on(side), .N = rows,
                                    .C = C};
        });
    }
};

// What is wrong with an INT8 matmul as fprop; "" if nothing.
std::string int8_matmul_error(Ctx& ctx) {
    constexpr int64_t M = 80, N = 144, K = 320;
    Int8Operand a(ctx, M, K, 1), b(ctx, N, K, 2);
    for (TwoTensors* cast : {&a.codes, &a.scales, &b.codes, &b.scales})
        if (const std::string wrong = cast->difference("a cast to INT8", kEqual); !wrong.empty()) return wrong;
    TwoTensors result(ctx, Dtype::kBf16, M * N);
    on_both<GemmArgs>(ctx, ops::gemm, cpu::gemm, [&](Side side) {
        return GemmArgs{.D = result.on(side), .A = a.codes.on(side), .B = b.codes.on(side), .M = M, .N = N, .K = K,
                        .A_granularity = Granularity::kRow, .B_granularity = Granularity::kRow,
                        .A_scale_inv = a.scales.on(side), .B_scale_inv = b.scales.on(side)};
    });
    return result.difference("fprop in INT8", kShare);
}

// What is wrong with matmuls of three experts, of which one has no rows, as fprop and as wgrad, added to FP32; "" if
// nothing.
std::string experts_error(Ctx& ctx, bool fp8) {
    constexpr int64_t E = 3, M = 80, N = kScaleBlock, K = 272, P = padded_rows(M, E);
    using enum Granularity;
    CastOperand x(ctx, Scaling::kDelayed, kBlock1x128, Dtype::kE4m3, M, K, 1),
        dy(ctx, Scaling::kDelayed, kBlock1x128, Dtype::kE4m3, M, N, 2),
        w(ctx, Scaling::kDelayed, kBlock128x128, Dtype::kE4m3, E * N, K, 3);
    TwoTensors offsets(ctx, {0, 33, 33, M}), y(ctx, Dtype::kBf16, M * N), dw(ctx, Dtype::kFp32, E * N * K, 4);
    TwoTensors x_codes(ctx, Dtype::kE4m3, K * P), x_scales(ctx, Dtype::kFp32, scale_blocks(P) * K),
        dy_codes(ctx, Dtype::kE4m3, N * P), dy_scales(ctx, Dtype::kFp32, scale_blocks(P) * N);
    const auto transpose = [&](CastOperand& in, TwoTensors& codes, TwoTensors& scales, int64_t C) {
        on_both<TransposeScaledArgs>(ctx, ops::transpose_scaled, cpu::transpose_scaled, [&](Side side) {
            return TransposeScaledArgs{.out = codes.on(side), .out_scale_inv = scales.on(side),
                                       .in = in.codes.on(side), .in_scale_inv = in.scales.on(side),
                                       .offsets = offsets.on(side), .R = M, .C = C, .E = E};
        });
    };
    if (fp8) transpose(x, x_codes, x_scales, K), transpose(dy, dy_codes, dy_scales, N);
    on_both<GroupedGemmArgs>(ctx, ops::grouped_gemm, cpu::grouped_gemm, [&](Side side) {
        return GroupedGemmArgs{.D = y.on(side), .A = fp8 ? x.codes.on(side) : x.in.on(side),
                               .B = fp8 ? w.codes.on(side) : w.in.on(side), .offsets = offsets.on(side), .E = E,
                               .M = M, .N = N, .K = K, .A_scale_inv = fp8 ? x.scales.on(side) : Tensor{},
                               .B_scale_inv = fp8 ? w.scales.on(side) : Tensor{}};
    });
    on_both<GroupedGemmArgs>(ctx, ops::grouped_gemm, cpu::grouped_gemm, [&](Side side) {
        return GroupedGemmArgs{.D = dw.on(side), .A = fp8 ? dy_codes.on(side) : dy.in.on(side),
                               .B = fp8 ? x_codes.on(side) : x.in.on(side), .offsets = offsets.on(side), .E = E,
                               .M = N, .N = K, .K = M, .layout = GemmLayout::kWgrad, .accumulate = true,
                               .A_scale_inv = fp8 ? dy_scales.on(side) : Tensor{},
                               .B_scale_inv = fp8 ? x_scales.on(side) : Tensor{}};
    });
    for (TwoTensors* cast : {&x_codes, &x_scales, &dy_codes, &dy_scales})
        if (const std::string wrong = cast->difference("a transpose in FP8", kEqual); !wrong.empty()) return wrong;
    const std::string wrong = y.difference("fprop", kShare);
    return wrong.empty() ? dw.difference("wgrad", kShare) : wrong;
}

// What is wrong with attention in BF16, forward and backward; "" if nothing.
std::string attention_error(Ctx& ctx, int64_t T, int64_t NKV, int64_t HS) {
    constexpr int64_t B = 2, NH = 4;
    const int64_t N = B * T, heads = NH + 2 * NKV;
    const float softmax_mul = 1 / std::sqrt(static_cast<float>(HS));
    TwoTensors qkv(ctx, Dtype::kBf16, N * heads * HS, 4), dout(ctx, Dtype::kBf16, N * NH * HS, 5),
        out(ctx, Dtype::kBf16, N * NH * HS), dqkv(ctx, Dtype::kBf16, N * heads * HS), lse(ctx, Dtype::kFp32, N * NH),
        delta(ctx, Dtype::kFp32, N * NH),
        sums(ctx, Dtype::kFp32, device::attention_sums_elems(Dtype::kBf16, B, T, NH, HS));
    on_both<AttentionForwardArgs>(ctx, ops::attention_forward, cpu::attention_forward, [&](Side side) {
        return AttentionForwardArgs{.out = out.on(side), .lse = lse.on(side), .qkv = qkv.on(side), .B = B, .T = T,
                                    .NH = NH, .NKV = NKV, .HS = HS, .softmax_mul = softmax_mul};
    });
    on_both<AttentionBackwardArgs>(ctx, ops::attention_backward, cpu::attention_backward, [&](Side side) {
        return AttentionBackwardArgs{.dqkv = dqkv.on(side), .delta = delta.on(side), .dout = dout.on(side),
                                     .out = out.on(side), .lse = lse.on(side), .qkv = qkv.on(side), .B = B, .T = T,
                                     .NH = NH, .NKV = NKV, .HS = HS, .softmax_mul = softmax_mul, .sums = sums.on(side)};
    });
    std::string wrong = out.difference("out", kShare);
    if (wrong.empty()) wrong = lse.difference("log sum exp", kShare);
    return wrong.empty() ? dqkv.difference("dqkv", kShare) : wrong;
}

}  // namespace

std::string result_difference(const char* name, const std::vector<float>& device, const std::vector<float>& cpu,
                              double share) {
    double largest = 0;
    for (float value : cpu) largest = std::max(largest, std::fabs(static_cast<double>(value)));
    for (size_t i = 0; i < cpu.size(); i++) {
        const auto got = static_cast<double>(device[i]), want = static_cast<double>(cpu[i]);
        if (!(std::fabs(got - want) <= share * largest))   // also NaN
            return strf("%s: element %zu of %zu is %.9g, on the CPU %.9g", name, i, cpu.size(), got, want);
    }
    return "";
}

// A GPU that cannot run per-tensor scaling fails; scales of blocks and INT8 are optional.
static CheckResult recipe_result(Ctx& ctx, const RecipeRow& row, const DeviceInfo& device) {
    const bool optional = row.x != Granularity::kTensor || row.int8_forward;
    if (const std::string lacks = fp8_device_error({.recipe = row.recipe}, device); !lacks.empty())
        return {optional ? kWarning : kFailed, lacks,
                optional ? "use --fp8-recipe delayed or tensorwise here" : "train in BF16 here, --fp8-recipe none"};
    std::string wrong = row.int8_forward ? int8_matmul_error(ctx) : fp8_matmul_error(ctx, row, false);
    if (wrong.empty()) wrong = fp8_matmul_error(ctx, row, true);
    if (wrong.empty())
        return {kOk, device.sm > 0 ? "runs here; casts, fprop and wgrad as on the CPU" : "emulated by the CPU"};
    return {kFailed, wrong, "FP8 is wrong: do not train here; run make test-gpu"};
}

CheckResults Doctor::check_fp8() {
    if (!opened_) return {{kNotChecked, "no device"}};
    CheckResults results;
    for (const RecipeRow& row : recipe_rows()) {
        results.push_back(recipe_result(ctx_, row, info_));
        results.back().name = std::string("FP8 ") + row.name;
    }
    return results;
}

CheckResults Doctor::check_experts() {
    if (!opened_) return {{kNotChecked, "no device"}};
    const std::string lacks = fp8_device_error({.recipe = Fp8Recipe::kBlockwise}, info_);
    std::string wrong = experts_error(ctx_, false);
    if (!wrong.empty()) wrong = "BF16: " + wrong;
    else if (lacks.empty() && !(wrong = experts_error(ctx_, true)).empty()) wrong = "FP8: " + wrong;
    if (!wrong.empty())
        return {{kFailed, wrong, "matmuls of experts are wrong: do not train --num-experts here; run make test-gpu"}};
    return {{kOk, std::string("fprop and wgrad in BF16") + (lacks.empty() ? " and FP8" : "") + ": as on the CPU"}};
}

CheckResults Doctor::check_attention() {
    if (!opened_) return {{kNotChecked, "no device"}};
    // The head dims of GPT-2 and of Llama-3; more than one tile of keys, the last one partly filled.
    std::string wrong = attention_error(ctx_, 129, 2, 64);
    if (wrong.empty()) wrong = attention_error(ctx_, 193, 1, 128);
    if (!wrong.empty()) return {{kFailed, wrong, "attention is wrong: do not train here; run make test-gpu"}};
    return {{kOk, strf("forward and backward, head dims 64 (%s) and 128 (%s): as on the CPU",
                       device::attention_kernel(ctx_, Dtype::kBf16, 64),
                       device::attention_kernel(ctx_, Dtype::kBf16, 128))}};
}
