// Attention of the GPU with sinks. Those of FP8 attention are in gpu_test_attention_fp8.cpp.
#include "tests/gpu/gpu_attention.h"

using namespace attention_test;

namespace attention_sinks_test {

namespace {

// The kernels with mma.sync also on compute capability 9.0.
Ctx& with_mma_sync() {
    static Ctx ctx = gpu();
    ctx.sm = 89;
    return ctx;
}

void check_kernels(const Attention& a) {
    check_against_loops(a);
    if (a.HS == 64 || a.HS == 128) check_against_loops(a, with_mma_sync());
}

}  // namespace

// Around tiles of 16, 64, 128 and 256 rows; windows of the own key alone, within a tile and over several.
TEST_CASE("gpu attention with sinks: tensor-core kernels against loops in double") {
    for (int64_t HS : kTensorDims) {
        for (const Shape& s : {Shape{2, 1, 2, 1, HS}, Shape{1, 17, 4, 2, HS}, Shape{2, 65, 4, 1, HS},
                               Shape{1, 129, 8, 1, HS}, Shape{2, 200, 3, 3, HS}, Shape{1, 257, 5, 1, HS}})
            for (int64_t window : {0, 1, 70})
                check_kernels(with_sinks(with_window(Attention(s, Dtype::kBf16), window)));
        Attention large({2, 193, 4, 2, HS, large_magnitude(HS)}, Dtype::kBf16);
        large.sinks = {1.25, 60, -60, 0};
        large.bf16_dsinks = true;
        check_kernels(large);
        for (int64_t window : {0, 33})
            for (const Lengths& lengths : {kBorders[1], kBorders[5]})
                check_kernels(with_documents(
                    with_window(with_sinks(Attention({2, 400, 4, 2, HS}, Dtype::kBf16)), window), lengths));
    }
}

TEST_CASE("gpu attention with sinks: plain kernels against loops in double") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16})
        for (const Shape& s : {Shape{1, 1, 1, 1, 2}, Shape{2, 7, 2, 1, 10}, Shape{1, 33, 4, 1, 80},
                               Shape{2, 65, 3, 3, 256}})
            for (int64_t window : {0, 1, 20}) check_against_loops(with_sinks(with_window(Attention(s, type), window)));
    for (int64_t HS : {64, 128}) check_against_loops(with_sinks(Attention({1, 100, 4, 2, HS}, Dtype::kFp32)));
    check_against_loops(with_documents(with_window(with_sinks(Attention({2, 400, 4, 2, 48}, Dtype::kBf16)), 33),
                                       kBorders[1]));
}

TEST_CASE("gpu attention: a sink of -infinity changes no bit, and a very large one takes all of P") {
    for (Ctx* ctx : {&gpu(), &with_mma_sync()})
        for (int64_t HS : {48, 64, 96, 128, 256})
            for (int64_t window : {0, 1, 70}) {
                const Attention a = with_window(Attention({2, 300, 4, 2, HS}, Dtype::kBf16), window);
                const Attention lowest = with_sinks(a, {-HUGE_VAL}), large = with_sinks(a, {8192});
                const Attention::Result given = a.on_cpu(a.type);
                check_extreme_sinks(a, on_gpu(a, given, 0, *ctx), on_gpu(lowest, lowest.on_cpu(a.type), 0, *ctx),
                                    on_gpu(large, large.on_cpu(a.type), 0, *ctx));
            }
}

TEST_CASE("gpu attention with sinks: at most twice the CPU's error, equal bits in every run") {
    check_against_cpu(with_sinks(Attention({6, 500, 8, 4, 64}, Dtype::kBf16)));
    check_against_cpu(with_sinks(Attention({1, 4096, 8, 2, 128}, Dtype::kBf16)));
    check_against_cpu(with_documents(with_window(with_sinks(Attention({1, 4096, 8, 8, 64}, Dtype::kBf16)), 129),
                                     {equal_parts(4096, 391)}));
}

}  // namespace attention_sinks_test
