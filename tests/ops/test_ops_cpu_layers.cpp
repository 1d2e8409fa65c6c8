// Embedding, rope at given positions, activations, bias gradient and classifier of the CPU.
#include "tests/support/op_test.h"

#include <numeric>

using namespace op_test;

namespace layers_test {

namespace {

const Dtype kTypes[] = {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64};
// Elements for scalar functions: around 0, ordinary, and large on both sides, where results vanish.
HostTensor activation_values(Dtype type, int64_t elems) {
    HostTensor t = random_tensor(type, elems, 1, 2);
    for (int64_t i = 0; i < elems; i += 5) t.set(i, t.get(i) * (i % 3 ? 10 : 1e-3));
    return t;
}

std::vector<int32_t> token_order(const std::vector<int32_t>& tokens) {
    std::vector<int32_t> order(tokens.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return static_cast<uint32_t>(tokens[a]) < static_cast<uint32_t>(tokens[b]);   // negative ids last
    });
    return order;
}

struct Embedding {
    int64_t N, T, C, V, Vp = V + 3;
    HostTensor wte, wpe, out, dout, dwte, dwpe;
    std::vector<int32_t> tokens, order;
    int32_t bad = 0;
    float mul = 1;
    Embedding(int64_t n, int64_t t, int64_t c, int64_t v, Dtype type, Dtype grad) : N(n), T(t), C(c), V(v) {
        wte = random_tensor(type, Vp * C, 1), wpe = random_tensor(type, (T + 2) * C, 2),
        out = HostTensor(type, N * C);
        dout = random_tensor(type, N * C, 3), dwte = random_tensor(grad, Vp * C, 4);
        dwpe = random_tensor(grad, (T + 2) * C, 5);
        for (int64_t i = 0; i < N; i++) tokens.push_back(static_cast<int32_t>(philox(6, i).word[0] % V));
        order = token_order(tokens);
    }
    void forward(bool positions = true) {
        Ctx ctx;
        cpu::embedding_forward(ctx, {.out = out.view(), .wte = wte.view(), .wpe = positions ? wpe.view() : Tensor{},
                                     .tokens = tokens.data(), .bad_tokens = &bad, .N = N, .T = T, .C = C, .V = V,
                                     .mul = mul});
    }
    void backward(bool positions = true) {
        Ctx ctx;
        cpu::embedding_backward(ctx, {.dwte = dwte.view(), .dwpe = positions ? dwpe.view() : Tensor{},
                                      .dout = dout.view(), .tokens = tokens.data(), .token_order = order.data(),
                                      .N = N, .T = T, .C = C, .V = V, .mul = mul});
    }
};

// Error bound of start[i] plus a sum of `chain` terms with absolute values `magnitude`.
void check_added(const char* name, const HostTensor& got, const HostTensor& start, const std::vector<double>& sum,
                 const std::vector<double>& magnitude, double chain, Dtype working) {
    HostTensor want(Dtype::kFp64, got.elems());
    for (int64_t i = 0; i < got.elems(); i++) want.set(i, start.get(i) + sum[i]);
    const double u = 2 * acc_roundoff(working), round = 1.01 * unit_roundoff(got.dtype());
    check_close(name, got, want, [&](int64_t i) {
        return chain * u * magnitude[i] + u * std::fabs(start.get(i))
               + (magnitude[i] > 0 ? round : 0) * std::fabs(want.get(i));
    });
}

}  // namespace

