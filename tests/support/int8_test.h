// Inputs of the operations of INT8 matrices, for the tests on both devices.
#pragma once
#include <bit>

#include "tests/support/comm_ops_test.h"

namespace int8_test {

using namespace op_test;

struct Shape {
    int64_t N, C;
};
// One group, columns that end within a warp, more than a block of threads has.
inline std::vector<Shape> shapes() {
    std::vector<Shape> all;
    for (int64_t C : {64, 192, 576, 14336})
        for (int64_t N : {1, 3, 129}) all.push_back({N, C});
    return all;
}

inline int8_t int8_of(const HostTensor& t, int64_t i) { return static_cast<int8_t>(byte_of(t, i)); }

// Rows of uneven values; of 8 or more the first ones are zeros, a NaN, infinities, sums that overflow, and numbers so
// small that 127 / amax overflows.
inline HostTensor rows_of(Dtype dtype, Shape shape, uint64_t key) {
    HostTensor x = uneven_tensor(dtype, shape.N, shape.C, key);
    if (shape.N < 8) return x;
    for (int64_t c = 0; c < shape.C; c++) {
        x.set(c, 0);
        x.set(4 * shape.C + c, 0x1p127);
        x.set(5 * shape.C + c, c % 7 * 0x1p-133);
    }
    x.set(1 * shape.C + shape.C / 2, std::nan(""));
    x.set(2 * shape.C, HUGE_VAL);
    x.set(3 * shape.C + shape.C - 1, -HUGE_VAL);
    return x;
}

struct Int8Matrix {
    HostTensor codes, scale_inv;
    Int8Matrix(int64_t N, int64_t C) : codes(Dtype::kInt8, N * C), scale_inv(Dtype::kFp32, N) {}
};
inline Int8Matrix quantized_int8(HostTensor x, Shape shape) {
    Int8Matrix q(shape.N, shape.C);
    Ctx ctx;
    cpu::quantize_int8(ctx, {.out = q.codes.view(), .scale_inv = q.scale_inv.view(), .in = x.view(), .N = shape.N,
                             .C = shape.C});
    return q;
}

}  // namespace int8_test
