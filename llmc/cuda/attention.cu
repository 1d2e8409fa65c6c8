// Attention: argument checks, the choice of the kernel, and the gradient of sinks.
#include "llmc/cuda/attention.cuh"

namespace cuda {
namespace {

// Args: AttentionForwardArgs or AttentionBackwardArgs.
template <typename Args> AttentionShape check_shape(const char* op, const Args& a) {
    CHECK(a.B > 0 && a.T > 0 && a.NKV > 0 && a.NH > 0 && a.NH % a.NKV == 0, "%s: B %lld T %lld, %lld query heads over "
          "%lld", op, (long long)a.B, (long long)a.T, (long long)a.NH, (long long)a.NKV);
    CHECK(a.HS > 0 && a.HS % 2 == 0 && a.HS <= 256, "%s: head dim %lld, must be even and at most 256", op,
          (long long)a.HS);
    CHECK(a.softmax_mul > 0, "%s: softmax_mul %g", op, a.softmax_mul);
    CHECK(a.softcap >= 0, "%s: a soft cap of %g", op, a.softcap);
    CHECK(a.T < int64_t{1} << 30, "%s: %lld tokens in a sequence", op, (long long)a.T);
    CHECK(a.window >= 0, "%s: a window of %lld tokens", op, (long long)a.window);
    if (a.sinks) expect(a.sinks, a.qkv.dtype, a.NH, op);
    return {.B = a.B, .T = a.T, .NH = a.NH, .NKV = a.NKV, .HS = a.HS, .softmax_mul = a.softmax_mul,
            .softcap = a.softcap, .documents = a.documents,
            .window = static_cast<int>(a.window == 0 ? a.T : std::min(a.window, a.T)),
            .sinks = a.sinks ? a.sinks.data : nullptr};
}

constexpr int kSinkThreads = 512;

// Math: dsinks[h] += - sum over the rows of head h of exp(sink - lse) delta
// Source: the derivative of a softmax by the score of a key without a value.
// Traffic: lse and delta read once.
// Requires: delta; dsinks fp32 or bf16.
// Parallel: a block owns a head; thread i adds rows i, i + 512, ... of each sequence, then the block its threads.
template <typename T, typename Grad>
__global__ void __launch_bounds__(kSinkThreads)
attention_sinks_backward_kernel(Grad* dsinks, const float* lse, const float* delta, AttentionShape shape) {
    __shared__ float shared[32];
    wait_for_previous_kernels();
    const int64_t h = blockIdx.x;
    const float sink = shape.sink<T>(h);
    float sum = 0;
    for (int64_t b = 0; b < shape.B; b++) {
#pragma unroll 4
        for (int64_t row = shape.stat(b, threadIdx.x, h); row < shape.stat(b, shape.T, h); row += kSinkThreads)
            sum = fmaf(-expf(sink - lse[row]), delta[row], sum);
    }
    sum = block_sum(sum, shared, threadIdx.x / 32, threadIdx.x % 32, kSinkThreads / 32);
    if (threadIdx.x == 0) dsinks[h] = from_float<Grad>(to_float(dsinks[h]) + sum);
}

void sinks_backward(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape) {
    expect(args.dsinks, args.dsinks.dtype, args.NH, "attention_backward: dsinks");
    dispatch(args.qkv.dtype, "attention_backward", [&](auto type) {
        dispatch(args.dsinks.dtype, "attention_backward: dsinks", [&](auto grad) {
            using Grad = decltype(grad);
            launch_early(ctx, attention_sinks_backward_kernel<decltype(type), Grad>, grid_size(args.NH), kSinkThreads,
                         0, args.dsinks.as<Grad>(), args.lse.as<float>(), args.delta.as<float>(), shape);
        });
    });
}

// Head dims (multiples of 8) that have tensor-core kernels in bf16, and which ones; all others have the plain kernels.
struct HeadDims {
    int64_t first, last;
    bool mma, forward_sm90, backward_sm90, fp8, capped_forward_sm90, capped_backward_sm90;
};
constexpr HeadDims kHeadDims[] = {{64, 64, true, true, true, true, false, false},
                                  {72, 96, false, true, true, false, false, false},
                                  {128, 128, true, true, true, true, true, false},
                                  {256, 256, false, true, true, false, true, true}};

bool fits(Dtype dtype, int64_t HS, bool HeadDims::* kernel) {
    for (const HeadDims& row : kHeadDims)
        if (row.first <= HS && HS <= row.last) return dtype == Dtype::kBf16 && HS % 8 == 0 && row.*kernel;
    return false;
}
bool fits_mma(Dtype dtype, int64_t HS) { return fits(dtype, HS, &HeadDims::mma); }
// An sm_90a build runs on compute capability 9.0 only.
bool fits_sm90(const Ctx& ctx, Dtype dtype, int64_t HS, bool HeadDims::* kernel) {
    return kSm90aCode && ctx.sm == 90 && fits(dtype, HS, kernel);
}

}  // namespace

const char* attention_kernel(const Ctx& ctx, Dtype dtype, int64_t head_size, bool softcap) {
    if (softcap) {
        if (fits_sm90(ctx, dtype, head_size, &HeadDims::capped_backward_sm90)) return "tensor cores (wgmma)";
        if (fits_sm90(ctx, dtype, head_size, &HeadDims::capped_forward_sm90))
            return "tensor cores (wgmma), backward in a plain kernel on the CUDA cores, which has the soft cap: slow";
        return "plain kernel on the CUDA cores, which has the soft cap: slow";
    }
    if (fits_sm90(ctx, dtype, head_size, &HeadDims::backward_sm90)) return "tensor cores (wgmma)";
    if (fits_sm90(ctx, dtype, head_size, &HeadDims::forward_sm90))
        return "tensor cores (wgmma), backward in a plain kernel on the CUDA cores: slow";
    if (fits_mma(dtype, head_size)) return "tensor cores (mma.sync)";
    return "plain kernel on the CUDA cores: slow; BF16 with head dim 64 or 128 uses the tensor cores, on compute "
           "capability 9.0 also with 72 to 96 (by 8) and 256";
}

int64_t attention_sums_elems(Dtype dtype, int64_t B, int64_t T, int64_t NH, int64_t head_size) {
    return kSm90aCode && fits(dtype, head_size, &HeadDims::backward_sm90)
               ? attention_sums_elems_sm90(B, T, NH, head_size) : 0;
}

void attention_forward(Ctx& ctx, const AttentionForwardArgs& args) {
    const AttentionShape shape = check_shape("attention_forward", args);
    const Dtype T = args.qkv.dtype;
    expect(args.qkv, T, args.B * args.T * shape.row(), "attention_forward: qkv");
    expect(args.out, T, args.B * args.T * args.NH * args.HS, "attention_forward: out");
    expect(args.lse, Dtype::kFp32, args.B * args.NH * args.T, "attention_forward: lse");
    const bool capped = args.softcap > 0;
    CHECK(!capped || (!args.heads && !args.max_logits), "attention_forward: a soft cap with FP8 or max_logits");
    if (args.heads) {
        const int64_t heads = args.B * (args.NH + 2 * args.NKV), blocks = head_blocks(args.T);
        CHECK(fits_sm90(ctx, T, args.HS, &HeadDims::fp8),
              "attention_forward: FP8 is not supported for this device, dtype or head dim");
        expect(args.heads.bytes, Dtype::kE4m3, heads * blocks * kHeadBlock * args.HS, "attention_forward: heads");
        expect(args.heads.scales, Dtype::kFp32, heads * blocks, "attention_forward: scales of heads");
        expect_aligned(args.heads.bytes, "attention_forward: heads");
        expect_aligned(args.out, "attention_forward: out");
        attention_forward_fp8_sm90(ctx, args, shape);
    } else if (const bool sm90 = fits_sm90(ctx, T, args.HS, capped ? &HeadDims::capped_forward_sm90
                                                                   : &HeadDims::forward_sm90);
               sm90 || (!capped && fits_mma(T, args.HS))) {
        expect_aligned(args.qkv, "attention_forward: qkv");
        expect_aligned(args.out, "attention_forward: out");
        (sm90 ? attention_forward_sm90 : attention_forward_mma)(ctx, args, shape);
    } else {
        attention_forward_plain(ctx, args, shape);
    }
    if (args.quant) quantize(ctx, {.quant = args.quant, .in = args.out, .N = args.B * args.T, .C = args.NH * args.HS});
}

void attention_backward(Ctx& ctx, const AttentionBackwardArgs& args) {
    const AttentionShape shape = check_shape("attention_backward", args);
    const Dtype T = args.qkv.dtype;
    expect(args.qkv, T, args.B * args.T * shape.row(), "attention_backward: qkv");
    expect(args.dqkv, T, args.B * args.T * shape.row(), "attention_backward: dqkv");
    expect(args.out, T, args.B * args.T * args.NH * args.HS, "attention_backward: out");
    expect(args.dout, T, args.B * args.T * args.NH * args.HS, "attention_backward: dout");
    expect(args.lse, Dtype::kFp32, args.B * args.NH * args.T, "attention_backward: lse");
    expect(args.delta, Dtype::kFp32, args.B * args.NH * args.T, "attention_backward: delta");
    const bool capped = args.softcap > 0;
    if (const bool sm90 =
            fits_sm90(ctx, T, args.HS, capped ? &HeadDims::capped_backward_sm90 : &HeadDims::backward_sm90);
        sm90 || (!capped && fits_mma(T, args.HS))) {
        expect_aligned(args.qkv, "attention_backward: qkv");
        expect_aligned(args.dqkv, "attention_backward: dqkv");
        expect_aligned(args.out, "attention_backward: out");
        expect_aligned(args.dout, "attention_backward: dout");
        (sm90 ? attention_backward_sm90 : attention_backward_mma)(ctx, args, shape);
    } else {
        attention_backward_plain(ctx, args, shape);
    }
    if (args.sinks) sinks_backward(ctx, args, shape);
    if (args.quant) quantize(ctx, {.quant = args.quant, .in = args.dqkv, .N = args.B * args.T, .C = shape.row()});
}

}  // namespace cuda
