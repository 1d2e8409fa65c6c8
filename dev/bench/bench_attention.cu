// Attention forward and backward. Usage:
// bench_attention [HEAD DIM | BATCH HEADS KV-HEADS TOKENS HEAD-DIM [DOCUMENT [WINDOW [SOFT CAP]]]]
// Without arguments it times the trainer's shapes, with one argument those of this head dim. DOCUMENT: every sequence
// is packed with documents of this many tokens (--reset-attention-mask); FLOPs then count only pairs within documents,
// and a further line compares the time with that of the same documents as separate sequences. WINDOW: --sliding-window,
// whose pairs alone count. FLOPs count half the square of scores (causal) and 2.5 times the forward for the backward,
// whatever a kernel recomputes. Random data, two input sets in turn. Prints: shape | forward us | TFLOP/s | % of the
// ceiling (an 8192^3 bf16 product, measured first) | backward ... and, where FP8 attention exists, us of: its pass over
// qkv | rope alone |
// that pass with rope | the forward | all that FP8 needs: the forward and what its pass costs more than rope, TFLOP/s
// of both, and times the bf16 forward. The last lines are rows of llmc/perf/rates.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "llmc/cuda/attention_backward_sm90.cuh"

namespace {

struct Shape {
    int64_t B, NH, NKV, T, HS;
    Dtype dtype = Dtype::kBf16;
    int64_t document = 0;   // tokens of a document; 0: a sequence is one
    int64_t window = 0;     // as in AttentionForwardArgs
    int64_t softcap = 0;    // as in AttentionForwardArgs
};
const Shape kShapes[] = {{1, 32, 8, 8192, 128}, {1, 32, 8, 4096, 128}, {8, 16, 4, 2048, 128},
                         {64, 12, 12, 1024, 64}, {8, 12, 12, 2048, 64}, {4, 25, 25, 1024, 64},
                         {4, 12, 12, 1024, 64, Dtype::kFp32},
                         {1, 16, 4, 8192, 256}, {1, 16, 4, 4096, 256},
                         // Gemma-2 9B and 27B, whose other layers have a window of 4096.
                         {1, 16, 8, 8192, 256, Dtype::kBf16, 0, 0, 50}, {1, 32, 16, 8192, 128, Dtype::kBf16, 0, 0, 50},
                         {1, 32, 32, 8192, 96}, {1, 32, 32, 8192, 80},
                         // The 8B with --context-parallel 1 and 2 at 65536 tokens and 8 at 131072, also with short
                         // documents.
                         {1, 32, 8, 65536, 128}, {1, 16, 4, 65536, 128}, {1, 4, 1, 131072, 128},
                         {1, 4, 1, 131072, 128, Dtype::kBf16, 1024},
                         // Windows: gpt-oss, and one of 4096 tokens at head dim 128.
                         {1, 64, 8, 8192, 64, Dtype::kBf16, 0, 128}, {1, 64, 8, 8192, 64, Dtype::kBf16, 0, 1024},
                         {1, 64, 8, 32768, 64, Dtype::kBf16, 0, 1024}, {1, 32, 8, 32768, 128, Dtype::kBf16, 0, 4096}};

struct Times {
    float forward = 0, backward = 0, fp8_forward = 0;   // us
};

struct Memory {
    Ctx& ctx;
    std::vector<void*> all;
    explicit Memory(Ctx& c) : ctx(c) {}
    ~Memory() {
        for (void* p : all) cuda::device_free(p);
    }
    Tensor sums(Dtype dtype, int64_t B, int64_t T, int64_t NH, int64_t HS) {
        const int64_t elems = cuda::attention_sums_elems(dtype, B, T, NH, HS);
        return elems > 0 ? random(Dtype::kFp32, elems) : Tensor{};
    }
    // AttentionForwardArgs::documents, or null.
    const int32_t* documents(const Shape& s) {
        if (s.document == 0) return nullptr;
        std::vector<int32_t> host(static_cast<size_t>(2 * s.B * s.T));
        for (int64_t row = 0; row < s.B * s.T; row++) {
            const int64_t start = row % s.T / s.document * s.document;
            host[static_cast<size_t>(row)] = static_cast<int32_t>(start);
            host[static_cast<size_t>(s.B * s.T + row)] = static_cast<int32_t>(start + s.document);
        }
        const Tensor t = zeros(Dtype::kInt32, 2 * s.B * s.T);
        cuda::copy_to_device(ctx, t.data, host.data(), t.bytes());
        cuda::synchronize(ctx);
        return t.as<int32_t>();
    }
    Tensor random(Dtype dtype, int64_t elems) {
        all.push_back(cuda::device_alloc(elems * dtype_bytes(dtype)));
        Tensor t{all.back(), dtype, elems};
        cuda::fill_normal(ctx, {.out = t, .key = all.size(), .element_offset = 0, .mean = 0, .std = 1});
        return t;
    }
    Tensor zeros(Dtype dtype, int64_t elems) {
        all.push_back(cuda::device_alloc(elems * dtype_bytes(dtype)));
        CUDA_CHECK(cudaMemset(all.back(), 0, static_cast<size_t>(elems * dtype_bytes(dtype))));
        return {all.back(), dtype, elems};
    }
};

// FLOPs of the forward: half of the square of each document, without that of what a window leaves out.
double mflop_of(const Shape& s) {
    const double keys = static_cast<double>(s.document > 0 ? s.document : s.T);
    const double most = s.window > 0 ? std::min(static_cast<double>(s.window), keys) : keys;
    return 2e-6 * static_cast<double>(s.B * s.NH * s.T * s.HS) * most * (2 - most / keys);
}

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
        cuda::gemm(ctx, {.D = d, .A = a, .B = b, .M = n, .N = n, .K = n});
    });
    return 2e-6 * n * n * n / us;
}

