// FP8 matmuls beside BF16 ones of the same shape, in the same run.
// Usage: bench_gemm_fp8 [name part]   a table of the trainer's shapes
//        bench_gemm_fp8 accuracy      errors of each way of accumulation, compared with double
// Algorithms are searched; operands are random and rotated beyond the L2 cache. Fast and precise accumulation have one
// scale per tensor. "block" has 1x128 scales with 128x128 ones (forward, dgrad) or 1x128 ones (wgrad), and the
// library's algorithms. "own block" is the custom kernel, which the trainer's search also times. "int8" has a scale per
// row, and is a forward pass only.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "dev/bench/gemm_bench.h"

using namespace gemm_bench;

namespace {

struct Linear {
    std::string name;
    int64_t in, out;
};
struct Model {
    const char* name;
    bool in_table;               // without a name part
    int64_t rows;                // tokens of a micro-batch
    std::vector<Linear> linears;
};

std::vector<Linear> gpt2(int64_t C) {
    return {{"qkv", C, 3 * C}, {"proj", C, C}, {"up", C, 4 * C}, {"down", 4 * C, C}, {"head", C, 50304}};
}
std::vector<Linear> llama(int64_t C, int64_t kv, int64_t F) {
    return {{"qkv", C, C + 2 * kv}, {"proj", C, C}, {"up", C, 2 * F}, {"down", F, C}, {"head", C, 128256}};
}
const Model kModels[] = {{"8B", true, 8192, llama(4096, 1024, 14336)},
                         {"124M", true, 65536, gpt2(768)},
                         {"small", true, 16384, llama(2048, 512, 5504)},
                         {"135M", false, 32768, llama(576, 192, 1536)},
                         {"1558M", false, 8192, gpt2(1600)},
                         {"1B", false, 8192, llama(2048, 512, 8192)},
                         {"350M", false, 16384, gpt2(1024)},
                         {"774M", false, 16384, gpt2(1280)}};

// One matmul of a linear.
struct Shape {
    GemmLayout layout;
    int64_t M, N, K;
    Dtype result = Dtype::kBf16;
};
constexpr GemmLayout kPasses[] = {GemmLayout::kForward, GemmLayout::kDgrad, GemmLayout::kWgrad};
const char* const kPassNames[] = {"forward", "dgrad", "wgrad"};

Shape shape_of(const Linear& linear, GemmLayout layout, int64_t rows) {
    if (layout == GemmLayout::kForward) return {layout, rows, linear.out, linear.in};
    if (layout == GemmLayout::kDgrad) return {layout, rows, linear.in, linear.out};
    return {layout, linear.out, linear.in, rows, Dtype::kFp32};
}

constexpr int64_t kPoolElems = 1 << 30, kFp32PoolElems = 1 << 29;
// The logits of more rows would not fit into memory.
bool fits(const Shape& s) {
    return std::max({s.M * s.K, s.N * s.K, s.M * s.N}) <= kPoolElems
           && (s.result == Dtype::kBf16 || s.M * s.N <= kFp32PoolElems);
}

enum Way { kBf16Way, kFast, kPrecise, kBlock, kOwnBlock, kInt8Way, kWays };
const char* const kWayNames[] = {"bf16", "fast", "precise", "block", "own block", "int8"};

// Random numbers of each type, made once. Operands are consecutive parts of them, starting over at the end.
class Pool {
public:
    Pool(Ctx& ctx, Dtype dtype, int64_t elems, float mean = 0, float std = 0.5f)
        : buffers_(ctx), all_(buffers_.random(dtype, elems, mean, std)) {}
    Tensor take(int64_t elems) {
        if (at_ + elems > all_.elems) at_ = 0;
        const Tensor t = all_.slice(at_, elems);
        at_ += ceil_div(elems, 256) * 256;
        return t;
    }

private:
    Buffers buffers_;
    Tensor all_;
    int64_t at_ = 0;
};
struct Pools {
    Pool bf16, e4m3, e5m2, int8, scales, bf16_result, fp32_result;
    explicit Pools(Ctx& ctx)
        : bf16(ctx, Dtype::kBf16, kPoolElems), e4m3(ctx, Dtype::kE4m3, kPoolElems),
          e5m2(ctx, Dtype::kE5m2, kPoolElems), int8(ctx, Dtype::kInt8, kPoolElems),
          scales(ctx, Dtype::kFp32, 64 << 20, 1, 0.25f), bf16_result(ctx, Dtype::kBf16, kPoolElems),
          fp32_result(ctx, Dtype::kFp32, kFp32PoolElems) {}
    Pool& of(Dtype dtype) {
        return dtype == Dtype::kBf16 ? bf16 : dtype == Dtype::kE4m3 ? e4m3 : dtype == Dtype::kE5m2 ? e5m2 : int8;
    }
};

// dy, the A of dgrad and wgrad, is E5M2 unless scales are blocks.
GemmArgs args_of(Pools& pools, const Shape& s, Way way) {
    const bool backward = s.layout != GemmLayout::kForward;
    const Dtype b = way == kBf16Way ? Dtype::kBf16 : way == kInt8Way ? Dtype::kInt8 : Dtype::kE4m3;
    const Dtype a = backward && (way == kFast || way == kPrecise) ? Dtype::kE5m2 : b;
    Pool& results = s.result == Dtype::kBf16 ? pools.bf16_result : pools.fp32_result;
    GemmArgs args{.D = results.take(s.M * s.N), .A = pools.of(a).take(s.M * s.K), .B = pools.of(b).take(s.N * s.K),
                  .M = s.M, .N = s.N, .K = s.K, .layout = s.layout,
                  .accumulate = s.layout == GemmLayout::kWgrad};
    if (way == kBf16Way) return args;
    args.fast_accumulation = way == kFast;
    if (way == kBlock || way == kOwnBlock) {
        args.A_granularity = Granularity::kBlock1x128;
        args.B_granularity = s.layout == GemmLayout::kWgrad ? Granularity::kBlock1x128 : Granularity::kBlock128x128;
    }
    if (way == kInt8Way) args.A_granularity = args.B_granularity = Granularity::kRow;
    args.A_scale_inv = pools.scales.take(scale_inv_elems(args.A_granularity, s.M, s.K));
    args.B_scale_inv = pools.scales.take(scale_inv_elems(args.B_granularity, s.N, s.K));
    return args;
}

// Microseconds of each way; 0 if it is refused, or if the custom kernels do not support the product.
std::vector<float> time_ways(Ctx& ctx, Pools& pools, const Shape& s, float budget_us) {
    std::vector<Candidate> candidates;
    std::vector<float> us(kWays, 0);
    std::vector<Way> run;
    for (Way way : {kBf16Way, kFast, kPrecise, kBlock, kOwnBlock, kInt8Way}) {
        if (way == kInt8Way && (s.layout != GemmLayout::kForward || !cuda::gemm_int8_available(ctx))) continue;
        Candidate candidate{ctx, {}, way == kOwnBlock};
        const int64_t set_bytes = (s.M + s.N) * s.K * (way == kBf16Way ? 2 : 1) + s.M * s.N * dtype_bytes(s.result);
        for (int64_t used = 0; used == 0 || used < (160 << 20); used += set_bytes)
            candidate.sets.push_back(args_of(pools, s, way));
        if (candidate.own && !cuda::gemm_fp8_blockwise_supports(ctx, candidate.sets[0])) continue;
        try {
            candidate.run(0);
        } catch (const Error& error) {
            std::fprintf(stderr, "%s\n", error.what());
            continue;
        }
        run.push_back(way);
        candidates.push_back(candidate);
    }
    cuda::synchronize(ctx);
    const std::vector<float> times = times_in_turn(candidates, budget_us);
    for (size_t i = 0; i < run.size(); i++) us[static_cast<size_t>(run[i])] = times[i];
    return us;
}

void print_table(Ctx& ctx, const char* part) {
    Pools pools(ctx);
    std::printf("%-22s", "TFLOP/s (x bf16)");
    for (const char* name : kWayNames) std::printf(" | %14s", name);
    std::printf("\n");
    for (const Model& model : kModels) {
        if (!part && !model.in_table) continue;
        for (const Linear& linear : model.linears) {
            for (GemmLayout pass : kPasses) {
                Shape s = shape_of(linear, pass, model.rows);
                for (Dtype result : {s.result, Dtype::kBf16}) {
                    const std::string name = strf("%s %s %s%s", model.name, linear.name.c_str(),
                                                  kPassNames[static_cast<int>(pass)],
                                                  pass != GemmLayout::kWgrad ? ""
                                                  : result == Dtype::kFp32   ? " fp32"
                                                                             : " bf16");
                    if (part && !std::strstr(name.c_str(), part)) continue;
                    s.result = result;
                    if (!fits(s)) break;
                    const std::vector<float> us = time_ways(ctx, pools, s, 60000);
                    std::printf("%-22s", name.c_str());
                    for (float t : us)
                        std::printf(" | %6.0f (%5.3f)", t > 0 ? tflops(s.M, s.N, s.K, t) : 0, t > 0 ? us[0] / t : 0);
                    std::printf("\n");
                    if (pass != GemmLayout::kWgrad) break;
                }
            }
        }
        std::fflush(stdout);
    }
}

// The value of a code; the CPU product in double is the measure.
std::vector<double> decoded(Ctx& ctx, const Tensor& codes) {
    std::vector<uint8_t> bytes(static_cast<size_t>(codes.elems));
    cuda::copy_to_host(ctx, bytes.data(), codes.data, codes.bytes());
    cuda::synchronize(ctx);
    std::vector<double> values;
    for (uint8_t code : bytes) values.push_back(from_fp8(codes.dtype, code));
    return values;
}

// With scales of 1, for terms with a mean of 0 and for terms of one sign.
void print_accuracy(Ctx& ctx) {
    constexpr int64_t M = 128, N = 256;
    Pools pools(ctx);
    std::printf("E4M3 operands, fp32 D: error against double, root mean square / root mean square of D, and "
                "largest / sum of |a b|\n%-22s | %19s | %19s | %19s\n", "", "fast", "precise", "block");
    for (float mean : {0.0f, 100.0f})
        for (int64_t K : {32, 64, 128, 256, 512, 1024, 4096, 16384}) {
            Buffers buffers(ctx);
            Tensor a = buffers.empty(Dtype::kE4m3, M * K), b = buffers.empty(Dtype::kE4m3, N * K);
            Tensor values = buffers.empty(Dtype::kFp32, (M + N) * K);
            cuda::fill_normal(ctx, {.out = values, .key = 1, .element_offset = 0, .mean = mean, .std = 75});
            for (const Tensor& t : {a, b})
                codes_kernel<<<256, 256, 0, cuda::stream_of(ctx)>>>(
                    static_cast<uint8_t*>(t.data), values.as<float>() + (t.data == b.data ? M * K : 0), t.elems,
                    __NV_E4M3);
            CHECK_LAUNCH("codes_kernel");
            std::vector<double> va = decoded(ctx, a), vb = decoded(ctx, b), want(M * N), magnitude(M * N);
            GemmArgs exact{.D = {want.data(), Dtype::kFp64, M * N}, .A = {va.data(), Dtype::kFp64, M * K},
                           .B = {vb.data(), Dtype::kFp64, N * K}, .M = M, .N = N, .K = K};
            cpu::gemm(ctx, exact);
            for (double& v : va) v = std::fabs(v);
            for (double& v : vb) v = std::fabs(v);
            exact.D.data = magnitude.data();
            cpu::gemm(ctx, exact);
            std::printf("mean %-5.0f K %-10lld", mean, (long long)K);
            for (Way way : {kFast, kPrecise, kBlock}) {
                GemmArgs args = args_of(pools, {GemmLayout::kForward, M, N, K, Dtype::kFp32}, way);
                args.A = a, args.B = b;
                for (const Tensor& grid : {args.A_scale_inv, args.B_scale_inv})
                    cuda::fill_constant(ctx, {.out = grid, .value = 1});
                cuda::gemm(ctx, args);
                std::vector<float> got(M * N);
                cuda::copy_to_host(ctx, got.data(), args.D.data, args.D.bytes());
                cuda::synchronize(ctx);
                double error = 0, size = 0, largest = 0;
                for (size_t i = 0; i < got.size(); i++) {
                    error += std::pow(got[i] - want[i], 2), size += std::pow(want[i], 2);
                    largest = std::max(largest, std::fabs(got[i] - want[i]) / magnitude[i]);
                }
                std::printf(" | %9.2e %9.2e", std::sqrt(error / size), largest);
            }
            std::printf("\n");
        }
}

}  // namespace

int main(int argc, char** argv) try {
    Context context;
    const std::string mode = argc > 1 ? argv[1] : "";
    if (mode == "accuracy") print_accuracy(context.ctx);
    else print_table(context.ctx, argc > 1 ? argv[1] : nullptr);
    return 0;
} catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code;
}