TEST_CASE("cpu embedding") {
    for (Dtype type : kTypes)
        for (auto [N, T, C, V] : {std::tuple{1, 1, 1, 1}, {12, 4, 5, 3}, {66, 33, 24, 50}})
            for (bool positions : {false, true}) {
                Embedding e(N, T, C, V, type,
                            type == Dtype::kFp64 ? type
                            : positions          ? Dtype::kBf16
                                                 : Dtype::kFp32);
                e.mul = C == 5 ? 4 : 1;   // exact products
                e.forward(positions);
                HostTensor want(Dtype::kFp64, N * C);
                for (int64_t i = 0; i < N * C; i++) {
                    int64_t n = i / C, c = i % C;
                    want.set(i, e.mul * e.wte.get(e.tokens[n] * C + c) + (positions ? e.wpe.get(n % T * C + c) : 0));
                }
                check_equal("out", e.out, want.to(type));   // one addition, one rounding
                CHECK_EQ(e.bad, 0);

                const Embedding before = e;
                e.backward(positions);
                std::vector<double> sum(e.Vp * C), magnitude(sum), position_sum((T + 2) * C),
                    position_magnitude(position_sum);
                for (int64_t i = 0; i < N * C; i++) {
                    int64_t n = i / C, c = i % C;
                    double term = e.dout.get(i);
                    sum[e.tokens[n] * C + c] += e.mul * term, magnitude[e.tokens[n] * C + c] += e.mul * std::fabs(term);
                    position_sum[n % T * C + c] += term, position_magnitude[n % T * C + c] += std::fabs(term);
                }
                check_added("dwte", e.dwte, before.dwte, sum, magnitude, N + 1, type);
                if (positions)
                    check_added("dwpe", e.dwpe, before.dwpe, position_sum, position_magnitude, N / T + 1, type);
                else CHECK(e.dwpe.same_bits(before.dwpe));
            }
}

TEST_CASE("cpu embedding backward at positions that restart") {
    for (Dtype type : kTypes) {
        Embedding e(66, 33, 24, 50, type, type == Dtype::kFp64 ? type : Dtype::kFp32), unreset = e;
        std::vector<int32_t> positions(66), order;
        const auto backward = [&](Embedding& of) {
            Ctx ctx;
            cpu::embedding_backward(ctx, {.dwte = of.dwte.view(), .dwpe = of.dwpe.view(), .dout = of.dout.view(),
                                          .tokens = of.tokens.data(), .token_order = of.order.data(), .N = of.N,
                                          .T = of.T, .C = of.C, .V = of.V, .positions = positions.data(),
                                          .position_order = order.data()});
        };
        // Positions that do not restart give the bits of none.
        for (int32_t n = 0; n < 66; n++) positions[static_cast<size_t>(n)] = n % 33;
        order = token_order(positions);
        Embedding same = e;
        unreset.backward(), backward(same);
        CHECK(same.dwpe.same_bits(unreset.dwpe));
        // Documents of 5 tokens: positions 0 to 4 have 13 or 14 rows each, all others none.
        for (int32_t n = 0; n < 66; n++) positions[static_cast<size_t>(n)] = n % 5;
        order = token_order(positions);
        const Embedding before = e;
        backward(e);
        std::vector<double> sum((e.T + 2) * e.C), magnitude(sum);
        for (int64_t i = 0; i < e.N * e.C; i++) {
            const int64_t at = i / e.C % 5 * e.C + i % e.C;
            sum[at] += e.dout.get(i), magnitude[at] += std::fabs(e.dout.get(i));
        }
        check_added("dwpe", e.dwpe, before.dwpe, sum, magnitude, 15, type);
        CHECK(e.dwte.same_bits(unreset.dwte));
        Ctx ctx;
        CHECK_THROWS_AS(cpu::embedding_backward(ctx, {.dwte = e.dwte.view(), .dwpe = e.dwpe.view(),
                                                      .dout = e.dout.view(), .tokens = e.tokens.data(),
                                                      .token_order = e.order.data(), .N = e.N, .T = e.T, .C = e.C,
                                                      .V = e.V, .positions = positions.data()}), Error);
    }
}

TEST_CASE("cpu embedding counts ids outside the vocabulary") {
    Embedding e(8, 4, 3, 5, Dtype::kFp32, Dtype::kFp32), good = e;
    e.tokens[1] = -5, e.tokens[4] = 5, e.tokens[6] = 1 << 30;
    good.tokens[1] = good.tokens[4] = good.tokens[6] = 0;
    e.bad = 2;
    e.forward(), good.forward();
    CHECK_EQ(e.bad, 5);
    CHECK(e.out.same_bits(good.out));
    // Positions get their gradients; tokens do not, as if those rows of dout were 0.
    e.order = token_order(e.tokens), good.order = token_order(good.tokens);
    Embedding without = good;
    for (int64_t n : {1, 4, 6})
        for (int64_t c = 0; c < 3; c++) without.dout.set(n * 3 + c, 0);
    e.backward(), good.backward(), without.backward();
    CHECK(e.dwte.same_bits(without.dwte));
    CHECK(e.dwpe.same_bits(good.dwpe));
    CHECK(!e.dwte.same_bits(good.dwte));
}

