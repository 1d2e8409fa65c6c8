// Attention of one token per text over a cache, for the tests of both devices: texts of different lengths in slots of
// another order, with rows of padding among them.
#pragma once
#include "tests/support/reference_attention.h"
#include "tests/support/op_test.h"

namespace op_test {

struct DecodeShape {
    int64_t NH, NKV, HS, capacity;
    std::vector<int64_t> lengths;   // by row; 0: a row of padding
    int64_t window = 0;
};

// Lengths around a vector, a block of k (256), a split (256), and the end of the cache.
inline std::vector<DecodeShape> decode_shapes() {
    return {{1, 1, 2, 1, {1}},
            {3, 3, 64, 300, {5, 300, 0, 257, 1}},
            {4, 2, 128, 530, {529, 256, 512, 0}},
            {8, 1, 80, 270, {8, 9, 255, 270, 0, 0}},
            {14, 2, 18, 65, {0, 17, 64, 65}},
            {6, 6, 256, 40, {33, 40}}};
}

struct DecodeCase {
    DecodeShape s;
    int64_t N, width;   // width: of a position in the cache
    std::vector<AttentionProblem> texts;   // by row; of one token for padding
    HostTensor cache, qkv, slots, positions;   // the cache does not have the last token of each text

    DecodeCase(DecodeShape shape, Dtype dtype, double magnitude = 1)
        : s(std::move(shape)), N(static_cast<int64_t>(s.lengths.size())), width(2 * s.NKV * s.HS),
          cache(dtype, N * s.capacity * width), qkv(dtype, N * (s.NH + 2 * s.NKV) * s.HS), slots(Dtype::kInt32, N),
          positions(Dtype::kInt32, N) {
        for (int64_t n = 0; n < N; n++) {
            const int64_t length = s.lengths[static_cast<size_t>(n)], row = (s.NH + 2 * s.NKV) * s.HS;
            slots.set(n, static_cast<double>(slot(n)));
            positions.set(n, static_cast<double>(length - 1));
            texts.emplace_back(QkvShape{1, std::max<int64_t>(length, 1), s.NH, s.NKV, s.HS}, dtype,
                               magnitude * (1 + 0.25 * static_cast<double>(n)));
            const AttentionProblem& text = texts.back();
            for (int64_t t = 0; t + 1 < length; t++)
                for (int64_t i = 0; i < width; i++)
                    cache.set((slot(n) * s.capacity + t) * width + i, text.qkv.get((t + 1) * row - width + i));
            for (int64_t i = 0; i < row; i++)
                qkv.set(n * row + i, text.qkv.get((std::max<int64_t>(length, 1) - 1) * row + i));
        }
    }
    int64_t slot(int64_t n) const { return N - 1 - n; }
    int64_t longest() const { return *std::max_element(s.lengths.begin(), s.lengths.end()); }
    int64_t split_elems() const { return decode_split_elems(N, s.NH, s.HS, longest()); }
    std::string name() const {
        return strf("%lld heads over %lld of %lld, %lld rows of up to %lld tokens %s", ll(s.NH), ll(s.NKV), ll(s.HS),
                    ll(N), ll(longest()), dtype_name(qkv.dtype()));
    }

    KvCache cache_args(Tensor rows, Tensor slot_numbers, Tensor row_positions) const {
        return {.rows = rows, .capacity = s.capacity, .slots = slot_numbers.as<int32_t>(),
                .positions = row_positions.as<int32_t>()};
    }
    CacheAppendArgs append_args(const KvCache& to, Tensor rows) const {
        return {.cache = to, .qkv = rows, .N = N, .NH = s.NH, .NKV = s.NKV, .HS = s.HS};
    }
    AttentionDecodeArgs decode_args(const KvCache& from, Tensor rows, Tensor out, Tensor splits) const {
        return {.out = out, .qkv = rows, .cache = from, .splits = splits, .N = N, .NH = s.NH, .NKV = s.NKV,
                .HS = s.HS, .longest = longest(), .softmax_mul = texts[0].softmax_mul, .window = s.window};
    }
};

// The rows that attention_decode writes, in double, with the largest error that each element may have; 0 for padding.
struct DecodeReference {
    HostTensor out;
    std::vector<double> error;
};

inline DecodeReference decode_reference(const DecodeCase& c) {
    const int64_t row = c.s.NH * c.s.HS;
    const double round = 1.01 * unit_roundoff(c.qkv.dtype());
    DecodeReference r{HostTensor(Dtype::kFp64, c.N * row), std::vector<double>(static_cast<size_t>(c.N * row))};
    for (int64_t n = 0; n < c.N; n++) {
        const int64_t length = c.s.lengths[static_cast<size_t>(n)];
        if (length == 0) {
            for (int64_t i = 0; i < row; i++) r.out.set(n * row + i, 0);
            continue;
        }
        AttentionProblem text = c.texts[static_cast<size_t>(n)];
        text.window = c.s.window;
        const std::vector<double> qkv = text.qkv.values();
        const double chain = static_cast<double>(length + 16) * 2 * 0x1p-24;   // of the sum over keys
        for (int64_t h = 0; h < c.s.NH; h++) {
            const Probabilities w = probabilities_of(text, qkv, 0, h, length - 1);
            for (int64_t d = 0; d < c.s.HS; d++) {
                double out = 0, error = 0;
                for (size_t i = 0; i < w.p.size(); i++) {
                    const double term = w.p[i] * qkv[text.v(0, w.first + static_cast<int64_t>(i), h) + d];
                    out += term, error += std::fabs(term) * (w.error[i] + chain);
                }
                const int64_t at = n * row + h * c.s.HS + d;
                r.out.set(at, out);
                r.error[static_cast<size_t>(at)] = error + round * (std::fabs(out) + error) + kTiny;
            }
        }
    }
    return r;
}

inline void check_against_loops(const DecodeCase& c, const HostTensor& out) {
    const DecodeReference want = decode_reference(c);
    check_close(c.name(), out, want.out, [&](int64_t i) { return want.error[static_cast<size_t>(i)]; });
}

}  // namespace op_test
