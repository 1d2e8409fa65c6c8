// The operations of INT8 matrices against the matrix of Hadamard in double.
#include "tests/support/int8_test.h"
#include "tests/support/random_inputs.h"

using namespace op_test;

namespace int8_test {

namespace {

// Element (i, j) of the orthogonal Hadamard matrix of 64.
double hadamard(int64_t i, int64_t j) {
    return std::popcount(static_cast<uint64_t>(i & j)) % 2 ? -0.125 : 0.125;
}
// values H of each group of 64, in double; rows of C columns.
std::vector<double> turned(const std::vector<double>& values) {
    std::vector<double> all(values.size());
    for (size_t i = 0; i < values.size(); i++)
        for (size_t j = 0; j < 64; j++)
            all[i] += values[i / 64 * 64 + j] * hadamard(static_cast<int64_t>(i % 64), static_cast<int64_t>(j));
    return all;
}
double amax_of(const std::vector<double>& values, int64_t begin, int64_t count) {
    double amax = 0;
    for (int64_t i = begin; i < begin + count; i++) amax = std::max(amax, std::fabs(values[static_cast<size_t>(i)]));
    return amax;
}
// 6 additions, whose terms are at most |x|_1 <= 8 |x|_2 = 8 |x'|_2 <= 64 amax', before the multiplication by 1/8.
constexpr double kTurnError = 6 * 8 * 0x1p-24;

uint32_t* bits_of(HostTensor& amaxes) { return object_in<uint32_t>(amaxes.view()); }

}  // namespace

TEST_CASE("cpu quantize_int8: codes and scales of random matrices within the rounding of the turn") {
    for (Shape shape : shapes())
        for (Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
            INFO(shape.N << " x " << shape.C << " " << std::string(dtype_name(dtype)));
            const HostTensor x = uneven_tensor(dtype, shape.N, shape.C, 1, 9);
            const Int8Matrix q = quantized_int8(x, shape);
            CHECK(q.codes.guards_intact());
            CHECK(q.scale_inv.guards_intact());
            const std::vector<double> want = turned(x.to(Dtype::kBf16).values());
            int64_t wrong = 0;
            for (int64_t n = 0; n < shape.N; n++) {
                const double amax = amax_of(want, n * shape.C, shape.C);
                CHECK(std::fabs(q.scale_inv.get(n) * 127 / amax - 1) <= kTurnError + 0x1p-23);
                int largest = 0;
                for (int64_t i = n * shape.C; i < (n + 1) * shape.C; i++) {
                    const int code = int8_of(q.codes, i);
                    largest = std::max(largest, std::abs(code));
                    const double exact = want[static_cast<size_t>(i)] * 127 / amax;
                    wrong += !(std::fabs(code - exact) <= 0.5 + 127 * (2 * kTurnError + 0x1p-22));
                }
                CHECK_EQ(largest, 127);
            }
            CHECK_EQ(wrong, 0);
        }
}

TEST_CASE("cpu quantize_int8: rows of zeros, values that are not finite, and tiny ones") {
    const Shape shape{9, 192};
    HostTensor x = rows_of(Dtype::kBf16, shape, 2);
    const Int8Matrix q = quantized_int8(x, shape);
    for (int64_t n = 0; n < 6; n++) {
        INFO("row " << n);
        const double scale_inv = q.scale_inv.get(n);
        if (n == 0) CHECK_EQ(scale_inv, 0.0);
        else CHECK_EQ(std::isnan(scale_inv), n < 5);
        for (int64_t c = 0; c < shape.C && n < 5; c++) CHECK_EQ(int8_of(q.codes, n * shape.C + c), 0);
    }
    HostTensor others = x;   // the other rows, of the same matrix without these
    for (int64_t i = 0; i < 6 * shape.C; i++) others.set(i, 1);
    const Int8Matrix plain = quantized_int8(others, shape);
    for (int64_t i = 6 * shape.C; i < 9 * shape.C; i++) CHECK_EQ(int8_of(q.codes, i), int8_of(plain.codes, i));
    Int8Matrix kept = q;
    Ctx ctx;
    StepState state{};
    state.skip = 1;
    cpu::quantize_int8(ctx, {.out = kept.codes.view(), .scale_inv = kept.scale_inv.view(), .in = others.view(),
                             .N = shape.N, .C = shape.C, .state = &state});
    CHECK(kept.codes.same_bits(q.codes));
    CHECK(kept.scale_inv.same_bits(q.scale_inv));
}

TEST_CASE("cpu row_amax, quantize_int8_run, row_scales: any partition at multiples of 64 gives quantize_int8's bits") {
    Ctx ctx;
    for (Shape shape : {Shape{1, 64}, {3, 192}, {129, 576}, {9, 14336}})
        for (Dtype dtype : {Dtype::kFp32, Dtype::kBf16})
            for (int64_t ranks : {1, 2, 5}) {
                INFO(shape.N << " x " << shape.C << " by " << ranks);
                const HostTensor x = rows_of(dtype, shape, 3);
                const Int8Matrix want = quantized_int8(x, shape);
                HostTensor amaxes(Dtype::kInt32, shape.N), codes(Dtype::kInt8, shape.N * shape.C);
                HostTensor scale_inv(Dtype::kFp32, shape.N);
                amaxes.fill(0);
                const auto ranges = random_ranges(x.elems(), ranks, 64, static_cast<uint64_t>(ranks));
                for (ShardRange range : ranges) {
                    HostTensor in = part_of(x, range);
                    cpu::row_amax(ctx, {.amaxes = bits_of(amaxes), .in = in.view(), .begin = range.begin, .R = shape.N,
                                        .C = shape.C});
                }
                for (ShardRange range : ranges) {
                    HostTensor in = part_of(x, range), out(Dtype::kInt8, range.elems);
                    cpu::quantize_int8_run(ctx, {.out = out.view(), .in = in.view(), .amaxes = bits_of(amaxes),
                                                 .begin = range.begin, .R = shape.N, .C = shape.C});
                    CHECK(out.guards_intact());
                    put_part(codes, range, out);
                }
                cpu::row_scales(ctx, {.scale_inv = scale_inv.view(), .amaxes = bits_of(amaxes), .R = shape.N});
                CHECK(codes.same_bits(want.codes));
                CHECK(scale_inv.same_bits(want.scale_inv));
                const HostTensor before = amaxes;
                HostTensor zeros(dtype, x.elems());
                zeros.fill(0);
                cpu::row_amax(ctx, {.amaxes = bits_of(amaxes), .in = zeros.view(), .begin = 0, .R = shape.N,
                                    .C = shape.C});
                CHECK(amaxes.same_bits(before));
            }
}

TEST_CASE("cpu transpose_int8 turns back: the bits of its definition, the values of the matrix within its codes") {
    Ctx ctx;
    for (Dtype format : {Dtype::kE4m3, Dtype::kE5m2})
        for (Shape shape : {Shape{16, 64}, {48, 192}, {144, 576}, {272, 128}}) {
            INFO(shape.N << " x " << shape.C << " " << std::string(dtype_name(format)));
            const int64_t R = shape.N, C = shape.C;
            const HostTensor x = rows_of(Dtype::kBf16, shape, 6);
            Int8Matrix q = quantized_int8(x, shape);
            HostTensor out(format, R * C);
            ScaleEntry entry{.scale_inv = 9, .scale = format == Dtype::kE4m3 ? 0.01f : 2.0f, .amax_bits = 5,
                             .step_amax_bits = 6};
            Fp8Counts counts{};
            cpu::transpose_int8(ctx, {.out = out.view(), .in = q.codes.view(), .scale_inv = q.scale_inv.view(),
                                      .entry = &entry, .R = R, .C = C, .counts = &counts});
            CHECK(out.guards_intact());
            CHECK_EQ(entry.scale_inv, 1 / entry.scale);
            CHECK_EQ(entry.amax_bits, 5);
            std::vector<double> codes(static_cast<size_t>(R * C));
            for (int64_t i = 0; i < R * C; i++) codes[static_cast<size_t>(i)] = int8_of(q.codes, i);
            const std::vector<double> sums = turned(codes);
            int64_t wrong = 0, far = 0;
            uint64_t saturated = 0, nonfinite = 0;
            for (int64_t i = 0; i < R * C; i++) {
                const int64_t r = i / C, c = i % C;
                const float scale_inv = static_cast<float>(q.scale_inv.get(r));
                const float value = static_cast<float>(8 * sums[static_cast<size_t>(i)]) * (scale_inv / 8);
                const uint8_t code = byte_of(out, c * R + r);
                wrong += code != to_fp8(format, value * entry.scale);
                nonfinite += std::isnan(value);
                if (std::isnan(value)) continue;
                const bool beyond = std::fabs(value * entry.scale) > fp8_largest(format);
                saturated += beyond;
                // A code is half a scale_inv away, 64 of them times 1/8; then FP8 rounds.
                const double original = x.get(i), number = from_fp8(format, code) / entry.scale;
                const double away = 4.01 * static_cast<double>(scale_inv);
                const double relative = format == Dtype::kE4m3 ? 0x1.01p-4 : 0x1.01p-3;
                const double least = (format == Dtype::kE4m3 ? 0x1p-10 : 0x1p-17) / entry.scale;
                const double bound = away + relative * (std::fabs(original) + away) + least;
                far += !beyond && r != 5 && std::fabs(number - original) > bound;
            }
            CHECK_EQ(wrong, 0);
            CHECK_EQ(far, 0);
            CHECK_EQ(counts.elems, static_cast<uint64_t>(R * C));
            CHECK_EQ(counts.saturated, saturated);
            CHECK_EQ(counts.nonfinite, nonfinite);
            CHECK_EQ(nonfinite, static_cast<uint64_t>(4 * C));
        }
}

TEST_CASE("cpu operations of INT8 matrices do not depend on the number of threads") {
    const Shape shape{160, 576};
    const HostTensor x = rows_of(Dtype::kFp32, shape, 7);
    check_threads([&] {
        Ctx ctx;
        Int8Matrix q = quantized_int8(x, shape);
        HostTensor in = x, amaxes(Dtype::kInt32, shape.N), out(Dtype::kE4m3, x.elems());
        ScaleEntry entry{.scale_inv = 1, .scale = 1, .amax_bits = 0, .step_amax_bits = 0};
        cpu::row_amax(ctx, {.amaxes = bits_of(amaxes.fill(0)), .in = in.view(), .begin = 0, .R = shape.N,
                            .C = shape.C});
        cpu::transpose_int8(ctx, {.out = out.view(), .in = q.codes.view(), .scale_inv = q.scale_inv.view(),
                                  .entry = &entry, .R = shape.N, .C = shape.C});
        return std::vector<HostTensor>{q.codes, q.scale_inv, amaxes, out};
    });
}

TEST_CASE("cpu operations of INT8 matrices refuse wrong arguments") {
    Ctx ctx;
    HostTensor in = random_tensor(Dtype::kBf16, 256, 1), out(Dtype::kInt8, 256), scales(Dtype::kFp32, 2);
    HostTensor fp8(Dtype::kE4m3, 256);
    uint32_t amaxes[2] = {};
    ScaleEntry entry{};
    auto quantize = [&](int64_t N, int64_t C) {
        cpu::quantize_int8(ctx, {.out = out.view(), .scale_inv = scales.view(), .in = in.view(), .N = N, .C = C});
    };
    quantize(2, 128);
    CHECK_THROWS_AS(quantize(8, 32), Error);
    CHECK_THROWS_AS(quantize(4, 64), Error);
    CHECK_THROWS_AS(quantize(2, 64), Error);
    auto amax = [&](int64_t begin) {
        cpu::row_amax(ctx, {.amaxes = amaxes, .in = in.view().slice(0, 128), .begin = begin, .R = 2, .C = 128});
    };
    amax(64);
    CHECK_THROWS_AS(amax(32), Error);
    CHECK_THROWS_AS(amax(192), Error);
    CHECK_THROWS_AS(cpu::quantize_int8_run(ctx, {.out = in.view(), .in = in.view(), .amaxes = amaxes, .begin = 0,
                                                 .R = 2, .C = 128}),
                    Error);
    CHECK_THROWS_AS(cpu::row_scales(ctx, {.scale_inv = scales.view(), .amaxes = amaxes, .R = 3}), Error);
    CHECK_THROWS_AS(cpu::transpose_int8(ctx, {.out = fp8.view(), .in = out.view(), .scale_inv = scales.view(),
                                              .entry = &entry, .R = 2, .C = 128}),
                    Error);
}

}  // namespace int8_test
