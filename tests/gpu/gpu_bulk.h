// Tensors of the GPU tests that are too large to keep on the host.
#pragma once
#include "tests/gpu/gpu_tensor.h"

namespace op_test {

// Device memory that a test reads only in part.
struct Bulk {
    Tensor tensor;
    Bulk(Dtype dtype, int64_t elems) : tensor{nullptr, dtype, elems} {
        tensor.data = cuda::device_alloc(tensor.bytes());
    }
    ~Bulk() { cuda::device_free(tensor.data); }
    Bulk(const Bulk&) = delete;
    Bulk& operator=(const Bulk&) = delete;
    HostTensor part(int64_t begin, int64_t elems) const {
        HostTensor host(tensor.dtype, elems);
        const Tensor slice = tensor.slice(begin, elems);
        cuda::copy_to_host(gpu(), host.data(), slice.data, slice.bytes());
        cuda::synchronize(gpu());
        return host;
    }
    HostTensor last(int64_t elems) const { return part(tensor.elems - elems, elems); }
};

}  // namespace op_test
