// Shared by the benches of matmuls: random operands, a context, alternating timings.
#pragma once
#include <cuda_fp8.h>

#include <algorithm>
#include <vector>

#include "llmc/base/fp8.h"
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/gemm.h"

namespace gemm_bench {

// Grid-stride: the same values, saturated to the format.
static __global__ void codes_kernel(uint8_t* out, const float* in, int64_t elems, __nv_fp8_interpretation_t format) {
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < elems; i += stride)
        out[i] = __nv_cvt_float_to_fp8(in[i], __NV_SATFINITE, format);
}

// Grid-stride: the same values, rounded to whole numbers up to 127.
static __global__ void int8_codes_kernel(int8_t* out, const float* in, int64_t elems) {
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < elems; i += stride)
        out[i] = static_cast<int8_t>(min(max(__float2int_rn(in[i]), -127), 127));
}

// Operands of one shape; freed at the end of the scope.
struct Buffers {
    Ctx& ctx;
    std::vector<void*> memory;
    explicit Buffers(Ctx& c) : ctx(c) {}
    ~Buffers() {
        for (void* p : memory) cuda::device_free(p);
    }
    Tensor empty(Dtype dtype, int64_t elems) {
        memory.push_back(cuda::device_alloc(elems * dtype_bytes(dtype)));
        return {memory.back(), dtype, elems};
    }
    // Normally distributed numbers; those in FP8 and INT8 use the range of the format, as after a cast with one scale.
    Tensor random(Dtype dtype, int64_t elems, float mean = 0, float std = 0.5f) {
        Tensor t = empty(dtype, elems);
        const bool codes = dtype_bytes(dtype) == 1;
        Tensor values = codes ? Tensor{cuda::device_alloc(4 * elems), Dtype::kFp32, elems} : t;
        if (codes) std = dtype == Dtype::kInt8 ? 127.0f / 4 : fp8_largest(dtype) / 6;
        cuda::fill_normal(ctx, {.out = values, .key = memory.size(), .element_offset = 0, .mean = mean, .std = std});
        if (codes) {
            if (dtype == Dtype::kInt8)
                int8_codes_kernel<<<1024, 256, 0, cuda::stream_of(ctx)>>>(t.as<int8_t>(), values.as<float>(), elems);
            else
                codes_kernel<<<1024, 256, 0, cuda::stream_of(ctx)>>>(
                    static_cast<uint8_t*>(t.data), values.as<float>(), elems,
                    dtype == Dtype::kE4m3 ? __NV_E4M3 : __NV_E5M2);
            CHECK_LAUNCH("codes_kernel");
            cuda::synchronize(ctx);
            cuda::device_free(values.data);
        }
        return t;
    }
};

// A context whose matmuls search among the library's algorithms.
struct Context {
    Ctx ctx;
    Context() {
        cuda::device_open(ctx, 0);
        cuda::gemm_set_search(ctx, true);
        ctx.gemm->search_custom = false;
    }
    ~Context() { cuda::device_close(ctx); }
    Context(const Context&) = delete;
};

// Calls that are compared: the same product with operands rotated beyond the L2 cache, on one context.
struct Candidate {
    Ctx& ctx;
    std::vector<GemmArgs> sets;
    bool own = false;   // on our own blockwise kernel
    void run(size_t i) const { (own ? cuda::gemm_fp8_blockwise : cuda::gemm)(ctx, sets[i % sets.size()]); }
};

// Median microseconds of each candidate, over `budget_us` in all. The candidates alternate: the card is power-limited,
// so that one that runs after a pause looks faster. The first calls, which search and load kernels, do not count.
template <typename Candidate> std::vector<float> times_in_turn(std::vector<Candidate>& candidates, float budget_us) {
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    auto once = [&](Candidate& c, size_t i) {
        CUDA_CHECK(cudaEventRecord(begin, cuda::stream_of(c.ctx)));
        c.run(i);
        CUDA_CHECK(cudaEventRecord(end, cuda::stream_of(c.ctx)));
        CUDA_CHECK(cudaEventSynchronize(end));
        float ms = 0;
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        return ms * 1000;
    };
    std::vector<std::vector<float>> times(candidates.size());
    float total = 0;
    for (size_t i = 0; total < budget_us || i < 8; i++)
        for (size_t c = 0; c < candidates.size(); c++) {
            const float us = once(candidates[c], i);
            if (i < 3) continue;
            times[c].push_back(us);
            total += us;
        }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    std::vector<float> medians;
    for (std::vector<float>& t : times) {
        std::nth_element(t.begin(), t.begin() + static_cast<int64_t>(t.size() / 2), t.end());
        medians.push_back(t[t.size() / 2]);
    }
    return medians;
}

inline double tflops(int64_t M, int64_t N, int64_t K, float us) {
    return 2e-6 * static_cast<double>(M * N) * static_cast<double>(K) / us;
}

}  // namespace gemm_bench
