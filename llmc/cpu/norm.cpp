// LayerNorm, RMSNorm and QK norm. CPU.
#include <cmath>

#include "llmc/cpu/quantize.h"

namespace cpu {
namespace {

enum class Kind { kLayer, kRms };

// One row: x = in + residual rounded to T, the statistics of the rounded values, the output.
template <Kind kind, typename T> void forward_row(const NormForwardArgs& args, int64_t n) {
    using A = Acc<T>;
    const int64_t C = args.C;
    const T* x = args.in.as<T>() + n * C;
    if (args.residual_out) {
        T* sum = args.residual_out.as<T>() + n * C;
        const T* residual = args.residual ? args.residual.as<T>() + n * C : nullptr;
        for_lanes<A>(C, [&](int64_t c, auto count) {
            Vec<A> value = load(x + c, count);
            store(sum + c, residual ? value + load(residual + c, count) : value, count);
        });
        x = sum;
    }
    A mean = 0;
    if constexpr (kind == Kind::kLayer) {
        Vec<A> sum;
        for_lanes<A>(C, [&](int64_t c, auto count) { sum = sum + load(x + c, count); });
        mean = sum_lanes(sum) / A(C);
        args.mean.as<A>()[n] = mean;
    }
    Vec<A> squares;
    for_lanes<A>(C, [&](int64_t c, auto count) {
        A centered[Vec<A>::kWidth] = {};
        store(centered, load(x + c, count) - Vec<A>(mean), count);
        squares = fma(load(centered), load(centered), squares);
    });
    const A rstd = A(1) / std::sqrt(sum_lanes(squares) / A(C) + A(args.eps));
    args.rstd.as<A>()[n] = rstd;
    const T* weight = args.weight.as<T>();
    const T* bias = args.bias ? args.bias.as<T>() : nullptr;
    T* out = args.out.as<T>() + n * C;
    for_lanes<A>(C, [&](int64_t c, auto count) {
        Vec<A> value = (load(x + c, count) - Vec<A>(mean)) * Vec<A>(rstd) * load(weight + c, count);
        store(out + c, bias ? value + load(bias + c, count) : value, count);
    });
    if (args.stream) add_row(out, args.stream.as<T>() + n * C, C);
}

// One row: dx =, dweight +=, dbias += (may be null).
template <Kind kind, typename T>
void backward_row(T* dx, const T* dresidual, Acc<T>* dweight, Acc<T>* dbias, const T* dout, const T* x,
                  Acc<T> mean, Acc<T> rstd, const T* weight, int64_t C) {
    using A = Acc<T>;
    Vec<A> sum_g, sum_gx;
    for_lanes<A>(C, [&](int64_t c, auto count) {
        Vec<A> dy = load(dout + c, count), g = dy * load(weight + c, count);
        Vec<A> normalised = (load(x + c, count) - Vec<A>(mean)) * Vec<A>(rstd);
        sum_g = sum_g + g;
        sum_gx = fma(g, normalised, sum_gx);   // load sets lanes past the end of g to 0
        store(dweight + c, fma(dy, normalised, load(dweight + c, count)), count);
        if (dbias) store(dbias + c, load(dbias + c, count) + dy, count);
    });
    const Vec<A> mean_g(kind == Kind::kLayer ? sum_lanes(sum_g) / A(C) : A(0));
    const Vec<A> mean_gx(sum_lanes(sum_gx) / A(C));
    for_lanes<A>(C, [&](int64_t c, auto count) {
        Vec<A> g = load(dout + c, count) * load(weight + c, count);
        Vec<A> normalised = (load(x + c, count) - Vec<A>(mean)) * Vec<A>(rstd);
        Vec<A> value = (g - mean_g - normalised * mean_gx) * Vec<A>(rstd);
        store(dx + c, dresidual ? load(dresidual + c, count) + value : value, count);
    });
}

template <Kind kind, typename T> void norm_backward(const NormBackwardArgs& args) {
    using A = Acc<T>;
    const int64_t C = args.C;
    const RowChunks chunks(args.N);
    A* partial = args.scratch.as<A>();
    parallel_for(chunks.count, args.N * C, [&](int64_t chunk) {
        A* dweight = partial + chunk * 2 * C;
        A* dbias = args.dbias ? dweight + C : nullptr;
        std::fill(dweight, dweight + 2 * C, A(0));
        for (int64_t n = chunk * chunks.rows; n < std::min(args.N, (chunk + 1) * chunks.rows); n++) {
            const T* dresidual = args.dresidual ? args.dresidual.as<T>() + n * C : nullptr;
            A mean = kind == Kind::kLayer ? args.mean.as<A>()[n] : A(0);
            backward_row<kind>(args.dx.as<T>() + n * C, dresidual, dweight, dbias, args.dout.as<T>() + n * C,
                               args.x.as<T>() + n * C, mean, args.rstd.as<A>()[n], args.weight.as<T>(), C);
        }
    });
    add_partials_to_grad(args.dweight, partial, chunks.count, 2 * C, C);
    if (args.dbias) add_partials_to_grad(args.dbias, partial + C, chunks.count, 2 * C, C);
}

template <Kind kind> void run_forward(const char* op, const NormForwardArgs& given) {
    NormForwardArgs args = given;
    const QuantResult result(op, given.quant, given.out, args.in.dtype, args.N, args.C);
    args.out = result.tensor();
    for_working_type(op, args.in.dtype, [&]<typename T>(Tag<T>) {
        const int64_t elems = args.N * args.C;
        check_tensor(op, "in", args.in, dtype_of<T>, elems);
        check_tensor(op, "out", args.out, dtype_of<T>, elems);
        check_optional(op, "residual", args.residual, dtype_of<T>, elems);
        check_optional(op, "residual_out", args.residual_out, dtype_of<T>, elems);
        check_optional(op, "stream", args.stream, dtype_of<T>, elems);
        CHECK(!args.stream || (kind == Kind::kRms && !args.residual_out && !given.quant), "%s after a branch", op);
        CHECK(!args.residual || args.residual_out, "%s: a residual without residual_out", op);
        if (kind == Kind::kLayer) check_tensor(op, "mean", args.mean, stat_dtype<T>, args.N);
        check_tensor(op, "rstd", args.rstd, stat_dtype<T>, args.N);
        check_tensor(op, "weight", args.weight, dtype_of<T>, args.C);
        check_optional(op, "bias", args.bias, dtype_of<T>, args.C);
        parallel_for(args.N, elems, [&](int64_t n) { forward_row<kind, T>(args, n); });
    });
    result.quantize();
}

template <Kind kind> void run_backward(const char* op, const NormBackwardArgs& args) {
    const QuantResult result(op, args.quant, args.dx, args.dout.dtype, args.N, args.C);
    for_working_type(op, args.dout.dtype, [&]<typename T>(Tag<T>) {
        const int64_t elems = args.N * args.C;
        check_tensor(op, "dout", args.dout, dtype_of<T>, elems);
        check_tensor(op, "x", args.x, dtype_of<T>, elems);
        check_tensor(op, "dx", args.dx, dtype_of<T>, elems);
        check_optional(op, "dresidual", args.dresidual, dtype_of<T>, elems);
        if (kind == Kind::kLayer) check_tensor(op, "mean", args.mean, stat_dtype<T>, args.N);
        check_tensor(op, "rstd", args.rstd, stat_dtype<T>, args.N);
        check_tensor(op, "weight", args.weight, dtype_of<T>, args.C);
        check_grad<T>(op, "dweight", args.dweight, args.C);
        if (args.dbias) check_grad<T>(op, "dbias", args.dbias, args.C);
        check_at_least(op, "scratch", args.scratch, stat_dtype<T>, 2 * kPartialRows * args.C);
        norm_backward<kind, T>(args);
    });
    result.quantize();
}

// A query or key head of the packed projections: its place in a row and its elements.
struct QkHead {
    int64_t begin, elems;
    template <typename Args> static QkHead of(const Args& a, int64_t h) {
        if (h < a.NH) return {h * a.HS, a.HS};
        return {a.NH * a.HS + (h - a.NH) * a.KS, a.KS};
    }
};

template <typename T> void qk_forward_row(const QkNormForwardArgs& args, int64_t n) {
    using A = Acc<T>;
    const int64_t heads = args.NH + args.NKV, width = args.width(), values = QkHead::of(args, heads).begin;
    const T* in = args.in.as<T>() + n * width;
    T* out = args.out.as<T>() + n * width;
    for (int64_t h = 0; h < heads; h++) {
        const QkHead head = QkHead::of(args, h);
        const T* x = in + head.begin;
        const T* weight = h < args.NH ? args.q_weight.as<T>() : args.k_weight.as<T>();
        const A rstd = A(1) / std::sqrt(dot<A>(x, x, head.elems) / A(head.elems) + A(args.eps));
        args.rstd.as<A>()[n * heads + h] = rstd;
        for_lanes<A>(head.elems, [&](int64_t d, auto count) {
            store(out + head.begin + d, load(x + d, count) * Vec<A>(rstd) * load(weight + d, count), count);
        });
    }
    std::copy(in + values, in + width, out + values);
}

template <typename T> void qk_backward(const QkNormBackwardArgs& args) {
    using A = Acc<T>;
    const int64_t HS = args.HS, heads = args.NH + args.NKV, width = args.width();
    const RowChunks chunks(args.N);
    A* partial = args.scratch.as<A>();
    parallel_for(chunks.count, args.N * width, [&](int64_t chunk) {
        A* dq_weight = partial + chunk * 2 * HS;
        std::fill(dq_weight, dq_weight + 2 * HS, A(0));
        for (int64_t n = chunk * chunks.rows; n < std::min(args.N, (chunk + 1) * chunks.rows); n++) {
            for (int64_t h = 0; h < heads; h++) {
                const QkHead head = QkHead::of(args, h);
                T* dqkv = args.dqkv.as<T>() + n * width + head.begin;
                const T* x = args.in.as<T>() + n * width + head.begin;
                const T* weight = h < args.NH ? args.q_weight.as<T>() : args.k_weight.as<T>();
                A* dweight = h < args.NH ? dq_weight : dq_weight + HS;
                const A rstd = args.rstd.as<A>()[n * heads + h];
                backward_row<Kind::kRms, T>(dqkv, nullptr, dweight, nullptr, dqkv, x, A(0), rstd, weight,
                                             head.elems);
            }
        }
    });
    add_partials_to_grad(args.dq_weight, partial, chunks.count, 2 * HS, HS);
    add_partials_to_grad(args.dk_weight, partial + HS, chunks.count, 2 * HS, args.KS);
}

}  // namespace

void layernorm_forward(Ctx&, const NormForwardArgs& args) { run_forward<Kind::kLayer>("layernorm_forward", args); }
void rmsnorm_forward(Ctx&, const NormForwardArgs& args) { run_forward<Kind::kRms>("rmsnorm_forward", args); }
void layernorm_backward(Ctx&, const NormBackwardArgs& args) { run_backward<Kind::kLayer>("layernorm_backward", args); }
void rmsnorm_backward(Ctx&, const NormBackwardArgs& args) { run_backward<Kind::kRms>("rmsnorm_backward", args); }

static void check_widths(const char* op, int64_t NH, int64_t NKV, int64_t HS, int64_t KS) {
    CHECK(KS == HS || (NH == 1 && NKV == 1 && KS > 0 && KS < HS), "%s: %lld heads of %lld, %lld of %lld", op,
          (long long)NH, (long long)HS, (long long)NKV, (long long)KS);
}

void qk_norm_forward(Ctx&, const QkNormForwardArgs& args) {
    const char* op = "qk_norm_forward";
    check_widths(op, args.NH, args.NKV, args.HS, args.KS);
    for_working_type(op, args.in.dtype, [&]<typename T>(Tag<T>) {
        const int64_t elems = args.N * args.width();
        check_tensor(op, "in", args.in, dtype_of<T>, elems);
        check_tensor(op, "out", args.out, dtype_of<T>, elems);
        check_tensor(op, "rstd", args.rstd, stat_dtype<T>, args.N * (args.NH + args.NKV));
        check_tensor(op, "q_weight", args.q_weight, dtype_of<T>, args.HS);
        check_tensor(op, "k_weight", args.k_weight, dtype_of<T>, args.KS);
        parallel_for(args.N, elems, [&](int64_t n) { qk_forward_row<T>(args, n); });
    });
}

void qk_norm_backward(Ctx&, const QkNormBackwardArgs& args) {
    const char* op = "qk_norm_backward";
    const int64_t width = args.width(), elems = args.N * width;
    check_widths(op, args.NH, args.NKV, args.HS, args.KS);
    const QuantResult result(op, args.quant, args.dqkv, args.in.dtype, args.N, width);
    for_working_type(op, args.in.dtype, [&]<typename T>(Tag<T>) {
        check_tensor(op, "in", args.in, dtype_of<T>, elems);
        check_tensor(op, "dqkv", args.dqkv, dtype_of<T>, elems);
        check_tensor(op, "rstd", args.rstd, stat_dtype<T>, args.N * (args.NH + args.NKV));
        check_tensor(op, "q_weight", args.q_weight, dtype_of<T>, args.HS);
        check_tensor(op, "k_weight", args.k_weight, dtype_of<T>, args.KS);
        check_grad<T>(op, "dq_weight", args.dq_weight, args.HS);
        check_grad<T>(op, "dk_weight", args.dk_weight, args.KS);
        check_at_least(op, "scratch", args.scratch, stat_dtype<T>, 2 * kPartialRows * args.HS);
        qk_backward<T>(args);
    });
    result.quantize();
    result.corrupt();
}

}  // namespace cpu
