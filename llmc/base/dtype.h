// Element types and their host representations. Includes nothing of llmc but check.h.
#pragma once
#include <cstdint>
#include <cstring>

#include "llmc/base/check.h"

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

enum class Dtype : uint8_t { kFp32, kBf16, kFp64, kInt32, kE4m3, kE5m2, kUe5m3, kInt8 };

// Both in the order of Dtype.
constexpr int64_t dtype_bytes(Dtype dtype) {
    constexpr int64_t kBytes[] = {4, 2, 8, 4, 1, 1, 1, 1};
    return kBytes[static_cast<size_t>(dtype)];
}
constexpr const char* dtype_name(Dtype dtype) {
    constexpr const char* kNames[] = {"fp32", "bf16", "fp64", "int32", "e4m3", "e5m2", "ue5m3", "int8"};
    return kNames[static_cast<size_t>(dtype)];
}

constexpr int64_t ceil_div(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }
constexpr int64_t round_up(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }

inline constexpr int32_t kIgnoreIndex = -1;   // a target without loss

// bfloat16, the upper half of a float, as bits. Conversion from float rounds to nearest even and keeps infinities; NaN
// becomes a quiet NaN.
struct bf16 {
    uint16_t bits = 0;
    bf16() = default;
    HOST_DEVICE explicit bf16(float value) {
        uint32_t u = to_bits(value);
        if ((u & 0x7fffffffu) > 0x7f800000u) {
            bits = static_cast<uint16_t>((u >> 16) | 0x40u);
        } else {
            bits = static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
        }
    }
    HOST_DEVICE explicit operator float() const {
        uint32_t u = static_cast<uint32_t>(bits) << 16;
        float value;
        memcpy(&value, &u, 4);
        return value;
    }
    HOST_DEVICE static bf16 from_bits(uint16_t raw) {
        bf16 value;
        value.bits = raw;
        return value;
    }
    HOST_DEVICE static uint32_t to_bits(float value) {
        uint32_t u;
        memcpy(&u, &value, 4);
        return u;
    }
};

template <typename T> inline constexpr Dtype dtype_of = Dtype::kFp32;
template <> inline constexpr Dtype dtype_of<bf16> = Dtype::kBf16;
template <> inline constexpr Dtype dtype_of<double> = Dtype::kFp64;
template <> inline constexpr Dtype dtype_of<int32_t> = Dtype::kInt32;
template <> inline constexpr Dtype dtype_of<int8_t> = Dtype::kInt8;

// A view of contiguous elements on a device; owns nothing. An empty one (data null) means "absent". Contains the number
// of elements so that every operation can check its shapes.
struct Tensor {
    void* data = nullptr;
    Dtype dtype = Dtype::kFp32;
    int64_t elems = 0;

    explicit operator bool() const { return elems > 0; }
    int64_t bytes() const { return elems * dtype_bytes(dtype); }

    // Null without elements, whatever data is: kernels see an optional tensor by its pointer.
    template <typename T> T* as() const {
        CHECK(elems == 0 || dtype == dtype_of<T>, "tensor of %s read as %s", dtype_name(dtype),
              dtype_name(dtype_of<T>));
        return elems > 0 ? static_cast<T*>(data) : nullptr;
    }
    // Returns the elements [begin, begin + count).
    Tensor slice(int64_t begin, int64_t count) const {
        CHECK(begin >= 0 && count >= 0 && begin + count <= elems, "slice [%lld, +%lld) of %lld elements",
              (long long)begin, (long long)count, (long long)elems);
        return {static_cast<char*>(data) + begin * dtype_bytes(dtype), dtype, count};
    }
};
