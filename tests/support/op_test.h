// Helpers of the operation tests on both devices: comparisons that must detect one wrong element, and everything from
// reference.h.
#pragma once
#include "tests/support/doctest.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "llmc/base/fp8_cast.h"
#include "tests/support/reference.h"

namespace op_test {

using namespace reference;

// fp8_cast for a format known at run time.
inline uint8_t to_fp8(Dtype format, float value) {
    return format == Dtype::kE4m3 ? fp8_cast<Dtype::kE4m3>(value) : fp8_cast<Dtype::kE5m2>(value);
}

// Roundoff of the accumulation type for `working`.
inline double acc_roundoff(Dtype working) { return working == Dtype::kFp64 ? 0x1p-53 : 0x1p-24; }
// Largest number of roundings of a term in a sum over N rows: in its chunk of rows, then over the chunks.
inline double column_chain(int64_t N) {
    int64_t rows = std::max<int64_t>(16, (N + kPartialRows - 1) / kPartialRows);
    return static_cast<double>(rows + (N + rows - 1) / rows + 4);
}
// The same for a sum along a row with at least four lanes.
inline double row_chain(int64_t C) { return static_cast<double>(C) / 4 + 8; }
// Compares, and checks that the bound is not vacuous: a change of one element (first, last and some in between) by
// `share` of the largest |want| must be detected.
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

// Integers in [-limit, limit], whose sums of products are exact.
inline HostTensor random_integers(Dtype dtype, int64_t elems, uint64_t key, int64_t limit) {
    HostTensor t(dtype, elems);
    for (int64_t i = 0; i < elems; i++) {
        int64_t random = philox(key, static_cast<uint64_t>(i)).word[0];
        t.set(i, static_cast<double>(random % (2 * limit + 1) - limit));
    }
    return t;
}

template <typename T> T* object_in(Tensor t) { return static_cast<T*>(t.data); }
template <typename T> HostTensor tensor_of(const T& object) {
    HostTensor t(Dtype::kInt32, sizeof(T) / 4);
    std::memcpy(t.data(), &object, sizeof object);
    return t;
}
template <typename T> T object_of(const HostTensor& t) {
    T object;
    std::memcpy(&object, t.data(), sizeof object);
    return object;
}
inline HostTensor int_tensor(const std::vector<int32_t>& values) {
    HostTensor t(Dtype::kInt32, static_cast<int64_t>(values.size()));
    for (int64_t i = 0; i < t.elems(); i++) t.set(i, values[i]);
    return t;
}
// Sines and cosines for rope of T positions.
inline HostTensor angle_table(int64_t T, int64_t HS) {
    HostTensor table(Dtype::kFp32, T * HS);
    for (int64_t i = 0; i < T * HS / 2; i++) {
        const double angle = static_cast<double>(i / (HS / 2) + 1) * std::pow(0.7, i % (HS / 2));
        table.set(2 * i, std::cos(angle));
        table.set(2 * i + 1, std::sin(angle));
    }
    return table;
}

}  // namespace op_test
