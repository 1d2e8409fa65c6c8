// Inputs of the operations of exact channels, for the tests on both devices.
#pragma once
#include "tests/support/comm_ops_test.h"

namespace exact_channels_test {

using namespace op_test;

inline constexpr int64_t kChannels = 16;

struct Case {
    int64_t N, C;
    Granularity granularity;
};
// Fewer rows than a sample has, columns that end within a block or a warp, several blocks.
inline std::vector<Case> cases() {
    std::vector<Case> all;
    for (Granularity granularity : {Granularity::kTensor, Granularity::kBlock1x128, Granularity::kBlock128x128})
        for (auto [N, C] : {std::pair<int64_t, int64_t>{1, 16}, {16, 48}, {144, 80}, {272, 400}, {1040, 144}})
            all.push_back({N, C, granularity});
    return all;
}

// 16 of C channels, ascending; all of 16.
inline HostTensor some_channels(int64_t C) {
    std::vector<int32_t> channels;
    for (int64_t j = 0; j < kChannels; j++) channels.push_back(static_cast<int32_t>((j * C + C / 2) / kChannels));
    return int_tensor(channels);
}

// An (N, C) matrix of uneven values, and its codes and scales.
struct Quantized {
    Granularity granularity;
    HostTensor values, rounded, codes, scale_inv;
    double largest = 0;

    Quantized(const Case& c, uint64_t key)
        : Quantized(c, uneven_tensor(Dtype::kFp32, c.N, c.C, key, 5)) {}
    Quantized(const Case& c, HostTensor from) : granularity(c.granularity), values(std::move(from)) {
        rounded = values.to(Dtype::kBf16);
        HostTensor wide = rounded.to(Dtype::kFp32);
        codes = HostTensor(Dtype::kE4m3, c.N * c.C);
        scale_inv = HostTensor(Dtype::kFp32, scale_inv_elems(c.granularity, c.N, c.C));
        for (int64_t i = 0; i < wide.elems(); i++) largest = std::max(largest, std::fabs(wide.get(i)));
        ScaleEntry entry{.scale_inv = 1, .scale = 1, .amax_bits = amax_bits_of(static_cast<float>(largest)),
                         .step_amax_bits = 0};
        const bool blocks = c.granularity != Granularity::kTensor;
        QuantOut quant;
        quant.rowwise = codes.view(), quant.granularity = c.granularity, quant.scaling = Scaling::kCurrent;
        quant.entry = &entry;
        if (blocks) quant.rowwise_scale_inv = scale_inv.view(), quant.scaling = Scaling::kDelayed;
        Ctx ctx;
        cpu::quantize(ctx, {.quant = quant, .in = wide.view(), .N = c.N, .C = c.C});
        if (!blocks) scale_inv.set(0, static_cast<double>(entry.scale_inv));
    }
    QuantizedMatrix matrix() { return {codes.view(), scale_inv.view(), granularity}; }
};

// A norm, its result and the result's codes.
struct NormCase {
    Case c;
    bool layer;
    HostTensor in, weight, bias, mean, rstd, out, channels;
    Quantized x;

    NormCase(const Case& c_, bool layer_)
        : c(c_), layer(layer_), in(random_tensor(Dtype::kBf16, c.N * c.C, 3, 2, 0.5)),
          weight(random_tensor(Dtype::kBf16, c.C, 4)), bias(random_tensor(Dtype::kBf16, c.C, 5)),
          mean(Dtype::kFp32, c.N), rstd(Dtype::kFp32, c.N), out(Dtype::kBf16, c.N * c.C), channels(some_channels(c.C)),
          x(c, in) {}
    void forward(Ctx& ctx) {
        const NormForwardArgs args{.out = out.view(), .residual_out = {}, .mean = layer ? mean.view() : Tensor{},
                                   .rstd = rstd.view(), .in = in.view(), .residual = {}, .weight = weight.view(),
                                   .bias = layer ? bias.view() : Tensor{}, .N = c.N, .C = c.C, .eps = 1e-5f};
        if (layer) cpu::layernorm_forward(ctx, args);
        else cpu::rmsnorm_forward(ctx, args);
        x = Quantized(c, out);
    }
    ExactNormArgs args(Tensor to) {
        return {.out = to, .in = in.view(), .mean = layer ? mean.view() : Tensor{}, .rstd = rstd.view(),
                .weight = weight.view(), .bias = layer ? bias.view() : Tensor{}, .x = x.matrix(),
                .channels = channels.view(), .N = c.N, .C = c.C};
    }
};

}  // namespace exact_channels_test
