// Candidates for custom matmuls with one scale per tensor on compute capability 9.0: a table of variants of one
// kernel template (tile_kernel.cuh). Nothing of the trainer runs them; bench_gemm_power measures them.
#pragma once
#include <string>
#include <vector>

#include "llmc/ops/ops.h"

namespace gemm_tiles {

// Types of A and B.
enum class Operands { kE4m3, kE5m2E4m3, kBf16 };
inline Dtype type_of_a(Operands o) {
    return o == Operands::kBf16 ? Dtype::kBf16 : o == Operands::kE4m3 ? Dtype::kE4m3 : Dtype::kE5m2;
}
inline Dtype type_of_b(Operands o) { return o == Operands::kBf16 ? Dtype::kBf16 : Dtype::kE4m3; }

// D(M, N) (+)= a_scale_inv b_scale_inv A(M, K) B(N, K)^T: both operands are contiguous along K.
struct Call {
    Tensor D;      // bf16 or fp32; += adds the product rounded to D's type, as the library does
    Tensor A, B;
    Tensor a_scale_inv, b_scale_inv;   // fp32, 1 element; FP8 only
    int64_t M, N, K;
    bool accumulate = false;
    // SwiGLU variants only: D = [gate | up] with N = 2 F, bf16; act = swiglu(D) (M, F) in E4M3 by slot->scale, whose
    // amax goes to slot->amax_bits. act_transposed (F, M) is optional.
    Tensor act = {}, act_transposed = {};
    Fp8Slot* slot = nullptr;
};

struct Variant {
    std::string name;
    Operands operands;
    int rows, columns;   // of the tile of a block
    int promote;         // elements of K per sum in the tensor cores; 0: all
    bool swiglu;
    int group;           // tiles along M that follow each other before the next column of tiles
    void (*launch)(Ctx& ctx, const Call& call, int group);
    void run(Ctx& ctx, const Call& call) const { launch(ctx, call, group); }
};

// All variants; none if this build or device has no instructions of sm_90a.
std::vector<Variant> variants(const Ctx& ctx);

// What is wrong with a call, or null.
const char* call_error(const Variant& variant, const Call& call);

// Parts of the table.
std::vector<Variant> fast_variants();
std::vector<Variant> precise_variants();
std::vector<Variant> bf16_variants();
std::vector<Variant> swiglu_variants();

}  // namespace gemm_tiles
