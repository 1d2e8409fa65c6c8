// Activation functions and the gradient of a bias, CPU.
#include "llmc/cpu/common.h"
#include "llmc/cpu/math.h"
#include "llmc/cpu/quantize.h"
#include "llmc/cpu/swiglu.h"

namespace cpu {
namespace {

// ---- one functor per activation function: value(x) and gradient(dout, x); gated ones have value(gate, up) and
// gradient(dout, gate, up), which replaces gate and up by their gradients

struct Gelu {
    template <typename A> static Vec<A> value(Vec<A> x) { return gelu(x); }
    template <typename A> static Vec<A> gradient(Vec<A> dout, Vec<A> x) { return dout * gelu_derivative(x); }
};

struct Geglu {
    template <typename A> static Vec<A> value(Vec<A> gate, Vec<A> up) { return gelu(gate) * up; }
    template <typename A> static void gradient(Vec<A> dout, Vec<A>& gate, Vec<A>& up) {
        const Vec<A> dgate = dout * up * gelu_derivative(gate);
        up = dout * gelu(gate);
        gate = dgate;
    }
};

struct Relu2 {
    // max returns a NaN of its second argument.
    template <typename A> static Vec<A> relu(Vec<A> x) { return max(Vec<A>(), x); }
    template <typename A> static Vec<A> value(Vec<A> x) { return relu(x) * relu(x); }
    template <typename A> static Vec<A> gradient(Vec<A> dout, Vec<A> x) { return dout * (relu(x) + relu(x)); }
};

template <typename F, typename A>
concept Gated = requires(Vec<A> v) { F::value(v, v); };

template <typename Call> void with_activation(Activation kind, Call&& call) {
    switch (kind) {
        case Activation::kGelu: return call(Gelu{});
        case Activation::kSwiglu: return call(Swiglu{});
        case Activation::kRelu2: return call(Relu2{});
        case Activation::kGeglu: return call(Geglu{});
        case Activation::kClampedSwiglu: return call(ClampedSwiglu{});
    }
}

// ---- loops for functions without and with a gate

template <typename T, typename F> void forward_all(F, const ActivationForwardArgs& args) {
    for_chunks(args.N * args.F, [&](int64_t begin, int64_t count) {
        const T* in = args.in.as<T>() + begin;
        T* out = args.out.as<T>() + begin;
        for_lanes<Acc<T>>(count, [&](int64_t i, auto n) { store(out + i, F::value(load(in + i, n)), n); });
    });
}

template <typename T, typename F> void backward_all(F, const ActivationBackwardArgs& args) {
    for_chunks(args.N * args.F, [&](int64_t begin, int64_t count) {
        const T *in = args.in.as<T>() + begin, *dout = args.dout.as<T>() + begin;
        T* din = args.din.as<T>() + begin;
        for_lanes<Acc<T>>(count, [&](int64_t i, auto n) {
            store(din + i, F::gradient(load(dout + i, n), load(in + i, n)), n);
        });
    });
}

template <typename T, Gated<Acc<T>> F> void forward_all(F, const ActivationForwardArgs& args) {
    parallel_for(args.N, args.N * args.F, [&](int64_t row) {
        const T *gate = args.in.as<T>() + row * 2 * args.F, *up = gate + args.F;
        T* out = args.out.as<T>() + row * args.F;
        for_lanes<Acc<T>>(args.F, [&](int64_t i, auto n) {
            store(out + i, F::value(load(gate + i, n), load(up + i, n)), n);
        });
    });
}

template <typename T, Gated<Acc<T>> F> void backward_all(F, const ActivationBackwardArgs& args) {
    parallel_for(args.N, args.N * args.F, [&](int64_t row) {
        const T *gate = args.in.as<T>() + row * 2 * args.F, *up = gate + args.F;
        const T* dout = args.dout.as<T>() + row * args.F;
        T* dgate = args.din.as<T>() + row * 2 * args.F;
        for_lanes<Acc<T>>(args.F, [&](int64_t i, auto n) {
            Vec<Acc<T>> g = load(gate + i, n), u = load(up + i, n);
            F::gradient(load(dout + i, n), g, u);
            store(dgate + i, g, n);
            store(dgate + args.F + i, u, n);
        });
    });
}

template <typename T> void bias_all(const BiasBackwardArgs& args) {
    const int64_t C = args.C;
    const RowChunks chunks(args.N);
    Acc<T>* partial = args.scratch.as<Acc<T>>();
    parallel_for(chunks.count, args.N * C, [&](int64_t chunk) {
        Acc<T>* sum = partial + chunk * C;
        std::fill(sum, sum + C, Acc<T>(0));
        for (int64_t n = chunk * chunks.rows; n < std::min(args.N, (chunk + 1) * chunks.rows); n++)
            add_row(sum, args.dout.as<T>() + n * C, C);
    });
    add_partials_to_grad(args.dbias, partial, chunks.count, C, C);
}

}  // namespace

void activation_forward(Ctx&, const ActivationForwardArgs& given) {
    constexpr const char* kOp = "activation_forward";
    ActivationForwardArgs args = given;
    const Dtype working = args.in.dtype;
    const QuantResult result(kOp, given.quant, given.out, working, args.N, args.F);
    args.out = result.tensor();
    check_tensor(kOp, "in", args.in, working, args.N * activation_inputs(args.kind, args.F));
    check_tensor(kOp, "out", args.out, working, args.N * args.F);
    for_working_type(kOp, working, [&]<typename T>(Tag<T>) {
        with_activation(args.kind, [&](auto function) { forward_all<T>(function, args); });
    });
    result.quantize();
}

void activation_backward(Ctx&, const ActivationBackwardArgs& given) {
    constexpr const char* kOp = "activation_backward";
    ActivationBackwardArgs args = given;
    const Dtype working = args.in.dtype;
    const int64_t inputs = activation_inputs(args.kind, args.F);
    const QuantResult result(kOp, given.quant, given.din, working, args.N, inputs);
    args.din = result.tensor();
    check_tensor(kOp, "in", args.in, working, args.N * inputs);
    check_tensor(kOp, "din", args.din, working, args.N * inputs);
    check_tensor(kOp, "dout", args.dout, working, args.N * args.F);
    for_working_type(kOp, working, [&]<typename T>(Tag<T>) {
        with_activation(args.kind, [&](auto function) { backward_all<T>(function, args); });
    });
    result.quantize();
}

void bias_backward(Ctx&, const BiasBackwardArgs& args) {
    for_working_type("bias_backward", args.dout.dtype, [&]<typename T>(Tag<T>) {
        check_tensor("bias_backward", "dout", args.dout, dtype_of<T>, args.N * args.C);
        check_grad<T>("bias_backward", "dbias", args.dbias, args.C);
        check_at_least("bias_backward", "scratch", args.scratch, stat_dtype<T>, kPartialRows * args.C);
        bias_all<T>(args);
    });
}

}  // namespace cpu
