// Attention: argument checks and the choice of the kernel.
#include "llmc/cuda/attention.cuh"

namespace cuda {
namespace {

AttentionShape check_shape(const char* op, int64_t B, int64_t T, int64_t NH, int64_t NKV, int64_t HS,
                           float softmax_mul, const int32_t* documents, int64_t window) {
    CHECK(B > 0 && T > 0 && NKV > 0 && NH > 0 && NH % NKV == 0, "%s: B %lld T %lld, %lld query heads over %lld", op,
          (long long)B, (long long)T, (long long)NH, (long long)NKV);
    CHECK(HS > 0 && HS % 2 == 0 && HS <= 256, "%s: head dim %lld, must be even and at most 256", op, (long long)HS);
    CHECK(softmax_mul > 0, "%s: softmax_mul %g", op, softmax_mul);
    CHECK(T < int64_t{1} << 30, "%s: %lld tokens in a sequence", op, (long long)T);
    CHECK(window >= 0, "%s: a window of %lld tokens", op, (long long)window);
    return {.B = B, .T = T, .NH = NH, .NKV = NKV, .HS = HS, .softmax_mul = softmax_mul, .documents = documents,
            .window = static_cast<int>(window == 0 ? T : std::min(window, T))};
}

// Head dims (multiples of 8) that have tensor-core kernels in bf16, and which ones; all others have the plain kernels.
struct HeadDims {
    int64_t first, last;
    bool mma, forward_sm90, backward_sm90, fp8;
};
constexpr HeadDims kHeadDims[] = {{64, 64, true, true, true, true},
                                  {72, 96, false, true, true, false},
                                  {128, 128, true, true, true, true},
                                  {256, 256, false, true, true, false}};

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

const char* attention_kernel(const Ctx& ctx, Dtype dtype, int64_t head_size) {
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
    const AttentionShape shape = check_shape("attention_forward", args.B, args.T, args.NH, args.NKV, args.HS,
                                             args.softmax_mul, args.documents, args.window);
    const Dtype T = args.qkv.dtype;
    expect(args.qkv, T, args.B * args.T * shape.row(), "attention_forward: qkv");
    expect(args.out, T, args.B * args.T * args.NH * args.HS, "attention_forward: out");
    expect(args.lse, Dtype::kFp32, args.B * args.NH * args.T, "attention_forward: lse");
    if (args.heads) {
        const int64_t heads = args.B * (args.NH + 2 * args.NKV), blocks = head_blocks(args.T);
        CHECK(fits_sm90(ctx, T, args.HS, &HeadDims::fp8),
              "attention_forward: FP8 is not supported for this device, dtype or head dim");
        expect(args.heads.bytes, Dtype::kE4m3, heads * blocks * kHeadBlock * args.HS, "attention_forward: heads");
        expect(args.heads.scales, Dtype::kFp32, heads * blocks, "attention_forward: scales of heads");
        expect_aligned(args.heads.bytes, "attention_forward: heads");
        expect_aligned(args.out, "attention_forward: out");
        attention_forward_fp8_sm90(ctx, args, shape);
    } else if (const bool sm90 = fits_sm90(ctx, T, args.HS, &HeadDims::forward_sm90); sm90 || fits_mma(T, args.HS)) {
        expect_aligned(args.qkv, "attention_forward: qkv");
        expect_aligned(args.out, "attention_forward: out");
        (sm90 ? attention_forward_sm90 : attention_forward_mma)(ctx, args, shape);
    } else {
        attention_forward_plain(ctx, args, shape);
    }
    if (args.quant) quantize(ctx, {.quant = args.quant, .in = args.out, .N = args.B * args.T, .C = args.NH * args.HS});
}

void attention_backward(Ctx& ctx, const AttentionBackwardArgs& args) {
    const AttentionShape shape = check_shape("attention_backward", args.B, args.T, args.NH, args.NKV, args.HS,
                                             args.softmax_mul, args.documents, args.window);
    const Dtype T = args.qkv.dtype;
    expect(args.qkv, T, args.B * args.T * shape.row(), "attention_backward: qkv");
    expect(args.dqkv, T, args.B * args.T * shape.row(), "attention_backward: dqkv");
    expect(args.out, T, args.B * args.T * args.NH * args.HS, "attention_backward: out");
    expect(args.dout, T, args.B * args.T * args.NH * args.HS, "attention_backward: dout");
    expect(args.lse, Dtype::kFp32, args.B * args.NH * args.T, "attention_backward: lse");
    expect(args.delta, Dtype::kFp32, args.B * args.NH * args.T, "attention_backward: delta");
    if (const bool sm90 = fits_sm90(ctx, T, args.HS, &HeadDims::backward_sm90); sm90 || fits_mma(T, args.HS)) {
        expect_aligned(args.qkv, "attention_backward: qkv");
        expect_aligned(args.dqkv, "attention_backward: dqkv");
        expect_aligned(args.out, "attention_backward: out");
        expect_aligned(args.dout, "attention_backward: dout");
        (sm90 ? attention_backward_sm90 : attention_backward_mma)(ctx, args, shape);
    } else {
        attention_backward_plain(ctx, args, shape);
    }
    if (args.quant) quantize(ctx, {.quant = args.quant, .in = args.dqkv, .N = args.B * args.T, .C = shape.row()});
}

}  // namespace cuda
