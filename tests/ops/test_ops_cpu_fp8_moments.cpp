// Moments in fp8 (--moment-dtype fp8): their codes, and the operations of the CPU, AdamW's and Muon's momentum.
#include "llmc/ops/moment_codes.h"

#include <algorithm>

#include "llmc/base/fp8.h"
#include "tests/support/op_test.h"

using namespace reference;

namespace {

uint32_t random_of(uint64_t element, int64_t step) {
    return philox(99, element / 4, static_cast<uint64_t>(step), kMomentRounds).word[element % 4];
}

// The number of a UE5M3 code, from its definition.
double ue5m3(uint32_t code) {
    const int exponent = static_cast<int>(code >> 3), mantissa = static_cast<int>(code & 7);
    return exponent == 0 ? std::ldexp(mantissa, -17) : std::ldexp(8 + mantissa, exponent - 18);
}

struct Fp8Adam {
    HostTensor param, master, m, v, m_scale_inv, v_scale_inv, grad;
    StepState state{};
    AdamWArgs args{};
    ScaleEntry entry{};

    // Gradients over `decades`; the state is that of a new run.
    Fp8Adam(int64_t n, Dtype type, Dtype grads, double decades = 0)
        : param(type, n), master(random_tensor(Dtype::kFp32, n, 1)), m(Dtype::kE4m3, n), v(Dtype::kUe5m3, n),
          m_scale_inv(Dtype::kFp32, scale_blocks(n)), v_scale_inv(Dtype::kFp32, scale_blocks(n)),
          grad(random_tensor(grads, n, 4)) {
        for (HostTensor* t : {&m, &v, &m_scale_inv, &v_scale_inv})
            std::memset(t->data(), 0, static_cast<size_t>(t->bytes()));
        for (int64_t i = 0; i < n; i++)
            grad.set(i, grad.get(i) * std::pow(10, -decades * (philox(5, static_cast<uint64_t>(i)).word[0] * 0x1p-32)));
        state.lr = 0.01f, state.grad_mul = 0.5f, state.adam_step = 1;
        args.lr_scale = 1, args.beta1 = 0.9f, args.beta2 = 0.95f, args.eps = 1e-8f, args.weight_decay = 0.1f;
        args.rng_key = 99, args.element_offset = 1024;
    }
    // One step on the elements [begin, end).
    void run(int64_t begin, int64_t end) {
        Ctx ctx;
        const auto part = [&](HostTensor& t) { return t.view().slice(begin, end - begin); };
        const auto scales = [&](HostTensor& t) {
            return t.view().slice(begin / kScaleBlock, scale_blocks(end) - begin / kScaleBlock);
        };
        AdamWArgs a = args;
        a.param = part(param), a.master = part(master), a.m = part(m), a.v = part(v), a.grad = part(grad);
        a.m_scale_inv = scales(m_scale_inv), a.v_scale_inv = scales(v_scale_inv);
        a.state = &state, a.entry = &entry, a.element_offset += begin;
        cpu::adamw(ctx, a);
    }
    void run() { run(0, master.elems()); }
    const uint8_t* codes(const HostTensor& t) const { return static_cast<const uint8_t*>(t.data()); }
    // The moments, masters, weights and amax of a step with the decoded moments in fp32.
    struct Plain {
        HostTensor m, v, master, param;
        ScaleEntry entry;
    };
    Plain plain_step() {
        const int64_t n = master.elems();
        Plain p{HostTensor(Dtype::kFp32, n), HostTensor(Dtype::kFp32, n), master, param, entry};
        for (int64_t i = 0; i < n; i++) p.m.set(i, m_at(i)), p.v.set(i, v_at(i));
        AdamWArgs a = args;
        a.param = p.param.view(), a.master = p.master.view(), a.m = p.m.view(), a.v = p.v.view();
        a.grad = grad.view(), a.state = &state, a.entry = &p.entry;
        Ctx ctx;
        cpu::adamw(ctx, a);
        return p;
    }
    float m_at(int64_t i) const { return decode_m(codes(m)[i], scale(m_scale_inv, i)); }
    float v_at(int64_t i) const { return decode_v(codes(v)[i], scale(v_scale_inv, i)); }
    static float scale(const HostTensor& t, int64_t i) { return static_cast<float>(t.get(i / kScaleBlock)); }
    bool same_state(const Fp8Adam& o) const {
        return m.same_bits(o.m) && v.same_bits(o.v) && m_scale_inv.same_bits(o.m_scale_inv)
               && v_scale_inv.same_bits(o.v_scale_inv) && master.same_bits(o.master) && param.same_bits(o.param)
               && entry.amax_bits == o.entry.amax_bits;
    }
};

}  // namespace

