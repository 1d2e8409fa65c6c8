#include "llmc/cuda/tensor_map.h"

namespace cuda {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// From the driver that is loaded, so that the program starts on machines without one.
Encode encoder() {
    static const Encode encode = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                                    &found));
#else
        CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found));
#endif
        CHECK(found == cudaDriverEntryPointSuccess && entry != nullptr, "the driver has no cuTensorMapEncodeTiled: %d",
              static_cast<int>(found));
        return reinterpret_cast<Encode>(entry);
    }();
    return encode;
}

}  // namespace

CUtensorMap panel_map(const void* data, int64_t B, int64_t T, int64_t columns, int rows, int panels) {
    CHECK(reinterpret_cast<uintptr_t>(data) % 16 == 0 && columns % kPanel == 0, "tensor map of %lld columns at %p",
          (long long)columns, data);
    CHECK(rows > 0 && rows <= 256 && panels > 0, "tensor map of boxes of %d rows and %d panels", rows, panels);
    const auto row_bytes = static_cast<cuuint64_t>(2 * columns);
    const cuuint64_t sizes[4] = {kPanel, static_cast<cuuint64_t>(T), static_cast<cuuint64_t>(columns / kPanel),
                                 static_cast<cuuint64_t>(B)};
    const cuuint64_t strides[3] = {row_bytes, 2 * kPanel, static_cast<cuuint64_t>(T) * row_bytes};
    const cuuint32_t box[4] = {kPanel, static_cast<cuuint32_t>(rows), static_cast<cuuint32_t>(panels), 1};
    const cuuint32_t steps[4] = {1, 1, 1, 1};
    CUtensorMap map;
    const CUresult status =
        encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(data), sizes, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    CHECK(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled of (%lld, %lld, %lld), boxes of %d rows and %d panels: %d",
          (long long)B, (long long)T, (long long)columns, rows, panels, static_cast<int>(status));
    return map;
}

}  // namespace cuda
