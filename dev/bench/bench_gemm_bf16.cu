// BF16 matmuls of the custom kernel, and BF16 and FP8 ones of experts, beside the library's, searched.
// Usage: bench_gemm_bf16 [name part]. Random data, operands rotated beyond the L2 cache where one set would fit; both
// in turns, since the card is power-limited. Symmetric: rates count the full product, of which ours computes half.
// Muon: products of several matrices, one after another on the library and at once; `symmetric` as above.
// Experts: beside the library's matmul of as many rows with the weights of one expert.
// Prints: shape | us, TFLOP/s of the library | us, TFLOP/s of the custom kernel | ratio
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "dev/bench/gemm_bench.h"
#include "llmc/ops/grouped_gemm.h"

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

// Of Muon's steps: the Gram matrices of `count` matrices, products of two squares, and that with the matrices.
struct MuonBatch {
    int64_t count, rows, cols;
};
const MuonBatch kMuon[] = {{48, 768, 768}, {12, 768, 3072}, {12, 3072, 768},   // GPT-2 124M on one rank
                           {6, 768, 768}, {2, 768, 3072}, {1, 768, 768},      // on eight
                           {12, 1600, 1600}, {3, 1600, 6400}, {7, 1024, 4096}, {20, 768, 2048}};

void muon(Ctx& ctx, const MuonBatch& batch, const std::function<bool(const std::string&)>& wanted) {
    const int64_t count = batch.count, rows = batch.rows, cols = batch.cols, k = std::min(rows, cols);
    const bool wide = rows <= cols;
    GemmArgs gram{.D = {}, .A = {}, .B = {}, .M = k, .N = k, .K = std::max(rows, cols), .symmetric = true,
                  .matrices = count};
    GemmArgs squares = gram, apply = gram;
    squares.K = k;
    if (!wide) gram.layout = GemmLayout::kWgrad;
    apply.M = rows, apply.N = cols, apply.K = k, apply.symmetric = false;
    if (wide) apply.layout = GemmLayout::kDgrad;
    const GemmArgs kinds[] = {gram, squares, apply};
    const char* names[] = {"Gram", "squares", "apply"};
    for (int kind = 0; kind < 3; kind++) {
        const std::string name = strf("Muon %s, %lld of %lld x %lld", names[kind], ll(count), ll(rows), ll(cols));
        if (!wanted(name)) continue;
        Buffers buffers(ctx);
        std::vector<GemmArgs> sets;
        const GemmArgs& g = kinds[kind];
        for (int64_t used = 0; used == 0 || used < (160 << 20); used += 2 * count * (g.M + g.N) * g.K) {
            sets.push_back(g);
            sets.back().A = buffers.random(kB, count * g.M * g.K);
            sets.back().B = kind == 0 ? sets.back().A : buffers.random(kB, count * g.N * g.K);
            sets.back().D = buffers.random(kB, count * g.M * g.N);
        }
        std::vector<Call> calls{{ctx, [&](Ctx& c, size_t i) {
                                     for_matrices(sets[i % sets.size()],
                                                  [&](const GemmArgs& one) { cuda::gemm(c, one); });
                                 }},
                                {ctx, [&](Ctx& c, size_t i) { cuda::gemm(c, sets[i % sets.size()]); }}};
        const std::vector<float> us = times_in_turn(calls, 100000);
        std::printf("%-34s | %8.1f %7.1f | %8.1f %7.1f | %5.3f\n", name.c_str(), us[0],
                    tflops(count * g.M, g.N, g.K, us[0]), us[1], tflops(count * g.M, g.N, g.K, us[1]), us[0] / us[1]);
        std::fflush(stdout);
    }
}

// Grouped matmuls of mixtures of experts. Balanced: all experts have as many rows; natural: shares of a router.
struct Moe {
    const char* name;
    int64_t experts, rows, wide, narrow;   // N and K of the forward pass
};
const Moe kMoe[] = {{"Qwen3-30B-A3B up", 128, 65536, 1536, 2048},
                    {"Qwen3-30B-A3B down", 128, 65536, 2048, 768},
                    {"OLMoE up", 64, 65536, 2048, 2048},
                    {"OLMoE down", 64, 65536, 2048, 1024},
                    {"one expert", 1, 65536, 1536, 2048}};   // what the kernels do with weights in the L2 cache

