// Custom matmuls with one scale per tensor on compute capability 9.0 (template: gemm_tile_kernel.cuh). The trainer runs
// one of them, gemm_swiglu_sm90.cu; dev/bench/gemm_tiles has others that are only measured.
#pragma once
#include "llmc/ops/ops.h"

namespace cuda::tiles {

// Types of A and B.
enum class Operands { kE4m3, kE5m2E4m3, kBf16 };

// D(M, N) (+)= a_scale_inv b_scale_inv A(M, K) B(N, K)^T: both operands are contiguous along K. Everything is 16-byte
// aligned, and so are rows.
struct Call {
    Tensor D;      // bf16 or fp32; += adds the product rounded to D's type, as the library does
    Tensor A, B;
    Tensor a_scale_inv, b_scale_inv;   // fp32, 1 element; FP8 only
    int64_t M, N, K;
    bool accumulate = false;
    // SwiGLU only: D = [gate | up] with N = 2 F in multiples of 32, bf16; act = swiglu(D) rounded to bf16 and cast to
    // E4M3 (M, F) by slot->scale; slot->scale_inv = 1 / scale; slot->amax_bits = max(itself, amax of act).
    // act_transposed (F, M) is optional and needs M in multiples of 16.
    Tensor act = {}, act_transposed = {};
    Fp8Slot* slot = nullptr;
};

// The SwiGLU variant that the trainer runs. group: see Schedule in gemm_tile_config.cuh. Bug (exit 1) on a device or in
// a build that gemm_fp8_blockwise_available refuses.
inline constexpr int kSwigluGroup = 8;
void launch_swiglu(Ctx& ctx, const Call& call, int group);

}  // namespace cuda::tiles
