// Attention forward and backward at the trainer's shapes. Usage: bench_attention [head size]
// FLOPs count half the square of scores (causal) and 2.5 times the forward for the backward, whatever a kernel
// recomputes. Random data, two input sets in turn.
// Prints: shape | forward us | TFLOP/s | % of the ceiling (an 8192^3 bf16 product, measured first) | backward ...
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "llmc/cuda/common.cuh"

namespace {

struct Shape {
    int64_t B, NH, NKV, T, HS;
    Dtype dtype = Dtype::kBf16;
};
const Shape kShapes[] = {{1, 32, 8, 8192, 128}, {1, 32, 8, 4096, 128}, {8, 16, 4, 2048, 128},
                         {64, 12, 12, 1024, 64}, {4, 25, 25, 1024, 64}, {4, 12, 12, 1024, 64, Dtype::kFp32}};

struct Memory {
    Ctx& ctx;
    std::vector<void*> all;
    explicit Memory(Ctx& c) : ctx(c) {}
    ~Memory() {
        for (void* p : all) cuda::device_free(p);
    }
    Tensor random(Dtype dtype, int64_t elems) {
        all.push_back(cuda::device_alloc(elems * dtype_bytes(dtype)));
        Tensor t{all.back(), dtype, elems};
        cuda::fill_normal(ctx, {.out = t, .key = all.size(), .element_offset = 0, .mean = 0, .std = 1});
        return t;
    }
};

float median_us(Ctx& ctx, const std::function<void(int)>& f) {
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    auto once = [&](int i) {
        CUDA_CHECK(cudaEventRecord(begin, cuda::stream_of(ctx)));
        f(i);
        CUDA_CHECK(cudaEventRecord(end, cuda::stream_of(ctx)));
        CUDA_CHECK(cudaEventSynchronize(end));
        float ms = 0;
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        return ms * 1000;
    };
    for (int i = 0; i < 4; i++) once(i);
    std::vector<float> times;
    float total = 0;
    for (int i = 0; total < 200000 || i < 5; i++) times.push_back(once(i)), total += times.back();
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    return times[times.size() / 2];
}

double matmul_ceiling(Ctx& ctx) {
    Memory memory(ctx);
    const int64_t n = 8192;
    const Tensor a = memory.random(Dtype::kBf16, n * n), b = memory.random(Dtype::kBf16, n * n),
                 d = memory.random(Dtype::kBf16, n * n);
    cuda::gemm_set_search(ctx, true);
    const float us = median_us(ctx, [&](int) {
        cuda::gemm(ctx, {.D = d, .A = a, .B = b, .bias = {}, .pre = {}, .M = n, .N = n, .K = n});
    });
    return 2e-6 * n * n * n / us;
}

void bench(Ctx& ctx, const Shape& s, double ceiling) {
    Memory memory(ctx);
    const int64_t N = s.B * s.T, width = (s.NH + 2 * s.NKV) * s.HS;
    std::vector<AttentionForwardArgs> forward;
    std::vector<AttentionBackwardArgs> backward;
    for (int set = 0; set < 2; set++) {
        const Tensor qkv = memory.random(s.dtype, N * width), out = memory.random(s.dtype, N * s.NH * s.HS),
                     dout = memory.random(s.dtype, N * s.NH * s.HS), dqkv = memory.random(s.dtype, N * width),
                     lse = memory.random(Dtype::kFp32, N * s.NH), delta = memory.random(Dtype::kFp32, N * s.NH);
        const float mul = 1 / std::sqrt(static_cast<float>(s.HS));
        forward.push_back({.out = out, .lse = lse, .qkv = qkv, .B = s.B, .T = s.T, .NH = s.NH, .NKV = s.NKV,
                           .HS = s.HS, .softmax_mul = mul});
        backward.push_back({.dqkv = dqkv, .delta = delta, .dout = dout, .out = out, .lse = lse, .qkv = qkv,
                            .B = s.B, .T = s.T, .NH = s.NH, .NKV = s.NKV, .HS = s.HS, .softmax_mul = mul});
    }
    const float forward_us = median_us(ctx, [&](int i) { cuda::attention_forward(ctx, forward[i % 2]); });
    const float backward_us = median_us(ctx, [&](int i) { cuda::attention_backward(ctx, backward[i % 2]); });
    const double mflop = 2e-6 * s.B * s.NH * s.T * s.T * s.HS;
    const double forward_rate = mflop / forward_us, backward_rate = 2.5 * mflop / backward_us;
    std::printf("%s B %2lld heads %2lld / %2lld T %5lld d %3lld | %9.1f | %6.1f | %5.1f | %9.1f | %6.1f | %5.1f\n",
                dtype_name(s.dtype), (long long)s.B, (long long)s.NH, (long long)s.NKV, (long long)s.T,
                (long long)s.HS, forward_us, forward_rate, 100 * forward_rate / ceiling, backward_us,
                backward_rate, 100 * backward_rate / ceiling);
}

}  // namespace

int main(int argc, char** argv) try {
    Ctx ctx;
    cuda::device_open(ctx, 0);
    const double ceiling = matmul_ceiling(ctx);
    std::printf("%s; ceiling %.0f TFLOP/s\n", cuda::device_info(0).name.c_str(), ceiling);
    std::printf("%-37s | %9s | %6s | %5s | %9s | %6s | %5s\n", "shape", "fwd us", "TFLOP/s", "%", "bwd us",
                "TFLOP/s", "%");
    for (const Shape& s : kShapes) {
        if (argc < 2 || s.HS == std::atoi(argv[1])) bench(ctx, s, ceiling);
    }
    cuda::device_close(ctx);
    return 0;
} catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code;
}
