// Elementwise operations on parameters: AdamW, initial values and casts. CPU.
#include "llmc/base/rng.h"
#include "llmc/cpu/quantize.h"
#include "llmc/ops/adam_math.h"
#include "llmc/ops/moment_codes.h"

namespace cpu {
namespace {

// Storage types: T of the parameter, M of the moments, G of the gradient.
template <typename T, typename M, typename G> void update_all(const AdamWArgs& args) {
    using A = Acc<T>;
    const StepState& state = *args.state;
    const auto constants = adam_constants<A>(args.beta1, args.beta2, args.eps, args.weight_decay,
                                             state.lr * args.lr_scale, state.grad_mul,
                                             state.adam_step - args.moments_begin);
    T* param = args.param ? args.param.as<T>() : nullptr;
    A* master = args.master.as<A>();
    M *m_of = args.m.as<M>(), *v_of = args.v.as<M>();
    const G* grad = args.grad.as<G>();
    for_chunks(args.master.elems, [&](int64_t begin, int64_t count) {
        uint32_t amax_bits = 0;
        for (int64_t i = begin; i < begin + count; i++) {
            A m = widen(m_of[i]), v = widen(v_of[i]), value = master[i];
            adam_update(constants, static_cast<A>(widen(grad[i])), m, v, value);
            if constexpr (std::is_same_v<M, bf16>) {
                Philox4 random = philox(args.rng_key, static_cast<uint64_t>(args.element_offset + i),
                                        static_cast<uint64_t>(state.adam_step));
                m_of[i] = stochastic_round_bf16(m, random.word[0]);
                v_of[i] = stochastic_round_bf16(v, random.word[1]);
            } else {
                m_of[i] = m;
                v_of[i] = v;
            }
            master[i] = value;
            if (param) param[i] = T(value);
            if constexpr (!std::is_same_v<A, double>)
                amax_bits = std::max(amax_bits, amax_bits_of(static_cast<float>(bf16(value))));
        }
        if (args.entry) raise_amax(&args.entry->amax_bits, amax_bits);
    });
}

// The same with moments in fp8, block by block: the scales of a block need all of its new moments.
template <typename T, typename G> void update_blocks(const AdamWArgs& args) {
    const StepState& state = *args.state;
    const auto c = adam_constants<float>(args.beta1, args.beta2, args.eps, args.weight_decay,
                                         state.lr * args.lr_scale, state.grad_mul,
                                         state.adam_step - args.moments_begin);
    T* param = args.param ? args.param.as<T>() : nullptr;
    float* master = args.master.as<float>();
    auto *m_codes = static_cast<uint8_t*>(args.m.data), *v_codes = static_cast<uint8_t*>(args.v.data);
    float *m_scale_inv = args.m_scale_inv.as<float>(), *v_scale_inv = args.v_scale_inv.as<float>();
    const G* grad = args.grad.as<G>();
    const auto update_block = [&](int64_t begin, int64_t count) {   // returns the amax of the weights
        const int64_t block = begin / kScaleBlock;
        float m[kScaleBlock], v[kScaleBlock];
        uint32_t m_amax = 0, v_amax = 0, amax = 0;
        for (int64_t j = 0; j < count; j++) {
            const int64_t i = begin + j;
            m[j] = decode_m(m_codes[i], m_scale_inv[block]), v[j] = decode_v(v_codes[i], v_scale_inv[block]);
            adam_update(c, static_cast<float>(widen(grad[i])), m[j], v[j], master[i]);
            m_amax = std::max(m_amax, amax_bits_of(m[j])), v_amax = std::max(v_amax, amax_bits_of(v[j]));
            if (param) param[i] = T(master[i]);
            amax = std::max(amax, amax_bits_of(static_cast<float>(bf16(master[i]))));
        }
        const MomentScale of_m = moment_scale(m_amax, kLog2LargestM), of_v = moment_scale(v_amax, kLog2LargestV);
        m_scale_inv[block] = of_m.scale_inv, v_scale_inv[block] = of_v.scale_inv;
        Philox4 random{};
        for (int64_t j = 0; j < count; j++) {
            if (j % 4 == 0)
                random = philox(args.rng_key, static_cast<uint64_t>(args.element_offset + begin + j) / 4,
                                static_cast<uint64_t>(state.adam_step), kMomentRounds);
            const uint32_t bits = random.word[j % 4];
            const uint32_t m_code = encode_m(m[j], of_m.scale, bits), v_code = encode_v(v[j], of_v.scale, bits >> 16);
            m_codes[begin + j] = of_m.scale > 0 ? static_cast<uint8_t>(m_code) : uint8_t{0};
            v_codes[begin + j] = of_v.scale > 0 ? static_cast<uint8_t>(v_code) : uint8_t{0};
        }
        return amax;
    };
    for_chunks(args.master.elems, [&](int64_t begin, int64_t count) {
        uint32_t amax = 0;
        for (int64_t done = 0; done < count; done += kScaleBlock)
            amax = std::max(amax, update_block(begin + done, std::min(kScaleBlock, count - done)));
        if (args.entry) raise_amax(&args.entry->amax_bits, amax);
    });
}

// Updates with gradients of type G.
template <typename T, typename G> void update(const AdamWArgs& args) {
    if (args.m.dtype == Dtype::kE4m3) update_blocks<T, G>(args);
    else if (args.m.dtype == Dtype::kBf16) update_all<T, bf16, G>(args);
    else update_all<T, float, G>(args);
}

// Rounds to nearest even once. A double that is not a float is first replaced by the adjacent float with an odd last
// bit, which is on the same side of every bf16 tie.
bf16 round_to_bf16(double value) {
    float near = static_cast<float>(value);
    uint32_t bits = bf16::to_bits(near);
    bool odd = bits & 1;
    if (static_cast<double>(near) == value || near != near || odd || (bits & 0x7fffffffu) >= 0x7f800000u)
        return bf16(near);
    // The adjacent float on the other side of the value; magnitudes grow with the bits.
    bool too_large = std::fabs(static_cast<double>(near)) > std::fabs(value);
    bits = too_large ? bits - 1 : bits + 1;
    float odd_neighbour;
    memcpy(&odd_neighbour, &bits, 4);
    return bf16(odd_neighbour);
}

template <typename To, typename From> To convert(From value) {
    if constexpr (std::is_same_v<To, bf16> && std::is_same_v<From, double>) return round_to_bf16(value);
    else if constexpr (std::is_same_v<To, bf16>) return bf16(static_cast<float>(value));
    else return static_cast<To>(widen(value));
}

}  // namespace

void adamw(Ctx&, const AdamWArgs& args) {
    const int64_t n = args.master.elems;
    const bool fp64 = args.master.dtype == Dtype::kFp64;
    const Dtype param_type = args.param ? args.param.dtype : fp64 ? Dtype::kFp64 : Dtype::kBf16;
    check_optional("adamw", "param", args.param, param_type, n);
    check_tensor("adamw", "master", args.master, param_type == Dtype::kFp64 ? Dtype::kFp64 : Dtype::kFp32, n);
    CHECK(!(fp64 && args.entry), "adamw: an FP8 entry with parameters in fp64");
    check_tensor("adamw", "m", args.m, args.m.dtype, n);
    const bool fp8 = args.m.dtype == Dtype::kE4m3;
    check_tensor("adamw", "v", args.v, fp8 ? Dtype::kUe5m3 : args.m.dtype, n);
    check_tensor("adamw", "m_scale_inv", args.m_scale_inv, Dtype::kFp32, fp8 ? scale_blocks(n) : 0);
    check_tensor("adamw", "v_scale_inv", args.v_scale_inv, Dtype::kFp32, fp8 ? scale_blocks(n) : 0);
    CHECK(!fp8 || (!fp64 && args.element_offset % kScaleBlock == 0), "adamw: fp8 moments in %s from element %lld",
          dtype_name(param_type), (long long)args.element_offset);
    for_working_type("adamw", param_type, [&]<typename T>(Tag<T>) {
        check_grad<T>("adamw", "grad", args.grad, n);
        if (args.state->skip) return;
        CHECK(args.state->adam_step > args.moments_begin, "adamw before step_guard: step %lld, moments from %lld",
              (long long)args.state->adam_step, (long long)args.moments_begin);
        if constexpr (std::is_same_v<T, double>) update_all<double, double, double>(args);
        else if (args.grad.dtype == Dtype::kBf16) update<T, bf16>(args);
        else update<T, float>(args);
    });
}

void ema(Ctx&, const EmaArgs& args) {
    check_tensor("ema", "master", args.master, args.ema.dtype, args.ema.elems);
    if (args.state->skip) return;
    for_working_type("ema", args.ema.dtype, [&]<typename T>(Tag<T>) {
        using A = Acc<T>;
        const A share = static_cast<A>(ema_share(args.decay, args.state->adam_step));
        T* average = args.ema.as<T>();
        const T* master = args.master.as<T>();
        for_elements(args.ema.elems, [&](int64_t i) {
            const A old = widen(average[i]);
            average[i] = T(adam_fma(share, widen(master[i]) - old, old));
        });
    });
}

void fill_normal(Ctx&, const FillNormalArgs& args) {
    for_working_type("fill_normal", args.out.dtype, [&]<typename T>(Tag<T>) {
        T* out = args.out.as<T>();
        for_elements(args.out.elems, [&](int64_t i) {
            const float normal = rng_normal(args.key, static_cast<uint64_t>(args.element_offset + i));
            out[i] = T(fmaf(args.std, normal, args.mean));
        });
    });
}

void fill_constant(Ctx&, const FillConstantArgs& args) {
    for_working_type("fill_constant", args.out.dtype, [&]<typename T>(Tag<T>) {
        std::fill(args.out.as<T>(), args.out.as<T>() + args.out.elems, T(args.value));
    });
}

void cast(Ctx&, const CastArgs& args) {
    check_tensor("cast", "out", args.out, args.out.dtype, args.in.elems);
    for_working_type("cast", args.out.dtype, [&]<typename To>(Tag<To>) {
        for_working_type("cast", args.in.dtype, [&]<typename From>(Tag<From>) {
            To* out = args.out.as<To>();
            const From* in = args.in.as<From>();
            for_elements(args.in.elems, [&](int64_t i) { out[i] = convert<To>(in[i]); });
        });
    });
}

}  // namespace cpu
