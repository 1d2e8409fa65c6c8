// Variants for gate and up of a gated MLP, with swiglu and its cast to E4M3 in the epilogue: forward.
#include "dev/bench/gemm_tiles/gemm_tiles.h"
#if defined(LLMC_SM90A)   // these use instructions that older devices lack
#include "dev/bench/gemm_tiles/tile_kernel.cuh"
#endif

namespace gemm_tiles {

#if defined(LLMC_SM90A)
namespace {
template <Work work, Share share, int stages, int panels>
using Swiglu = Tiles<Operands::kE4m3, work, 64, 256, share, stages, panels, 0, true>;
}

std::vector<Variant> swiglu_variants() {
    return {
        variant<Swiglu<Work::kTogether, Share::kNone, 4, 2>>(16),
        variant<Swiglu<Work::kTogether, Share::kColumns, 4, 2>>(8),
        variant<Swiglu<Work::kTogether, Share::kColumns, 3, 4>>(8),
        variant<Swiglu<Work::kTurns, Share::kColumns, 4, 4>>(16),
    };
}
#else
std::vector<Variant> swiglu_variants() { return {}; }
#endif

}  // namespace gemm_tiles
