// Gate and up of a gated MLP in FP8 with delayed scaling, with swiglu and its cast to E4M3 in the epilogue: one kernel
// instead of a matmul and a pass over its result. Requires sm_90a.
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/gemm.h"
#include "llmc/cuda/gemm_tile.h"
#include "llmc/ops/gemm_fp8.h"
#if defined(LLMC_SM90A)   // these use instructions that older devices lack
#include "llmc/cuda/gemm_tile_kernel.cuh"
#endif

namespace cuda {

namespace tiles {
void launch_swiglu(Ctx& ctx, const Call& call, int group) {
#if defined(LLMC_SM90A)
    launch<Tiles<Operands::kE4m3, Work::kTogether, 64, 256, Share::kColumns, 4, 2, 0, true>>(ctx, call, group);
#else
    (void)ctx, (void)call, (void)group;
    FAIL(kExitBug, "gemm_swiglu is not in this build");
#endif
}
}  // namespace tiles

bool gemm_swiglu_supports(const Ctx& ctx, const GemmActivationArgs& args) {
    const GemmArgs& g = args.gemm;
    const QuantOut& quant = args.activation.quant;
    return gemm_fp8_blockwise_available(ctx) && fits_gemm_activation(args) && !fp8_gemm_error(g)
           && g.A.dtype == Dtype::kE4m3 && g.B.dtype == Dtype::kE4m3 && g.D.dtype == Dtype::kBf16
           && g.fast_accumulation && !g.bias && !g.accumulate && g.N % 32 == 0 && quant.record
           && quant.rowwise.dtype == Dtype::kE4m3 && aligned_to_16(quant.rowwise)
           && (!quant.transposed || (g.M % 16 == 0 && quant.transposed.dtype == Dtype::kE4m3
                                     && aligned_to_16(quant.transposed)));
}

void gemm_swiglu(Ctx& ctx, const GemmActivationArgs& args) {
    const GemmArgs& g = args.gemm;
    const QuantOut& quant = args.activation.quant;
    CHECK(gemm_swiglu_supports(ctx, args), "gemm_swiglu: not a call that it takes, or not on this device");
    tiles::launch_swiglu(ctx, {.D = g.D, .A = g.A, .B = g.B, .a_scale_inv = g.A_scale_inv, .b_scale_inv = g.B_scale_inv,
                               .M = g.M, .N = g.N, .K = g.K, .act = quant.rowwise, .act_transposed = quant.transposed,
                               .slot = quant.slot}, tiles::kSwigluGroup);
}

}  // namespace cuda