namespace {

double sigmoid(double x) { return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x)); }
double gelu(double x) {
    // 0.5 (1 + tanh(z)) as a sigmoid, because tanh loses the digits of large negative x.
    return x * sigmoid(2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
}
double gelu_argument(double x) { return 2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x); }
double gelu_slope(double x) {
    double s = sigmoid(gelu_argument(x)), t = sigmoid(-gelu_argument(x));
    return s + x * s * t * 2 * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
}

// An activation and its gradient, whose inputs are `in` and `dout`.
struct Activated {
    Activation kind;
    Dtype type;
    int64_t N, F;
    HostTensor in = activation_values(type, activation_inputs(kind, N * F)), dout = random_tensor(type, N * F, 2);
    HostTensor out{type, N * F}, din{type, in.elems()};

    void forward() {
        Ctx ctx;
        cpu::activation_forward(ctx, {.kind = kind, .out = out.view(), .in = in.view(), .N = N, .F = F});
    }
    void backward(HostTensor& to) {
        Ctx ctx;
        cpu::activation_backward(ctx, {.kind = kind, .din = to.view(), .dout = dout.view(), .in = in.view(), .N = N,
                                       .F = F});
    }
    // Compares both with what they should be, and the gradient with one that overwrites `in`.
    void check(const HostTensor& want, const Bound& bound, const HostTensor& dwant, const Bound& dbound) {
        forward(), backward(din);
        check_close("activation", out, want, bound);
        check_close("gradient", din, dwant, dbound);
        backward(in);
        CHECK(in.same_bits(din));
    }
};

template <typename Check> void for_activations(Activation kind, Check check) {
    for (Dtype type : kTypes)
        for (auto [N, F] : {std::pair{1, 1}, {3, 7}, {130, 101}}) check(Activated{kind, type, N, F});
}

}  // namespace

TEST_CASE("cpu gelu") {
    CHECK_LT(std::fabs(gelu(1) - 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * 1.044715))), 1e-15);
    for_activations(Activation::kGelu, [](Activated a) {
        const HostTensor x = a.in;
        HostTensor want(Dtype::kFp64, a.N * a.F), dwant(want);
        const double u = 2 * acc_roundoff(a.type), round = 1.01 * unit_roundoff(a.type);
        for (int64_t i = 0; i < want.elems(); i++)
            want.set(i, gelu(x.get(i))), dwant.set(i, gelu_slope(x.get(i)) * a.dout.get(i));
        // A sigmoid of z carries the relative error of z times |z|; beyond 110 it is 0 or 1.
        auto relative = [&](int64_t i) { return (4 * std::min(std::fabs(gelu_argument(x.get(i))), 110.0) + 12) * u; };
        a.check(want, [&](int64_t i) { return (relative(i) + round) * std::fabs(want.get(i)) + kTiny; }, dwant,
                [&](int64_t i) {
            double v = x.get(i), s = sigmoid(gelu_argument(v)), t = sigmoid(-gelu_argument(v));
            double terms = s + std::fabs(v) * s * t * (1.6 + 0.22 * v * v);
            return relative(i) * terms * std::fabs(a.dout.get(i)) + round * std::fabs(dwant.get(i)) + kTiny;
        });
    });
}

TEST_CASE("cpu geglu") {
    for_activations(Activation::kGeglu, [](Activated a) {
        const int64_t F = a.F;
        HostTensor want(Dtype::kFp64, a.N * F), error(want), dwant(Dtype::kFp64, 2 * a.N * F), derror(dwant);
        const double u = 2 * acc_roundoff(a.type), round = 1.01 * unit_roundoff(a.type);
        for (int64_t i = 0; i < a.N * F; i++) {
            const int64_t at = i / F * 2 * F + i % F;
            const double gate = a.in.get(at), up = a.in.get(at + F), dy = a.dout.get(i), z = gelu_argument(gate);
            const double relative = (4 * std::min(std::fabs(z), 110.0) + 14) * u;   // as of gelu
            const double terms = sigmoid(z) + std::fabs(gate) * sigmoid(z) * sigmoid(-z) * (1.6 + 0.22 * gate * gate);
            want.set(i, gelu(gate) * up), dwant.set(at, dy * up * gelu_slope(gate));
            dwant.set(at + F, dy * gelu(gate));
            error.set(i, relative * std::fabs(want.get(i)));
            derror.set(at, relative * terms * std::fabs(dy * up));
            derror.set(at + F, relative * std::fabs(dwant.get(at + F)));
        }
        a.check(want, [&](int64_t i) { return error.get(i) + round * std::fabs(want.get(i)) + kTiny; }, dwant,
                [&](int64_t i) { return derror.get(i) + round * std::fabs(dwant.get(i)) + kTiny; });
    });
}

