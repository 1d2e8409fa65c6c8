// FP8 matmuls with one scale per tensor and precise accumulation, whose sums are added to fp32 registers every 256 of K
// instead of the library's 128, which is faster and has other bits (--fp8-promotion 256). Requires sm_90a.
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/gemm.h"
#include "llmc/cuda/gemm_tile.h"
#include "llmc/ops/gemm_fp8.h"
#if defined(LLMC_SM90A)   // these use instructions that older devices lack
#include "llmc/cuda/gemm_tile_kernel.cuh"
#endif

namespace cuda {

namespace tiles {
namespace {
template <bool tall> void launch_promote256(Ctx& ctx, const Call& call, int group) {
#if defined(LLMC_SM90A)
    constexpr int kRows = tall ? 128 : 64, kColumns = tall ? 128 : 256;   // of a consumer warpgroup
    constexpr Share kShare = tall ? Share::kRows : Share::kColumns;
    if (call.A.dtype == Dtype::kE5m2)
        launch<Tiles<Operands::kE5m2E4m3, Work::kTogether, kRows, kColumns, kShare, 4, 2, 256>>(ctx, call, group);
    else launch<Tiles<Operands::kE4m3, Work::kTogether, kRows, kColumns, kShare, 4, 2, 256>>(ctx, call, group);
#else
    (void)ctx, (void)call, (void)group;
    FAIL(kExitBug, "gemm_promote256 is not in this build");
#endif
}
}  // namespace

void launch_promote256_128x256(Ctx& ctx, const Call& call, int group) {
    launch_promote256<false>(ctx, call, group);
}
void launch_promote256_256x128(Ctx& ctx, const Call& call, int group) {
    launch_promote256<true>(ctx, call, group);
}
}  // namespace tiles

bool gemm_promote256_supports(const Ctx& ctx, const GemmArgs& args) {
    return gemm_fp8_blockwise_available(ctx) && fp8_operands(args) && !fp8_gemm_error(args)
           && args.A_granularity == Granularity::kTensor && args.B.dtype == Dtype::kE4m3 && !args.fast_accumulation
           && args.epilogue == GemmEpilogue::kNone && args.M < (1 << 30) && args.N < (1 << 30);
}

// The faster tile for each type of D (dev/results/2026-11-25-h100-matmuls).
void gemm_promote256(Ctx& ctx, const GemmArgs& args) {
    CHECK(gemm_promote256_supports(ctx, args), "gemm_promote256: not a call that it takes, or not on this device");
    const auto launch = args.D.dtype == Dtype::kFp32 ? tiles::launch_promote256_256x128
                                                     : tiles::launch_promote256_128x256;
    launch(ctx, {.D = args.D, .A = args.A, .B = args.B, .a_scale_inv = args.A_scale_inv,
                 .b_scale_inv = args.B_scale_inv, .M = args.M, .N = args.N, .K = args.K,
                 .accumulate = args.accumulate}, tiles::kPromote256Group);
}

}  // namespace cuda
