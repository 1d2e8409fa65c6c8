// Cross entropy with its gradient in place. CPU.
#include "llmc/cpu/common.h"
#include "llmc/cpu/math.h"

namespace cpu {
namespace {

template <typename T> void ignored_row(const ClassifierArgs& args, int64_t n) {
    args.losses.as<Acc<T>>()[n] = 0;
    if (args.z_loss > 0) args.squares.as<Acc<T>>()[n] = 0;
    if (!args.write_dlogits) return;
    T* row = args.logits.as<T>() + n * args.Vp;
    std::fill(row, row + args.Vp, T(0.0f));
}

template <typename T> void counted_row(const ClassifierArgs& args, int64_t n, int64_t target) {
    using A = Acc<T>;
    T* row = args.logits.as<T>() + n * args.Vp;
    A largest = widen(row[0]);
    Vec<A> most(largest);
    const A mul(args.logit_mul);
    const SoftCap<A> logit{mul, A(args.softcap)};
    const int64_t whole = args.V / Vec<A>::kWidth * Vec<A>::kWidth;
    for (int64_t i = 0; i < whole; i += Vec<A>::kWidth) most = max(most, load(row + i));
    largest = max_lanes(most);
    for (int64_t i = whole; i < args.V; i++) largest = std::max(largest, widen(row[i]));
    const auto scaled = [&](A x) { return logit.of(Vec<A>(x)).v[0]; };
    largest = scaled(largest);
    const auto shifted = [&](Vec<A> x) { return exp(logit.of(x) - Vec<A>(largest)); };

    // Lanes past the end hold -infinity, whose exponential is 0.
    Vec<A> sum;
    for (int64_t i = 0; i < whole; i += Vec<A>::kWidth) sum = sum + shifted(load(row + i));
    if (whole < args.V) {
        A rest[Vec<A>::kWidth];
        std::fill(rest, rest + Vec<A>::kWidth, -std::numeric_limits<A>::infinity());
        for (int64_t i = whole; i < args.V; i++) rest[i - whole] = scaled(widen(row[i])) - largest;
        sum = sum + exp(load(rest));
    }
    const A total = sum_lanes(sum);
    const A of_target = scaled(widen(row[target])), gap = largest - of_target;
    args.losses.as<A>()[n] = static_cast<A>(static_cast<double>(gap) + log(static_cast<double>(total)));
    if (!args.write_dlogits) return;

    A z_mul(1);
    if (args.z_loss > 0) {
        const A lse = static_cast<A>(static_cast<double>(largest) + log(static_cast<double>(total)));
        z_mul += 2 * A(args.z_loss) * lse;
        args.squares.as<A>()[n] = lse * lse;
    }
    const A dloss_mul = A(args.state->dloss_mul) * mul, row_mul = dloss_mul * z_mul, inverse = A(1) / total;
    const A target_probability = exp(Vec<A>(-gap)).v[0] * inverse;
    for_lanes<A>(args.V, [&](int64_t i, auto count) {
        const Vec<A> y = logit.of(load(row + i, count)), probability = exp(y - Vec<A>(largest)) * Vec<A>(inverse);
        store(row + i, probability * Vec<A>(row_mul) * logit.slope(y), count);
    });
    row[target] = T((target_probability * z_mul - A(1)) * dloss_mul * logit.slope(Vec<A>(of_target)).v[0]);
    std::fill(row + args.V, row + args.Vp, T(0.0f));
}

template <typename T> void run(const ClassifierArgs& args) {
    int32_t bad = 0;
#pragma omp parallel for schedule(static) reduction(+ : bad) if (args.N * args.V >= kParallelElems)
    for (int64_t n = 0; n < args.N; n++) {
        const int64_t target = args.targets[n];
        const bool known = target >= 0 && target < args.V;
        if (!known && target != kIgnoreIndex) bad++;
        if (known) counted_row<T>(args, n, target);
        else ignored_row<T>(args, n);
    }
    args.state->bad_tokens += bad;
}

}  // namespace

void classifier(Ctx&, const ClassifierArgs& args) {
    CHECK(args.V > 0 && args.V <= args.Vp, "classifier: %lld of %lld columns", (long long)args.V, (long long)args.Vp);
    for_working_type("classifier", args.logits.dtype, [&]<typename T>(Tag<T>) {
        check_tensor("classifier", "logits", args.logits, dtype_of<T>, args.N * args.Vp);
        check_tensor("classifier", "losses", args.losses, stat_dtype<T>, args.N);
        if (args.z_loss > 0) check_tensor("classifier", "squares", args.squares, stat_dtype<T>, args.N);
        CHECK(args.write_dlogits || args.z_loss == 0, "classifier: a z-loss without gradients");
        run<T>(args);
    });
}

void dlogits_residual(Ctx&, const DlogitsResidualArgs& args) {
    const char* op = "dlogits_residual";
    const int64_t N = args.N, C = args.C, Vp = args.Vp;
    check_tensor(op, "dx", args.dx, Dtype::kBf16, N * C);
    check_tensor(op, "dlogits", args.dlogits, Dtype::kBf16, N * Vp);
    check_tensor(op, "codes", args.codes, args.codes.dtype, N * Vp);
    check_tensor(op, "scale_inv", args.scale_inv, Dtype::kFp32, scale_inv_elems(args.granularity, N, Vp));
    check_tensor(op, "weight", args.weight, Dtype::kBf16, Vp * C);
    const bool blocks = args.granularity != Granularity::kTensor;
    const float* const numbers = fp8_values(args.codes.dtype);
    parallel_for(N, N * Vp, [&](int64_t n) {
        const int64_t target = args.targets[n];
        if (target < 0 || target >= args.V) return;
        const bf16* const dlogits = args.dlogits.as<bf16>() + n * Vp;
        const uint8_t* const codes = static_cast<const uint8_t*>(args.codes.data) + n * Vp;
        double sum = 0;
        for (int64_t v = 0; v < Vp; v++) {
            const double scale_inv = args.scale_inv.as<float>()[blocks ? v / kScaleBlock * N + n : 0];
            sum += double{widen(dlogits[v])} - double{numbers[codes[v]]} * scale_inv;
        }
        const Vec<float> residual(static_cast<float>(sum));
        const bf16* const weight = args.weight.as<bf16>() + target * C;
        bf16* const dx = args.dx.as<bf16>() + n * C;
        for_lanes<float>(C, [&](int64_t c, auto count) {
            store(dx + c, fma(residual, load(weight + c, count), load(dx + c, count)), count);
        });
    });
}

}  // namespace cpu
