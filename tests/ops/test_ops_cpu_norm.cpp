// LayerNorm, RMSNorm, QK norm and rope of the CPU.
#include "tests/support/op_test.h"

using namespace op_test;

namespace norm_test {

namespace {

struct Shape {
    int64_t N, C;
};
// Rows shorter than a vector, with a remainder; more rows than partial sums (512 chunks of 16).
const Shape kShapes[] = {{1, 5}, {1, 8}, {3, 7}, {17, 24}, {70, 129}, {8300, 5}};
const Dtype kTypes[] = {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64};

// All tensors of one norm; inputs are random, outputs poisoned.
struct Norm {
    bool layer;
    int64_t N, C;
    Dtype type;
    HostTensor in, residual, weight, bias, out, residual_out, mean, rstd;
    HostTensor dout, dresidual, dx, dweight, dbias, scratch;
    static constexpr float kEps = 1e-3f;

    Norm(bool is_layer, Shape s, Dtype dtype, Dtype grad) : layer(is_layer), N(s.N), C(s.C), type(dtype) {
        Dtype stat = stat_dtype(dtype);
        in = random_tensor(dtype, N * C, 1, 1, 0.5), residual = random_tensor(dtype, N * C, 2);
        weight = random_tensor(dtype, C, 3), bias = random_tensor(dtype, C, 4);
        out = residual_out = HostTensor(dtype, N * C), mean = rstd = HostTensor(stat, N);
        dout = random_tensor(dtype, N * C, 5), dresidual = random_tensor(dtype, N * C, 6),
        dx = HostTensor(dtype, N * C);
        dweight = random_tensor(grad, C, 7), dbias = random_tensor(grad, C, 8);
        scratch = HostTensor(stat, 2 * kPartialRows * C);
    }
    void forward(bool with_residual = true, const Tensor& stream = {}) {
        Ctx ctx;
        NormForwardArgs args{.out = out.view(), .residual_out = {}, .mean = {}, .rstd = rstd.view(), .in = in.view(),
                             .residual = {}, .weight = weight.view(), .bias = {}, .N = N, .C = C, .eps = kEps,
                             .stream = stream};
        if (with_residual) args.residual = residual.view(), args.residual_out = residual_out.view();
        if (layer) args.mean = mean.view(), args.bias = bias.view();
        (layer ? cpu::layernorm_forward : cpu::rmsnorm_forward)(ctx, args);
    }
    void backward(const HostTensor& x_values, bool in_place = false) {
        Ctx ctx;
        HostTensor x = x_values;
        if (in_place) dx = dresidual;
        NormBackwardArgs args{.dx = dx.view(), .dresidual = (in_place ? dx : dresidual).view(),
                              .dweight = dweight.view(), .dbias = {}, .scratch = scratch.view(), .dout = dout.view(),
                              .x = x.view(), .mean = {}, .rstd = rstd.view(), .weight = weight.view(), .N = N, .C = C};
        if (layer) args.mean = mean.view(), args.dbias = dbias.view();
        (layer ? cpu::layernorm_backward : cpu::rmsnorm_backward)(ctx, args);
    }
};

// The formulas in double on the values x that the operation normalised.
struct Reference {
    HostTensor out, mean, rstd, mean_magnitude;
    Reference(const Norm& n, const HostTensor& x)
        : out(Dtype::kFp64, n.N * n.C),
          mean(Dtype::kFp64, n.N),
          rstd(Dtype::kFp64, n.N),
          mean_magnitude(mean) {
        for (int64_t r = 0; r < n.N; r++) {
            double sum = 0, magnitude = 0, squares = 0;
            for (int64_t c = 0; c < n.C; c++)
                sum += x.get(r * n.C + c), magnitude += std::fabs(x.get(r * n.C + c));
            double m = n.layer ? sum / n.C : 0;
            for (int64_t c = 0; c < n.C; c++) squares += std::pow(x.get(r * n.C + c) - m, 2);
            double inverse = 1 / std::sqrt(squares / n.C + static_cast<double>(Norm::kEps));
            mean.set(r, m), rstd.set(r, inverse), mean_magnitude.set(r, magnitude / n.C);
            for (int64_t c = 0; c < n.C; c++) {
                double value = (x.get(r * n.C + c) - m) * inverse * n.weight.get(c);
                out.set(r * n.C + c, value + (n.layer ? n.bias.get(c) : 0));
            }
        }
    }
};

void check_forward(const Norm& n, const HostTensor& x) {
    Reference want(n, x);
    // 2: with fp64 the plain loops round as much as the operation.
    const double u = 2 * acc_roundoff(n.type), k = row_chain(n.C), round = 1.01 * unit_roundoff(n.type);
    auto mean_error = [&](int64_t r) { return n.layer ? k * u * want.mean_magnitude.get(r) : 0.0; };
    if (n.layer) check_close("mean", n.mean, want.mean, [&](int64_t r) { return mean_error(r); });
    check_close("rstd", n.rstd, want.rstd, [&](int64_t r) { return (k + 6) * u * want.rstd.get(r); });
    check_close("out", n.out, want.out, [&](int64_t i) {
        int64_t r = i / n.C, c = i % n.C;
        double scaled = std::fabs(n.weight.get(c)) * want.rstd.get(r);
        double normalised = std::fabs(x.get(i) - want.mean.get(r));
        return scaled * (mean_error(r) + normalised * (k + 8) * u) + (u + round) * std::fabs(want.out.get(i)) + kTiny;
    });
}

void check_backward(const Norm& n, const HostTensor& x, const Norm& before) {
    const double u = 2 * acc_roundoff(n.type), k = row_chain(n.C), round = 1.01 * unit_roundoff(n.type);
    HostTensor dx(Dtype::kFp64, n.N * n.C), error(dx);
    std::vector<double> dweight(n.C), dbias(n.C), weight_terms(n.C), bias_terms(n.C);
    for (int64_t r = 0; r < n.N; r++) {
        double mean = n.layer ? n.mean.get(r) : 0, rstd = n.rstd.get(r), g_sum = 0, gx_sum = 0, g_abs = 0, gx_abs = 0;
        auto normalised = [&](int64_t c) { return (x.get(r * n.C + c) - mean) * rstd; };
        auto g = [&](int64_t c) { return n.dout.get(r * n.C + c) * n.weight.get(c); };
        for (int64_t c = 0; c < n.C; c++) {
            g_sum += g(c), gx_sum += g(c) * normalised(c);
            g_abs += std::fabs(g(c)), gx_abs += std::fabs(g(c) * normalised(c));
            double term = n.dout.get(r * n.C + c) * normalised(c);
            dweight[c] += term, weight_terms[c] += std::fabs(term);
            dbias[c] += n.dout.get(r * n.C + c), bias_terms[c] += std::fabs(n.dout.get(r * n.C + c));
        }
        if (!n.layer) g_sum = g_abs = 0;
        for (int64_t c = 0; c < n.C; c++) {
            double value = rstd * (g(c) - g_sum / n.C - normalised(c) * gx_sum / n.C);
            double terms = rstd * (std::fabs(g(c)) + g_abs / n.C + std::fabs(normalised(c)) * gx_abs / n.C);
            double below = n.dresidual.get(r * n.C + c);
            dx.set(r * n.C + c, below + value);
            error.set(r * n.C + c, (k + 10) * u * terms + (u + round) * std::fabs(below + value) + kTiny);
        }
    }
    check_close("dx", n.dx, dx, [&](int64_t i) { return error.get(i); });
    auto check_sums = [&](const char* name, const HostTensor& got, const HostTensor& start, auto& sums, auto& terms) {
        HostTensor want(Dtype::kFp64, n.C);
        for (int64_t c = 0; c < n.C; c++) want.set(c, start.get(c) + sums[c]);
        check_close(name, got, want, [&](int64_t c) {
            return (column_chain(n.N) + 3) * u * terms[c]
                   + 1.01 * unit_roundoff(got.dtype()) * std::fabs(want.get(c)) + u * std::fabs(start.get(c));
        });
    };
    check_sums("dweight", n.dweight, before.dweight, dweight, weight_terms);
    if (n.layer) check_sums("dbias", n.dbias, before.dbias, dbias, bias_terms);
}

}  // namespace

TEST_CASE("cpu layernorm and rmsnorm") {
    for (bool layer : {false, true})
        for (Dtype type : kTypes)
            for (const Shape& s : kShapes)
                for (bool with_residual : {false, true}) {
                    INFO("layer " << layer << ", " << dtype_name(type) << ", N " << s.N << ", C " << s.C);
                    Dtype grad = type == Dtype::kFp64 ? type : with_residual ? Dtype::kFp32 : Dtype::kBf16;
                    Norm n(layer, s, type, grad);
                    n.forward(with_residual);
                    HostTensor x = n.in;
                    if (with_residual) {
                        for (int64_t i = 0; i < x.elems(); i++) x.set(i, n.in.get(i) + n.residual.get(i));
                        check_equal("residual_out", n.residual_out, x);
                    }
                    check_forward(n, x);
                    if (!layer && !with_residual) {   // after a branch
                        Norm after = n;
                        after.forward(false, n.residual.view());
                        for (int64_t i = 0; i < x.elems(); i++) after.in.set(i, n.out.get(i) + n.residual.get(i));
                        check_equal("out", after.out, after.in);
                        CHECK(after.rstd.same_bits(n.rstd));
                    }
                    Norm before = n;
                    n.backward(x);
                    check_backward(n, x, before);
                    // in place of dresidual
                    Norm again = before;
                    again.backward(x, true);
                    CHECK(again.dx.same_bits(n.dx));
                }
}

TEST_CASE("cpu norm edges") {
    // A single column: the result of layernorm is the bias and the gradient is 0.
    Norm n(true, {4, 1}, Dtype::kFp32, Dtype::kFp32);
    n.forward(false);
    for (int64_t i = 0; i < 4; i++) CHECK_EQ(n.out.get(i), n.bias.get(0));
    n.backward(n.in);
    check_equal("dx", n.dx, n.dresidual);
    // A wrong size is a bug of the caller.
    n.C = 2;
    CHECK_THROWS_AS(n.forward(false), Error);
    CHECK_THROWS_AS(n.backward(n.in), Error);
    Norm rms(false, {2, 4}, Dtype::kFp32, Dtype::kFp32);
    rms.residual_out = HostTensor();
    CHECK_THROWS_AS(rms.forward(), Error);   // there is no place for the sum
    Norm layer(true, {2, 4}, Dtype::kFp32, Dtype::kFp32);
    CHECK_THROWS_AS(layer.forward(false, layer.residual.view()), Error);   // only rmsnorm follows a branch
}

namespace {

struct QkNorm {
    int64_t N, NH, NKV, HS, KS, heads = NH + NKV, width = NH * HS + 2 * NKV * KS;
    HostTensor in, q_weight, k_weight, out, rstd, dqkv, dq_weight, dk_weight, scratch;
    static constexpr float kEps = 1e-4f;
    QkNorm(int64_t n, int64_t nh, int64_t nkv, int64_t hs, int64_t ks, Dtype type, Dtype grad)
        : N(n), NH(nh), NKV(nkv), HS(hs), KS(ks) {
        Dtype stat = stat_dtype(type);
        in = random_tensor(type, N * width, 1), out = HostTensor(type, N * width),
        rstd = HostTensor(stat, N * heads);
        q_weight = random_tensor(type, HS, 2), k_weight = random_tensor(type, KS, 3);
        dqkv = random_tensor(type, N * width, 4);
        dq_weight = random_tensor(grad, HS, 5), dk_weight = random_tensor(grad, KS, 6);
        scratch = HostTensor(stat, 2 * kPartialRows * HS);
    }
    void forward() {
        Ctx ctx;
        cpu::qk_norm_forward(ctx, {.out = out.view(), .rstd = rstd.view(), .in = in.view(), .q_weight = q_weight.view(),
                                   .k_weight = k_weight.view(), .N = N, .NH = NH, .NKV = NKV, .HS = HS, .KS = KS,
                                   .eps = kEps});
    }
    void backward() {
        Ctx ctx;
        cpu::qk_norm_backward(ctx, {.dqkv = dqkv.view(), .dq_weight = dq_weight.view(), .dk_weight = dk_weight.view(),
                                    .scratch = scratch.view(), .in = in.view(), .rstd = rstd.view(),
                                    .q_weight = q_weight.view(), .k_weight = k_weight.view(), .N = N, .NH = NH,
                                    .NKV = NKV, .HS = HS, .KS = KS});
    }
    // Head h of row n as the row of an rmsnorm (N = 1), with which the operation must agree bit for bit.
    int64_t elems(int64_t h) const { return h < NH ? HS : KS; }
    int64_t begin(int64_t n, int64_t h) const { return n * width + (h < NH ? h * HS : NH * HS + (h - NH) * KS); }
    Norm as_norm(int64_t n, int64_t h, Dtype type) const {
        Norm norm(false, {1, elems(h)}, type, stat_dtype(type));
        for (int64_t d = 0; d < elems(h); d++) {
            norm.in.set(d, in.get(begin(n, h) + d)), norm.dout.set(d, dqkv.get(begin(n, h) + d));
            norm.weight.set(d, (h < NH ? q_weight : k_weight).get(d));
        }
        norm.rstd.set(0, rstd.get(n * heads + h));
        norm.dresidual.fill(0);
        return norm;
    }
};

}  // namespace

TEST_CASE("cpu qk_norm is an rmsnorm of every query and key head") {
    for (Dtype type : kTypes)
        for (auto [N, NH, NKV, HS, KS] :
             {std::tuple{1, 1, 1, 6, 6}, {5, 4, 2, 16, 16}, {37, 3, 1, 10, 10}, {37, 1, 1, 40, 8}, {3, 1, 1, 21, 7}}) {
            QkNorm q(N, NH, NKV, HS, KS, type, stat_dtype(type));
            q.forward();
            const QkNorm before = q;
            q.backward();
            HostTensor dq(Dtype::kFp64, HS), dk(Dtype::kFp64, KS);
            dq.fill(0), dk.fill(0);
            const double round = 1.01 * unit_roundoff(type), u = 2 * acc_roundoff(type);
            for (int64_t n = 0; n < N; n++)
                for (int64_t h = 0; h < q.heads; h++) {
                    Norm norm = before.as_norm(n, h, type);
                    HostTensor x = norm.in;
                    const int64_t elems = q.elems(h), at = q.begin(n, h);
                    HostTensor row(type, elems), drow(type, elems);
                    for (int64_t d = 0; d < elems; d++) {
                        row.set(d, q.out.get(at + d)), drow.set(d, q.dqkv.get(at + d));
                        double term = norm.dout.get(d) * x.get(d) * norm.rstd.get(0);
                        (h < NH ? dq : dk).set(d, (h < NH ? dq : dk).get(d) + term);
                    }
                    double mean_square = 0;
                    for (int64_t d = 0; d < elems; d++) mean_square += x.get(d) * x.get(d) / static_cast<double>(elems);
                    double rstd = 1 / std::sqrt(mean_square + static_cast<double>(QkNorm::kEps));
                    REQUIRE(std::fabs(norm.rstd.get(0) - rstd) <= (row_chain(HS) + 6) * u * rstd);
                    for (int64_t d = 0; d < elems; d++) {
                        double want = x.get(d) * rstd * norm.weight.get(d);
                        REQUIRE(std::fabs(row.get(d) - want)
                                <= ((row_chain(HS) + 8) * u + round) * std::fabs(want) + kTiny);
                    }
                    norm.backward(x);
                    CHECK(norm.dx.same_bits(drow));
                }
            // V is copied, forward and backward.
            for (int64_t n = 0; n < N; n++)
                for (int64_t i = q.width - NKV * KS; i < q.width; i++) {
                    REQUIRE(q.out.get(n * q.width + i) == q.in.get(n * q.width + i));
                    REQUIRE(q.dqkv.get(n * q.width + i) == before.dqkv.get(n * q.width + i));
                }
            for (int64_t d = 0; d < HS; d++) dq.set(d, dq.get(d) + before.dq_weight.get(d));
            for (int64_t d = 0; d < KS; d++) dk.set(d, dk.get(d) + before.dk_weight.get(d));
            auto bound = [&](int64_t) {
                return (column_chain(N) + NH + 4) * u * 6 * N * NH;
            };  // |terms| below 6
            check_close("dq_weight", q.dq_weight, dq, bound);
            check_close("dk_weight", q.dk_weight, dk, bound);
        }
}

namespace {

struct Rope {
    int64_t N, T, NH, NKV, HS, R, width = (NH + 2 * NKV) * HS;
    HostTensor qkv, cos_sin;
    Rope(int64_t n, int64_t t, int64_t nh, int64_t nkv, int64_t hs, int64_t r, Dtype type)
        : N(n), T(t), NH(nh), NKV(nkv), HS(hs), R(r) {
        qkv = random_tensor(type, N * width, 1);
        cos_sin = HostTensor(stat_dtype(type), T * R);
        for (int64_t t_ = 0; t_ < T; t_++)
            for (int64_t i = 0; i < R / 2; i++) {
                double angle = static_cast<double>(t_) * std::pow(100.0, -2.0 * i / R);
                cos_sin.set(t_ * R + 2 * i, std::cos(angle)), cos_sin.set(t_ * R + 2 * i + 1, std::sin(angle));
            }
    }
    RopeArgs args() {
        return {.qkv = qkv.view(), .cos_sin = cos_sin.view(), .N = N, .T = T, .NH = NH, .NKV = NKV, .HS = HS,
                .rotated = R == HS ? 0 : R};
    }
};

}  // namespace

TEST_CASE("cpu rope rotates queries and keys by their position") {
    Ctx ctx;
    for (Dtype type : kTypes)
        for (auto [N, T, NH, NKV, HS, R] : {std::tuple{1, 1, 1, 1, 2, 2}, {14, 7, 4, 2, 10, 10}, {6, 3, 3, 1, 32, 32},
                                           {14, 7, 4, 2, 10, 6}}) {
            Rope r(N, T, NH, NKV, HS, R, type);
            HostTensor before = r.qkv, want(Dtype::kFp64, r.qkv.elems());
            for (int64_t i = 0; i < want.elems(); i++) {
                int64_t n = i / r.width, column = i % r.width, d = column % HS, half = R / 2, pair = d % half;
                int64_t partner = d < half ? i + half : i - half;
                double cosine = r.cos_sin.get(n % T * R + 2 * pair), sine = r.cos_sin.get(n % T * R + 2 * pair + 1);
                bool rotated = column < (NH + NKV) * HS && d < R;
                want.set(i, !rotated ? before.get(i)
                                : before.get(i) * cosine + (d < half ? -1 : 1) * before.get(partner) * sine);
            }
            cpu::rope_forward(ctx, r.args());
            auto bound = [&](int64_t i) {
                return 12 * 4 * acc_roundoff(type)
                       + 1.01 * unit_roundoff(type) * std::fabs(want.get(i));  // |x| < 6
            };
            check_close("rope", r.qkv, want, bound);
            cpu::rope_backward(ctx, r.args());   // rotates back
            check_close("back", r.qkv, before,
                        [&](int64_t) { return 6 * (40 * acc_roundoff(type) + 3 * unit_roundoff(type)); });
        }
    Rope odd(2, 2, 1, 1, 3, 3, Dtype::kFp32), longer(2, 2, 1, 1, 4, 6, Dtype::kFp32);
    CHECK_THROWS_AS(cpu::rope_forward(ctx, odd.args()), Error);
    CHECK_THROWS_AS(cpu::rope_forward(ctx, longer.args()), Error);
}

}  // namespace norm_test
