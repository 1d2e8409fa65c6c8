// Shared by all files of this folder: error checks, and checks of tensors and launch sizes.
#pragma once
#include <cuda_runtime.h>

#include "llmc/base/check.h"
#include "llmc/base/dtype.h"
#include "llmc/ops/device.h"

// Raises an Error with the call and the reason if a CUDA runtime call fails.
#define CUDA_CHECK(call) ::cuda::check_cuda((call), #call, __FILE__, __LINE__)

namespace cuda {

// Whether this build's machine code is for sm_90a, which wgmma needs.
#if defined(LLMC_SM90A)
inline constexpr bool kSm90aCode = true;
#else
inline constexpr bool kSm90aCode = false;
#endif

inline void check_cuda(cudaError_t status, const char* what, const char* file, int line) {
    if (status == cudaSuccess) return;
    FAIL(kExitBug, "%s:%d: %s: %s (%s)", file, line, what, cudaGetErrorString(status),
         cudaGetErrorName(status));
}

// The same for the start of a kernel, which the error names.
inline void check_launch(cudaError_t status, const void* kernel) {
    if (status == cudaSuccess) return;
    cudaGetLastError();
    const char* name = "a kernel";
    static_cast<void>(cudaFuncGetName(&name, kernel));
    FAIL(kExitBug, "launch of %s: %s (%s)", name, cudaGetErrorString(status), cudaGetErrorName(status));
}

inline cudaStream_t stream_of(const Ctx& ctx) { return static_cast<cudaStream_t>(ctx.stream); }

// Checks and converts a number of blocks; the limit is that of gridDim.x.
inline unsigned grid_size(int64_t blocks) {
    CHECK(blocks > 0 && blocks < (int64_t{1} << 31), "a grid of %lld blocks", (long long)blocks);
    return static_cast<unsigned>(blocks);
}

// Checks that `tensor` has exactly `elems` elements of `dtype`; `what` is "operation: field".
inline void expect(const Tensor& tensor, Dtype dtype, int64_t elems, const char* what) {
    CHECK(tensor.data != nullptr && tensor.elems == elems, "%s has %lld elements, not %lld", what,
          (long long)tensor.elems, (long long)elems);
    CHECK(tensor.dtype == dtype, "%s is %s, not %s", what, dtype_name(tensor.dtype), dtype_name(dtype));
}
// The same for a tensor that may be longer than the part used of it (tables, scratch).
inline void expect_at_least(const Tensor& tensor, Dtype dtype, int64_t elems, const char* what) {
    CHECK(tensor.data != nullptr && tensor.elems >= elems, "%s has %lld elements, fewer than %lld", what,
          (long long)tensor.elems, (long long)elems);
    CHECK(tensor.dtype == dtype, "%s is %s, not %s", what, dtype_name(tensor.dtype), dtype_name(dtype));
}

// Checks that `tensor` begins at a multiple of 16 bytes, or is absent.
inline void expect_aligned(const Tensor& tensor, const char* what) {
    CHECK(reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0, "%s is not 16-byte aligned", what);
}

}  // namespace cuda