TEST_CASE("fp8 moments: codes are E4M3 and UE5M3, and keep their numbers under every scale and random number") {
    for (float scale : {1.0f, 0x1p100f, 0x1p-15f})
        for (uint32_t code = 0; code < 256; code++) {
            const float m = decode_m(code, 1 / scale), v = decode_v(code, 1 / scale);
            if ((code & 0x7f) != 0x7f) CHECK_EQ(m, from_fp8(Dtype::kE4m3, static_cast<uint8_t>(code)) / scale);
            CHECK_EQ(static_cast<double>(v), ue5m3(code) / static_cast<double>(scale));
            for (uint32_t random : {0u, 1u, 0x8000u, 0xffffu, 0xabcd0000u}) {
                CHECK_EQ(encode_m(m, scale, random), code);
                CHECK_EQ(encode_v(v, scale, random), code);
            }
        }
}

TEST_CASE("fp8 moments: values round up where the random number exceeds the distance, in double") {
    int64_t rounded_up = 0;
    for (uint64_t i = 0; i < 200000; i++) {
        const Philox4 p = philox(7, i);
        const float x = std::ldexp(static_cast<float>(1 + p.word[0] * 0x1p-32), static_cast<int>(p.word[1] % 34) - 20);
        const uint32_t random = p.word[2] & 0xffff;
        const auto check = [&](uint32_t code, double largest, double smallest_step, uint32_t least) {
            if (static_cast<double>(x) >= largest) return;
            const double step = std::max(std::ldexp(1.0, std::ilogb(x) - 3), smallest_step);
            const double fraction = x / step - std::floor(x / step), lower = std::floor(x / step) * step;
            // Floats below the smallest number of the format have 20 more binary places, which round once.
            if (std::fabs(fraction + random / 65536.0 - 1) < 0x1p-19) return;
            const bool up = fraction + random / 65536.0 >= 1;
            const double want = std::max(lower + (up ? step : 0), least * smallest_step);
            CHECK_EQ((least ? ue5m3(code) : static_cast<double>(from_fp8(Dtype::kE4m3, static_cast<uint8_t>(code)))),
                     want);
            rounded_up += up;
        };
        check(encode_m(x, 1, random), 448, 0x1p-9, 0);
        check(encode_v(x, 1, random), 114688, 0x1p-17, 1);
        CHECK_EQ(encode_m(-x, 1, random), (encode_m(x, 1, random) | 0x80));
    }
    CHECK_GT(rounded_up, 100000);
    CHECK_EQ(encode_v(1e-30f, 1, 0), 1);   // v > 0 stays above 0
    CHECK_EQ(encode_v(0, 1, 0xffff), 0);
    for (float amax : {1e-45f, 1e-38f, 3e-5f, 1.0f, 1.75f, 1.7500001f, 448.0f, 1e7f})
        for (auto [log2, largest] : {std::pair{kLog2LargestM, 448.0}, {kLog2LargestV, 114688.0}}) {
            const MomentScale s = moment_scale(amax_bits_of(amax), log2);
            const double scaled = static_cast<double>(amax) * static_cast<double>(s.scale);
            CHECK_EQ(s.scale * s.scale_inv, 1);
            CHECK_LE(scaled, largest);
            CHECK((2 * scaled > largest || s.scale == 0x1p100f));
        }
    for (auto [amax, log2] : {std::pair{1.5e7f, kLog2LargestM}, {4e9f, kLog2LargestV}, {INFINITY, kLog2LargestM}}) {
        const MomentScale s = moment_scale(amax_bits_of(amax), log2);   // beyond the least scale
        CHECK_EQ(s.scale, 0);
        CHECK(std::isnan(s.scale_inv));
        CHECK_EQ(moment_scale(amax_bits_of(0.9f * amax), log2).scale, amax == INFINITY ? 0.0f : 0x1p-15f);
    }
}

TEST_CASE("cpu adamw with fp8 moments: masters as with moments in fp32, codes by the documented random bits") {
    for (auto [type, grads] : {std::pair{Dtype::kBf16, Dtype::kFp32}, {Dtype::kBf16, Dtype::kBf16},
                               {Dtype::kFp32, Dtype::kFp32}})
        for (int64_t n : {1, 127, 128, 129, 5003}) {
            CAPTURE(n);
            Fp8Adam a(n, type, grads, 6);
            a.args.lr_scale = 0.5f;
            for (int step = 1; step <= 4; step++) {
                a.state.adam_step = step;
                const Fp8Adam::Plain plain = a.plain_step();
                a.run();
                CHECK(a.master.same_bits(plain.master));
                CHECK(a.param.same_bits(plain.param));
                CHECK(a.m.guards_intact());
                CHECK(a.v.guards_intact());
                CHECK_EQ(a.entry.amax_bits, plain.entry.amax_bits);
                int64_t different = 0;
                for (int64_t i = 0; i < n; i++) {
                    const uint64_t element = static_cast<uint64_t>(1024 + i);
                    const uint32_t random = random_of(element, step);
                    const float m_scale = 1 / a.scale(a.m_scale_inv, i), v_scale = 1 / a.scale(a.v_scale_inv, i);
                    different += a.codes(a.m)[i] != encode_m(static_cast<float>(plain.m.get(i)), m_scale, random);
                    different += a.codes(a.v)[i] != encode_v(static_cast<float>(plain.v.get(i)), v_scale, random >> 16);
                }
                CHECK_EQ(different, 0);
            }
        }
}

