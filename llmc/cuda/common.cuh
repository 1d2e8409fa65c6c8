// Shared by all kernel files: dtype dispatch, launches, 16-byte accesses, bf16 conversion, reductions. Needs compute
// capability 8.0. Reductions have a fixed order, so equal inputs give equal bits.
#pragma once
#include <cuda_bf16.h>

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "llmc/cuda/common.h"
#include "llmc/ops/ops.h"

// Reports invalid launch parameters without synchronising; used after every <<<>>>, with the kernel's name.
#define CHECK_LAUNCH(kernel) ::cuda::check_cuda(cudaGetLastError(), "launch of " kernel, __FILE__, __LINE__)

namespace cuda {

// ---- host: dtypes, launch sizes

// Whether a block of the kernel can have `bytes` of dynamic shared memory.
template <typename Kernel> bool shared_memory_fits(const Ctx& ctx, Kernel* kernel, size_t bytes) {
    int limit = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, ctx.index));
    cudaFuncAttributes attributes;
    CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    return bytes + attributes.sharedSizeBytes <= static_cast<size_t>(limit);
}
// Lets the kernel use `bytes` of dynamic shared memory; the default is 48 KB, static and dynamic together.
template <typename Kernel> void allow_shared_memory(Kernel* kernel, size_t bytes) {
    if (bytes <= 32 * 1024) return;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(bytes)));
}

// Calls f(T{}) with T = float or bf16. fp64 exists on the CPU only.
template <typename F> void dispatch(Dtype dtype, const char* what, F&& f) {
    if (dtype == Dtype::kFp32) return f(float{});
    if (dtype == Dtype::kBf16) return f(bf16{});
    CHECK(false, "%s in %s: the CUDA device computes in fp32 and bf16 (fp64 is for the CPU device)", what,
          dtype_name(dtype));
}

// Whether rows of `columns` elements of T at these addresses (null = absent) can be accessed 16 bytes at a time.
template <typename T> bool vectorizable(int64_t columns, std::initializer_list<const void*> pointers) {
    for (const void* p : pointers) {
        if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return false;
    }
    return columns % static_cast<int64_t>(16 / sizeof(T)) == 0;
}

// Whether a tensor begins at a multiple of `elems` of its elements; true if it is absent.
inline bool aligned(const Tensor& tensor, int64_t elems) {
    const auto bytes = static_cast<uintptr_t>(elems * dtype_bytes(tensor.dtype));
    return reinterpret_cast<uintptr_t>(tensor.data) % bytes == 0;
}

// Blocks for a kernel whose blocks process `vectors` vectors of `width` elements each, and the remaining elements.
inline unsigned flat_blocks(int64_t elems, int width, int vectors) {
    return grid_size(ceil_div(std::max<int64_t>(elems / width, 1), vectors));
}

// Calls f(width) with the elements per access as a compile-time constant: 16 bytes of T, or 1 on the scalar path.
template <typename T, typename F> void with_width(bool vector, F&& f) {
    if (vector) f(std::integral_constant<int, static_cast<int>(16 / sizeof(T))>{});
    else f(std::integral_constant<int, 1>{});
}

// Starts a kernel on ctx's stream and checks its launch parameters without synchronising.
template <typename... Params, typename... Args>
void launch_with(const Ctx& ctx, cudaLaunchAttribute* attribute, void (*kernel)(Params...), dim3 grid, dim3 block,
                 size_t shared_bytes, const Args&... args) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes;
    config.stream = stream_of(ctx), config.attrs = attribute, config.numAttrs = attribute ? 1 : 0;
    check_launch(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...),
                 reinterpret_cast<const void*>(kernel));
}
template <typename... Params, typename... Args>
void launch_kernel(const Ctx& ctx, void (*kernel)(Params...), dim3 grid, dim3 block, const Args&... args) {
    launch_with(ctx, nullptr, kernel, grid, block, 0, args...);
}

// ---- programmatic dependent launch. The kernel starts while the previous kernel of the stream drains, then waits
// for its end. This hides the launch latency: amax of 8192 x 4096 took 16.9 us instead of 18.4 on an H200. The kernel
// completes only after the previous one, so later events, copies and launches need no care.

// Every thread of such a kernel must call this before it accesses global memory: previous kernels may still write what
// this one reads and read what it writes.
__device__ inline void wait_for_previous_kernels() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}
// The attribute is set on compute capability 9.0 and later only. Code compiled for 8.x does not wait, but cannot run
// there.
template <typename... Params, typename... Args>
void launch_early(const Ctx& ctx, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
                  const Args&... args) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    launch_with(ctx, ctx.sm >= 90 ? &attribute : nullptr, kernel, grid, block, shared_bytes, args...);
}

// ---- device: conversion

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(bf16 value) {
    return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}

// Rounds to nearest even with the hardware's conversion; bf16::bf16(float) does the same in software.
template <typename T> __device__ inline T from_float(float value) {
    if constexpr (std::is_same_v<T, bf16>) {
        return bf16::from_bits(__bfloat16_as_ushort(__float2bfloat16_rn(value)));
    } else {
        return value;
    }
}

// The value rounded to T, as a later reader of the stored element gets it.
template <typename T> __device__ inline float rounded(float value) { return to_float(from_float<T>(value)); }

// ---- device: 16-byte accesses. A uint4 holds kVec<T> unconverted elements: a bf16 row takes half the registers of its
// floats.

