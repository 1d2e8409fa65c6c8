// The cases of comm_check: a collective, and what each rank contributes to it.
#pragma once
#include <cmath>
#include <cstring>
#include <string>

#include "llmc/base/dtype.h"

enum class Call { kSum, kMax, kReduceScatter, kAllGather, kAllToAll, kExchange, kExchangeAll };
inline constexpr const char* kCallNames[] = {"sum", "max", "reduce_scatter", "all_gather", "all_to_all", "exchange",
                                             "exchange_all"};
enum class Values { kIntegers, kReals, kSpecial, kBits };

struct Case {
    Call call;
    Dtype dtype;      // of max: int32 stands for uint32
    int64_t elems;    // of one block, or of the whole tensor if the collective has no blocks
    Values values;
    std::string name(int64_t n) const {
        return strf("%s of %lld %s", kCallNames[static_cast<int>(call)], (long long)n, dtype_name(dtype));
    }
};

inline uint64_t number(const Case& c, int rank, int64_t i) {   // Philox would take half of the program's time
    const auto key = static_cast<uint64_t>(c.elems) * 8 + static_cast<uint64_t>(c.call);
    uint64_t bits = (key * 1024 + static_cast<uint64_t>(rank)) * 0xd1342543de82ef95 + static_cast<uint64_t>(i);
    for (int round = 0; round < 2; round++) bits = (bits ^ (bits >> 32)) * 0x9e3779b97f4a7c15;
    return bits ^ (bits >> 32);
}

// Element i of the contribution of `rank`, if it consists of numbers.
inline double value_of(const Case& c, int rank, int ranks, int64_t i) {
    const uint64_t bits = number(c, rank, i);
    if (c.values == Values::kSpecial) {
        if (i % 5 == 0 && rank == 0) return NAN;
        if (i % 5 == 1 && rank == ranks - 1) return INFINITY;
        if (i % 5 == 2 && rank < 2) return rank == 0 ? INFINITY : -INFINITY;
    }
    if (c.values == Values::kReals) {
        const double real = std::ldexp(static_cast<double>(static_cast<int64_t>(bits)), -60 + static_cast<int>(i % 9));
        return static_cast<double>(static_cast<float>(real));
    }
    return static_cast<double>(static_cast<int64_t>(bits % 511) - 255);
}

inline void store(uint8_t* to, Dtype dtype, double value) {
    auto put = [&](auto v) { std::memcpy(to, &v, sizeof v); };
    switch (dtype) {
        case Dtype::kFp32: return put(static_cast<float>(value));
        case Dtype::kFp64: return put(value);
        case Dtype::kInt32: return put(static_cast<int32_t>(value));
        default: FAIL(kExitBug, "%s is not a number here", dtype_name(dtype));
    }
}

inline double load(const uint8_t* from, Dtype dtype) {
    auto get = [&](auto v) {
        std::memcpy(&v, from, sizeof v);
        return static_cast<double>(v);
    };
    switch (dtype) {
        case Dtype::kFp32: return get(float{});
        case Dtype::kFp64: return get(double{});
        default: return get(int32_t{});
    }
}