TEST_CASE("cpu swiglu") {
    for_activations(Activation::kSwiglu, [](Activated a) {
        const int64_t F = a.F;
        HostTensor want(Dtype::kFp64, a.N * F), dwant(Dtype::kFp64, 2 * a.N * F), terms(dwant);
        const double u = 2 * acc_roundoff(a.type), round = 1.01 * unit_roundoff(a.type);
        for (int64_t i = 0; i < a.N * F; i++) {
            const int64_t at = i / F * 2 * F + i % F;
            const double gate = a.in.get(at), up = a.in.get(at + F), dy = a.dout.get(i), s = sigmoid(gate);
            want.set(i, gate * s * up);
            dwant.set(at, dy * up * (s + gate * s * sigmoid(-gate))), dwant.set(at + F, dy * gate * s);
            terms.set(at, std::fabs(dy * up) * (s + std::fabs(gate) * s * sigmoid(-gate)));
            terms.set(at + F, std::fabs(dy * gate) * s);
        }
        a.check(want, [&](int64_t i) { return (16 * u + round) * std::fabs(want.get(i)) + kTiny; }, dwant,
                [&](int64_t i) { return 20 * u * terms.get(i) + round * std::fabs(dwant.get(i)) + kTiny; });
    });
}

TEST_CASE("cpu clamped_swiglu") {
    for_activations(Activation::kClampedSwiglu, [](Activated a) {
        const int64_t F = a.F;
        HostTensor want(Dtype::kFp64, a.N * F), error(want), dwant(Dtype::kFp64, 2 * a.N * F), terms(dwant);
        const double u = 2 * acc_roundoff(a.type), round = 1.01 * unit_roundoff(a.type);
        a.in.set(0, 7), a.in.set(F, -7);   // at the limits
        for (int64_t i = 0; i < a.N * F; i++) {
            const int64_t at = i / F * 2 * F + i % F;
            const double gate = std::min(a.in.get(at), 7.0), up = std::clamp(a.in.get(at + F), -7.0, 7.0) + 1,
                         dy = a.dout.get(i), z = 1.702 * gate, s = sigmoid(z);
            // A sigmoid of z carries the relative error of z times |z|; up + 1 is rounded relative to 1.
            const double relative = (16 + 2 * std::min(std::fabs(z), 110.0)) * u, size = std::fabs(up) + 1;
            want.set(i, gate * s * up), error.set(i, relative * std::fabs(gate) * s * size);
            dwant.set(at, a.in.get(at) > 7 ? 0 : dy * up * (s + z * s * sigmoid(-z)));
            dwant.set(at + F, std::fabs(a.in.get(at + F)) > 7 ? 0 : dy * gate * s);
            terms.set(at, relative * std::fabs(dy) * size * (s + std::fabs(z) * s * sigmoid(-z)));
            terms.set(at + F, relative * std::fabs(dwant.get(at + F)));
        }
        a.check(want, [&](int64_t i) { return error.get(i) + round * std::fabs(want.get(i)) + kTiny; }, dwant,
                [&](int64_t i) { return terms.get(i) + round * std::fabs(dwant.get(i)) + kTiny; });
        CHECK((a.din.get(0) != 0 && a.din.get(F) != 0));
    });
}

