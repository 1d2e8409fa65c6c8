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
// Adds the terms in float in the given order.
HostTensor plain_sum(const std::vector<HostTensor>& terms, const std::vector<size_t>& order) {
    HostTensor sum = terms[order[0]].to(kF);
    for (size_t r = 1; r < order.size(); r++)
        for (int64_t i = 0; i < sum.elems(); i++)
            sum.as<float>()[i] += static_cast<float>(terms[order[r]].get(i));
    return sum;
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
    HostTensor x(kF, static_cast<int64_t>(amaxes.size()) * kGradCommChunk);
    x.fill(0);
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

TEST_CASE("cpu quantize_chunks: a chunk of zeros") {
    HostTensor x(kF, 3 * kGradCommChunk);
    x.fill(0);
    x.set(5, -0.0);
    x.set(2 * kGradCommChunk, 1e-30);
    const Chunks got(x);
    CHECK_EQ(got.scales.get(0), 1);
    CHECK_EQ(got.scales.get(1), 1);
    CHECK_EQ(byte_of(got.codes, 5), 0x80);
    CHECK_EQ(byte_of(got.codes, 6), 0);
    CHECK_EQ(got.counts.flushed, 3000);
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

TEST_CASE("cpu sum_ranks: in rank order, bit for bit") {
    for (Dtype dtype : {kF, kB})
        for (int64_t ranks : {1, 2, 3, 4, 8, 13})
            for (int64_t n : {1, 7, 4096, 10007}) {
                INFO(std::string(dtype_name(dtype)) << ", " << ranks << " ranks of " << n);
                std::vector<HostTensor> terms;
                std::vector<size_t> order;
                for (int64_t r = 0; r < ranks; r++) {
                    terms.push_back(random_tensor(dtype, n, static_cast<uint64_t>(r) + 1, std::exp2(r % 3 * 5)));
                    order.push_back(static_cast<size_t>(r));
                }
                const HostTensor got = sum_of_ranks(joined(terms), ranks);
                CHECK(got.same_bits(plain_sum(terms, order)));
                std::reverse(order.begin(), order.end());
                if (ranks > 2 && n > 100) CHECK_FALSE(got.same_bits(plain_sum(terms, order)));
            }
    HostTensor minus(kF, 1);
    minus.fill(-0.0);
    CHECK(sum_of_ranks(minus, 1).same_bits(minus));   // the sum begins with the first value, not with 0
}

TEST_CASE("cpu sum_ranks: a block that is elsewhere is read there, in its place in the order") {
    Ctx ctx;
    for (Dtype dtype : {kF, kB})
        for (int64_t own_rank : {0, 1, 2}) {
            const int64_t ranks = 3, n = 10007;
            HostTensor in = random_tensor(dtype, ranks * n, 3, 9), out(kF, n);
            const HostTensor want = sum_of_ranks(in, ranks);
            HostTensor own(dtype, n);
            for (int64_t i = 0; i < n; i++) {
                own.set(i, in.get(own_rank * n + i));
                in.set(own_rank * n + i, NAN);
            }
            cpu::sum_ranks(ctx, {.out = out.view(), .in = in.view(), .scales = {}, .own = own.view(),
                                 .own_rank = own_rank, .ranks = ranks});
            CHECK(out.same_bits(want));
        }
}

TEST_CASE("cpu sum_ranks: adds the rounded sum over the ranks to what was there") {
    Ctx ctx;
    for (Dtype dtype : {kF, kB})
        for (int64_t ranks : {1, 3}) {
            const int64_t n = 10007;
            HostTensor in = random_tensor(dtype, ranks * n, 3), out = random_tensor(kF, n, 4, 100);
            const HostTensor sum = sum_of_ranks(in, ranks), want = plain_sum({out, sum}, {0, 1});
            cpu::sum_ranks(ctx, {.out = out.view(), .in = in.view(), .scales = {}, .ranks = ranks, .accumulate = true});
            CHECK(out.guards_intact());
            CHECK(out.same_bits(want));
            CHECK_FALSE(out.same_bits(sum));
        }
}

TEST_CASE("cpu sum_ranks: a bf16 sum is the fp32 one of what was there and the ranks, rounded once") {
    Ctx ctx;
    for (Dtype dtype : {kF, kB})
        for (int64_t ranks : {1, 3})
            for (int64_t n : {1, 7, 10007})
                for (bool accumulate : {false, true}) {
                    HostTensor in = random_tensor(dtype, ranks * n, 3), before = random_tensor(kB, n, 4, 3);
                    HostTensor out = before;
                    cpu::sum_ranks(ctx, {.out = out.view(), .in = in.view(), .scales = {}, .ranks = ranks,
                                         .accumulate = accumulate});
                    CHECK(out.guards_intact());
                    const HostTensor sum = sum_of_ranks(in, ranks);
                    int64_t wrong = 0, twice = 0;
                    for (int64_t i = 0; i < n; i++) {
                        const auto term = static_cast<float>(sum.get(i)), there = static_cast<float>(before.get(i));
                        const auto got = static_cast<float>(out.get(i));
                        wrong += got != static_cast<float>(bf16(accumulate ? there + term : term));
                        twice += got != static_cast<float>(bf16(there + static_cast<float>(bf16(term))));
                    }
                    CHECK_EQ(wrong, 0);
                    // Rounding the sum of the ranks first would be detected, unless that sum is a bf16 number.
                    if (n > 100 && accumulate && (dtype == kF || ranks > 1)) CHECK_GT(twice, 0);
                }
}

TEST_CASE("cpu sum_ranks: codes are multiplied by the scale of their own chunk and rank, then added") {
    const int64_t n = 5 * kGradCommChunk;
    for (int64_t ranks : {1, 2, 5, 8}) {
        std::vector<HostTensor> codes, scales, terms;
        std::vector<size_t> order;
        for (int64_t r = 0; r < ranks; r++) {
            HostTensor code(kCodes, n), scale = random_tensor(kF, n / kGradCommChunk, static_cast<uint64_t>(r) + 50);
            HostTensor term(kF, n);
            for (int64_t i = 0; i < n; i++) {
                uint32_t random = philox(static_cast<uint64_t>(r), static_cast<uint64_t>(i)).word[0] % 256;
                if (random % 128 == 127) random--;   // NaN
                static_cast<uint8_t*>(code.data())[i] = static_cast<uint8_t>(random);
                term.set(i, fp8_value(kCodes, static_cast<int>(random)) * scale.get(i / kGradCommChunk));
            }
            codes.push_back(code), scales.push_back(scale), terms.push_back(term);
            order.push_back(static_cast<size_t>(r));
        }
        const HostTensor got = sum_of_ranks(joined(codes), ranks, joined(scales));
        CHECK(got.same_bits(plain_sum(terms, order)));
        scales.back().set(2, scales.back().get(2) * 1.5);
        CHECK_FALSE(sum_of_ranks(joined(codes), ranks, joined(scales)).same_bits(got));
    }
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
