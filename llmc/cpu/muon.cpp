// The operations of Muon that are not matmuls. CPU.
#include "llmc/base/rng.h"
#include "llmc/cpu/common.h"
#include "llmc/cpu/quantize.h"
#include "llmc/ops/adam_math.h"
#include "llmc/ops/moment_codes.h"

namespace cpu {
namespace {

template <typename M, typename G> void momentum_of_all(const MuonMomentumArgs& args) {
    using A = Acc<G>;
    const StepState& state = *args.state;
    const A beta = args.beta, grad_mul = state.grad_mul;
    M* m_of = args.m.as<M>();
    G* grad = args.grad.as<G>();
    for_elements(args.grad.elems, [&](int64_t i) {
        A m = widen(m_of[i]);
        grad[i] = G(nesterov_update<A>(beta, static_cast<A>(widen(grad[i])) * grad_mul, m));
        if constexpr (std::is_same_v<M, bf16>)
            m_of[i] = stochastic_round_bf16(m, philox(args.rng_key, static_cast<uint64_t>(args.element_offset + i),
                                                      static_cast<uint64_t>(state.adam_step)).word[0]);
        else m_of[i] = m;
    });
}

// The same with m in fp8, block by block: the scale of a block needs all of its new m.
template <typename G> void momentum_of_blocks(const MuonMomentumArgs& args) {
    const StepState& state = *args.state;
    auto* codes = static_cast<uint8_t*>(args.m.data);
    float* scale_inv = args.m_scale_inv.as<float>();
    G* grad = args.grad.as<G>();
    const auto update_block = [&](int64_t begin, int64_t count) {
        float m[kScaleBlock], &inv = scale_inv[begin / kScaleBlock];
        uint32_t amax = 0;
        for (int64_t j = 0; j < count; j++) {
            m[j] = decode_m(codes[begin + j], inv);
            const float g = static_cast<float>(widen(grad[begin + j])) * state.grad_mul;
            grad[begin + j] = G(nesterov_update(args.beta, g, m[j]));
            amax = std::max(amax, amax_bits_of(m[j]));
        }
        const MomentScale scale = moment_scale(amax, kLog2LargestM);
        inv = scale.scale_inv;
        Philox4 random{};
        for (int64_t j = 0; j < count; j++) {
            if (j % 4 == 0)
                random = philox(args.rng_key, static_cast<uint64_t>(args.element_offset + begin + j) / 4,
                                static_cast<uint64_t>(state.adam_step), kMomentRounds);
            const uint32_t code = encode_m(m[j], scale.scale, random.word[j % 4]);
            codes[begin + j] = scale.scale > 0 ? static_cast<uint8_t>(code) : uint8_t{0};
        }
    };
    for_chunks(args.grad.elems, [&](int64_t begin, int64_t count) {
        for (int64_t done = 0; done < count; done += kScaleBlock)
            update_block(begin + done, std::min(kScaleBlock, count - done));
    });
}

template <typename G> void momentum(const MuonMomentumArgs& args) {
    if constexpr (std::is_same_v<G, double>) momentum_of_all<double, double>(args);
    else if (args.m.dtype == Dtype::kE4m3) momentum_of_blocks<G>(args);
    else if (args.m.dtype == Dtype::kBf16) momentum_of_all<bf16, G>(args);
    else momentum_of_all<float, G>(args);
}

template <typename T, typename G> void update_all(const MuonUpdateArgs& args) {
    using A = Acc<G>;
    const A lr = args.state->lr, scale = args.scale, weight_decay = args.weight_decay;
    T* param = args.param ? args.param.as<T>() : nullptr;
    A* master = args.master.as<A>();
    const G* direction = args.direction.as<G>();
    for_chunks(args.master.elems, [&](int64_t begin, int64_t count) {
        uint32_t amax_bits = 0;
        for (int64_t i = begin; i < begin + count; i++) {
            master[i] = decayed_step<A>(lr, scale, weight_decay, widen(direction[i]), master[i]);
            if (param) param[i] = T(master[i]);
            amax_bits = std::max(amax_bits, amax_bits_of(static_cast<float>(bf16(static_cast<float>(master[i])))));
        }
        if (args.entry) raise_amax(&args.entry->amax_bits, amax_bits);
    });
}

}  // namespace

void muon_momentum(Ctx&, const MuonMomentumArgs& args) {
    const int64_t n = args.grad.elems;
    const bool fp8 = args.m.dtype == Dtype::kE4m3;
    check_tensor("muon_momentum", "m", args.m, args.m.dtype, n);
    check_tensor("muon_momentum", "m_scale_inv", args.m_scale_inv, Dtype::kFp32, fp8 ? scale_blocks(n) : 0);
    CHECK(!fp8 || (args.grad.dtype != Dtype::kFp64 && args.element_offset % kScaleBlock == 0),
          "muon_momentum: fp8 momentum of %s from element %lld", dtype_name(args.grad.dtype),
          (long long)args.element_offset);
    if (args.state->skip) return;
    CHECK(args.state->adam_step > 0, "muon_momentum before step_guard: step %lld", (long long)args.state->adam_step);
    for_working_type("muon_momentum", args.grad.dtype, [&]<typename G>(Tag<G>) { momentum<G>(args); });
}

void muon_normalize(Ctx&, const MuonNormalizeArgs& args) {
    const int64_t n = args.matrix.elems / args.matrices;
    check_tensor("muon_normalize", "matrix", args.matrix, args.matrix.dtype, args.matrices * n);
    for_working_type("muon_normalize", args.matrix.dtype, [&]<typename T>(Tag<T>) {
        for (int64_t m = 0; m < args.matrices; m++) {
            const auto by = static_cast<Acc<T>>(muon_norm_inv(args.sum_squares[m], args.margin));
            T* matrix = args.matrix.as<T>() + m * n;
            for_elements(n, [&](int64_t i) { matrix[i] = T(widen(matrix[i]) * by); });
        }
    });
}

void muon_polynomial(Ctx&, const MuonPolynomialArgs& args) {
    const int64_t k = args.k, elems = args.matrices * k * k;
    check_tensor("muon_polynomial", "square", args.square, args.square.dtype, elems);
    check_tensor("muon_polynomial", "gram", args.gram, args.square.dtype, elems);
    for_working_type("muon_polynomial", args.square.dtype, [&]<typename T>(Tag<T>) {
        using A = Acc<T>;
        const A a = static_cast<A>(args.a), b = static_cast<A>(args.b), c = static_cast<A>(args.c);
        T* square = args.square.as<T>();
        const T* gram = args.gram.as<T>();
        for_elements(elems, [&](int64_t i) {
            square[i] = T(polynomial_element<A>(a, b, c, widen(gram[i]), widen(square[i]), i / k % k == i % k));
        });
    });
}

void muon_row_norm(Ctx&, const MuonRowNormArgs& args) {
    check_tensor("muon_row_norm", "matrix", args.matrix, args.matrix.dtype, args.rows * args.cols);
    for_working_type("muon_row_norm", args.matrix.dtype, [&]<typename T>(Tag<T>) {
        using A = Acc<T>;
        for (const Tensor* v : {&args.v, &args.new_v}) check_tensor("muon_row_norm", "v", *v, stat_dtype<T>, args.rows);
        const A* v = args.v.as<A>();
        A* new_v = args.new_v.as<A>();
        parallel_for(args.rows, args.matrix.elems, [&](int64_t r) {
            T* row = args.matrix.as<T>() + r * args.cols;
            const double squares = sum_terms(args.cols, [&](int64_t i) {
                const double x = static_cast<double>(widen(row[i]));
                return x * x;
            });
            new_v[r] = args.state->skip ? v[r] : row_moment<A>(args.beta2, v[r], squares, args.cols);
            const A by = row_norm_inv(new_v[r]);
            for (int64_t i = 0; i < args.cols; i++) row[i] = T(widen(row[i]) * by);
        });
    });
}

void muon_update(Ctx&, const MuonUpdateArgs& args) {
    const int64_t n = args.master.elems;
    const bool fp64 = args.master.dtype == Dtype::kFp64;
    check_tensor("muon_update", "master", args.master, fp64 ? Dtype::kFp64 : Dtype::kFp32, n);
    check_tensor("muon_update", "direction", args.direction, args.direction.dtype, n);
    CHECK(fp64 == (args.direction.dtype == Dtype::kFp64), "muon_update: direction is %s",
          dtype_name(args.direction.dtype));
    if (args.param) check_tensor("muon_update", "param", args.param, args.param.dtype, n);
    if (args.state->skip) return;
    const Dtype param = args.param ? args.param.dtype : fp64 ? Dtype::kFp64 : Dtype::kBf16;
    for_working_type("muon_update", param, [&]<typename T>(Tag<T>) {
        if constexpr (std::is_same_v<T, double>) update_all<double, double>(args);
        else if (args.direction.dtype == Dtype::kBf16) update_all<T, bf16>(args);
        else update_all<T, float>(args);
    });
}

}  // namespace cpu
