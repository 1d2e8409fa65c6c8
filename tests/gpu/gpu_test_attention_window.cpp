// Attention of the GPU within a sliding window.
#include <array>

#include "tests/gpu/gpu_attention.h"

using namespace attention_test;

namespace attention_window_test {

namespace {

// Around tiles of 16, 32, 64, 128 and 192 rows.
const int64_t kWindows[] = {1, 2, 15, 17, 63, 64, 65, 127, 128, 129, 193, 300, 399};
const Lengths kDocuments = {{129, 271}, {63, 1, 1, 335}};

// Whether a result of query t differs: out and lse.
bool differs(const Attention& a, const Attention::Result& x, const Attention::Result& y, int64_t t) {
    for (int64_t i = a.o(0, t, 0); i < a.o(0, t, 0) + a.NH * a.HS; i++)
        if (x.out.get(i) != y.out.get(i)) return true;
    return false;
}

}  // namespace

TEST_CASE("gpu attention within a window: tensor-core kernels against loops in double") {
    for (int64_t HS : kTensorDims) {
        for (int64_t window : kWindows) {
            const Attention a = with_window(Attention({2, 400, 4, 2, HS}, Dtype::kBf16), window);
            check_against_loops(a);
            check_against_loops(with_documents(a, kDocuments));
        }
        check_against_loops(with_window(Attention({1, 193, 8, 1, HS}, Dtype::kBf16), 100));
        check_against_loops(with_window(Attention({2, 193, 4, 1, HS, large_magnitude(HS)}, Dtype::kBf16), 70));
    }
}

TEST_CASE("gpu attention within a window: plain kernels against loops in double") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16})
        for (int64_t window : {1, 7, 16, 33, 200}) {
            const Attention a = with_window(Attention({2, 400, 4, 2, 48}, type), window);
            check_against_loops(a);
            check_against_loops(with_documents(a, kDocuments));
        }
    check_against_loops(with_window(Attention({1, 33, 4, 1, 80}, Dtype::kFp32), 9));
    for (int64_t HS : {64, 128}) check_against_loops(with_window(Attention({1, 100, 4, 2, HS}, Dtype::kFp32), 31));
}

// The query at t attends to the keys from t - window + 1 to t.
TEST_CASE("gpu attention: a key reaches as many queries as the window has tokens, to the bit") {
    for (int64_t HS : {48, 64, 96, 128, 256})
        for (int64_t window : {1, 2, 64, 129, 200}) {
            const Attention a = with_window(Attention({1, 400, 2, 1, HS}, Dtype::kBf16), window);
            const Attention::Result before = on_gpu(a, a.on_cpu(a.type));
            for (int64_t key : {0, 63, 64, 200, 399}) {
                Attention changed = a;
                for (int64_t i = a.v(0, key, 0); i < a.v(0, key, 0) + HS; i++) changed.qkv.set(i, a.qkv.get(i) + 90);
                const Attention::Result after = on_gpu(changed, changed.on_cpu(a.type));
                int64_t wrong = 0;
                // Of far larger scores, the value of a key with a tiny P may be lost in rounding: count only the reach
                // beyond the window, and that the key's own query sees it.
                for (int64_t t = 0; t < a.T; t++)
                    wrong += differs(a, before, after, t) && !(key <= t && t < key + window);
                INFO(a.name() << "key " << key);
                CHECK_EQ(wrong, 0);
                CHECK(differs(a, before, after, key));
            }
        }
}

// If tiles lie before every query's window, or after all queries of a key, a kernel must not read them at all: 0 times
// NaN would be NaN.
TEST_CASE("gpu attention: tiles before and after the window are skipped, not masked") {
    for (int64_t HS : {48, 64, 96, 128, 256}) {
        const int64_t window = 128, T = 1152;
        const Attention clean = with_window(Attention({1, T, 4, 2, HS}, Dtype::kBf16), window);
        const Attention::Result given = clean.on_cpu(clean.type), before = on_gpu(clean, given);
        // Tiles of 192 queries that begin past 128 + window - 1 read no key below 128; one tile of slack. Those of keys
        // that end before T - 128 - window read none of the last queries.
        for (const auto& [bad, from, to] : {std::array{int64_t{0}, int64_t{576}, T}, {T - 128, 0, T - 576}}) {
            Attention corrupted = clean;
            for (int64_t i = 0; i < 128 * clean.width(); i++) corrupted.qkv.set(bad * clean.width() + i, std::nan(""));
            const Attention::Result after = on_gpu(corrupted, given);
            for (int64_t t = from; t < to; t++) {
                int64_t touched = differs(clean, before, after, t);
                for (int64_t i = clean.q(0, t, 0); i < clean.q(0, t, 0) + clean.width(); i++)
                    touched += after.dqkv.get(i) != before.dqkv.get(i);
                REQUIRE_EQ(touched, 0);
            }
        }
    }
}

TEST_CASE("gpu attention: a window of the whole sequence is bitwise equal to none") {
    for (int64_t HS : {48, 64, 96, 128, 256})
        for (Dtype type : {Dtype::kBf16, Dtype::kFp32}) {
            const Attention a({2, 400, 4, 2, HS}, type);
            const Attention::Result given = a.on_cpu(a.type), none = on_gpu(a, given);
            for (int64_t window : {400, 401, 1 << 20}) {
                const Attention::Result whole = on_gpu(with_window(a, window), given);
                INFO(a.name() << window);
                CHECK(whole.same_bits(none));
            }
        }
}

// More tiles than multiprocessors; equal bits in every run.
TEST_CASE("gpu attention within a window: many tiles and long sequences") {
    check_against_cpu(with_window(Attention({6, 500, 8, 4, 64}, Dtype::kBf16), 83));
    check_against_cpu(with_window(Attention({1, 4096, 8, 2, 128}, Dtype::kBf16), 1000));
    const Attention both = with_window(Attention({1, 4096, 8, 8, 64}, Dtype::kBf16), 129);
    check_against_cpu(with_documents(both, {equal_parts(4096, 391)}));
    for (int64_t HS : {80, 96, 256}) check_against_cpu(with_window(Attention({2, 300, 4, 1, HS}, Dtype::kBf16), 150));
    check_against_cpu(with_window(Attention({1, 4096, 8, 2, 256}, Dtype::kBf16), 1000));
}

}  // namespace attention_window_test
