// Generation on the CPU: attention over a cache against the last rows of attention_forward, the cache itself, and
// positions of rows.
#include "tests/support/decode_test.h"

using namespace op_test;

namespace decode_test {

namespace {

struct Decoded {
    HostTensor cache, out;
};
Decoded decode(const DecodeCase& c) {
    HostTensor cache = c.cache, qkv = c.qkv, slots = c.slots, positions = c.positions;
    HostTensor out(qkv.dtype(), c.N * c.s.NH * c.s.HS), splits(Dtype::kFp32, c.split_elems());
    Ctx ctx;
    const KvCache at = c.cache_args(cache.view(), slots.view(), positions.view());
    cpu::cache_append(ctx, c.append_args(at, qkv.view()));
    cpu::attention_decode(ctx, c.decode_args(at, qkv.view(), out.view(), splits.view()));
    return {cache, out};
}

// Returns what attention_forward computes for the last token of each text; 0 for padding.
HostTensor last_rows(const DecodeCase& c) {
    const int64_t row = c.s.NH * c.s.HS;
    HostTensor out(c.qkv.dtype(), c.N * row);
    for (int64_t n = 0; n < c.N; n++) {
        const AttentionProblem& text = c.texts[static_cast<size_t>(n)];
        const bool padding = c.s.lengths[static_cast<size_t>(n)] == 0;
        const HostTensor all = text.on_cpu(text.type).out;
        for (int64_t i = 0; i < row; i++) out.set(n * row + i, padding ? 0 : all.get((text.s.T - 1) * row + i));
    }
    return out;
}

}  // namespace

TEST_CASE("attention over a cache: the bits of attention_forward's last rows") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64}) {
        for (const DecodeShape& shape : decode_shapes()) {
            for (double magnitude : {1.0, 6.0}) {
                const DecodeCase c(shape, type, magnitude);
                INFO(c.name());
                const HostTensor expected = last_rows(c);
                CHECK(decode(c).out.same_bits(expected));
            }
        }
    }
}

TEST_CASE("attention over a cache against loops in double") {
    std::vector<DecodeShape> shapes = decode_shapes();
    shapes.push_back({8, 2, 64, 300, {300, 256, 17}, 45});
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16})
        for (const DecodeShape& shape : shapes)
            for (double magnitude : {1.0, 6.0}) {
                const DecodeCase c(shape, type, magnitude);
                check_against_loops(c, decode(c).out);
            }
}

// Up to 256 keys are one sum, so that it makes no difference where it begins.
TEST_CASE("attention over a cache with a window is attention over the last tokens alone") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16}) {
        for (int64_t window : {1, 7, 48, 100, 150}) {
            const DecodeCase c({4, 2, 20, 250, {90, 1, 150, 0, 7, 250}, window}, type);
            DecodeCase last(c);
            last.s.window = 0;
            for (int64_t n = 0; n < c.N; n++) {
                const int64_t length = c.s.lengths[static_cast<size_t>(n)], kept = std::min(length, window);
                last.s.lengths[static_cast<size_t>(n)] = kept;
                last.positions.set(n, static_cast<double>(kept - 1));
                for (int64_t i = 0; i < kept * c.width; i++) {
                    const int64_t slot = c.slot(n) * c.s.capacity * c.width;
                    last.cache.set(slot + i, c.cache.get(slot + (length - kept) * c.width + i));
                }
            }
            INFO(c.name() << ", window " << window);
            CHECK(decode(c).out.same_bits(decode(last).out));
        }
    }
}

TEST_CASE("attention over a cache: every cached element that a row may see changes it, and no other") {
    const DecodeCase c({4, 2, 16, 20, {7, 0, 20}}, Dtype::kFp32);
    const HostTensor before = decode(c).out;
    for (int64_t n : {0, 2}) {
        const int64_t row = c.s.NH * c.s.HS, length = c.s.lengths[static_cast<size_t>(n)];
        for (int64_t t = 0; t < c.s.capacity; t++) {
            for (int64_t i : {int64_t{0}, c.width / 2 - 1, c.width / 2, c.width - 1}) {
                DecodeCase changed = c;
                changed.cache.set((c.slot(n) * c.s.capacity + t) * c.width + i, 3.5);
                const HostTensor after = decode(changed).out;
                for (int64_t other = 0; other < c.N; other++) {
                    int64_t differ = 0;
                    for (int64_t e = other * row; e < (other + 1) * row; e++) differ += after.get(e) != before.get(e);
                    INFO("position " << t << " element " << i << " of row " << n << ", seen by row " << other);
                    // The row's own key and value are written by cache_append.
                    CHECK((differ > 0) == (other == n && t < length - 1));
                }
            }
        }
    }
}

