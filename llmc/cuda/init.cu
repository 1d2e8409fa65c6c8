// Initial values and conversions, elementwise, with the same bits as the CPU.
#include "llmc/base/rng.h"
#include "llmc/cuda/common.cuh"

namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVecsPerThread = 2;
constexpr int kCastWidth = 4;   // 16 bytes of fp32, 8 of bf16: a warp's accesses are contiguous in both
constexpr int kCastsPerThread = 4;

// Math: out[i] = mean + std * rng_normal(key, offset + i), one fma.
// Source: Box-Muller over Philox, rng.h.
// Traffic: out written once; about 150 instructions per element.
// Requires: a build without fast-math options (see rng.h on contraction).
// Parallel: a thread owns one element.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    fill_normal_kernel(T* out, uint64_t key, int64_t offset, float mean, float std, int64_t elems) {
    const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (i >= elems) return;
    out[i] = from_float<T>(fmaf(std, rng_normal(key, static_cast<uint64_t>(offset + i)), mean));
}

// Math: out[i] = value.
// Source: none needed.
// Traffic: out written once.
// Requires: kWidth > 1 needs an aligned tensor; the remaining elements are processed one by one.
// Parallel: a thread owns 2 vectors, kThreads vectors apart.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads) fill_constant_kernel(T* out, float value, int64_t elems) {
    const int64_t vectors = elems / kWidth;
    const int64_t first = int64_t{blockIdx.x} * kThreads * kVecsPerThread + threadIdx.x;
    float values[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; i++) values[i] = value;
#pragma unroll
    for (int k = 0; k < kVecsPerThread; k++) {
        const int64_t v = first + k * kThreads;
        if (v < vectors) store_floats<T, kWidth>(out + v * kWidth, values);
    }
    const int64_t rest = vectors * kWidth + threadIdx.x;
    if (blockIdx.x == 0 && rest < elems) out[rest] = from_float<T>(value);
}

// Math: out[i] = in[i], rounded to nearest even.
// Source: IEEE 754.
// Traffic: in read, out written, once.
// Requires: kWidth > 1 needs aligned tensors; the remaining elements are processed one by one.
// Parallel: a thread owns 4 groups of kWidth elements, kThreads groups apart.
template <typename To, typename From, int kWidth>
__global__ void __launch_bounds__(kThreads) cast_kernel(To* out, const From* in, int64_t elems) {
    const int64_t vectors = elems / kWidth;
    const int64_t first = int64_t{blockIdx.x} * kThreads * kCastsPerThread + threadIdx.x;
    float value[kCastsPerThread][kWidth];
#pragma unroll
    for (int k = 0; k < kCastsPerThread; k++) {
        const int64_t v = first + k * kThreads;
        if (v < vectors) load_floats<From, kWidth>(in + v * kWidth, value[k]);
    }
#pragma unroll
    for (int k = 0; k < kCastsPerThread; k++) {
        const int64_t v = first + k * kThreads;
        if (v < vectors) store_floats<To, kWidth>(out + v * kWidth, value[k]);
    }
    const int64_t rest = vectors * kWidth + threadIdx.x;
    if (blockIdx.x == 0 && rest < elems) out[rest] = from_float<To>(to_float(in[rest]));
}

}  // namespace

void fill_normal(Ctx& ctx, const FillNormalArgs& args) {
    const int64_t elems = args.out.elems;
    if (elems == 0) return;
    dispatch(args.out.dtype, "fill_normal", [&](auto type) {
        using T = decltype(type);
        launch_kernel(ctx, fill_normal_kernel<T>, grid_size(ceil_div(elems, kThreads)), kThreads, args.out.as<T>(),
                      args.key, args.element_offset, args.mean, args.std, elems);
    });
}

void fill_constant(Ctx& ctx, const FillConstantArgs& args) {
    const int64_t elems = args.out.elems;
    if (elems == 0) return;
    dispatch(args.out.dtype, "fill_constant", [&](auto type) {
        using T = decltype(type);
        T* out = args.out.as<T>();
        with_width<T>(vectorizable<T>(0, {out}), [&](auto width) {
            constexpr int kWidth = decltype(width)::value;
            launch_kernel(ctx, fill_constant_kernel<T, kWidth>, flat_blocks(elems, kWidth, kThreads * kVecsPerThread),
                          kThreads, out, args.value, elems);
        });
    });
}

void cast(Ctx& ctx, const CastArgs& args) {
    const int64_t elems = args.in.elems;
    CHECK(args.out.elems == elems, "cast of %lld elements into %lld", (long long)elems, (long long)args.out.elems);
    if (elems == 0) return;
    if (args.out.dtype == args.in.dtype) {
        copy_on_device(ctx, args.out.data, args.in.data, args.in.bytes());
        return;
    }
    dispatch(args.out.dtype, "cast: out", [&](auto to_type) {
        using To = decltype(to_type);
        dispatch(args.in.dtype, "cast: in", [&](auto from_type) {
            using From = decltype(from_type);
            To* out = args.out.as<To>();
            const From* in = args.in.as<From>();
            auto launch = [&](auto width) {
                constexpr int kWidth = decltype(width)::value;
                launch_kernel(ctx, cast_kernel<To, From, kWidth>,
                              flat_blocks(elems, kWidth, kThreads * kCastsPerThread), kThreads, out, in, elems);
            };
            if (vectorizable<bf16>(0, {out, in})) launch(std::integral_constant<int, kCastWidth>{});
            else launch(std::integral_constant<int, 1>{});
        });
    });
}

}  // namespace cuda
