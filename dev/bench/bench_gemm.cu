// Matmuls of the trainer's shapes: the library's first answer against the searched plan.
// Usage: bench_gemm [name part]. Random data, operands rotated beyond the L2 cache where one set would fit.
// Prints: shape | us | TFLOP/s | % of the ceiling (an 8192^3 bf16 product, measured first) | x the first
// answer
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "dev/bench/gemm_bench.h"

using namespace gemm_bench;

namespace {

struct Shape {
    const char* name;
    GemmLayout layout;
    int64_t M, N, K;
    Dtype operands = Dtype::kBf16, result = Dtype::kBf16;
    bool accumulate = false;
    bool bias = false;
};

constexpr GemmLayout kF = GemmLayout::kForward, kD = GemmLayout::kDgrad, kW = GemmLayout::kWgrad;
constexpr Dtype kB = Dtype::kBf16, kS = Dtype::kFp32;
const Shape kShapes[] = {
    {"8B qkv forward", kF, 8192, 6144, 4096},
    {"8B o forward", kF, 8192, 4096, 4096},
    {"8B gate+up forward", kF, 8192, 28672, 4096},
    {"8B down forward", kF, 8192, 4096, 14336},
    {"8B head forward", kF, 8192, 128256, 4096},
    {"8B gate+up dgrad", kD, 8192, 4096, 28672},
    {"8B down dgrad", kD, 8192, 14336, 4096},
    {"8B head dgrad", kD, 8192, 4096, 128256},
    {"8B qkv wgrad += fp32", kW, 6144, 4096, 8192, kB, kS, true},
    {"8B gate+up wgrad += fp32", kW, 28672, 4096, 8192, kB, kS, true},
    {"8B gate+up wgrad += bf16", kW, 28672, 4096, 8192, kB, kB, true},
    {"8B down wgrad += fp32", kW, 4096, 14336, 8192, kB, kS, true},
    {"124M qkv forward, bias", kF, 65536, 2304, 768, kB, kB, false, true},
    {"124M fc forward, bias", kF, 65536, 3072, 768, kB, kB, false, true},
    {"124M fc2 forward, bias", kF, 65536, 768, 3072, kB, kB, false, true},
    {"124M head forward", kF, 65536, 50304, 768},
    {"124M fc dgrad", kD, 65536, 768, 3072},
    {"124M head dgrad", kD, 65536, 768, 50304},
    {"124M qkv wgrad += fp32", kW, 2304, 768, 65536, kB, kS, true},
    {"124M fc wgrad += fp32", kW, 3072, 768, 65536, kB, kS, true},
    {"124M o wgrad += fp32", kW, 768, 768, 65536, kB, kS, true},
    {"124M fc forward fp32", kF, 16384, 3072, 768, kS, kS},
};
const Shape kCeiling = {"8192^3", kF, 8192, 8192, 8192};

struct Contexts {
    Context first{false}, searched{true};
};

struct Times {
    float first_us, searched_us;
};

// Times both algorithms for about 200 ms.
Times time_both(Contexts& contexts, const Shape& s) {
    Buffers buffers(contexts.first.ctx);
    const int64_t set_bytes = (s.M * s.K + s.N * s.K) * dtype_bytes(s.operands)
                              + s.M * s.N * dtype_bytes(s.result);
    std::vector<GemmArgs> sets;
    for (int64_t used = 0; used == 0 || used < (160 << 20); used += set_bytes) {
        GemmArgs args{.D = buffers.random(s.result, s.M * s.N), .A = buffers.random(s.operands, s.M * s.K),
                      .B = buffers.random(s.operands, s.N * s.K), .M = s.M, .N = s.N,
                      .K = s.K, .layout = s.layout, .accumulate = s.accumulate};
        if (s.bias) args.bias = buffers.random(s.operands, s.N);
        sets.push_back(args);
    }
    cuda::synchronize(contexts.first.ctx);
    std::vector<Candidate> both{{contexts.searched.ctx, sets}, {contexts.first.ctx, sets}};
    const std::vector<float> us = times_in_turn(both, 200000);
    return {us[1], us[0]};
}

// Compares a small product in every layout with the CPU before anything is timed.
void check(Ctx& ctx) {
    const int64_t M = 136, N = 264, K = 520;
    for (GemmLayout layout : {kF, kD, kW}) {
        Buffers buffers(ctx);
        GemmArgs args{.D = buffers.random(kB, M * N), .A = buffers.random(kB, M * K),
                      .B = buffers.random(kB, N * K), .M = M, .N = N, .K = K, .layout = layout};
        std::vector<bf16> a(M * K), b(N * K), d(M * N), want(M * N);
        cuda::copy_to_host(ctx, a.data(), args.A.data, args.A.bytes());
        cuda::copy_to_host(ctx, b.data(), args.B.data, args.B.bytes());
        cuda::gemm(ctx, args);
        cuda::copy_to_host(ctx, d.data(), args.D.data, args.D.bytes());
        cuda::synchronize(ctx);
        args.A.data = a.data(), args.B.data = b.data(), args.D.data = want.data();
        cpu::gemm(ctx, args);
        double error = 0, size = 0;
        for (int64_t i = 0; i < M * N; i++) {
            error += std::pow(static_cast<float>(d[i]) - static_cast<float>(want[i]), 2);
            size += std::pow(static_cast<float>(want[i]), 2);
        }
        CHECK(error < 1e-5 * size, "layout %d is wrong: relative error %g", static_cast<int>(layout),
              std::sqrt(error / size));
    }
}

}  // namespace

int main(int argc, char** argv) try {
    Contexts contexts;
    check(contexts.first.ctx);
    const double ceiling = tflops(kCeiling.M, kCeiling.N, kCeiling.K,
                                  time_both(contexts, kCeiling).searched_us);
    std::printf("%s, %s; ceiling %.0f TFLOP/s\n", cuda::device_info(0).name.c_str(),
                cuda::device_info(0).matmul_library.c_str(), ceiling);
    std::printf("%-28s | %9s | %8s | %5s | %s\n", "shape", "us", "TFLOP/s", "%", "x first answer");
    for (const Shape& s : kShapes) {
        if (argc > 1 && !std::strstr(s.name, argv[1])) continue;
        const Times t = time_both(contexts, s);
        const double rate = tflops(s.M, s.N, s.K, t.searched_us);
        std::printf("%-28s | %9.1f | %8.1f | %5.1f | %.3f\n", s.name, t.searched_us, rate,
                    100 * rate / ceiling, t.first_us / t.searched_us);
    }
    return 0;
} catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code;
}
