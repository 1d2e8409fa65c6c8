// The operations of exact channels against their definitions in double, and a linear whose channels are all exact.
#include "llmc/model/linear.h"
#include "tests/support/exact_channels_test.h"
#include "tests/support/reference_gemm_fp8.h"

using namespace op_test;

namespace exact_channels_test {

namespace {

double number(const HostTensor& codes, const HostTensor& scale_inv, Granularity granularity, int64_t R, int64_t C,
              int64_t r, int64_t c) {
    return static_cast<double>(from_fp8(Dtype::kE4m3, byte_of(codes, r * C + c)))
           * scale_inv.get(scale_inv_index(granularity, R, C, r, c));
}

}  // namespace

TEST_CASE("cpu channel_energy sums the squares of every 16th row") {
    Ctx ctx;
    for (const Case& c : cases()) {
        Quantized x(c, 1);
        HostTensor energies(Dtype::kFp32, c.C), want(Dtype::kFp64, c.C);
        cpu::channel_energy(ctx, {.energies = energies.view(), .x = x.matrix(), .N = c.N, .C = c.C});
        double chain = 0;
        for (int64_t j = 0; j < c.C; j++) {
            double sum = 0;
            for (int64_t n = 0; n < c.N; n += 16) {
                const double value = number(x.codes, x.scale_inv, c.granularity, c.N, c.C, n, j);
                sum += value * value;
            }
            want.set(j, sum);
            chain = static_cast<double>(c.N / 16 + 36);
        }
        INFO(c.N << " x " << c.C);
        CHECK_EQ(first_difference(energies, want, [&](int64_t i) { return (chain + 3) * 0x1p-24 * want.get(i); }), "");
        HostTensor before = energies;
        static_cast<uint8_t*>(x.codes.data())[3] = 0x7f;   // NaN in a row that counts, a number in one that does not
        if (c.N > 1) static_cast<uint8_t*>(x.codes.data())[c.C + 5] ^= 0x78;
        cpu::channel_energy(ctx, {.energies = energies.view(), .x = x.matrix(), .N = c.N, .C = c.C});
        CHECK(std::isfinite(energies.get(3)));
        CHECK(energies.get(3) < before.get(3));
        energies.set(3, before.get(3));
        CHECK(energies.same_bits(before));
    }
}

TEST_CASE("cpu top_channels chooses the largest, of equal ones the lowest, and nothing without energies") {
    Ctx ctx;
    HostTensor energies(Dtype::kFp32, 3 * 7), channels = int_tensor({9, 9, 9, 9, 9, 9, 9, 9, 9});
    const double values[] = {1, 5, 2, 5, 2, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x1p-149};
    for (int64_t i = 0; i < 21; i++) energies.set(i, values[i]);
    StepState state{};
    auto run = [&] {
        cpu::top_channels(ctx, {.channels = channels.view(), .energies = energies.view(), .rows = 3, .C = 7, .K = 3,
                                .state = &state});
    };
    state.skip = 1;
    run();
    CHECK(channels.same_bits(int_tensor({9, 9, 9, 9, 9, 9, 9, 9, 9})));
    state.skip = 0;
    run();
    CHECK(channels.same_bits(int_tensor({1, 2, 3, 9, 9, 9, 0, 1, 6})));
}

TEST_CASE("cpu exact_weight_columns: any partition writes the elements of the whole") {
    Ctx ctx;
    for (const Case& c : cases()) {
        if (c.granularity == Granularity::kBlock1x128) continue;
        for (Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
            Quantized w(c, 2);
            const int64_t elems = c.N * c.C;
            HostTensor in = w.values.to(dtype), channels = some_channels(c.C), out(Dtype::kBf16, c.N * 2 * kChannels);
            HostTensor want(Dtype::kFp64, out.elems());
            for (int64_t i = 0; i < c.N * kChannels; i++) {
                const int64_t r = i / kChannels, j = i % kChannels, k = static_cast<int64_t>(channels.get(j));
                const double w8 = number(w.codes, w.scale_inv, c.granularity, c.N, c.C, r, k);
                want.set(r * 2 * kChannels + j, w8);
                want.set(r * 2 * kChannels + kChannels + j, w.rounded.get(r * c.C + k) - w8);
            }
            for (int64_t count : {1, 2, 5}) {
                out.fill(0);
                for (ShardRange range : random_ranges(elems, count, 1, static_cast<uint64_t>(count))) {
                    HostTensor part = part_of(in, range), codes = part_of(w.codes, range);
                    cpu::exact_weight_columns(ctx, {.out = out.view(), .in = part.view(),
                                                    .w = {codes.view(), w.scale_inv.view(), c.granularity},
                                                    .channels = channels.view(), .begin = range.begin, .R = c.N,
                                                    .C = c.C});
                }
                check_close("exact weight", out, want, [&](int64_t i) {   // of a difference also the product's rounding
                    return 0x1.1p-8 * std::fabs(want.get(i)) + 0x1p-22 * w.largest;
                });
            }
        }
    }
}

TEST_CASE("cpu exact_norm_columns: the norm's own bits in the second half, what FP8 loses of them in the first") {
    Ctx ctx;
    for (const Case& c : cases()) {
        if (c.granularity == Granularity::kBlock128x128) continue;
        for (bool layer : {false, true}) {
            NormCase norm(c, layer);
            norm.forward(ctx);
            HostTensor out(Dtype::kBf16, c.N * 2 * kChannels), want(Dtype::kFp64, out.elems());
            cpu::exact_norm_columns(ctx, norm.args(out.view()));
            for (int64_t i = 0; i < c.N * kChannels; i++) {
                const int64_t n = i / kChannels, j = i % kChannels, k = static_cast<int64_t>(norm.channels.get(j));
                const double x = norm.out.get(n * c.C + k), x8 = number(norm.x.codes, norm.x.scale_inv, c.granularity,
                                                                        c.N, c.C, n, k);
                want.set(n * 2 * kChannels + j, x - x8);
                want.set(n * 2 * kChannels + kChannels + j, x);
                CHECK(out.get(n * 2 * kChannels + kChannels + j) == x);
            }
            check_close("exact norm", out, want,
                        [&](int64_t i) { return 0x1.1p-8 * std::fabs(want.get(i)) + 0x1p-20; });
        }
    }
}

TEST_CASE("a linear layer all of whose channels are exact is the one in BF16 within rounding") {
    Ctx ctx;
    const int64_t out = 48, K = kChannels;
    for (Granularity granularity : {Granularity::kTensor, Granularity::kBlock1x128}) {
        const bool blocks = granularity != Granularity::kTensor;
        const Case c{80, K, granularity};
        NormCase norm(c, false);
        norm.forward(ctx);
        Quantized w({out, K, blocks ? Granularity::kBlock128x128 : granularity}, 7);
        HostTensor y(Dtype::kBf16, c.N * out), x_columns(Dtype::kBf16, c.N * 2 * K);
        HostTensor w_columns(Dtype::kBf16, out * 2 * K);
        cpu::exact_norm_columns(ctx, norm.args(x_columns.view()));
        cpu::exact_weight_columns(ctx, {.out = w_columns.view(), .in = w.values.view(), .w = w.matrix(),
                                        .channels = norm.channels.view(), .begin = 0, .R = out, .C = K});
        Fp8Linear fp8{.in = K, .out = out, .weight = {w.codes.view(), w.scale_inv.view(), w.granularity},
                      .weight_transposed = {}};
        const Fp8Operand rows{norm.x.codes.view(), norm.x.scale_inv.view(), granularity};
        const LinearOperand x{.unquantized = {}, .fp8 = {rows, {}}, .exact = x_columns.view()};
        const Linear linear{.weight = {}, .bias = {}, .dweight = {}, .dbias = {}, .in = K, .out = out, .fp8 = &fp8};
        HostTensor want(Dtype::kFp64, c.N * out), size = want;
        for (int64_t i = 0; i < c.N * out; i++) {
            double sum = 0, sizes = 0;
            for (int64_t k = 0; k < K; k++) {
                const double term = norm.out.get(i / out * K + k) * w.rounded.get(i % out * K + k);
                sum += term, sizes += std::fabs(term);
            }
            want.set(i, sum), size.set(i, sizes);
        }
        // y is rounded to bf16 twice; so are x - x8, w8 and w - w8, once each. FP8 errs by 2^-4 of a number.
        const Bound bound = [&](int64_t i) { return 0x1p-7 * std::fabs(want.get(i)) + 0x1p-9 * size.get(i); };
        linear_forward(ctx, linear, y.view(), x, c.N);
        CHECK_NE(first_difference(y, want, bound), "");   // without the second term
        fp8.channels = norm.channels.view();
        fp8.exact_weight = w_columns.view();
        linear_forward(ctx, linear, y.view(), x, c.N);
        CHECK_EQ(first_difference(y, want, bound), "");
    }
}

}  // namespace exact_channels_test