TEST_CASE("cpu adamw with fp8 moments: parts of whole blocks give the bits of the whole, and every element counts") {
    const int64_t n = 20003;
    const Fp8Adam start(n, Dtype::kBf16, Dtype::kBf16, 4);
    Fp8Adam whole = start, parts = start;
    for (int step = 1; step <= 3; step++) {
        whole.state.adam_step = parts.state.adam_step = step;
        whole.run();
        parts.run(0, 128), parts.run(128, 7040), parts.run(7040, n);
    }
    CHECK(parts.same_state(whole));
    Fp8Adam skipped = whole;
    skipped.state.skip = 1;
    skipped.run();
    CHECK(skipped.same_state(whole));
    for (int change = 0; change < 4; change++) {
        Fp8Adam other = start;
        if (change == 0) other.args.rng_key++;
        if (change == 1) other.args.element_offset += kScaleBlock;
        if (change == 2) other.state.adam_step++;
        if (change == 3) other.grad.set(n - 1, 2 * other.grad.get(n - 1));
        Fp8Adam first = start;
        first.run(), other.run();
        CHECK_FALSE((other.m.same_bits(first.m) && other.v.same_bits(first.v)));
    }
    Fp8Adam shifted = start;
    shifted.args.element_offset++;
    CHECK_THROWS_AS(shifted.run(), Error);
}

TEST_CASE("cpu adamw with fp8 moments: zero blocks stay zero, values that are not finite make their block NaN alone") {
    Fp8Adam a(3 * kScaleBlock, Dtype::kFp32, Dtype::kFp32);
    a.args.weight_decay = 0;
    for (int64_t i = 0; i < kScaleBlock; i++) a.grad.set(i, 0);
    a.grad.set(2 * kScaleBlock + 5, 1e30);   // its square is infinite
    const HostTensor before = a.master;
    a.run();
    for (int64_t i = 0; i < kScaleBlock; i++) {
        CHECK_EQ(a.codes(a.m)[i] | a.codes(a.v)[i], 0);
        CHECK_EQ(a.master.get(i), before.get(i));
        CHECK(std::isfinite(a.v_at(kScaleBlock + i)));
        CHECK(std::isnan(a.v_at(2 * kScaleBlock + i)));
    }
}

namespace {

// Steps of Muon's momentum on parts of n elements that begin at `begins`.
struct Fp8Momentum {
    HostTensor m, scale_inv, grad;
    StepState state{};
    uint64_t key = 99;
    int64_t offset = 1024;

    Fp8Momentum(int64_t n, Dtype grads)
        : m(Dtype::kE4m3, n), scale_inv(Dtype::kFp32, scale_blocks(n)), grad(random_tensor(grads, n, 4)) {
        for (HostTensor* t : {&m, &scale_inv}) std::memset(t->data(), 0, static_cast<size_t>(t->bytes()));
        state.grad_mul = 0.5f, state.adam_step = 1;
    }
    void run(std::vector<int64_t> begins = {0}) {
        begins.push_back(grad.elems());
        Ctx ctx;
        for (size_t i = 0; i + 1 < begins.size(); i++) {
            const int64_t begin = begins[i], n = begins[i + 1] - begin;
            cpu::muon_momentum(ctx, {.m = m.view().slice(begin, n),
                                     .m_scale_inv = scale_inv.view().slice(begin / kScaleBlock, scale_blocks(n)),
                                     .grad = grad.view().slice(begin, n), .state = &state, .beta = 0.95f,
                                     .rng_key = key, .element_offset = offset + begin});
        }
    }
    uint8_t code(int64_t i) const { return static_cast<const uint8_t*>(m.data())[i]; }
    float scale(int64_t i) const { return static_cast<float>(scale_inv.get(i / kScaleBlock)); }
    bool operator==(const Fp8Momentum& o) const {
        return m.same_bits(o.m) && scale_inv.same_bits(o.scale_inv) && grad.same_bits(o.grad);
    }
};

}  // namespace