// ||got - want|| / ||want|| of device bf16 against the host's.
double relative_error(Ctx& ctx, const Tensor& got, const std::vector<bf16>& want) {
    std::vector<bf16> values(want.size());
    cuda::copy_to_host(ctx, values.data(), got.data, got.bytes());
    cuda::synchronize(ctx);
    double error = 0, size = 0;
    for (size_t i = 0; i < want.size(); i++) {
        error += std::pow(static_cast<float>(values[i]) - static_cast<float>(want[i]), 2);
        size += std::pow(static_cast<float>(want[i]), 2);
    }
    return std::sqrt(error / size);
}

// Compares small problems with the CPU before anything is timed.
void check(Ctx& ctx) {
    for (int64_t HS : {64, 80, 96, 128, 256}) {
        Memory memory(ctx);
        const int64_t B = 2, T = 300, NH = 4, NKV = 2, N = B * T, width = (NH + 2 * NKV) * HS;
        const float mul = 1 / std::sqrt(static_cast<float>(HS));
        auto random = [&](int64_t elems) { return memory.random(Dtype::kBf16, elems); };
        const Tensor qkv = random(N * width), dqkv = random(N * width), out = random(N * NH * HS),
                     dout = random(N * NH * HS), lse = memory.random(Dtype::kFp32, N * NH),
                     delta = memory.random(Dtype::kFp32, N * NH);
        const Tensor sums = memory.sums(Dtype::kBf16, B, T, NH, HS);
        AttentionForwardArgs forward{.out = out, .lse = lse, .qkv = qkv, .B = B, .T = T, .NH = NH, .NKV = NKV,
                                     .HS = HS, .softmax_mul = mul};
        AttentionBackwardArgs backward{.dqkv = dqkv, .delta = delta, .dout = dout, .out = out, .lse = lse,
                                       .qkv = qkv, .B = B, .T = T, .NH = NH, .NKV = NKV, .HS = HS,
                                       .softmax_mul = mul, .sums = sums};
        cuda::attention_forward(ctx, forward);
        cuda::attention_backward(ctx, backward);
        std::vector<bf16> h_qkv(N * width), h_dqkv(N * width), h_out(N * NH * HS), h_dout(N * NH * HS);
        std::vector<float> h_lse(N * NH), h_delta(N * NH);
        cuda::copy_to_host(ctx, h_qkv.data(), qkv.data, qkv.bytes());
        cuda::copy_to_host(ctx, h_dout.data(), dout.data, dout.bytes());
        cuda::synchronize(ctx);
        forward.qkv.data = backward.qkv.data = h_qkv.data(), backward.dqkv.data = h_dqkv.data();
        forward.out.data = backward.out.data = h_out.data(), backward.dout.data = h_dout.data();
        forward.lse.data = backward.lse.data = h_lse.data(), backward.delta.data = h_delta.data();
        cpu::attention_forward(ctx, forward);
        cpu::attention_backward(ctx, backward);
        const double out_error = relative_error(ctx, out, h_out);
        const double dqkv_error = relative_error(ctx, dqkv, h_dqkv);
        CHECK(out_error < 0.01 && dqkv_error < 0.01, "head size %lld is wrong: relative errors %g and %g",
              (long long)HS, out_error, dqkv_error);
    }
}

