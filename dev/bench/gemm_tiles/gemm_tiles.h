// Candidates for custom matmuls with one scale per tensor on compute capability 9.0: a table of variants of one
// kernel template (llmc/cuda/gemm_tile_kernel.cuh). bench_gemm_power measures them; the trainer runs the SwiGLU variant
// alone.
#pragma once
#include <string>
#include <vector>

#include "llmc/cuda/gemm_tile.h"

namespace gemm_tiles {

using cuda::tiles::Call;
using cuda::tiles::Operands;

inline Dtype type_of_a(Operands o) {
    return o == Operands::kBf16 ? Dtype::kBf16 : o == Operands::kE4m3 ? Dtype::kE4m3 : Dtype::kE5m2;
}
inline Dtype type_of_b(Operands o) { return o == Operands::kBf16 ? Dtype::kBf16 : Dtype::kE4m3; }

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

}  // namespace gemm_tiles