TEST_CASE("cpu muon_momentum in fp8: updates as with fp32, codes by the documented random bits") {
    for (Dtype grads : {Dtype::kFp32, Dtype::kBf16})
        for (int64_t n : {1, 127, 128, 129, 5003}) {
            CAPTURE(n);
            Fp8Momentum a(n, grads);
            for (int step = 1; step <= 4; step++) {
                a.state.adam_step = step;
                HostTensor m(Dtype::kFp32, n), grad = a.grad;
                for (int64_t i = 0; i < n; i++) m.set(i, decode_m(a.code(i), a.scale(i)));
                Ctx ctx;
                cpu::muon_momentum(ctx, {.m = m.view(), .grad = grad.view(), .state = &a.state, .beta = 0.95f,
                                         .rng_key = 0, .element_offset = 0});
                a.run();
                CHECK(a.grad.same_bits(grad));
                CHECK(a.m.guards_intact());
                int64_t different = 0;
                for (int64_t i = 0; i < n; i++) {
                    const auto element = static_cast<uint64_t>(1024 + i);
                    const uint32_t random = random_of(element, step);
                    different += a.code(i) != encode_m(static_cast<float>(m.get(i)), 1 / a.scale(i), random);
                }
                CHECK_EQ(different, 0);
            }
        }
}

TEST_CASE("cpu muon_momentum in fp8: parts of whole blocks give the bits of the whole, NaN stays in its block") {
    const Fp8Momentum start(20003, Dtype::kBf16);
    Fp8Momentum whole = start, parts = start;
    for (int step = 1; step <= 3; step++) {
        whole.state.adam_step = parts.state.adam_step = step;
        whole.run(), parts.run({0, 128, 7040});
    }
    CHECK(parts == whole);
    Fp8Momentum skipped = whole;
    skipped.state.skip = 1;
    skipped.run();
    CHECK(skipped == whole);
    for (int change = 0; change < 4; change++) {
        Fp8Momentum first = start, other = start;
        if (change == 0) other.key++;
        if (change == 1) other.offset += kScaleBlock;
        if (change == 2) other.state.adam_step++;
        if (change == 3) other.grad.set(20002, 2 * other.grad.get(20002));
        first.run(), other.run();
        CHECK_FALSE(other.m.same_bits(first.m));
    }
    Fp8Momentum shifted = start;
    shifted.offset++;
    CHECK_THROWS_AS(shifted.run(), Error);
    Fp8Momentum bad = start;
    for (int64_t i = 0; i < kScaleBlock; i++) bad.grad.set(i, 0);
    bad.grad.set(2 * kScaleBlock + 5, INFINITY);
    bad.run();
    for (int64_t i = 0; i < kScaleBlock; i++) {
        CHECK_EQ(bad.code(i), 0);
        CHECK(std::isfinite(decode_m(bad.code(kScaleBlock + i), bad.scale(kScaleBlock))));
        CHECK(std::isnan(decode_m(bad.code(2 * kScaleBlock + i), bad.scale(2 * kScaleBlock))));
    }
}

// Without the rule of encode_v the largest update is more than a thousand times the learning rate.
TEST_CASE("cpu adamw with fp8 moments: no update explodes, whatever the range within a block") {
    const auto ratio = [](double m, double v) { return v > 0 ? std::fabs(m) / std::sqrt(v) : m == 0 ? 0 : INFINITY; };
    for (double decades : {3.0, 8.0, 16.0}) {
        Fp8Adam a(8 * kScaleBlock, Dtype::kFp32, Dtype::kFp32, decades);
        a.args.eps = 0, a.args.weight_decay = 0, a.state.grad_mul = 1;
        const HostTensor grad = a.grad;
        double largest = 0, worst = 0;
        for (int step = 1; step <= 200; step++) {
            a.state.adam_step = step;
            for (int64_t i = 0; i < a.grad.elems(); i++)
                a.grad.set(i, grad.get(i) * static_cast<double>(rng_normal(8, static_cast<uint64_t>(step * 9999 + i))));
            const HostTensor before = a.master;
            const Fp8Adam::Plain plain = a.plain_step();
            a.run();
            for (int64_t block = 0; block < 8; block++) {
                double exact = 0, rounded = 0;
                for (int64_t i = block * kScaleBlock; i < (block + 1) * kScaleBlock; i++) {
                    exact = std::max(exact, ratio(plain.m.get(i), plain.v.get(i)));
                    rounded = std::max(rounded, ratio(static_cast<double>(a.m_at(i)), static_cast<double>(a.v_at(i))));
                    largest = std::max(largest, std::fabs(a.master.get(i) - before.get(i)) / 0.01);
                }
                worst = std::max(worst, rounded / exact);
            }
        }
        CHECK_LE(worst, 2.5);
        CHECK_GT(largest, 1);
        CHECK_LE(largest, 4);   // times the learning rate
    }
}