bool has_fp8(const Ctx& ctx, Dtype dtype, int64_t HS) {
    return (HS == 64 || HS == 128) && std::strstr(cuda::attention_kernel(ctx, dtype, HS), "wgmma") != nullptr;
}

Fp8Heads heads_for(Memory& memory, int64_t B, int64_t T, int64_t heads, int64_t HS) {
    const int64_t blocks = B * heads * head_blocks(T);
    return {.bytes = memory.zeros(Dtype::kE4m3, blocks * kHeadBlock * HS),
            .scales = memory.zeros(Dtype::kFp32, blocks)};
}

// Compares FP8 attention with the CPU.
void check_fp8(Ctx& ctx) {
    for (int64_t HS : {64, 128}) {
        if (!has_fp8(ctx, Dtype::kBf16, HS)) continue;
        Memory memory(ctx);
        const int64_t B = 2, T = 300, NH = 4, NKV = 2, N = B * T, width = (NH + 2 * NKV) * HS;
        const Tensor qkv = memory.random(Dtype::kBf16, N * width), out = memory.random(Dtype::kBf16, N * NH * HS),
                     lse = memory.random(Dtype::kFp32, N * NH);
        QuantizeHeadsArgs quantize{.heads = heads_for(memory, B, T, NH + 2 * NKV, HS), .qkv = qkv, .cos_sin = {},
                                   .B = B, .T = T, .NH = NH, .NKV = NKV, .HS = HS};
        AttentionForwardArgs forward{.out = out, .lse = lse, .qkv = qkv, .B = B, .T = T, .NH = NH, .NKV = NKV,
                                     .HS = HS, .softmax_mul = 1 / std::sqrt(static_cast<float>(HS)),
                                     .heads = quantize.heads};
        std::vector<bf16> h_qkv(N * width), h_out(N * NH * HS);
        std::vector<float> h_lse(N * NH), h_scales(quantize.heads.scales.elems);
        std::vector<uint8_t> h_bytes(quantize.heads.bytes.elems);
        cuda::copy_to_host(ctx, h_qkv.data(), qkv.data, qkv.bytes());
        cuda::synchronize(ctx);
        cuda::quantize_heads(ctx, quantize);
        cuda::attention_forward(ctx, forward);
        quantize.qkv.data = forward.qkv.data = h_qkv.data();
        quantize.heads.bytes.data = h_bytes.data(), quantize.heads.scales.data = h_scales.data();
        forward.out.data = h_out.data(), forward.lse.data = h_lse.data(), forward.heads = quantize.heads;
        cpu::quantize_heads(ctx, quantize);
        cpu::attention_forward(ctx, forward);
        const double qkv_error = relative_error(ctx, qkv, h_qkv), out_error = relative_error(ctx, out, h_out);
        CHECK(qkv_error == 0 && out_error < 0.01, "FP8, head size %lld is wrong: relative errors %g and %g",
              (long long)HS, qkv_error, out_error);
    }
}