TEST_CASE("cpu relu2") {
    for_activations(Activation::kRelu2, [](Activated a) {
        a.in.set(0, 1.5);
        if (a.N > 1) a.in.set(a.N, -0.0);
        HostTensor want(Dtype::kFp64, a.N * a.F), dwant(want);
        const double round = 1.01 * (unit_roundoff(a.type) + 2 * acc_roundoff(a.type));
        for (int64_t i = 0; i < want.elems(); i++) {
            const double relu = a.in.get(i) > 0 ? a.in.get(i) : 0;
            want.set(i, relu * relu), dwant.set(i, 2 * relu * a.dout.get(i));
        }
        a.check(want, [&](int64_t i) { return round * std::fabs(want.get(i)) + kTiny; }, dwant,
                [&](int64_t i) { return round * std::fabs(dwant.get(i)) + kTiny; });
        if (a.N > 1) CHECK_FALSE(std::signbit(a.out.get(a.N)));   // of -0
    });
}

TEST_CASE("cpu relu2 of values that are not finite") {
    const double inf = HUGE_VAL, nan = std::nan("");
    for (Dtype type : kTypes)
        for (int64_t at : {0, 8, 10}) {   // within a whole vector and at the end
            Activated a{Activation::kRelu2, type, 1, 11};
            a.in.fill(1), a.dout.fill(1);
            for (auto [x, value, gradient] : {std::tuple{nan, nan, nan}, {inf, inf, inf}, {-inf, 0.0, 0.0}}) {
                a.in.set(at, x);
                a.forward(), a.backward(a.din);
                CHECK((std::isnan(value) ? std::isnan(a.out.get(at)) : a.out.get(at) == value));
                CHECK((std::isnan(gradient) ? std::isnan(a.din.get(at)) : a.din.get(at) == gradient));
                CHECK(a.out.get(1) == 1);
                CHECK(a.din.get(1) == 2);
            }
        }
}

TEST_CASE("cpu bias_backward adds column sums") {
    Ctx ctx;
    for (Dtype type : kTypes)
        for (auto [N, C] : {std::pair{1, 1}, {5, 3}, {33, 130}, {8300, 5}}) {
            HostTensor dout = random_tensor(type, N * C, 1), scratch(stat_dtype(type), kPartialRows * C);
            HostTensor before = random_tensor(N == 33 && type != Dtype::kFp64 ? Dtype::kBf16 : stat_dtype(type), C, 2);
            HostTensor dbias = before;
            cpu::bias_backward(
                ctx, {.dbias = dbias.view(), .scratch = scratch.view(), .dout = dout.view(), .N = N, .C = C});
            std::vector<double> sum(C), magnitude(C);
            for (int64_t i = 0; i < N * C; i++)
                sum[i % C] += dout.get(i), magnitude[i % C] += std::fabs(dout.get(i));
            check_added("dbias", dbias, before, sum, magnitude, column_chain(N), type);
            CHECK(scratch.guards_intact());
        }
}

namespace {

struct Classifier {
    int64_t N, V, Vp;
    HostTensor logits, losses, squares;
    std::vector<int32_t> targets;
    StepState state{};
    float z_loss = 0, logit_mul = 1, softcap = 0;
    Classifier(int64_t n, int64_t v, int64_t vp, Dtype type, double mul = 3) : N(n), V(v), Vp(vp) {
        logits = random_tensor(type, N * Vp, 1, mul), losses = HostTensor(stat_dtype(type), N);
        squares = losses;
        for (int64_t i = 0; i < N; i++) targets.push_back(static_cast<int32_t>(philox(2, i).word[0] % V));
        state.dloss_mul = 0.37f;
    }
    void run(bool write = true) {
        Ctx ctx;
        cpu::classifier(ctx, {.logits = logits.view(), .losses = losses.view(), .targets = targets.data(),
                              .state = &state, .N = N, .V = V, .Vp = Vp, .write_dlogits = write, .logit_mul = logit_mul,
                              .z_loss = write ? z_loss : 0.0f, .squares = squares.view(), .softcap = softcap});
    }
};

}  // namespace

