// Grouped matmuls for tests of both devices: experts of given sizes, NaN in rows of no expert, and the result of double
// loops.
#pragma once
#include "tests/support/op_test.h"

namespace grouped_gemm_test {

using namespace op_test;

struct GroupedProduct {
    std::vector<int64_t> rows;   // of each expert
    int64_t before, after;       // rows of no expert
    int64_t wide, narrow;        // N and K, or N and M of kWgrad
    GemmLayout layout;
    bool accumulate = false;
    HostTensor a, b, d, offsets;

    bool wgrad() const { return layout == GemmLayout::kWgrad; }
    int64_t experts() const { return static_cast<int64_t>(rows.size()); }
    int64_t all_rows() const { return static_cast<int64_t>(offsets.get(experts())) + after; }
    GroupedGemmArgs args(Tensor D, Tensor A, Tensor B, Tensor of) const {
        return {.D = D, .A = A, .B = B, .offsets = of, .E = experts(), .M = wgrad() ? narrow : all_rows(), .N = wide,
                .K = wgrad() ? all_rows() : narrow, .layout = layout, .accumulate = accumulate};
    }
    // Sums in double. magnitude: of the terms' absolute values, for bounds.
    void expect(HostTensor& want, HostTensor& magnitude) const {
        want = d.to(Dtype::kFp64), magnitude = HostTensor(Dtype::kFp64, d.elems());
        for (int64_t i = 0; i < d.elems(); i++) magnitude.set(i, 0);
        for (int64_t e = 0; e < experts(); e++) {
            const int64_t begin = static_cast<int64_t>(offsets.get(e)), end = begin + rows[static_cast<size_t>(e)];
            for (int64_t m = wgrad() ? 0 : begin; m < (wgrad() ? narrow : end); m++)
                for (int64_t n = 0; n < wide; n++) {
                    const int64_t at = wgrad() ? (e * narrow + m) * wide + n : m * wide + n;
                    double sum = accumulate ? d.get(at) : 0, size = 0;
                    for (int64_t k = wgrad() ? begin : 0; k < (wgrad() ? end : narrow); k++) {
                        const double x = wgrad() ? a.get(k * narrow + m) : a.get(m * narrow + k);
                        const double y = wgrad()                              ? b.get(k * wide + n)
                                         : layout == GemmLayout::kForward ? b.get((e * wide + n) * narrow + k)
                                                                              : b.get((e * narrow + k) * wide + n);
                        sum += x * y, size += std::fabs(x * y);
                    }
                    want.set(at, sum), magnitude.set(at, size);
                }
        }
    }
};

// integers: small ones, whose sums are exact. D begins as NaN, except where it is added to or
// stays as it is.
inline GroupedProduct grouped_product(const std::vector<int64_t>& rows, int64_t wide, int64_t narrow,
                                      GemmLayout layout, Dtype dtype, Dtype result, bool accumulate, bool integers) {
    GroupedProduct p{.rows = rows, .before = 3, .after = 5, .wide = wide, .narrow = narrow, .layout = layout,
                     .accumulate = accumulate, .a{}, .b{}, .d{}, .offsets{}};
    std::vector<int32_t> offsets{static_cast<int32_t>(p.before)};
    for (int64_t count : rows) offsets.push_back(offsets.back() + static_cast<int32_t>(count));
    p.offsets = int_tensor(offsets);
    const auto make = [&](Dtype type, int64_t elems, uint64_t key) {
        return integers ? random_integers(type, elems, key, 2) : random_tensor(type, elems, key, 0.5);
    };
    const int64_t all = p.all_rows(), weights = p.experts() * wide * narrow;
    p.a = make(dtype, all * narrow, 1);
    p.b = make(dtype, p.wgrad() ? all * wide : weights, 2);
    p.d = accumulate ? make(result, weights, 3) : HostTensor(result, p.wgrad() ? weights : all * wide);
    for (int64_t row = 0; row < all; row++) {
        if (row >= p.before && row < all - p.after) continue;
        for (int64_t i = 0; i < narrow; i++) p.a.set(row * narrow + i, std::nan(""));
        for (int64_t i = 0; i < wide; i++) {
            if (p.wgrad()) p.b.set(row * wide + i, std::nan(""));
            else p.d.set(row * wide + i, 7);
        }
    }
    return p;
}

}  // namespace grouped_gemm_test
