// Communication of gradients on the CPU: quantization in chunks, local reduction in rank order, comparison of sums.
#include "tests/support/fp8_format.h"
#include "tests/support/comm_ops_test.h"

using namespace op_test;

namespace grad_comm_test {

namespace {

constexpr Dtype kF = Dtype::kFp32, kB = Dtype::kBf16, kCodes = Dtype::kE4m3;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
const Fp8Numbers& numbers() {
    static const Fp8Numbers all(kCodes);
    return all;
}

struct Chunks {
    HostTensor codes, scales;
    Fp8Counts counts{1000, 2000, 3000, 4000};
    explicit Chunks(const HostTensor& x) : codes(kCodes, x.elems()), scales(kF, x.elems() / kGradCommChunk) {
        Ctx ctx;
        HostTensor in = x;
        cpu::quantize_chunks(ctx, {.out = codes.view(), .scales = scales.view(), .in = in.view(), .counts = &counts});
        CHECK(codes.guards_intact());
        CHECK(scales.guards_intact());
        CHECK(in.same_bits(x));
    }
    double dequantized(int64_t i) const {
        return fp8_value(kCodes, byte_of(codes, i)) * scales.get(i / kGradCommChunk);
    }
};

// 448 / amax in fp32 (rounded from double), or the next smaller float if the product would exceed 448.
float plain_scale(double amax) {
    if (amax == 0) return 1;
    const float largest = std::numeric_limits<float>::max();
    const double quotient = 448 / amax;
    float scale = quotient > static_cast<double>(largest) ? largest : static_cast<float>(quotient);
    if (static_cast<float>(amax * static_cast<double>(scale)) > 448) scale = std::nextafter(scale, 0.0f);
    return scale;
}

// Checks all chunks of x, which is finite, against the definition and an error bound.
void check_chunks(const HostTensor& x) {
    const Chunks got(x);
    unsigned long long flushed = 0;
    int64_t wrong = 0, far = 0;
    for (int64_t begin = 0; begin < x.elems(); begin += kGradCommChunk) {
        double amax = 0;
        for (int64_t i = begin; i < begin + kGradCommChunk; i++) amax = std::max(amax, std::fabs(x.get(i)));
        const float scale = plain_scale(amax);
        wrong += got.scales.get(begin / kGradCommChunk) != static_cast<double>(1 / scale);
        for (int64_t i = begin; i < begin + kGradCommChunk; i++) {
            const float product = static_cast<float>(x.get(i) * static_cast<double>(scale));
            const int code = numbers().nearest(static_cast<double>(product));
            wrong += byte_of(got.codes, i) != code;
            flushed += x.get(i) != 0 && (code & 0x7f) == 0;
            // Half a step of a normal or subnormal number, and roundings of the scales and the product.
            const double size = std::fabs(x.get(i)), step = 0x1p-10 / static_cast<double>(scale);
            far += std::fabs(got.dequantized(i) - x.get(i)) > std::max(0x1p-4 * size, step) * (1 + 0x1p-18) + 0x1p-149;
        }
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(far, 0);
    CHECK_EQ(got.counts.elems, 1000 + static_cast<unsigned long long>(x.elems()));
    CHECK_EQ(got.counts.saturated, 2000);
    CHECK_EQ(got.counts.flushed, 3000 + flushed);
    CHECK_EQ(got.counts.nonfinite, 4000);
}

// Concatenates the inputs of all ranks.
HostTensor joined(const std::vector<HostTensor>& parts) {
    HostTensor all(parts[0].dtype(), parts[0].elems() * static_cast<int64_t>(parts.size()));
    for (size_t r = 0; r < parts.size(); r++)
        put_part(all, {static_cast<int64_t>(r) * parts[0].elems(), parts[0].elems()}, parts[r]);
    return all;
}
HostTensor sum_of_ranks(HostTensor in, int64_t ranks, HostTensor scales = {}) {
    Ctx ctx;
    HostTensor out(kF, in.elems() / ranks);
    cpu::sum_ranks(ctx, {.out = out.view(), .in = in.view(), .scales = scales.view(), .ranks = ranks});
    CHECK(out.guards_intact());
    return out;
}
// What `before` becomes: the sum of the terms in their order or, with accumulate, `before` plus that, rounded once.
HostTensor plain_sum(const std::vector<HostTensor>& terms, const HostTensor& before, bool accumulate) {
    HostTensor out = before;
    for (int64_t i = 0; i < out.elems(); i++) {
        auto sum = static_cast<float>(terms[0].get(i));
        for (size_t r = 1; r < terms.size(); r++) sum += static_cast<float>(terms[r].get(i));
        if (accumulate) sum = static_cast<float>(before.get(i)) + sum;
        out.set(i, static_cast<double>(sum));
    }
    return out;
}

struct Distance {
    double sums[4] = {5, 6, 7, 8};
    Distance(const HostTensor& a, const HostTensor& b) {
        Ctx ctx;
        HostTensor x = a, y = b, scratch(Dtype::kFp64, 4 * kPartialSums);
        cpu::compare_sums(ctx, {.sums = sums, .a = x.view(), .b = y.view(), .scratch = scratch.view()});
        CHECK(scratch.guards_intact());
    }
};

}  // namespace

TEST_CASE("cpu quantize_chunks: codes, scales and counts match the definition") {
    for (Dtype dtype : {kF, kB})
        for (int64_t chunks : {1, 3, 65, 300})
            for (int powers : {1, 40, 250}) {
                INFO(std::string(dtype_name(dtype)) << ", " << chunks << " chunks, " << powers << " powers of two");
                check_chunks(uneven_tensor(dtype, chunks, kGradCommChunk, static_cast<uint64_t>(powers), powers));
            }
}

TEST_CASE("cpu quantize_chunks: the largest value is kept and never saturates") {
    // 18 significands of each power of two alone in a chunk: from the denormals to the largest float.
    std::vector<double> amaxes;
    for (int power = -149; power < 128; power++)
        for (uint64_t i = 0; i < 18; i++) {
            const double low = i < 16 ? 0x1p-23 * (philox(1, i + 20 * static_cast<uint64_t>(power + 149)).word[0] >> 9)
                                      : (i == 16 ? 0.0 : 1 - 0x1p-23);
            amaxes.push_back(static_cast<double>(static_cast<float>(std::ldexp(1 + low, power))));
        }
    HostTensor x(kF, (static_cast<int64_t>(amaxes.size()) + 1) * kGradCommChunk);   // the last chunk is zero
    x.fill(0);
    x.set(x.elems() - 1, -0.0);
    for (size_t i = 0; i < amaxes.size(); i++)
        x.set(static_cast<int64_t>(i * kGradCommChunk + i % kGradCommChunk), i % 2 ? -amaxes[i] : amaxes[i]);
    check_chunks(x);
    const Chunks got(x);
    int64_t missed = 0, invented = 0;
    for (int64_t i = 0; i < x.elems(); i++) {
        const double want = x.get(i), size = std::fabs(want), error = std::fabs(got.dequantized(i) - want);
        if (size == 0) invented += got.dequantized(i) != 0;
        else if (size >= 448 * 0x1p-126) missed += byte_of(got.codes, i) % 128 != 0x7e || error > 0x1p-22 * size;
        else missed += error > std::max(size / 16, 0x1p-138);   // half a step, scale being the largest float
    }
    CHECK_EQ(invented, 0);
    CHECK_EQ(missed, 0);
    for (int64_t i = 0; i < got.scales.elems(); i++) {
        const double scale = got.scales.get(i);
        if (!(scale > 0 && std::isfinite(scale))) CHECK_EQ(scale, 1);
    }
}

TEST_CASE("cpu quantize_chunks: a value that is not finite makes its chunk NaN and is counted") {
    for (Dtype dtype : {kF, kB})
        for (double odd : {std::nan(""), kInfinity, -kInfinity})
            for (int64_t at : {int64_t{128}, int64_t{200}, int64_t{255}}) {
                HostTensor x = uneven_tensor(dtype, 4, kGradCommChunk, 3), plain = x;
                x.set(130, 1e30), x.set(131, 1e-30), x.set(at, odd);
                plain.set(130, 1e30), plain.set(131, 1e-30), plain.set(at, 0);
                const Chunks got(x), without(plain);
                CHECK(std::isnan(got.scales.get(1)));
                CHECK_EQ(got.counts.nonfinite, 4001);
                CHECK_EQ(got.counts.saturated, 2000);
                CHECK_EQ(got.counts.elems, 1000 + 4 * 128);
                // In a NaN chunk nothing counts as flushed, although 1e-30 next to 1e30 would be.
                CHECK_LT(got.counts.flushed, without.counts.flushed);
                const HostTensor sum = sum_of_ranks(joined({got.codes, without.codes}), 2,
                                                    joined({got.scales, without.scales}));
                int64_t wrong = 0;
                for (int64_t i = 0; i < sum.elems(); i++) wrong += std::isnan(sum.get(i)) != (i / 128 == 1);
                CHECK_EQ(wrong, 0);
            }
}

// Inputs in FP32, BF16 or codes with scales; a rank's block in its place or elsewhere; results written or added.
TEST_CASE("cpu sum_ranks: in rank order, bit for bit, rounded once") {
    Ctx ctx;
    for (Dtype dtype : {kF, kB, kCodes})
        for (Dtype result : {kF, kB})
            for (int64_t ranks : {1, 2, 3, 8, 13})
                for (int64_t n : {1, 7, 10007}) {
                    INFO(std::string(dtype_name(dtype)) << ", " << ranks << " ranks of " << n);
                    if (dtype == kCodes) n = (n + 500) / kGradCommChunk * kGradCommChunk;
                    std::vector<HostTensor> inputs, scales, terms;
                    for (int64_t r = 0; r < ranks; r++) {
                        const auto key = static_cast<uint64_t>(r) + 1;
                        inputs.push_back(random_tensor(dtype == kCodes ? kF : dtype, n, key, std::exp2(r % 3 * 5)));
                        terms.push_back(inputs.back().to(kF));
                        if (dtype != kCodes) continue;
                        const Chunks chunks(terms.back());
                        inputs.back() = chunks.codes, scales.push_back(chunks.scales);
                        for (int64_t i = 0; i < n; i++) terms.back().set(i, chunks.dequantized(i));
                    }
                    const HostTensor before = random_tensor(result, n, 40, 3);
                    HostTensor in = joined(inputs), scale = dtype == kCodes ? joined(scales) : HostTensor();
                    for (bool accumulate : {false, true})
                        for (int64_t own_rank = 0; own_rank <= (dtype == kCodes ? 0 : ranks); own_rank++) {
                            // From own_rank 1 on the block of the rank before it is elsewhere.
                            HostTensor out = before, there = in, own;
                            if (own_rank > 0) {
                                own = inputs[static_cast<size_t>(own_rank - 1)];
                                for (int64_t i = 0; i < n; i++) there.set((own_rank - 1) * n + i, NAN);
                            }
                            cpu::sum_ranks(ctx, {.out = out.view(), .in = there.view(), .scales = scale.view(),
                                                 .own = own.view(), .own_rank = std::max<int64_t>(0, own_rank - 1),
                                                 .ranks = ranks, .accumulate = accumulate});
                            CHECK(out.guards_intact());
                            CHECK(out.same_bits(plain_sum(terms, before, accumulate)));
                        }
                    if (n < 100 || ranks < 3 || result != kF) continue;
                    const HostTensor sum = plain_sum(terms, before, false);
                    std::reverse(terms.begin(), terms.end());
                    CHECK_FALSE(plain_sum(terms, before, false).same_bits(sum));   // another order would be seen
                }
    HostTensor minus(kF, 1);
    minus.fill(-0.0);
    CHECK(sum_of_ranks(minus, 1).same_bits(minus));   // the sum begins with the first value, not with 0
    // Every code.
    HostTensor all(kCodes, 256), scales(kF, 2);
    for (int code = 0; code < 256; code++) static_cast<uint8_t*>(all.data())[code] = static_cast<uint8_t>(code);
    scales.fill(0.375);
    const HostTensor got = sum_of_ranks(all, 1, scales);
    for (int code = 0; code < 256; code++) {
        const double want = fp8_value(kCodes, code) * 0.375;
        CHECK((std::isnan(want) ? std::isnan(got.get(code)) : got.get(code) == want));
    }
}

TEST_CASE("cpu compare_sums matches plain sums, and one changed element changes the result") {
    for (int64_t n : {1, 3, 64, 1000, 70001}) {
        HostTensor a = random_tensor(kF, n, 1), b = random_tensor(kF, n, 2, 3);
        double want[4] = {5, 6, 7, 8}, sizes[4] = {5, 6, 7, 8};
        for (int64_t i = 0; i < n; i++) {
            const double x = a.get(i), y = b.get(i), terms[4] = {x * x, y * y, x * y, (x - y) * (x - y)};
            for (int k = 0; k < 4; k++) want[k] += terms[k], sizes[k] += std::fabs(terms[k]);
        }
        const Distance got(a, b);
        for (int k = 0; k < 4; k++) CHECK_LE(std::fabs(got.sums[k] - want[k]), (n + 3) * 0x1p-52 * sizes[k]);
        const Distance again(a, b);
        CHECK_EQ(std::memcmp(got.sums, again.sums, sizeof got.sums), 0);
        CHECK_EQ(Distance(a, a).sums[3], 8);
        HostTensor moved = b;
        moved.set(n / 2, moved.get(n / 2) + 0.5);
        const Distance other(a, moved);
        for (int k = 1; k < 4; k++) CHECK_GT(std::fabs(other.sums[k] - got.sums[k]), 1e-6);
        CHECK_EQ(other.sums[0], got.sums[0]);
        moved.set(n / 2, std::nan(""));
        CHECK(std::isnan(Distance(a, moved).sums[3]));
    }
}

TEST_CASE("cpu quantize_chunks and sum_ranks refuse wrong arguments") {
    Ctx ctx;
    HostTensor x = random_tensor(kF, 256, 1), codes(kCodes, 256), scales(kF, 2), out(kF, 128);
    auto chunks = [&](auto change) {
        QuantizeChunksArgs args{.out = codes.view(), .scales = scales.view(), .in = x.view()};
        change(args);
        cpu::quantize_chunks(ctx, args);
    };
    chunks([](QuantizeChunksArgs&) {});
    CHECK_THROWS_AS(chunks([](QuantizeChunksArgs& a) { a.in.elems = 255; }), Error);
    CHECK_THROWS_AS(chunks([](QuantizeChunksArgs& a) { a.scales.elems = 1; }), Error);
    CHECK_THROWS_AS(chunks([](QuantizeChunksArgs& a) { a.out.dtype = Dtype::kE5m2; }), Error);
    auto sum = [&](auto change) {
        SumRanksArgs args{.out = out.view(), .in = codes.view(), .scales = scales.view(), .ranks = 2};
        change(args);
        cpu::sum_ranks(ctx, args);
    };
    sum([](SumRanksArgs&) {});
    CHECK_THROWS_AS(sum([](SumRanksArgs& a) { a.ranks = 0; }), Error);
    CHECK_THROWS_AS(sum([](SumRanksArgs& a) { a.ranks = 3; }), Error);
    CHECK_THROWS_AS(sum([](SumRanksArgs& a) { a.scales = {}; }), Error);
    CHECK_THROWS_AS(sum([](SumRanksArgs& a) { a.own = a.in.slice(0, a.out.elems); }), Error);
    CHECK_THROWS_AS(sum([](SumRanksArgs& a) { a.own_rank = a.ranks; }), Error);
    CHECK_THROWS_AS(sum([](SumRanksArgs& a) { a.in.dtype = Dtype::kE5m2; }), Error);
    CHECK_THROWS_AS(sum([](SumRanksArgs& a) { a.out.dtype = Dtype::kFp64; }), Error);
    CHECK_THROWS_AS(sum([](SumRanksArgs& a) { a.out.elems = 127, a.in.elems = 254; }), Error);
}

}  // namespace grad_comm_test