TEST_CASE("cpu classifier") {
    for (Dtype type : kTypes)
        for (auto [N, V, Vp, W, cap] :
             {std::tuple{1, 1, 1, 0.0f, 0.0f}, {3, 5, 8, 0.0f, 0.0f}, {9, 29, 128, 0.0f, 0.0f},
              {20, 1001, 1024, 0.0f, 0.0f}, {3, 5, 8, 0.25f, 0.0f}, {20, 1001, 1024, 1e-2f, 0.0f},
              {9, 29, 128, 0.0f, 2.5f}, {3, 6, 8, 0.25f, 4.0f}, {20, 1001, 1024, 1e-2f, 7.5f}}) {
            Classifier c(N, V, Vp, type);
            c.z_loss = W, c.softcap = cap;
            c.logit_mul = V % 2 && N > 3 ? 0.3f : 1;
            const double mul = double{c.logit_mul};
            if (N > 2) c.targets[2] = kIgnoreIndex;
            // Padding has no effect.
            for (int64_t n = 0; n < N; n++)
                for (int64_t i = V; i < Vp; i++) c.logits.set(n * Vp + i, 1e30);
            const HostTensor unscaled = c.logits;
            HostTensor logits(Dtype::kFp64, N * Vp);
            double most = 0;   // of the products, which are rounded
            const double wide_cap = double{cap};
            for (int64_t i = 0; i < N * Vp; i++) {
                const double product = mul * unscaled.get(i);
                logits.set(i, cap > 0 ? wide_cap * std::tanh(product / wide_cap) : product);
            }
            for (int64_t i = 0; (mul != 1 || cap > 0) && i < N * Vp; i++)
                if (i % Vp < V) most = std::max(most, (cap > 0 ? 4 : 1) * std::fabs(logits.get(i)));   // tanh: 2 ulp
            const double u = 2 * acc_roundoff(type), round = 1.01 * unit_roundoff(type);
            HostTensor loss(Dtype::kFp64, N), dlogits(Dtype::kFp64, N * Vp), loss_error(loss), error(dlogits);
            HostTensor squares(Dtype::kFp64, N), squares_error(squares);
            squares.fill(0), squares_error.fill(0);
            loss.fill(0), dlogits.fill(0), loss_error.fill(0), error.fill(0);
            for (int64_t n = 0; n < N; n++) {
                if (c.targets[n] == kIgnoreIndex) continue;
                double largest = -1e300, sum = 0, chain = V / 4.0 + 12;
                for (int64_t i = 0; i < V; i++) largest = std::max(largest, logits.get(n * Vp + i));
                for (int64_t i = 0; i < V; i++) sum += std::exp(logits.get(n * Vp + i) - largest);
                double gap = largest - logits.get(n * Vp + c.targets[n]);
                loss.set(n, gap + std::log(sum));
                loss_error.set(n, (chain + 40 + 2 * most) * u + 4 * u * (std::fabs(gap) + std::log(sum)));
                const double lse = largest + std::log(sum), z = 1 + 2 * static_cast<double>(W) * lse,
                             lse_error = (chain + 40 + most) * u + 4 * u * (std::fabs(largest) + std::log(sum)),
                             z_error = 2 * static_cast<double>(W) * lse_error + 2 * u * std::fabs(z);
                squares.set(n, lse * lse);
                squares_error.set(n, 2 * std::fabs(lse) * lse_error + 2 * u * lse * lse);
                for (int64_t i = 0; i < V; i++) {
                    double below = largest - logits.get(n * Vp + i), p = std::exp(-below) / sum,
                           hit = i == c.targets[n];
                    const double t = cap > 0 ? logits.get(n * Vp + i) / wide_cap : 0;
                    double value = (p * z - hit) * static_cast<double>(c.state.dloss_mul) * mul * (1 - t * t);
                    dlogits.set(n * Vp + i, value);
                    error.set(n * Vp + i, 0.37 * ((p * std::fabs(z) * (2 * chain + 40 + below + 4 * most) + 2 * hit) * u
                                                 + p * z_error)
                                              + (cap > 0 ? 16 * u * std::fabs(p * z - hit) : 0)
                                              + round * std::fabs(value) + kTiny);
                }
            }
            c.run(false);
            CHECK(c.logits.same_bits(unscaled));
            HostTensor first = c.losses;
            c.run(true);
            CHECK(c.losses.same_bits(first));
            CHECK_EQ(c.state.bad_tokens, 0);
            if (V == 1) {   // probability 1: no loss and no gradient
                CHECK_EQ(c.losses.get(0), 0);
                CHECK_EQ(c.logits.get(0), 0);
                continue;
            }
            check_close("losses", c.losses, loss, [&](int64_t n) { return loss_error.get(n); });
            if (W > 0) check_close("squares", c.squares, squares, [&](int64_t n) { return squares_error.get(n); });
            check_close("dlogits", c.logits, dlogits, [&](int64_t i) { return error.get(i); });
        }
}

