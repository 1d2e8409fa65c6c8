// All tensors of a QuantOut in guarded host memory, for tests on both devices.
#pragma once
#include "tests/support/op_test.h"

#include "llmc/base/fp8.h"

namespace op_test {

// The fields of a QuantOut.
struct QuantRequest {
    std::string name;
    bool rowwise = true, transposed = true;
    Granularity granularity = Granularity::kTensor;
    Scaling scaling = Scaling::kDelayed;
    Dtype format = Dtype::kE4m3;
    bool record = false, dbias = false, counts = true;
    bool keep_out = false;   // write the bf16 result too, if it is optional
    bool copies() const { return rowwise || transposed; }
};

// All kinds of QuantOut that the recipes use, and some others.
inline std::vector<QuantRequest> quant_requests() {
    using enum Granularity;
    constexpr Dtype k5 = Dtype::kE5m2;
    return {{.name = "delayed", .record = true},
            {.name = "delayed, not counted", .record = true, .counts = false},
            {.name = "delayed e5m2, out kept", .format = k5, .keep_out = true},
            {.name = "delayed e5m2 with dbias", .format = k5, .record = true, .dbias = true},
            {.name = "delayed, rowwise only", .transposed = false, .record = true, .counts = false},
            {.name = "delayed e5m2, transposed only", .rowwise = false, .format = k5, .counts = false},
            {.name = "current", .scaling = Scaling::kCurrent, .record = true},
            {.name = "current e5m2", .scaling = Scaling::kCurrent, .format = k5},
            {.name = "record only", .rowwise = false, .transposed = false, .record = true, .counts = false,
             .keep_out = true},
            {.name = "record with dbias", .rowwise = false, .transposed = false, .record = true, .dbias = true,
             .counts = false, .keep_out = true},
            {.name = "dbias only", .rowwise = false, .transposed = false, .dbias = true, .counts = false,
             .keep_out = true},
            {.name = "1x128", .granularity = kBlock1x128, .record = true},
            {.name = "1x128 with dbias", .granularity = kBlock1x128, .record = true, .dbias = true},
            {.name = "1x128 e5m2, transposed only, out kept", .rowwise = false, .granularity = kBlock1x128,
             .format = k5, .keep_out = true},
            {.name = "1x128, rowwise only", .transposed = false, .granularity = kBlock1x128, .counts = false},
            {.name = "1x128, rowwise only, recorded, out kept", .transposed = false, .granularity = kBlock1x128,
             .record = true, .keep_out = true},
            {.name = "1x128, rowwise with dbias", .transposed = false, .granularity = kBlock1x128, .dbias = true,
             .counts = false},
            {.name = "128x128", .granularity = kBlock128x128, .record = true},
            {.name = "128x128, rowwise only", .transposed = false, .granularity = kBlock128x128, .counts = false},
            {.name = "128x128 e5m2, transposed only", .rowwise = false, .granularity = kBlock128x128, .format = k5}};
}
inline QuantRequest quant_request(const std::string& name) {
    for (const QuantRequest& request : quant_requests())
        if (request.name == name) return request;
    FAIL("no request " << name);
    return {};
}

struct QuantMemory {
    QuantRequest request;
    HostTensor rowwise, transposed, rowwise_scale_inv, transposed_scale_inv, dbias, dbias_scratch;
    ScaleEntry entry{.scale_inv = -1, .scale = 24, .amax_bits = 0, .step_amax_bits = 0};
    Fp8Counts counts{1000, 2000, 3000, 4000};
    uint32_t first_nonfinite = 77;

    // For (matrices, N, C) results. amax_before: amax that an earlier pass recorded in the entry.
    QuantMemory(const QuantRequest& asked, int64_t N, int64_t C, float amax_before = 3.5f, int64_t matrices = 1)
        : request(asked) {
        const bool blocks = asked.granularity != Granularity::kTensor;
        const auto scales = [&](int64_t R, int64_t K) {
            return HostTensor(Dtype::kFp32, matrices * scale_inv_elems(asked.granularity, R, K));
        };
        if (asked.rowwise) rowwise = HostTensor(asked.format, matrices * N * C);
        if (asked.transposed) transposed = HostTensor(asked.format, matrices * N * C);
        if (asked.rowwise && blocks) rowwise_scale_inv = scales(N, C);
        if (asked.transposed && blocks) transposed_scale_inv = scales(C, N);
        if (asked.dbias) {
            dbias = random_tensor(Dtype::kFp32, C, 99);
            dbias_scratch = HostTensor(Dtype::kFp32, quant_partial_rows(N) * C);
        }
        entry.amax_bits = amax_bits_of(amax_before);
    }
    QuantOut out() {
        return {.rowwise = rowwise.view(), .transposed = transposed.view(), .granularity = request.granularity,
                .scaling = request.scaling, .entry = &entry, .rowwise_scale_inv = rowwise_scale_inv.view(),
                .transposed_scale_inv = transposed_scale_inv.view(), .record = request.record,
                .counts = request.counts ? &counts : nullptr,
                .first_nonfinite = request.counts ? &first_nonfinite : nullptr, .event = 5, .dbias = dbias.view(),
                .dbias_scratch = dbias_scratch.view()};
    }
    // Returns "" or what differs, except for scratch.
    std::string difference(const QuantMemory& other) const {
        if (!rowwise.same_bits(other.rowwise)) return "rowwise";
        if (!transposed.same_bits(other.transposed)) return "transposed";
        if (!rowwise_scale_inv.same_bits(other.rowwise_scale_inv)) return "rowwise_scale_inv";
        if (!transposed_scale_inv.same_bits(other.transposed_scale_inv)) return "transposed_scale_inv";
        if (!dbias.same_bits(other.dbias)) return "dbias";
        if (std::memcmp(&entry, &other.entry, sizeof entry) != 0) return "entry";
        if (std::memcmp(&counts, &other.counts, sizeof counts) != 0) return "counts";
        if (first_nonfinite != other.first_nonfinite) return "first_nonfinite";
        return guards_intact() && other.guards_intact() ? "" : "guards";
    }
    bool guards_intact() const {
        bool intact = true;
        for (const HostTensor* t :
             {&rowwise, &transposed, &rowwise_scale_inv, &transposed_scale_inv, &dbias, &dbias_scratch})
            intact &= t->guards_intact();
        return intact;
    }
};

}  // namespace op_test
