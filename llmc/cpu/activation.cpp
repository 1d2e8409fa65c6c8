// gelu, swiglu and the gradient of a bias, CPU.
#include "llmc/cpu/common.h"
#include "llmc/cpu/math.h"
#include "llmc/cpu/quantize.h"

namespace cpu {
namespace {

template <typename T> void gelu_forward_all(const ActivationForwardArgs& args) {
    for_pieces(args.N * args.F, [&](int64_t begin, int64_t count) {
        const T* in = args.in.as<T>() + begin;
        T* out = args.out.as<T>() + begin;
        for_lanes<Acc<T>>(count, [&](int64_t i, auto n) { store(out + i, gelu(load(in + i, n)), n); });
    });
}

template <typename T> void gelu_backward_all(const ActivationBackwardArgs& args) {
    for_pieces(args.N * args.F, [&](int64_t begin, int64_t count) {
        const T *in = args.in.as<T>() + begin, *dout = args.dout.as<T>() + begin;
        T* din = args.din.as<T>() + begin;
        for_lanes<Acc<T>>(count, [&](int64_t i, auto n) {
            store(din + i, load(dout + i, n) * gelu_derivative(load(in + i, n)), n);
        });
    });
}

template <typename T> void swiglu_forward_row(const ActivationForwardArgs& args, int64_t row) {
    const int64_t F = args.F;
    const T *gate = args.in.as<T>() + row * 2 * F, *up = gate + F;
    T* out = args.out.as<T>() + row * F;
    for_lanes<Acc<T>>(F, [&](int64_t i, auto n) {
        Vec<Acc<T>> g = load(gate + i, n);
        store(out + i, g * sigmoid_pair(g).of_x * load(up + i, n), n);
    });
}

// d(silu)/dg = s (1 + g (1 - s)), s = sigmoid(g).
template <typename T> void swiglu_backward_row(const ActivationBackwardArgs& args, int64_t row) {
    using A = Acc<T>;
    const int64_t F = args.F;
    const T *gate = args.in.as<T>() + row * 2 * F, *up = gate + F, *dout = args.dout.as<T>() + row * F;
    T* dgate = args.din.as<T>() + row * 2 * F;
    for_lanes<A>(F, [&](int64_t i, auto n) {
        Vec<A> g = load(gate + i, n), u = load(up + i, n), dy = load(dout + i, n);
        SigmoidPair<A> s = sigmoid_pair(g);
        store(dgate + i, dy * u * (s.of_x * fma(g, s.of_minus_x, Vec<A>(A(1)))), n);
        store(dgate + F + i, dy * (g * s.of_x), n);
    });
}

template <typename T> void bias_all(const BiasBackwardArgs& args) {
    const int64_t C = args.C;
    const RowRuns runs(args.N);
    Acc<T>* partial = args.scratch.as<Acc<T>>();
#pragma omp parallel for schedule(static) if (args.N * C >= kParallelElems)
    for (int64_t run = 0; run < runs.count; run++) {
        Acc<T>* sum = partial + run * C;
        std::fill(sum, sum + C, Acc<T>(0));
        for (int64_t n = run * runs.rows; n < std::min(args.N, (run + 1) * runs.rows); n++)
            add_row_of(sum, args.dout.as<T>() + n * C, C);
    }
    add_partials_to_grad(args.dbias, partial, runs.count, C, C);
}

// Calls body(tag, args), whose output is there, and quantises that. Input rows have `inputs` times F elements.
template <typename Body>
void run_forward(const char* op, const ActivationForwardArgs& given, int64_t inputs, Body&& body) {
    ActivationForwardArgs args = given;
    const Dtype T = args.in.dtype;
    const QuantResult result(op, given.quant, given.out, T, args.N, args.F);
    args.out = result.tensor();
    check_tensor(op, "in", args.in, T, inputs * args.N * args.F);
    check_tensor(op, "out", args.out, T, args.N * args.F);
    for_working_type(op, T, [&](auto tag) { body(tag, args); });
    result.quantize();
}
template <typename Body>
void run_backward(const char* op, const ActivationBackwardArgs& given, int64_t inputs, Body&& body) {
    ActivationBackwardArgs args = given;
    const Dtype T = args.in.dtype;
    const QuantResult result(op, given.quant, given.din, T, args.N, inputs * args.F);
    args.din = result.tensor();
    check_tensor(op, "in", args.in, T, inputs * args.N * args.F);
    check_tensor(op, "din", args.din, T, inputs * args.N * args.F);
    check_tensor(op, "dout", args.dout, T, args.N * args.F);
    for_working_type(op, T, [&](auto tag) { body(tag, args); });
    result.quantize();
}

}  // namespace

void gelu_forward(Ctx&, const ActivationForwardArgs& args) {
    run_forward("gelu_forward", args, 1, []<typename T>(Tag<T>, const ActivationForwardArgs& complete) {
        gelu_forward_all<T>(complete);
    });
}

void gelu_backward(Ctx&, const ActivationBackwardArgs& args) {
    run_backward("gelu_backward", args, 1, []<typename T>(Tag<T>, const ActivationBackwardArgs& complete) {
        gelu_backward_all<T>(complete);
    });
}

void swiglu_forward(Ctx&, const ActivationForwardArgs& args) {
    run_forward("swiglu_forward", args, 2, []<typename T>(Tag<T>, const ActivationForwardArgs& complete) {
#pragma omp parallel for schedule(static) if (complete.N * complete.F >= kParallelElems)
        for (int64_t n = 0; n < complete.N; n++) swiglu_forward_row<T>(complete, n);
    });
}

void swiglu_backward(Ctx&, const ActivationBackwardArgs& args) {
    run_backward("swiglu_backward", args, 2, []<typename T>(Tag<T>, const ActivationBackwardArgs& complete) {
#pragma omp parallel for schedule(static) if (complete.N * complete.F >= kParallelElems)
        for (int64_t n = 0; n < complete.N; n++) swiglu_backward_row<T>(complete, n);
    });
}

void bias_backward(Ctx&, const BiasBackwardArgs& args) {
    for_working_type("bias_backward", args.dout.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        check_tensor("bias_backward", "dout", args.dout, dtype_of<T>, args.N * args.C);
        check_grad<T>("bias_backward", "dbias", args.dbias, args.C);
        check_at_least("bias_backward", "scratch", args.scratch, stat_dtype<T>, kPartialRows * args.C);
        bias_all<T>(args);
    });
}

}  // namespace cpu
