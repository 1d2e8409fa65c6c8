// Helpers of the operation tests, CPU and GPU: tensors in guarded host memory whose outputs start as NaN,
// comparison under a derived bound, proof that one wrong element is caught, finite differences.
#pragma once
#include "tests/doctest.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "llmc/ops.h"
#include "llmc/rng.h"

namespace op_test {

// Half the distance of two neighbours, relative to the value: the error of one rounding.
inline double unit_roundoff(Dtype dtype) {
    return dtype == Dtype::kBf16 ? 0x1p-8 : dtype == Dtype::kFp64 ? 0x1p-53 : 0x1p-24;
}
// Of the type that operations on `working` accumulate in.
inline double acc_roundoff(Dtype working) { return working == Dtype::kFp64 ? 0x1p-53 : 0x1p-24; }
inline Dtype stat_dtype(Dtype working) { return working == Dtype::kFp64 ? Dtype::kFp64 : Dtype::kFp32; }
// Roundings on the longest way of a term into a sum over the N rows of a column: runs of rows, then the runs.
inline double column_chain(int64_t N) {
    int64_t rows = std::max<int64_t>(16, (N + kPartialRows - 1) / kPartialRows);
    return static_cast<double>(rows + (N + rows - 1) / rows + 4);
}
// Of a sum along a row, in lanes of four at least.
inline double row_chain(int64_t C) { return static_cast<double>(C) / 4 + 8; }
// Absolute slack for results below the normal range.
inline constexpr double kTiny = 1e-37;

// Elements in host memory between two guard zones. Fresh ones are NaN in every float type (all bytes 0xff).
class HostTensor {
public:
    HostTensor() = default;
    HostTensor(Dtype dtype, int64_t elems) : dtype_(dtype), elems_(elems) {
        bytes_.assign(static_cast<size_t>(2 * kGuard + elems * dtype_bytes(dtype)), 0xff);
        for (int64_t i = 0; i < kGuard; i++) bytes_[i] = bytes_[bytes_.size() - 1 - i] = kGuardByte;
    }
    Dtype dtype() const { return dtype_; }
    int64_t elems() const { return elems_; }
    int64_t bytes() const { return elems_ * dtype_bytes(dtype_); }
    void* data() { return bytes_.data() + kGuard; }
    const void* data() const { return bytes_.data() + kGuard; }
    Tensor view() { return elems_ ? Tensor{data(), dtype_, elems_} : Tensor{}; }
    template <typename T> T* as() { return view().as<T>(); }

    double get(int64_t i) const {
        const char* at = static_cast<const char*>(data()) + i * dtype_bytes(dtype_);
        auto read = [&]<typename T>(T value) {
            std::memcpy(&value, at, sizeof value);
            return value;
        };
        if (dtype_ == Dtype::kFp64) return read(double{});
        if (dtype_ == Dtype::kBf16) return static_cast<float>(read(bf16{}));
        if (dtype_ == Dtype::kInt32) return read(int32_t{});
        return read(float{});
    }
    // Rounded to the dtype.
    void set(int64_t i, double value) {
        char* at = static_cast<char*>(data()) + i * dtype_bytes(dtype_);
        auto write = [&](auto rounded) { std::memcpy(at, &rounded, sizeof rounded); };
        if (dtype_ == Dtype::kFp64) write(value);
        else if (dtype_ == Dtype::kBf16) write(bf16(static_cast<float>(value)));
        else if (dtype_ == Dtype::kInt32) write(static_cast<int32_t>(value));
        else write(static_cast<float>(value));
    }
    std::vector<double> values() const {
        std::vector<double> copy(static_cast<size_t>(elems_));
        for (int64_t i = 0; i < elems_; i++) copy[i] = get(i);
        return copy;
    }
    HostTensor& fill(double value) {
        for (int64_t i = 0; i < elems_; i++) set(i, value);
        return *this;
    }
    // The same values in another type.
    HostTensor to(Dtype dtype) const {
        HostTensor copy(dtype, elems_);
        for (int64_t i = 0; i < elems_; i++) copy.set(i, get(i));
        return copy;
    }
    bool same_bits(const HostTensor& other) const { return bytes_ == other.bytes_; }
    // The operation wrote no byte before the first or after the last element.
    bool guards_intact() const {
        bool intact = true;
        for (int64_t i = 0; i < kGuard && elems_; i++)
            intact &= bytes_[i] == kGuardByte && bytes_[bytes_.size() - 1 - i] == kGuardByte;
        return intact;
    }

private:
    static constexpr int64_t kGuard = 64;
    static constexpr uint8_t kGuardByte = 0xa5;
    Dtype dtype_ = Dtype::kFp32;
    int64_t elems_ = 0;
    std::vector<uint8_t> bytes_;
};

// Normal numbers mean + mul * z, rounded to the dtype; `key` names the stream.
inline HostTensor random_tensor(Dtype dtype, int64_t elems, uint64_t key, double mul = 1, double mean = 0) {
    HostTensor t(dtype, elems);
    for (int64_t i = 0; i < elems; i++)
        t.set(i, mean + mul * static_cast<double>(rng_normal(key, static_cast<uint64_t>(i))));
    return t;
}
// Whole numbers in [-limit, limit]: sums of their products are exact.
inline HostTensor random_integers(Dtype dtype, int64_t elems, uint64_t key, int64_t limit) {
    HostTensor t(dtype, elems);
    for (int64_t i = 0; i < elems; i++) {
        int64_t random = philox(key, static_cast<uint64_t>(i)).word[0];
        t.set(i, static_cast<double>(random % (2 * limit + 1) - limit));
    }
    return t;
}

// The largest error that element i may have.
using Bound = std::function<double(int64_t i)>;

// "" if every element of got is within the bound of want and the guards hold, else a line on the first
// element that is not.
inline std::string first_difference(const HostTensor& got, const HostTensor& want, const Bound& bound) {
    if (got.elems() != want.elems()) return "different sizes";
    if (!got.guards_intact()) return "wrote outside the tensor";
    for (int64_t i = 0; i < got.elems(); i++) {
        double error = std::fabs(got.get(i) - want.get(i)), limit = bound(i);
        if (!(error <= limit))
            return strf("element %lld of %lld is %.9g, expected %.9g: error %.3g, bound %.3g", (long long)i,
                        (long long)got.elems(), got.get(i), want.get(i), error, limit);
    }
    return "";
}

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
