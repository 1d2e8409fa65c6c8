#include "llmc/cuda/tensor_map.h"

#include <array>

namespace cuda {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Looked up in the loaded driver, so that the program starts on machines without one.
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

// Encodes a map of four dimensions: sizes in elements, strides of all but the first in bytes, the box in elements.
CUtensorMap encoded(const void* data, CUtensorMapDataType type, CUtensorMapSwizzle swizzle,
                    const std::array<cuuint64_t, 4>& sizes, const std::array<cuuint64_t, 3>& strides,
                    const std::array<cuuint32_t, 4>& box) {
    CHECK(reinterpret_cast<uintptr_t>(data) % 16 == 0, "tensor map of memory at %p", data);
    CHECK(box[1] > 0 && box[1] <= 256 && box[2] > 0, "tensor map of boxes of %u rows and %u panels", box[1], box[2]);
    const cuuint32_t steps[4] = {1, 1, 1, 1};
    CUtensorMap map;
    const CUresult status =
        encoder()(&map, type, 4, const_cast<void*>(data), sizes.data(), strides.data(), box.data(), steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    CHECK(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled of (%llu, %llu, %llu, %llu), boxes of %u rows, %u panels: %d",
          (unsigned long long)sizes[3], (unsigned long long)sizes[2], (unsigned long long)sizes[1],
          (unsigned long long)sizes[0], box[1], box[2], static_cast<int>(status));
    return map;
}

}  // namespace

CUtensorMap panel_map(const void* data, int64_t B, int64_t T, int64_t columns, int rows, int panels) {
    CHECK(columns % kPanel == 0, "tensor map of %lld columns", (long long)columns);
    const auto row_bytes = static_cast<cuuint64_t>(2 * columns);
    return encoded(data, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B,
                   {kPanel, static_cast<cuuint64_t>(T), static_cast<cuuint64_t>(columns / kPanel),
                    static_cast<cuuint64_t>(B)},
                   {row_bytes, 2 * kPanel, static_cast<cuuint64_t>(T) * row_bytes},
                   {kPanel, static_cast<cuuint32_t>(rows), static_cast<cuuint32_t>(panels), 1});
}

CUtensorMap head_map(const void* data, int64_t B, int64_t T, int64_t columns, int rows, int64_t head_dim) {
    CHECK(head_dim % 8 == 0 && columns % head_dim == 0, "tensor map of %lld columns, head dim %lld", (long long)columns,
          (long long)head_dim);
    const auto row_bytes = static_cast<cuuint64_t>(2 * columns), width = static_cast<cuuint64_t>(head_dim);
    return encoded(data, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B,
                   {width, static_cast<cuuint64_t>(T), static_cast<cuuint64_t>(columns) / width,
                    static_cast<cuuint64_t>(B)},
                   {row_bytes, 2 * width, static_cast<cuuint64_t>(T) * row_bytes},
                   {kPanel, static_cast<cuuint32_t>(rows), 1, 1});
}

CUtensorMap byte_map(const void* data, int64_t B, int64_t heads, int64_t rows, int row_bytes, int box_rows) {
    CHECK(row_bytes == 64 || row_bytes == 128, "tensor map of rows of %d bytes", row_bytes);
    const auto width = static_cast<cuuint64_t>(row_bytes), count = static_cast<cuuint64_t>(rows);
    return encoded(data, CU_TENSOR_MAP_DATA_TYPE_UINT8,
                   row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                   {width, count, static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(B)},
                   {width, count * width, static_cast<cuuint64_t>(heads) * count * width},
                   {static_cast<cuuint32_t>(row_bytes), static_cast<cuuint32_t>(box_rows), 1, 1});
}

CUtensorMap matrix_map(const void* data, int64_t rows, int64_t columns, int box_rows) {
    CHECK(columns % 16 == 0, "tensor map of a matrix of %lld columns", (long long)columns);
    const auto width = static_cast<cuuint64_t>(columns), count = static_cast<cuuint64_t>(rows);
    return encoded(data, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, {width, count, 1, 1},
                   {width, count * width, count * width}, {128, static_cast<cuuint32_t>(box_rows), 1, 1});
}

CUtensorMap box_map(const Tensor& matrix, int64_t rows, int64_t columns, int64_t stride, int box_rows, int box_bytes,
                    int64_t matrices) {
    CHECK(box_bytes == 64 || box_bytes == 128, "tensor map of boxes of %d bytes", box_bytes);
    const int64_t elem_bytes = dtype_bytes(matrix.dtype);
    CHECK(stride * elem_bytes % 16 == 0, "tensor map of a matrix with %lld elements between rows", (long long)stride);
    const CUtensorMapDataType type = matrix.dtype == Dtype::kFp32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : matrix.dtype == Dtype::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                    : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    const auto row_bytes = static_cast<cuuint64_t>(stride * elem_bytes), count = static_cast<cuuint64_t>(rows);
    return encoded(matrix.data, type, box_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                   {static_cast<cuuint64_t>(columns), count, static_cast<cuuint64_t>(matrices), 1},
                   {row_bytes, count * row_bytes, static_cast<cuuint64_t>(matrices) * count * row_bytes},
                   {static_cast<cuuint32_t>(box_bytes / elem_bytes), static_cast<cuuint32_t>(box_rows), 1, 1});
}

}  // namespace cuda
