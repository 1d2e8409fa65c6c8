// Attention of the GPU with soft caps of the scores.
#include "tests/gpu/gpu_attention.h"

using namespace attention_test;

namespace attention_softcap_test {

// Caps that bend nearly all scores, and only the largest ones.
constexpr double kCaps[] = {1.5, 12};

// Around tiles of 16, 64, 80, 128 rows; windows of the own key alone, within a tile and over several.
TEST_CASE("gpu attention with a soft cap: tensor-core kernels against loops in double") {
    for (int64_t HS : {128, 256})
        for (double cap : kCaps) {
            for (const Shape& s : {Shape{2, 1, 2, 1, HS}, Shape{1, 17, 4, 2, HS}, Shape{2, 65, 4, 1, HS},
                                   Shape{1, 79, 2, 1, HS}, Shape{1, 129, 8, 1, HS}, Shape{2, 200, 3, 3, HS},
                                   Shape{1, 257, 5, 1, HS}})
                for (int64_t window : {0, 1, 70})
                    check_against_loops(with_softcap(with_window(Attention(s, Dtype::kBf16), window), cap));
            check_against_loops(with_softcap(Attention({2, 193, 4, 2, HS, large_magnitude(HS)}, Dtype::kBf16), cap));
            for (int64_t window : {0, 33})
                for (const Lengths& lengths : {kBorders[1], kBorders[5]})
                    check_against_loops(with_documents(
                        with_softcap(with_window(with_sinks(Attention({2, 400, 4, 2, HS}, Dtype::kBf16)), window), cap),
                        lengths));
        }
}

TEST_CASE("gpu attention with a soft cap: plain kernels against loops in double") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16})
        for (double cap : kCaps)
            for (const Shape& s : {Shape{1, 1, 1, 1, 2}, Shape{2, 7, 2, 1, 10}, Shape{1, 33, 4, 1, 80},
                                   Shape{2, 65, 3, 3, 250}, Shape{1, 100, 4, 2, 64}})
                for (int64_t window : {0, 20})
                    check_against_loops(with_softcap(with_sinks(with_window(Attention(s, type), window)), cap));
    for (int64_t HS : {128, 256}) check_against_loops(with_softcap(Attention({1, 100, 4, 2, HS}, Dtype::kFp32), 3));
}

TEST_CASE("gpu attention with a soft cap: at most twice the CPU's error, equal bits in every run") {
    check_against_cpu(with_softcap(Attention({1, 700, 8, 2, 128}, Dtype::kBf16), 4));
    check_against_cpu(with_softcap(Attention({1, 1100, 8, 4, 256}, Dtype::kBf16), 4));
    check_against_cpu(with_softcap(with_window(Attention({2, 600, 4, 2, 256, 3}, Dtype::kBf16), 129), 50));
}

}  // namespace attention_softcap_test
