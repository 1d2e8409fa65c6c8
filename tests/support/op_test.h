// Helpers of the operation tests, CPU and GPU: proof that one wrong element is caught, finite differences, and from
// oracle.h tensors in guarded host memory and comparison under a derived bound.
#pragma once
#include "tests/support/doctest.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "llmc/ops/reference.h"

namespace op_test {

using namespace reference;

// Of the type that operations on `working` accumulate in.
inline double acc_roundoff(Dtype working) { return working == Dtype::kFp64 ? 0x1p-53 : 0x1p-24; }
// Roundings on the longest way of a term into a sum over the N rows of a column: runs of rows, then the runs.
inline double column_chain(int64_t N) {
    int64_t rows = std::max<int64_t>(16, (N + kPartialRows - 1) / kPartialRows);
    return static_cast<double>(rows + (N + rows - 1) / rows + 4);
}
// Of a sum along a row, in lanes of four at least.
inline double row_chain(int64_t C) { return static_cast<double>(C) / 4 + 8; }
// Compares, and shows that the bound is not vacuous: one element (first, last and some in between) moved by
// `share` of the largest |want| must be reported.
inline void check_close(const std::string& name, const HostTensor& got, const HostTensor& want,
                        const Bound& bound, double share = 1.0 / 16) {
    INFO(name);
    CHECK_EQ(first_difference(got, want, bound), "");
    double largest = 0;
    for (int64_t i = 0; i < want.elems(); i++) largest = std::max(largest, std::fabs(want.get(i)));
    HostTensor wrong = got;
    for (int64_t i : {int64_t{0}, want.elems() / 3, want.elems() / 2, want.elems() - 1}) {
        double before = wrong.get(i);
        wrong.set(i, before + share * largest);
        INFO("element " << i << " moved by " << share * largest << ", bound " << bound(i));
        CHECK_NE(first_difference(wrong, want, bound), "");
        wrong.set(i, before);
    }
}
inline void check_equal(const std::string& name, const HostTensor& got, const HostTensor& want) {
    check_close(name, got, want, [](int64_t) { return 0.0; });
}

// Checks `gradient` of `loss` with respect to `input` (fp64, restored afterwards) by central differences of
// fourth order, to `relative` of the largest element.
inline void check_gradient(const std::string& name, HostTensor& input, const HostTensor& gradient,
                           const std::function<double()>& loss, double relative = 1e-6) {
    constexpr double h = 1e-3;
    HostTensor numeric(Dtype::kFp64, input.elems());
    double largest = 0;
    for (int64_t i = 0; i < input.elems(); i++) {
        double x = input.get(i);
        auto at = [&](double step) {
            input.set(i, x + step);
            return loss();
        };
        numeric.set(i, (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h));
        input.set(i, x);
        largest = std::max(largest, std::fabs(numeric.get(i)));
    }
    INFO(name);
    CHECK_GT(largest, 0);
    check_close(name, gradient, numeric, [&](int64_t) { return relative * largest; }, 1e-4);
}

// sum of a[i] * b[i]: turns an output into a loss whose gradient is b.
inline double dot_product(const HostTensor& a, const HostTensor& b) {
    double sum = 0;
    for (int64_t i = 0; i < a.elems(); i++) sum += a.get(i) * b.get(i);
    return sum;
}

}  // namespace op_test