// Balanced, or with shares that fall by a factor of 16 from the first expert to the last.
std::vector<int32_t> offsets_of(const Moe& moe, bool balanced) {
    std::vector<double> shares;
    double sum = 0;
    for (int64_t e = 0; e < moe.experts; e++) {
        const double part = static_cast<double>(e * 37 % moe.experts) / static_cast<double>(moe.experts);
        shares.push_back(balanced ? 1 : std::pow(16.0, -part));
        sum += shares.back();
    }
    std::vector<int32_t> offsets{0};
    double until = 0;
    for (double share : shares) {
        until += share / sum;
        offsets.push_back(static_cast<int32_t>(std::lround(until * static_cast<double>(moe.rows))));
    }
    return offsets;
}

// Of the library, one dense matmul of all rows with the weights of one expert: what a perfect grouped one would take.
void grouped(Ctx& ctx, const std::string& name, const Moe& moe, GemmLayout layout, Dtype result, bool accumulate,
             bool balanced, bool fp8) {
    Buffers buffers(ctx);
    const bool wgrad = layout == GemmLayout::kWgrad, dgrad = layout == GemmLayout::kDgrad;
    const int64_t weights = moe.experts * moe.wide * moe.narrow;
    const int64_t N = dgrad ? moe.narrow : wgrad ? moe.narrow : moe.wide, K = dgrad ? moe.wide : moe.narrow;
    const int64_t M = wgrad ? moe.wide : moe.rows, depth = wgrad ? moe.rows : K;
    const std::vector<int32_t> host = offsets_of(moe, balanced);
    const Tensor offsets = buffers.empty(Dtype::kInt32, moe.experts + 1);
    cuda::copy_to_device(ctx, offsets.data, host.data(), offsets.bytes());
    const Dtype type = fp8 ? Dtype::kE4m3 : kB;
    const int64_t columns = fp8 && wgrad ? padded_rows(depth, moe.experts) : depth;   // of a transposed operand
    GroupedGemmArgs args{.D = buffers.random(result, wgrad ? weights : M * N), .A = buffers.random(type, M * columns),
                         .B = buffers.random(type, wgrad ? columns * N : weights), .offsets = offsets,
                         .E = moe.experts, .M = M, .N = N, .K = depth, .layout = layout, .accumulate = accumulate};
    GemmArgs dense{.D = wgrad ? args.D.slice(0, M * N) : args.D, .A = args.A.slice(0, M * depth),
                   .B = args.B.slice(0, N * depth), .M = M, .N = N, .K = depth, .layout = layout,
                   .accumulate = accumulate};
    if (fp8) {
        dense.A_granularity = Granularity::kBlock1x128;
        dense.B_granularity = wgrad ? Granularity::kBlock1x128 : Granularity::kBlock128x128;
        const int64_t of_b = scale_inv_elems(dense.B_granularity, N, columns);
        args.A_scale_inv = buffers.random(Dtype::kFp32, scale_inv_elems(dense.A_granularity, M, columns), 1, 0);
        args.B_scale_inv = buffers.random(Dtype::kFp32, wgrad ? of_b : moe.experts * of_b, 1, 0);
        dense.A_scale_inv = args.A_scale_inv.slice(0, scale_inv_elems(dense.A_granularity, M, depth));
        dense.B_scale_inv = args.B_scale_inv.slice(0, scale_inv_elems(dense.B_granularity, N, depth));
    }
    cuda::synchronize(ctx);
    std::vector<Call> calls{{ctx, [&](Ctx& c, size_t) { cuda::gemm(c, dense); }},
                            {ctx, [&](Ctx& c, size_t) { cuda::grouped_gemm(c, args); }}};
    const std::vector<float> us = times_in_turn(calls, 200000);
    std::printf("%-34s | %8.1f %7.1f | %8.1f %7.1f | %5.3f\n", name.c_str(), us[0], tflops(M, N, depth, us[0]), us[1],
                tflops(M, N, depth, us[1]), us[0] / us[1]);
    std::fflush(stdout);
}