TEST_CASE("cpu classifier ignores and counts targets") {
    Classifier c(5, 7, 9, Dtype::kBf16);
    c.targets = {3, kIgnoreIndex, 7, -2, 0}, c.state.bad_tokens = 1, c.z_loss = 0.5f;
    c.run();
    CHECK_EQ(c.state.bad_tokens, 3);   // 7 and -2, but not kIgnoreIndex
    for (int64_t n : {1, 2, 3}) {
        CHECK_EQ(c.losses.get(n), 0);
        CHECK_EQ(c.squares.get(n), 0);
        for (int64_t i = 0; i < 9; i++) CHECK_EQ(c.logits.get(n * 9 + i), 0);
    }
    CHECK_GT(c.losses.get(0), 0);
    CHECK_GT(c.losses.get(4), 0);
}

TEST_CASE("cpu classifier propagates values that are not finite and handles large logits") {
    for (double bad : {std::nan(""), static_cast<double>(INFINITY)}) {
        Classifier c(2, 20, 24, Dtype::kFp32);
        c.logits.set(3, bad);
        c.run();
        CHECK_FALSE(std::isfinite(c.losses.get(0)));
        CHECK(std::isfinite(c.losses.get(1)));
    }
    Classifier c(2, 20, 24, Dtype::kFp32, 1e4);
    c.run();
    for (int64_t n = 0; n < 2; n++) CHECK(std::isfinite(c.losses.get(n)));
    for (int64_t i = 0; i < c.logits.elems(); i++) CHECK(std::isfinite(c.logits.get(i)));
}

TEST_CASE("cpu rope and embedding at given positions are those of the rows at these positions") {
    constexpr int64_t N = 5, T = 9, NH = 3, NKV = 1, HS = 6, C = 11, V = 7;
    std::vector<int32_t> positions = {8, 0, 1, 3, 3}, tokens = {1, 6, 2, 2, 0};
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16}) {
        Ctx ctx;
        const HostTensor one = random_tensor(type, (NH + 2 * NKV) * HS, 3);
        HostTensor table = random_tensor(Dtype::kFp32, T * HS, 4), wte = random_tensor(type, V * C, 5),
                   wpe = random_tensor(type, T * C, 6), rows(type, N * one.elems()), all(type, T * one.elems()),
                   out(type, N * C);
        for (int64_t i = 0; i < rows.elems(); i++) rows.set(i, one.get(i % one.elems()));
        for (int64_t i = 0; i < all.elems(); i++) all.set(i, one.get(i % one.elems()));
        RopeArgs args{.qkv = all.view(), .cos_sin = table.view(), .N = T, .T = T, .NH = NH, .NKV = NKV, .HS = HS};
        cpu::rope_forward(ctx, args);
        args.qkv = rows.view(), args.N = N, args.T = 1, args.positions = positions.data();
        cpu::rope_forward(ctx, args);
        int32_t bad = 0;
        cpu::embedding_forward(ctx, {.out = out.view(), .wte = wte.view(), .wpe = wpe.view(), .tokens = tokens.data(),
                                     .bad_tokens = &bad, .N = N, .T = 1, .C = C, .V = V,
                                     .positions = positions.data()});
        for (int64_t n = 0; n < N; n++) {
            const int64_t at = positions[static_cast<size_t>(n)], token = tokens[static_cast<size_t>(n)];
            for (int64_t i = 0; i < one.elems(); i++)
                CHECK(rows.get(n * one.elems() + i) == all.get(at * one.elems() + i));
            HostTensor sum(type, C);
            for (int64_t i = 0; i < C; i++) sum.set(i, wte.get(token * C + i) + wpe.get(at * C + i));
            for (int64_t i = 0; i < C; i++) CHECK(out.get(n * C + i) == sum.get(i));
        }
        for (int32_t beyond : {static_cast<int32_t>(T), -1}) {
            positions[0] = beyond;
            CHECK_THROWS_AS(cpu::rope_forward(ctx, args), Error);
        }
        positions[0] = 8;
    }
}

}  // namespace layers_test
