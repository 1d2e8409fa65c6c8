// Attention: checks, and the call of the kernels.
#include "llmc/cuda/attention.cuh"

namespace cuda {
namespace {

AttentionShape check_shape(const char* op, int64_t B, int64_t T, int64_t NH, int64_t NKV, int64_t HS,
                           float softmax_mul) {
    CHECK(B > 0 && T > 0 && NKV > 0 && NH > 0 && NH % NKV == 0,
          "%s: B %lld T %lld, %lld query heads over %lld", op, (long long)B, (long long)T, (long long)NH,
          (long long)NKV);
    CHECK(HS > 0 && HS % 2 == 0 && HS <= 256, "%s: head size %lld, must be even and at most 256", op,
          (long long)HS);
    CHECK(T < (int64_t{1} << 31) - 256, "%s: %lld tokens in a sequence", op, (long long)T);
    return {.B = B, .T = T, .NH = NH, .NKV = NKV, .HS = HS, .softmax_mul = softmax_mul};
}

}  // namespace

void attention_forward(Ctx& ctx, const AttentionForwardArgs& args) {
    const AttentionShape shape = check_shape("attention_forward", args.B, args.T, args.NH, args.NKV, args.HS,
                                             args.softmax_mul);
    const Dtype T = args.qkv.dtype;
    expect(args.qkv, T, args.B * args.T * shape.row(), "attention_forward: qkv");
    expect(args.out, T, args.B * args.T * args.NH * args.HS, "attention_forward: out");
    expect(args.lse, Dtype::kFp32, args.B * args.NH * args.T, "attention_forward: lse");
    attention_forward_plain(ctx, args, shape);
}

void attention_backward(Ctx& ctx, const AttentionBackwardArgs& args) {
    const AttentionShape shape = check_shape("attention_backward", args.B, args.T, args.NH, args.NKV, args.HS,
                                             args.softmax_mul);
    const Dtype T = args.qkv.dtype;
    expect(args.qkv, T, args.B * args.T * shape.row(), "attention_backward: qkv");
    expect(args.dqkv, T, args.B * args.T * shape.row(), "attention_backward: dqkv");
    expect(args.out, T, args.B * args.T * args.NH * args.HS, "attention_backward: out");
    expect(args.dout, T, args.B * args.T * args.NH * args.HS, "attention_backward: dout");
    expect(args.lse, Dtype::kFp32, args.B * args.NH * args.T, "attention_backward: lse");
    expect(args.delta, Dtype::kFp32, args.B * args.NH * args.T, "attention_backward: delta");
    attention_backward_plain(ctx, args, shape);
}

}  // namespace cuda
