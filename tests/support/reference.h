// Tensors of the tests of operations: guarded host memory whose elements start as NaN, random values, and comparison
// under an error bound.
#pragma once
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "llmc/base/check.h"
#include "llmc/base/rng.h"
#include "llmc/ops/ops.h"

namespace reference {

// Relative error of one rounding.
inline double unit_roundoff(Dtype dtype) {
    return dtype == Dtype::kBf16 ? 0x1p-8 : dtype == Dtype::kFp64 ? 0x1p-53 : 0x1p-24;
}
inline Dtype stat_dtype(Dtype working) { return working == Dtype::kFp64 ? Dtype::kFp64 : Dtype::kFp32; }
// Absolute tolerance for results below the normal range.
inline constexpr double kTiny = 1e-37;

// Elements in host memory between two guard zones. New elements are NaN in every float type (all bytes 0xff).
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
    // Rounds to the dtype.
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
    // Converts to another dtype.
    HostTensor to(Dtype dtype) const {
        HostTensor copy(dtype, elems_);
        for (int64_t i = 0; i < elems_; i++) copy.set(i, get(i));
        return copy;
    }
    bool same_bits(const HostTensor& other) const { return bytes_ == other.bytes_; }
    // Whether no byte before the first or after the last element was written.
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

// Normally distributed numbers mean + mul * z, rounded to the dtype; `key` selects the random stream.
inline HostTensor random_tensor(Dtype dtype, int64_t elems, uint64_t key, double mul = 1, double mean = 0) {
    HostTensor t(dtype, elems);
    for (int64_t i = 0; i < elems; i++)
        t.set(i, mean + mul * static_cast<double>(rng_normal(key, static_cast<uint64_t>(i))));
    return t;
}

// The largest error that element i may have.
using Bound = std::function<double(int64_t i)>;

// Returns "" if every element of got is within the bound of want and the guards are intact, else one line on the first
// element that is not.
inline std::string first_difference(const HostTensor& got, const HostTensor& want,
                                    const Bound& bound = [](int64_t) { return 0.0; }) {
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

}  // namespace reference