TEST_CASE("cache_append writes the keys and values of its rows and nothing else") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16}) {
        for (const DecodeShape& shape : decode_shapes()) {
            const DecodeCase c(shape, type);
            HostTensor expected = c.cache;
            const int64_t row = (c.s.NH + 2 * c.s.NKV) * c.s.HS;
            for (int64_t n = 0; n < c.N; n++) {
                const int64_t length = c.s.lengths[static_cast<size_t>(n)];
                for (int64_t i = 0; i < c.width && length > 0; i++)
                    expected.set((c.slot(n) * c.s.capacity + length - 1) * c.width + i,
                                 c.qkv.get((n + 1) * row - c.width + i));
            }
            INFO(c.name());
            CHECK(decode(c).cache.same_bits(expected));
        }
    }
}

TEST_CASE("rope and embedding at given positions are those of the rows at these positions") {
    constexpr int64_t N = 5, T = 9, NH = 3, NKV = 1, HS = 6, C = 11, V = 7;
    std::vector<int32_t> positions = {8, 0, -1, 3, 3}, tokens = {1, 6, 2, 2, 0};
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16}) {
        Ctx ctx;
        const HostTensor one = random_tensor(type, (NH + 2 * NKV) * HS, 3);
        HostTensor table = random_tensor(Dtype::kFp32, T * HS, 4), wte = random_tensor(type, V * C, 5),
                   wpe = random_tensor(type, T * C, 6), rows(type, N * one.elems()), all(type, T * one.elems()),
                   out(type, N * C);
        for (int64_t i = 0; i < rows.elems(); i++) rows.set(i, one.get(i % one.elems()));
        for (int64_t i = 0; i < all.elems(); i++) all.set(i, one.get(i % one.elems()));
        RopeArgs args{.qkv = all.view(), .cos_sin = table.view(), .N = T, .T = T, .NH = NH, .NKV = NKV, .HS = HS};
        cpu::rope_forward(ctx, args);
        args.qkv = rows.view(), args.N = N, args.T = 1, args.positions = positions.data();
        cpu::rope_forward(ctx, args);
        int32_t bad = 0;
        cpu::embedding_forward(ctx, {.out = out.view(), .wte = wte.view(), .wpe = wpe.view(), .tokens = tokens.data(),
                                     .bad_tokens = &bad, .N = N, .T = 1, .C = C, .V = V,
                                     .positions = positions.data()});
        for (int64_t n = 0; n < N; n++) {
            const int64_t at = std::max(positions[static_cast<size_t>(n)], 0), token = tokens[static_cast<size_t>(n)];
            for (int64_t i = 0; i < one.elems(); i++)
                CHECK(rows.get(n * one.elems() + i) == all.get(at * one.elems() + i));
            HostTensor sum(type, C);
            for (int64_t i = 0; i < C; i++) sum.set(i, wte.get(token * C + i) + wpe.get(at * C + i));
            for (int64_t i = 0; i < C; i++) CHECK(out.get(n * C + i) == sum.get(i));
        }
        positions[0] = T;
        CHECK_THROWS_AS(cpu::rope_forward(ctx, args), Error);
        positions[0] = 8;
    }
}

TEST_CASE("a cache refuses slots and positions that it does not have") {
    DecodeCase c({2, 1, 4, 6, {3, 6}}, Dtype::kFp32);
    c.positions.set(0, 6);
    CHECK_THROWS_AS(decode(c), Error);
    c.positions.set(0, 2);
    c.slots.set(1, 2);
    CHECK_THROWS_AS(decode(c), Error);
}

}  // namespace decode_test