// Returns the time of the forward alone.
float bench_fp8(Ctx& ctx, const Shape& s, const std::vector<AttentionForwardArgs>& forward, Memory& memory,
                float bf16_us, double ceiling) {
    std::vector<float> angles(static_cast<size_t>(s.T * s.HS));
    for (size_t i = 0; i < angles.size(); i++) {
        const auto angle = static_cast<float>(i / 2);
        angles[i] = i % 2 ? std::sin(angle) : std::cos(angle);
    }
    const Tensor table = memory.zeros(Dtype::kFp32, s.T * s.HS);
    cuda::copy_to_device(ctx, table.data, angles.data(), table.bytes());
    cuda::synchronize(ctx);
    std::vector<AttentionForwardArgs> fp8 = forward;
    std::vector<QuantizeHeadsArgs> quantize;
    for (AttentionForwardArgs& args : fp8) {
        args.heads = heads_for(memory, s.B, s.T, s.NH + 2 * s.NKV, s.HS);
        quantize.push_back({.heads = args.heads, .qkv = args.qkv, .cos_sin = {}, .B = s.B, .T = s.T, .NH = s.NH,
                            .NKV = s.NKV, .HS = s.HS});
    }
    const float pass_us = median_us(ctx, [&](int i) { cuda::quantize_heads(ctx, quantize[i % 2]); });
    const float kernel_us = median_us(ctx, [&](int i) { cuda::attention_forward(ctx, fp8[i % 2]); });
    const float both_us = median_us(ctx, [&](int i) {
        cuda::quantize_heads(ctx, quantize[i % 2]);
        cuda::attention_forward(ctx, fp8[i % 2]);
    });
    const float rope_us = median_us(ctx, [&](int i) {
        cuda::rope_forward(ctx, {.qkv = fp8[i % 2].qkv, .cos_sin = table, .N = s.B * s.T, .T = s.T, .NH = s.NH,
                                 .NKV = s.NKV, .HS = s.HS});
    });
    for (QuantizeHeadsArgs& args : quantize) args.cos_sin = table;
    const float rope_pass_us = median_us(ctx, [&](int i) { cuda::quantize_heads(ctx, quantize[i % 2]); });
    const double mflop = mflop_of(s);
    const float with_rope_us = kernel_us + rope_pass_us - rope_us;
    std::printf("  fp8: pass %.1f, rope %.1f, rope and pass %.1f, forward %.1f (%.0f TFLOP/s, %.0f %%) | whole %.1f "
                "(%.0f TFLOP/s, %.2f x bf16), after rope %.1f (%.0f TFLOP/s, %.2f x)\n", pass_us, rope_us, rope_pass_us,
                kernel_us, mflop / kernel_us, 100 * mflop / kernel_us / ceiling, both_us, mflop / both_us,
                bf16_us / both_us, with_rope_us, mflop / with_rope_us, bf16_us / with_rope_us);
    return kernel_us;
}

struct Problem {
    std::vector<AttentionForwardArgs> forward;
    std::vector<AttentionBackwardArgs> backward;

    Problem(Memory& memory, const Shape& s) {
        const int64_t N = s.B * s.T, width = (s.NH + 2 * s.NKV) * s.HS;
        const float mul = 1 / std::sqrt(static_cast<float>(s.HS));
        const Tensor sums = memory.sums(s.dtype, s.B, s.T, s.NH, s.HS);
        const int32_t* documents = memory.documents(s);
        for (int set = 0; set < 2; set++) {
            const Tensor qkv = memory.random(s.dtype, N * width), out = memory.random(s.dtype, N * s.NH * s.HS),
                         dout = memory.random(s.dtype, N * s.NH * s.HS), dqkv = memory.random(s.dtype, N * width),
                         lse = memory.random(Dtype::kFp32, N * s.NH),
                         delta = memory.random(Dtype::kFp32, N * s.NH);
            forward.push_back({.out = out, .lse = lse, .qkv = qkv, .B = s.B, .T = s.T, .NH = s.NH, .NKV = s.NKV,
                               .HS = s.HS, .softmax_mul = mul, .documents = documents, .window = s.window,
                               .softcap = static_cast<float>(s.softcap)});
            backward.push_back({.dqkv = dqkv, .delta = delta, .dout = dout, .out = out, .lse = lse, .qkv = qkv,
                                .B = s.B, .T = s.T, .NH = s.NH, .NKV = s.NKV, .HS = s.HS, .softmax_mul = mul,
                                .documents = documents, .window = s.window, .sums = sums,
                                .softcap = static_cast<float>(s.softcap)});
        }
    }
    Times times(Ctx& ctx) {
        Times t;
        t.forward = median_us(ctx, [&](int i) { cuda::attention_forward(ctx, forward[i % 2]); });
        t.backward = median_us(ctx, [&](int i) { cuda::attention_backward(ctx, backward[i % 2]); });
        return t;
    }
};

// The two kernels of the backward at head dim 256 apart, with the FLOPs that each of them executes.
void bench_apart(Ctx& ctx, const Shape& s, const AttentionBackwardArgs& args, double forward_mflop) {
    const cuda::AttentionShape shape{.B = s.B, .T = s.T, .NH = s.NH, .NKV = s.NKV, .HS = s.HS,
                                     .softmax_mul = args.softmax_mul, .documents = args.documents,
                                     .window = static_cast<int>(s.window > 0 ? s.window : s.T)};
    const cuda::DqSums none{nullptr, static_cast<uint32_t*>(args.sums.data), nullptr, 0};
    const float keys_us = median_us(ctx, [&](int) {
        CUDA_CHECK(cudaMemsetAsync(none.taken, 0, 4, cuda::stream_of(ctx)));
        cuda::attention_backward_fused_sm90(ctx, args, none, shape);
    });
    const float queries_us = median_us(ctx, [&](int) { cuda::attention_backward_queries_sm90(ctx, args, shape); });
    std::printf("  dK and dV %.1f us (%.0f TFLOP/s), dQ %.1f us (%.0f TFLOP/s)\n", keys_us, 2 * forward_mflop / keys_us,
                queries_us, 1.5 * forward_mflop / queries_us);
}

