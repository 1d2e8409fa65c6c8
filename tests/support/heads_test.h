// Heads split among ranks and joined again, for the tests of both devices.
#pragma once
#include "tests/support/op_test.h"

namespace op_test {

struct HeadSplit {
    int64_t B, T, ranks, NH, NKV, HS;   // NKV 0: query heads only

    int64_t kv() const { return heads_of_rank(NKV, ranks); }
    int64_t all_width() const { return (NH + 2 * NKV) * HS; }
    int64_t own_width() const { return (NH / ranks + 2 * kv()) * HS; }
    int64_t all_elems() const { return B * T * all_width(); }
    int64_t own_elems() const { return B * ranks * T * own_width(); }
    std::string name() const {
        return strf("%lld x %lld tokens, %lld ranks, %lld over %lld heads of %lld", ll(B), ll(T), ll(ranks), ll(NH),
                    ll(NKV), ll(HS));
    }
    SplitHeadsArgs split_args(Tensor out, Tensor in) const {
        return {.out = out, .in = in, .B = B, .T = T, .ranks = ranks, .NH = NH, .NKV = NKV, .HS = HS};
    }
    JoinHeadsArgs join_args(Tensor out, Tensor in) const {
        return {.out = out, .in = in, .B = B, .T = T, .ranks = ranks, .NH = NH, .NKV = NKV, .HS = HS};
    }

    // Calls use(index in the rows of ranks, index in the rows of all heads) for each element, rank by rank.
    template <typename Use> void each(Use&& use) const {
        int64_t own = 0;
        for (int64_t b = 0; b < B; b++)
            for (int64_t r = 0; r < ranks; r++)
                for (int64_t t = 0; t < T; t++) {
                    const int64_t row = (b * T + t) * (NH + 2 * NKV);
                    auto heads = [&](int64_t first, int64_t count) {
                        for (int64_t i = 0; i < count * HS; i++) use(own++, (row + first) * HS + i);
                    };
                    heads(r * (NH / ranks), NH / ranks);
                    if (NKV == 0) continue;
                    const int64_t query_heads_of_a_key = NH / NKV, key = r * (NH / ranks) / query_heads_of_a_key;
                    heads(NH + key, kv());
                    heads(NH + NKV + key, kv());
                }
    }
    HostTensor split(const HostTensor& in) const {
        HostTensor out(in.dtype(), own_elems());
        each([&](int64_t own, int64_t all) { out.set(own, in.get(all)); });
        return out;
    }
    // In the order of ranks, in fp32, rounded once.
    HostTensor join(const HostTensor& in) const {
        HostTensor sums(in.dtype() == Dtype::kFp64 ? Dtype::kFp64 : Dtype::kFp32, all_elems());
        sums.fill(0);
        each([&](int64_t own, int64_t all) { sums.set(all, sums.get(all) + in.get(own)); });
        return sums.to(in.dtype());
    }
};

// One rank, shares of the key heads, one key head for several ranks; odd lengths and head dims.
inline std::vector<HeadSplit> head_splits() {
    return {{1, 5, 1, 3, 3, 8},    {2, 7, 2, 4, 2, 8},    {1, 1, 4, 8, 8, 24},  {3, 9, 3, 9, 3, 18},
            {1, 13, 4, 4, 2, 64},  {2, 11, 8, 32, 8, 128}, {1, 33, 8, 8, 1, 40}, {2, 6, 6, 12, 2, 10},
            {2, 17, 4, 12, 0, 64}, {1, 70, 2, 32, 0, 128}, {1, 3, 16, 64, 8, 128}};
}

}  // namespace op_test