// The transposed x of weight gradients, beside a copy of as many bytes.
void transposes(Ctx& ctx, const std::string& name, const Moe& moe, bool balanced) {
    Buffers buffers(ctx);
    const int64_t C = moe.narrow, R = moe.rows, P = padded_rows(R, moe.experts);
    const std::vector<int32_t> host = offsets_of(moe, balanced);
    const Tensor offsets = buffers.empty(Dtype::kInt32, moe.experts + 1);
    cuda::copy_to_device(ctx, offsets.data, host.data(), offsets.bytes());
    const TransposeScaledArgs args{.out = buffers.empty(Dtype::kE4m3, C * P),
                                   .out_scale_inv = buffers.empty(Dtype::kFp32, P / 128 * C),
                                   .in = buffers.random(Dtype::kE4m3, R * C),
                                   .in_scale_inv = buffers.random(Dtype::kFp32, scale_blocks(C) * R, 1, 0),
                                   .offsets = offsets, .R = R, .C = C, .E = moe.experts};
    cuda::synchronize(ctx);
    std::vector<Call> calls{{ctx, [&](Ctx& c, size_t) {
                                 CUDA_CHECK(cudaMemcpyAsync(args.out.data, args.in.data, static_cast<size_t>(R * C),
                                                            cudaMemcpyDeviceToDevice, cuda::stream_of(c)));
                             }},
                            {ctx, [&](Ctx& c, size_t) { cuda::transpose_scaled(c, args); }}};
    const std::vector<float> us = times_in_turn(calls, 50000);
    const auto rate = [&](float time) { return 2e-3 * static_cast<double>(R * C) / time; };   // GB/s
    std::printf("%-34s | %8.1f %7.0f | %8.1f %7.0f | %5.3f GB/s\n", name.c_str(), us[0], rate(us[0]), us[1],
                rate(us[1]), us[0] / us[1]);
    std::fflush(stdout);
}

void all_grouped(Ctx& ctx, const std::function<bool(const std::string&)>& wanted) {
    struct Pass {
        const char* name;
        GemmLayout layout;
        Dtype result = kB;
        bool accumulate = false, fp8 = false;
    };
    const Pass kPasses[] = {{"forward", GemmLayout::kForward}, {"dgrad", GemmLayout::kDgrad},
                            {"wgrad", GemmLayout::kWgrad}, {"wgrad += bf16", GemmLayout::kWgrad, kB, true},
                            {"wgrad += fp32", GemmLayout::kWgrad, Dtype::kFp32, true},
                            {"FP8 forward", GemmLayout::kForward, kB, false, true},
                            {"FP8 dgrad", GemmLayout::kDgrad, kB, false, true},
                            {"FP8 wgrad", GemmLayout::kWgrad, kB, false, true},
                            {"FP8 wgrad += bf16", GemmLayout::kWgrad, kB, true, true},
                            {"FP8 wgrad += fp32", GemmLayout::kWgrad, Dtype::kFp32, true, true}};
    for (const Moe& moe : kMoe)
        for (bool balanced : {true, false}) {
            if (moe.experts == 1 && !balanced) continue;
            const char* routing = balanced ? "" : ", natural";
            for (const Pass& pass : kPasses) {
                const std::string name = strf("%s %s%s", moe.name, pass.name, routing);
                if (!wanted(name)) continue;
                grouped(ctx, name, moe, pass.layout, pass.result, pass.accumulate, balanced, pass.fp8);
            }
            const std::string name = strf("%s FP8 transpose x%s", moe.name, routing);
            if (wanted(name)) transposes(ctx, name, moe, balanced);
        }
}

}  // namespace

int main(int argc, char** argv) try {
    const auto wanted = [&](const std::string& name) { return argc < 2 || std::strstr(name.c_str(), argv[1]); };
    Context context;
    std::printf("%s, %s\n", cuda::device_info(0).name.c_str(), cuda::device_info(0).matmul_library.c_str());
    std::printf("%-34s | %16s | %16s | ratio\n", "us, TFLOP/s", "library", "custom");
    for (int64_t n : {1024, 1536, 2048, 3072, 4096, 5120, 8192})
        for (int64_t K : {n, 7 * n / 2})
            for (GemmLayout layout : {GemmLayout::kForward, GemmLayout::kWgrad}) {
                const std::string name = strf("symmetric %s %lld, K %lld",
                                              layout == GemmLayout::kForward ? "A A^T" : "A^T A", ll(n), ll(K));
                if (wanted(name)) symmetric(context.ctx, name.c_str(), n, K, layout);
            }
    for (const MuonBatch& batch : kMuon) muon(context.ctx, batch, wanted);
    all_grouped(context.ctx, wanted);
    return 0;
} catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code;
}