// Returns a row of llmc/perf/rates.
std::string bench(Ctx& ctx, const Shape& s, double ceiling) {
    Memory memory(ctx);
    Problem problem(memory, s);
    Times times = problem.times(ctx);
    const double mflop = mflop_of(s);
    std::printf("%s B %3lld heads %2lld / %2lld T %6lld d %3lld", dtype_name(s.dtype), (long long)s.B, (long long)s.NH,
                (long long)s.NKV, (long long)s.T, (long long)s.HS);
    auto print = [&](double work, float us) {
        std::printf(" | %9.1f | %7.1f | %5.1f", us, work / us, 100 * work / us / ceiling);
    };
    print(mflop, times.forward), print(2.5 * mflop, times.backward);
    if (s.document > 0) std::printf(" | documents of %lld", (long long)s.document);
    if (s.window > 0) std::printf(" | window of %lld", (long long)s.window);
    if (s.softcap > 0) std::printf(" | soft cap of %lld", (long long)s.softcap);
    std::printf("\n");
    if (s.softcap > 0) return "";
    if (s.HS == 256) bench_apart(ctx, s, problem.backward[0], mflop);
    if (has_fp8(ctx, s.dtype, s.HS))
        times.fp8_forward = bench_fp8(ctx, s, problem.forward, memory, times.forward, ceiling);
    if (s.window > 0) return "";
    if (s.document == 0)
        return strf("attention %s %lld %lld %lld %lld %.1f %.1f %.1f\n", dtype_name(s.dtype), (long long)s.B,
                    (long long)s.NH, (long long)s.T, (long long)s.HS, times.forward, times.backward, times.fp8_forward);
    Shape apart = s;
    apart.B = s.B * s.T / s.document, apart.T = s.document, apart.document = 0;
    Memory more(ctx);
    const Times other = Problem(more, apart).times(ctx);
    std::printf("  documents: times those of %lld sequences of %lld tokens: forward %.2f, backward %.2f\n",
                (long long)apart.B, (long long)apart.T, times.forward / other.forward, times.backward / other.backward);
    return "";
}

std::vector<Shape> shapes_of(int argc, char** argv) {
    if (argc <= 2) {
        std::vector<Shape> shapes;
        for (const Shape& s : kShapes)
            if (argc < 2 || s.HS == std::atoi(argv[1])) shapes.push_back(s);
        return shapes;
    }
    REQUIRE(argc >= 6 && argc <= 9, "usage: bench_attention [HEAD-DIM | BATCH HEADS KV-HEADS TOKENS HEAD-DIM "
            "[DOCUMENT [WINDOW [SOFT-CAP]]]]");
    int64_t word[8] = {};
    for (int i = 1; i < argc; i++) word[i - 1] = std::atoll(argv[i]);
    const Shape s{word[0], word[1], word[2], word[3], word[4], Dtype::kBf16, word[5], word[6], word[7]};
    REQUIRE(s.document >= 0 && (s.document == 0 || s.T % s.document == 0), "%lld tokens are no whole number of "
            "documents of %lld", (long long)s.T, (long long)s.document);
    return {s};
}

}  // namespace

int main(int argc, char** argv) try {
    const std::vector<Shape> shapes = shapes_of(argc, argv);
    Ctx ctx;
    cuda::device_open(ctx, 0);
    check(ctx);
    check_fp8(ctx);
    const double ceiling = matmul_ceiling(ctx);
    std::printf("%s; ceiling %.0f TFLOP/s\n", cuda::device_info(0).name.c_str(), ceiling);
    std::printf("%-39s", "shape");
    for (const char* what : {"fwd us", "bwd us"})
        std::printf(" | %9s | %7s | %5s", what, "TFLOP/s", "%");
    std::printf("\n");
    std::string rates;
    for (const Shape& s : shapes) rates += bench(ctx, s, ceiling);
    std::printf("%s", rates.c_str());
    cuda::device_close(ctx);
    return 0;
} catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code;
}
