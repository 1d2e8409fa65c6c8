// BF16 matmuls of the custom kernel beside the library's, searched.
// Usage: bench_gemm_bf16 [name part]. Random data, operands rotated beyond the L2 cache where one set would fit; both
// in turns, since the card is power-limited. Symmetric: rates count the full product, of which ours computes half.
// Prints: shape | us, TFLOP/s of the library | us, TFLOP/s of the custom kernel | ratio
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "dev/bench/gemm_bench.h"

using namespace gemm_bench;

namespace {

struct Call {
    Ctx& ctx;
    std::function<void(Ctx&, size_t)> run_set;
    void run(size_t i) const { run_set(ctx, i); }
};

constexpr Dtype kB = Dtype::kBf16;

void symmetric(Ctx& ctx, const char* name, int64_t n, int64_t K, GemmLayout layout) {
    Buffers buffers(ctx);
    std::vector<GemmArgs> sets;
    for (int64_t used = 0; used == 0 || used < (160 << 20); used += 2 * (n * K + n * n)) {
        const Tensor a = buffers.random(kB, n * K);
        sets.push_back({.D = buffers.random(kB, n * n), .A = a, .B = a, .M = n, .N = n, .K = K, .layout = layout});
    }
    std::vector<Call> calls{{ctx, [&](Ctx& c, size_t i) { cuda::gemm(c, sets[i % sets.size()]); }},
                            {ctx, [&](Ctx& c, size_t i) { cuda::gemm_symmetric(c, sets[i % sets.size()]); }}};
    const std::vector<float> us = times_in_turn(calls, 200000);
    std::printf("%-34s | %8.1f %7.1f | %8.1f %7.1f | %5.3f\n", name, us[0], tflops(n, n, K, us[0]), us[1],
                tflops(n, n, K, us[1]), us[0] / us[1]);
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) try {
    const auto wanted = [&](const std::string& name) { return argc < 2 || std::strstr(name.c_str(), argv[1]); };
    Context context(true);
    std::printf("%s, %s\n", cuda::device_info(0).name.c_str(), cuda::device_info(0).matmul_library.c_str());
    std::printf("%-34s | %16s | %16s | ratio\n", "us, TFLOP/s", "library", "custom");
    for (int64_t n : {1024, 1536, 2048, 3072, 4096, 5120, 8192})
        for (int64_t K : {n, 7 * n / 2})
            for (GemmLayout layout : {GemmLayout::kForward, GemmLayout::kWgrad}) {
                const std::string name = strf("symmetric %s %lld, K %lld",
                                              layout == GemmLayout::kForward ? "A A^T" : "A^T A", ll(n), ll(K));
                if (wanted(name)) symmetric(context.ctx, name.c_str(), n, K, layout);
            }
    return 0;
} catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code;
}
