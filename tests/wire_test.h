// Inputs of the tests of what travels between ranks, for either device.
#pragma once
#include "tests/quant_test.h"

namespace op_test {

// (N, C) values whose neighbourhoods of 32 x 32 have very different sizes, so that a factor of the wrong block shows;
// some zeros.
inline HostTensor uneven_tensor(Dtype dtype, int64_t N, int64_t C, uint64_t key, int powers = 33) {
    HostTensor x = random_tensor(dtype, N * C, key);
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++) {
            const int64_t i = n * C + c;
            const uint32_t random = philox(key, static_cast<uint64_t>(n / 32 * 1000 + c / 32)).word[1];
            const int power = static_cast<int>(random % static_cast<uint32_t>(powers)) - powers / 2;
            x.set(i, i % 61 == 7 ? 0 : std::ldexp(x.get(i), power));
        }
    return x;
}

// A run of the elements of a tensor.
struct Run {
    int64_t begin, elems;
};
// [0, elems) cut at random places, multiples of `align`, into `count` runs; some may be empty.
inline std::vector<Run> random_runs(int64_t elems, int64_t count, int64_t align, uint64_t key) {
    std::vector<int64_t> cuts = {0, elems};
    for (int64_t i = 1; i < count; i++) {
        const int64_t random = philox(key, static_cast<uint64_t>(i)).word[0];
        cuts.push_back(random % (elems / align + 1) * align);
    }
    std::sort(cuts.begin(), cuts.end());
    std::vector<Run> runs;
    for (size_t i = 0; i + 1 < cuts.size(); i++) runs.push_back({cuts[i], cuts[i + 1] - cuts[i]});
    return runs;
}

// Elements [begin, begin + elems) in guarded memory of their own, and back.
inline HostTensor part_of(const HostTensor& whole, Run run) {
    HostTensor part(whole.dtype(), run.elems);
    const int64_t size = dtype_bytes(whole.dtype());
    std::memcpy(part.data(), static_cast<const char*>(whole.data()) + run.begin * size,
                static_cast<size_t>(part.bytes()));
    return part;
}
inline void put_part(HostTensor& whole, Run run, const HostTensor& part) {
    const int64_t size = dtype_bytes(whole.dtype());
    std::memcpy(static_cast<char*>(whole.data()) + run.begin * size, part.data(), static_cast<size_t>(part.bytes()));
}

inline uint8_t byte_of(const HostTensor& t, int64_t i) { return static_cast<const uint8_t*>(t.data())[i]; }

// The weights that several ranks may make together: rowwise and transposed, with one factor or square blocks.
inline std::vector<QuantRequest> weight_requests() {
    std::vector<QuantRequest> requests;
    for (Dtype format : {Dtype::kE4m3, Dtype::kE5m2}) {
        requests.push_back({.name = "delayed", .format = format});
        requests.push_back({.name = "current", .scaling = Scaling::kCurrent, .format = format});
        requests.push_back({.name = "squares", .granularity = Granularity::kBlock128x128, .format = format});
    }
    return requests;
}

}  // namespace op_test