template <typename T> inline constexpr int kVec = static_cast<int>(16 / sizeof(T));

template <typename T> __device__ inline uint4 load_vec(const T* p) {
    return *reinterpret_cast<const uint4*>(p);
}
template <typename T> __device__ inline void store_vec(T* p, const uint4& raw) {
    *reinterpret_cast<uint4*>(p) = raw;
}
// For data that is accessed once and larger than the L2 cache: evicted first.
template <typename T> __device__ inline uint4 load_vec_streaming(const T* p) {
    return __ldcs(reinterpret_cast<const uint4*>(p));
}
template <typename T> __device__ inline void store_vec_streaming(T* p, const uint4& raw) {
    __stcs(reinterpret_cast<uint4*>(p), raw);
}

__device__ inline uint32_t pack_bf16x2(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, 4);
    return bits;
}
__device__ inline float bf16x2_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float bf16x2_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

template <typename T> __device__ inline void unpack(const uint4& raw, float (&value)[kVec<T>]) {
    const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (std::is_same_v<T, bf16>) {
            value[2 * i] = bf16x2_low(word[i]);
            value[2 * i + 1] = bf16x2_high(word[i]);
        } else {
            value[i] = __uint_as_float(word[i]);
        }
    }
}
template <typename T> __device__ inline uint4 pack(const float (&value)[kVec<T>]) {
    if constexpr (std::is_same_v<T, bf16>) {
        return make_uint4(pack_bf16x2(value[0], value[1]), pack_bf16x2(value[2], value[3]),
                          pack_bf16x2(value[4], value[5]), pack_bf16x2(value[6], value[7]));
    } else {
        return make_uint4(__float_as_uint(value[0]), __float_as_uint(value[1]), __float_as_uint(value[2]),
                          __float_as_uint(value[3]));
    }
}

// Load and store `count` consecutive elements as floats: 1 (the scalar path of a kernel), or a multiple of 4 at an
// address aligned to 16 bytes (8 for 4 elements of bf16).
template <typename T, int count> __device__ inline void load_floats(const T* p, float (&value)[count]) {
    if constexpr (count == 1) {
        value[0] = to_float(*p);
    } else if constexpr (sizeof(T) * count == 8) {
        uint2 raw = *reinterpret_cast<const uint2*>(p);
        value[0] = bf16x2_low(raw.x), value[1] = bf16x2_high(raw.x);
        value[2] = bf16x2_low(raw.y), value[3] = bf16x2_high(raw.y);
    } else {
        static_assert(count % kVec<T> == 0);
#pragma unroll
        for (int i = 0; i < count; i += kVec<T>) {
            float part[kVec<T>];
            unpack<T>(load_vec(p + i), part);
#pragma unroll
            for (int j = 0; j < kVec<T>; j++) value[i + j] = part[j];
        }
    }
}
template <typename T, int count> __device__ inline void store_floats(T* p, const float (&value)[count]) {
    if constexpr (count == 1) {
        *p = from_float<T>(value[0]);
    } else if constexpr (sizeof(T) * count == 8) {
        *reinterpret_cast<uint2*>(p) =
            make_uint2(pack_bf16x2(value[0], value[1]), pack_bf16x2(value[2], value[3]));
    } else {
        static_assert(count % kVec<T> == 0);
#pragma unroll
        for (int i = 0; i < count; i += kVec<T>) {
            float part[kVec<T>];
#pragma unroll
            for (int j = 0; j < kVec<T>; j++) part[j] = value[i + j];
            store_vec(p + i, pack<T>(part));
        }
    }
}

// kWidth unconverted elements (16 bytes of T, 8 bytes of bf16, or 1 element), so that loads in flight take few
// registers.
template <typename T, int kWidth> struct Packed {
    using Raw = std::conditional_t<kWidth == 1, T, std::conditional_t<sizeof(T) * kWidth == 8, uint2, uint4>>;
    Raw raw;
    __device__ void load(const T* p) { raw = *reinterpret_cast<const Raw*>(p); }
    __device__ void unpack_to(float (&value)[kWidth]) const {
        if constexpr (kWidth == 1) {
            value[0] = to_float(raw);
        } else if constexpr (sizeof(T) * kWidth == 8) {
            value[0] = bf16x2_low(raw.x), value[1] = bf16x2_high(raw.x);
            value[2] = bf16x2_low(raw.y), value[3] = bf16x2_high(raw.y);
        } else {
            unpack<T>(raw, value);
        }
    }
};

// ---- device: reductions. Butterflies: every lane ends with the same bits.

// Over aligned groups of `width` lanes (a power of two).
template <int width = 32, typename V> __device__ inline V warp_sum(V value) {
#pragma unroll
    for (int offset = width / 2; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    return value;
}
template <int width = 32> __device__ inline float warp_max(float value) {
#pragma unroll
    for (int offset = width / 2; offset > 0; offset /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
    }
    return value;
}

// Sums over the `warps` warps of a block; every thread gets the sum. shared: 32 values, not overwritten before another
// __syncthreads (callers with several reductions pass separate ones).
template <typename V> __device__ inline V block_sum(V value, V* shared, int warp, int lane, int warps) {
    value = warp_sum(value);
    if (lane == 0) shared[warp] = value;
    __syncthreads();
    return warp_sum(lane < warps ? shared[lane] : V(0));
}

}  // namespace cuda
