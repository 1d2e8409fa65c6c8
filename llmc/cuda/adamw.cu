// The optimizer step on a run of elements of one parameter.
#include "llmc/adam_math.h"
#include "llmc/cuda/common.cuh"
#include "llmc/rng.h"

namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 4;

// Math: adam_update of adam_math.h; moments in bf16 are rounded stochastically.
// Source: Loshchilov and Hutter, arXiv 1711.05101.
// Traffic: master, m, v read and written, grad read, param written, once.
// Requires: kWidth = 4 needs tensors aligned to 4 elements; the odd elements at the end go one by one.
// Parallel: a thread owns every (kThreads gridDim.x)-th group of kWidth elements, all blocks resident. The
// constants of the step are computed once a block, since the bias corrections are powers in fp64.
template <typename T, typename Moment, typename Grad, int kWidth>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    adamw_kernel(T* param, float* master, Moment* m, Moment* v, const Grad* grad, const StepState* state,
                 float beta1, float beta2, float eps, float weight_decay, uint64_t rng_key,
                 int64_t element_offset, int64_t elems) {
    if (state->skip) return;
    __shared__ AdamConstants<float> constants;
    const int64_t step = state->adam_step;
    if (threadIdx.x == 0) {
        constants = adam_constants<float>(beta1, beta2, eps, weight_decay, state->lr, state->grad_mul, step);
    }
    __syncthreads();
    const AdamConstants<float> c = constants;
    auto update = [&](int64_t i, float g, float& m_value, float& v_value, float& master_value) {
        adam_update(c, g, m_value, v_value, master_value);
        if constexpr (std::is_same_v<Moment, bf16>) {
            const Philox4 random = philox(rng_key, static_cast<uint64_t>(element_offset + i),
                                          static_cast<uint64_t>(step));
            // Exact when stored: the value is one that bf16 holds.
            m_value = to_float(stochastic_round_bf16(m_value, random.word[0]));
            v_value = to_float(stochastic_round_bf16(v_value, random.word[1]));
        }
    };
    const int64_t groups = elems / kWidth;
    const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    const int64_t threads = int64_t{gridDim.x} * kThreads;
    for (int64_t group = thread; group < groups; group += threads) {
        const int64_t i = group * kWidth;
        float gs[kWidth], ms[kWidth], vs[kWidth], values[kWidth];
        load_floats<float, kWidth>(master + i, values);
        load_floats<Moment, kWidth>(m + i, ms);
        load_floats<Moment, kWidth>(v + i, vs);
        load_floats<Grad, kWidth>(grad + i, gs);
#pragma unroll
        for (int j = 0; j < kWidth; j++) update(i + j, gs[j], ms[j], vs[j], values[j]);
        store_floats<float, kWidth>(master + i, values);
        store_floats<Moment, kWidth>(m + i, ms);
        store_floats<Moment, kWidth>(v + i, vs);
        store_floats<T, kWidth>(param + i, values);
    }
    const int64_t rest = groups * kWidth + thread;
    if (rest < elems) {
        float m_value = to_float(m[rest]), v_value = to_float(v[rest]), value = master[rest];
        update(rest, to_float(grad[rest]), m_value, v_value, value);
        master[rest] = value;
        m[rest] = from_float<Moment>(m_value);
        v[rest] = from_float<Moment>(v_value);
        param[rest] = from_float<T>(value);
    }
}

template <typename T, typename Moment, typename Grad> void launch_adamw(Ctx& ctx, const AdamWArgs& args) {
    const int64_t elems = args.param.elems;
    constexpr int kWidth = 4;
    auto aligned = [](const Tensor& t) {
        const auto bytes = static_cast<uintptr_t>(kWidth * dtype_bytes(t.dtype));
        return reinterpret_cast<uintptr_t>(t.data) % bytes == 0;
    };
    auto launch = [&](auto width) {
        const int64_t groups = std::max<int64_t>(elems / decltype(width)::value, 1);
        const int64_t blocks = std::min(ceil_div(groups, kThreads), int64_t{kBlocksPerSm} * ctx.sm_count);
        adamw_kernel<T, Moment, Grad, decltype(width)::value>
            <<<grid_size(blocks), kThreads, 0, stream_of(ctx)>>>(
                args.param.as<T>(), args.master.as<float>(), args.m.as<Moment>(), args.v.as<Moment>(),
                args.grad.as<Grad>(), args.state, args.beta1, args.beta2, args.eps, args.weight_decay,
                args.rng_key, args.element_offset, elems);
        CHECK_LAUNCH("adamw_kernel");
    };
    if (aligned(args.param) && aligned(args.master) && aligned(args.m) && aligned(args.v) &&
        aligned(args.grad)) {
        launch(std::integral_constant<int, kWidth>{});
    } else {
        launch(std::integral_constant<int, 1>{});
    }
}

}  // namespace

void adamw(Ctx& ctx, const AdamWArgs& args) {
    const int64_t elems = args.param.elems;
    if (elems == 0) return;
    expect(args.master, Dtype::kFp32, elems, "adamw: master");
    expect(args.m, args.m.dtype, elems, "adamw: m");
    expect(args.v, args.m.dtype, elems, "adamw: v");
    expect(args.grad, args.grad.dtype, elems, "adamw: grad");
    CHECK(args.state != nullptr, "adamw without a state");
    dispatch(args.param.dtype, "adamw: param", [&](auto param) {
        dispatch(args.m.dtype, "adamw: moments", [&](auto moment) {
            dispatch(args.grad.dtype, "adamw: grad", [&](auto grad) {
                launch_adamw<decltype(param), decltype(moment), decltype(grad)>(ctx, args);
            });
        });
    });
}

}  // namespace cuda
