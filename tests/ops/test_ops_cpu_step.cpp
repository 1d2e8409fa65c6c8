// Reductions, guard, AdamW, initial values, casts and the device functions of the CPU.
#include "tests/support/op_test.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

using namespace op_test;

namespace step_test {

namespace {

const Dtype kTypes[] = {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64};
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

TEST_CASE("cpu sums over tensors") {
    Ctx ctx;
    HostTensor scratch(Dtype::kFp64, kPartialSums);
    for (Dtype type : kTypes)
        for (int64_t n : {1, 2, 63, 64, 65, 1000, 70001}) {
            HostTensor in = random_tensor(type, n, 1);
            double sum = 5, want = 5, magnitude = 5;
            for (int64_t i = 0; i < n; i++) want += in.get(i) * in.get(i);
            cpu::sum_squares(ctx, {.sum = &sum, .in = in.view(), .scratch = scratch.view()});
            CHECK_LT(std::fabs(sum - want), n * 0x1p-52 * want);
            if (type == Dtype::kBf16) continue;   // losses are stat
            sum = want = 5;
            for (int64_t i = 0; i < n; i++) want += in.get(i), magnitude += std::fabs(in.get(i));
            cpu::sum_losses(ctx, {.sum = &sum, .losses = in.view(), .scratch = scratch.view(), .N = n});
            CHECK_LT(std::fabs(sum - want), n * 0x1p-52 * magnitude);
            in.set(n / 2, in.get(n / 2) + 0.125);
            double moved = 5;
            cpu::sum_losses(ctx, {.sum = &moved, .losses = in.view(), .scratch = scratch.view(), .N = n});
            CHECK_LT(std::fabs(moved - sum - 0.125), n * 0x1p-22);
        }
    CHECK(scratch.guards_intact());
}

TEST_CASE("cpu ema") {
    Ctx ctx;
    for (Dtype type : {Dtype::kFp32, Dtype::kFp64})
        for (int64_t n : {1, 3, 70001})
            for (auto [step, decay, used] : {std::tuple{int64_t{1}, 0.999, 2.0 / 11}, {int64_t{9000}, 0.999, 0.999},
                                             {int64_t{80}, 0.5, 0.5}, {int64_t{8}, 0.999, 0.5}}) {
                HostTensor ema = random_tensor(type, n, 1), master = random_tensor(type, n, 2);
                const HostTensor before = ema;
                HostTensor want(Dtype::kFp64, n);
                for (int64_t i = 0; i < n; i++) want.set(i, used * before.get(i) + (1 - used) * master.get(i));
                StepState state{};
                state.adam_step = step, state.skip = StepState::kLargeNorm;
                const EmaArgs args{.ema = ema.view(), .master = master.view(), .state = &state, .decay = decay};
                cpu::ema(ctx, args);
                CHECK(ema.same_bits(before));
                state.skip = 0;
                cpu::ema(ctx, args);
                // The share, the difference and the sum are each rounded once, and so are those of the reference.
                check_close("ema", ema, want, [&](int64_t i) {
                    const double moved = std::fabs(want.get(i) - before.get(i));
                    return acc_roundoff(type) * 1.01 * (3 * moved + std::fabs(want.get(i)))
                           + 0x1p-51 * (std::fabs(before.get(i)) + std::fabs(master.get(i)));
                });
                CHECK(ema.guards_intact());
            }
}

TEST_CASE("cpu step_guard") {
    Ctx ctx;
    auto guard = [&](double loss, double squares, int32_t bad, float clip) {
        StepState s{};
        s.loss_sum = loss, s.sum_squares = squares, s.bad_tokens = bad, s.adam_step = 7, s.skip = 5;
        cpu::step_guard(ctx, {.state = &s, .clip = clip});
        return s;
    };
    StepState s = guard(3, 16, 0, 1);
    CHECK_EQ(s.grad_norm, 4.0f);
    CHECK_EQ(s.grad_mul, 0.25f);
    CHECK_EQ(s.skip, 0);
    CHECK_EQ(s.adam_step, 8);
    CHECK_EQ(guard(3, 16, 0, 4).grad_mul, 1.0f);
    CHECK_EQ(guard(3, 16, 0, 0).grad_mul, 1.0f);
    CHECK_EQ(guard(3, 0, 0, 1).grad_mul, 1.0f);
    for (StepState bad : {guard(kNan, 16, 0, 1), guard(kInfinity, 16, 0, 1), guard(3, kNan, 0, 1),
                          guard(3, kInfinity, 0, 1), guard(3, 1e300, 0, 1), guard(3, 16, 1, 1)}) {
        CHECK_EQ(bad.skip, 1);
        CHECK_EQ(bad.adam_step, 7);
    }
    for (int64_t capacity : {8, 9, 10}) {   // of rows of experts
        int32_t rows[] = {4, 9, 9, 0};
        StepState s{};
        cpu::step_guard(ctx, {.state = &s, .clip = 1, .expert_rows = {rows, Dtype::kInt32, 4}, .capacity = capacity});
        CHECK_EQ(s.skip, capacity < 9 ? StepState::kNotFinite : 0);
        CHECK_EQ(s.expert_rows, 9);
        CHECK_EQ(s.fullest_layer, 1);
    }
    // --skip-grad-norm: the median of the norms in any order, the larger of two; the oldest leaves the window.
    for (int64_t before : {int64_t{0}, kLeastNorms - 1, kLeastNorms, kNormWindow - 1, kNormWindow, kNormWindow + 37}) {
        StepState held{};
        std::vector<float> all;
        for (int64_t i = 0; i < before; i++) {
            all.push_back(static_cast<float>(1 + i * 7919 % 31));   // some are equal
            held.sum_squares = static_cast<double>(all.back() * all.back());
            cpu::step_guard(ctx, {.state = &held, .clip = 1});
        }
        std::vector<float> last(all.end() - std::min<int64_t>(before, kNormWindow), all.end());
        std::sort(last.begin(), last.end());
        const bool enough = before >= kLeastNorms;
        const float limit = enough ? 2.5f * last[last.size() / 2] : 0.0f;
        for (double factor : {1.0, 1 + 0x1p-20, 100.0}) {
            StepState s = held;
            const double norm = enough ? factor * static_cast<double>(limit) : factor;
            s.sum_squares = norm * norm;
            cpu::step_guard(ctx, {.state = &s, .clip = 1, .skip_norm = 2.5f});
            CHECK_EQ(s.norm_limit, limit);
            CHECK_EQ(s.skip, enough && factor > 1 ? StepState::kLargeNorm : 0);
            CHECK_EQ(s.adam_step, before + !s.skip);
            CHECK_EQ(s.norm_count, before + 1);
            CHECK_EQ(s.norms[before % kNormWindow], s.grad_norm);
            s.sum_squares = kNan;
            cpu::step_guard(ctx, {.state = &s, .clip = 1, .skip_norm = 2.5f});
            CHECK_EQ(s.skip, StepState::kNotFinite);
            CHECK_EQ(s.norm_count, before + 1);
        }
    }
    // step_guard detects a single bad element of a gradient.
    for (double value : {kNan, kInfinity, -kInfinity}) {
        HostTensor grad = random_tensor(Dtype::kBf16, 5000, 1), scratch(Dtype::kFp64, kPartialSums);
        grad.set(4321, value);
        StepState state{};
        cpu::sum_squares(ctx, {.sum = &state.sum_squares, .in = grad.view(), .scratch = scratch.view()});
        cpu::step_guard(ctx, {.state = &state, .clip = 1});
        CHECK_EQ(state.skip, 1);
    }
}

namespace {

struct Adam {
    HostTensor param, master, m, v, grad;
    StepState state{};
    AdamWArgs args{};
    Adam(int64_t n, Dtype type, Dtype moments, Dtype grads) {
        param = HostTensor(type, n), master = random_tensor(stat_dtype(type), n, 1),
        m = random_tensor(moments, n, 2, 0.1);
        v = random_tensor(moments, n, 3, 0.01), grad = random_tensor(grads, n, 4);
        for (int64_t i = 0; i < n; i++) v.set(i, std::fabs(v.get(i)));
        state.lr = 0.01f, state.grad_mul = 0.5f, state.adam_step = 3;
        args.beta1 = 0.9f, args.beta2 = 0.95f, args.eps = 1e-6f, args.weight_decay = 0.1f;
        args.rng_key = 99, args.element_offset = 1000;
    }
    void run() {
        Ctx ctx;
        args.param = param.view(), args.master = master.view(), args.m = m.view(), args.v = v.view();
        args.grad = grad.view(), args.state = &state;
        cpu::adamw(ctx, args);
    }
};

}  // namespace

TEST_CASE("cpu adamw follows its formula") {
    for (auto [type, moments, grads] : {std::tuple{Dtype::kFp32, Dtype::kFp32, Dtype::kFp32},
                                        {Dtype::kBf16, Dtype::kFp32, Dtype::kBf16},
                                        {Dtype::kBf16, Dtype::kBf16, Dtype::kFp32},
                                        {Dtype::kFp64, Dtype::kFp64, Dtype::kFp64}}) {
        const int64_t n = 9001;
        Adam a(n, type, moments, grads), before = a;
        a.run();
        HostTensor m(Dtype::kFp64, n), v(m), master(m), error(m);
        const double u = 2 * acc_roundoff(type);
        for (int64_t i = 0; i < n; i++) {
            double b1 = a.args.beta1, b2 = a.args.beta2, g = before.grad.get(i) * a.state.grad_mul;
            m.set(i, b1 * before.m.get(i) + (1 - b1) * g), v.set(i, b2 * before.v.get(i) + (1 - b2) * g * g);
            double m_hat = m.get(i) / (1 - b1 * b1 * b1), v_hat = v.get(i) / (1 - b2 * b2 * b2);
            double denominator = std::sqrt(v_hat) + static_cast<double>(a.args.eps), decay = a.args.weight_decay;
            double direction = m_hat / denominator + decay * before.master.get(i);
            master.set(i, before.master.get(i) - static_cast<double>(a.state.lr) * direction);
            double m_terms = std::fabs(b1 * before.m.get(i)) + std::fabs((1 - b1) * g);
            double terms = m_terms / (1 - b1 * b1 * b1) / denominator + std::fabs(decay * before.master.get(i));
            error.set(i, 10 * u * static_cast<double>(a.state.lr) * terms + u * std::fabs(master.get(i)));
        }
        // Stochastic rounding changes a moment by less than one ulp, twice the roundoff of nearest.
        const double step = moments == Dtype::kBf16 ? 2 * unit_roundoff(moments) : 0;
        auto moment_bound = [&](const HostTensor& want) {
            return [&want, u, step](int64_t i) {
                return (4 * u + step) * (std::fabs(want.get(i)) + 4 * u) + 4 * u * 0.5;
            };
        };
        check_close("m", a.m, m, moment_bound(m));
        check_close("v", a.v, v, moment_bound(v));
        check_close("master", a.master, master, [&](int64_t i) { return error.get(i); });
        CHECK(a.param.same_bits(a.master.to(type)));
        CHECK(a.grad.same_bits(before.grad));

        Adam skipped = before;
        skipped.state.skip = 1;
        skipped.run();
        CHECK(skipped.param.same_bits(before.param));
        CHECK(skipped.master.same_bits(before.master));
        CHECK(skipped.m.same_bits(before.m));
        CHECK(skipped.v.same_bits(before.v));
    }
}

TEST_CASE("cpu adamw rounds bf16 moments stochastically, keyed by parameter, element and step") {
    const int64_t n = 20000;
    Adam a(n, Dtype::kFp32, Dtype::kBf16, Dtype::kFp32);
    // A gradient so small that round to nearest would keep m at 1 for ever: 0.9 + 0.1 * 1.005 = 1 + 5e-4.
    a.m.fill(1), a.v.fill(1), a.grad.fill(1.005), a.state.grad_mul = 1;
    Adam whole = a;
    whole.run();
    double mean = 0;
    for (int64_t i = 0; i < n; i++) mean += whole.m.get(i) / n;
    // Up by 2^-7 with probability 5e-4 * 128: five standard deviations of the mean.
    double up = 5e-4 * 128, sigma = std::sqrt(up * (1 - up) / n) / 128;
    CHECK_LT(std::fabs(mean - 1.0005), 5 * sigma);

    // Random numbers depend on the element index: two parts give the bits of the whole.
    Adam pieces = a;
    Ctx ctx;
    for (auto [begin, count] : {std::pair<int64_t, int64_t>{0, 7001}, {7001, n - 7001}}) {
        AdamWArgs args = pieces.args;
        args.param = pieces.param.view().slice(begin, count),
        args.master = pieces.master.view().slice(begin, count);
        args.m = pieces.m.view().slice(begin, count), args.v = pieces.v.view().slice(begin, count);
        args.grad = pieces.grad.view().slice(begin, count), args.state = &pieces.state;
        args.element_offset += begin;
        cpu::adamw(ctx, args);
    }
    CHECK(pieces.m.same_bits(whole.m));
    CHECK(pieces.v.same_bits(whole.v));
    for (int change = 0; change < 3; change++) {
        Adam other = a;
        if (change == 0) other.args.rng_key++;
        if (change == 1) other.args.element_offset++;
        if (change == 2) other.state.adam_step++;
        other.run();
        CHECK_FALSE(other.m.same_bits(whole.m));
    }
    // m and v use the documented words of the random number.
    const float m = std::fmaf(0.9f, 1.0f, (1 - 0.9f) * 1.005f);
    const float v = std::fmaf(0.95f, 1.0f, (1 - 0.95f) * (1.005f * 1.005f));
    HostTensor rounded_m(Dtype::kBf16, n), rounded_v(Dtype::kBf16, n);
    for (int64_t i = 0; i < n; i++) {
        Philox4 random = philox(99, static_cast<uint64_t>(1000 + i), 3);
        rounded_m.as<bf16>()[i] = stochastic_round_bf16(m, random.word[0]);
        rounded_v.as<bf16>()[i] = stochastic_round_bf16(v, random.word[1]);
    }
    CHECK(whole.m.same_bits(rounded_m));
    CHECK(whole.v.same_bits(rounded_v));
    Adam early = a;
    early.state.adam_step = 0;
    CHECK_THROWS_AS(early.run(), Error);
}

TEST_CASE("cpu initial values depend only on key and element") {
    Ctx ctx;
    const int64_t n = 10001;
    HostTensor whole(Dtype::kFp32, n), narrow(Dtype::kBf16, n), part(Dtype::kFp32, 100);
    cpu::fill_normal(ctx, {.out = whole.view(), .key = 5, .element_offset = 3, .mean = 0.25f, .std = 2});
    cpu::fill_normal(ctx, {.out = narrow.view(), .key = 5, .element_offset = 3, .mean = 0.25f, .std = 2});
    cpu::fill_normal(ctx, {.out = part.view(), .key = 5, .element_offset = 3 + 777, .mean = 0.25f, .std = 2});
    bool equal = true;
    for (int64_t i = 0; i < n; i++)
        equal &= whole.get(i) == static_cast<double>(std::fmaf(2, rng_normal(5, static_cast<uint64_t>(3 + i)), 0.25f));
    CHECK(equal);
    CHECK(narrow.same_bits(whole.to(Dtype::kBf16)));
    for (int64_t i = 0; i < 100; i++) CHECK_EQ(part.get(i), whole.get(777 + i));
    CHECK(whole.guards_intact());
    for (Dtype type : kTypes) {
        HostTensor t(type, 77);
        cpu::fill_constant(ctx, {.out = t.view(), .value = 1.5f});
        check_equal("fill_constant", t, HostTensor(type, 77).fill(1.5));
    }
}

TEST_CASE("cpu cast rounds to nearest even") {
    Ctx ctx;
    for (Dtype from : kTypes)
        for (Dtype to : kTypes) {
            HostTensor in = random_tensor(from, 9001, 1), out(to, 9001);
            cpu::cast(ctx, {.out = out.view(), .in = in.view()});
            CHECK(out.same_bits(in.to(to)));
        }
    // double to bf16 rounds once: a rounding to float would make these two a tie.
    HostTensor in(Dtype::kFp64, 6), out(Dtype::kBf16, 6);
    const double tie = 1 + 0x1p-8, tiny = 0x1p-40;
    const double values[] = {tie, tie + tiny, tie - tiny, -(tie + tiny), kNan, 1e300};
    const double expected[] = {1, 1 + 0x1p-7, 1, -(1 + 0x1p-7), kNan, kInfinity};
    for (int i = 0; i < 6; i++) in.set(i, values[i]);
    cpu::cast(ctx, {.out = out.view(), .in = in.view()});
    for (int i = 0; i < 6; i++) CHECK((out.get(i) == expected[i] || (i == 4 && std::isnan(out.get(i)))));
}

TEST_CASE("cpu device") {
    CHECK_EQ(cpu::device_count(), 1);
    for (int index : {-1, 0}) {
        DeviceInfo info = cpu::device_info(index);
        CHECK_EQ(info.name, "CPU");
        CHECK_EQ(info.matmul_library, "cpu");
        CHECK_GT(info.sm_count, 0);
        CHECK_GT(info.memory_bytes, 1 << 20);
    }
    Ctx ctx;
    CHECK_THROWS_AS(cpu::device_open(ctx, 1), Error);
    cpu::device_open(ctx, 0);
    CHECK_GT(ctx.sm_count, 0);

    int64_t before = cpu::allocation_count();
    auto* a = static_cast<char*>(cpu::device_alloc(1000));
    auto* b = static_cast<char*>(cpu::pinned_alloc(0));
    CHECK_EQ(cpu::allocation_count(), before + 2);
    CHECK_EQ(reinterpret_cast<uintptr_t>(a) % 256, 0);
    CHECK_EQ(reinterpret_cast<uintptr_t>(b) % 256, 0);
    char host[4] = {1, 2, 3, 4}, back[4] = {};
    cpu::fill_bytes(ctx, a, 7, 1000);
    cpu::copy_to_device(ctx, a + 2, host, 4);
    cpu::copy_on_device(ctx, a + 100, a + 2, 4);
    cpu::copy_to_host(ctx, back, a + 100, 4);
    cpu::synchronize(ctx);
    CHECK_EQ(std::memcmp(host, back, 4), 0);
    CHECK_EQ(a[1], 7);
    CHECK_EQ(a[6], 7);
    ctx.rehearsal = true;   // addresses of a rehearsal are invalid
    cpu::fill_bytes(ctx, nullptr, 0, 1000);
    cpu::copy_to_host(ctx, host, nullptr, 1000);
    ctx.rehearsal = false;
    cpu::device_free(a);
    cpu::pinned_free(b);
    try {
        cpu::device_alloc(int64_t{1} << 50);
        CHECK(false);
    } catch (const Error& error) {
        CHECK_EQ(error.exit_code, kExitBadInput);
        CHECK_NE(std::string(error.what()).find("1125899906842624"), std::string::npos);
    }
    Event *begin = cpu::event_create(), *end = cpu::event_create();
    cpu::event_record(ctx, begin), cpu::event_record(ctx, end);
    cpu::event_wait(end);
    CHECK(cpu::event_reached(end));
    CHECK_GE(cpu::event_elapsed_ms(begin, end), 0);
    cpu::event_destroy(begin), cpu::event_destroy(end);
    cpu::device_close(ctx);
}

TEST_CASE("cpu matmul plans are empty and name their library") {
    Ctx ctx;
    CHECK_EQ(cpu::gemm_import_plans(ctx, cpu::gemm_export_plans(ctx)), "");
    std::string reason =
        cpu::gemm_import_plans(ctx, R"({"library":"cuBLASLt 13.1","gpu":"H200","plans":[{}]})");
    CHECK_NE(reason.find("cuBLASLt 13.1"), std::string::npos);
    for (const char* text :
         {"", "{", "[]", "7", R"({"library":3,"plans":[]})", R"({"library":"cpu","plans":{}})"}) {
        INFO(text);
        CHECK_THROWS_AS(cpu::gemm_import_plans(ctx, text), Error);
    }
}

}  // namespace step_test
