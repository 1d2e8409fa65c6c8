// Variants for gate and up of a gated MLP, with swiglu and its cast to E4M3 in the epilogue: forward.
#include "dev/bench/gemm_tiles/tile_kernel.cuh"

namespace gemm_tiles {

namespace {
template <Work work, Share share, int panels>
using Swiglu = Tiles<Operands::kE4m3, work, 64, 256, share, 4, panels, 0, true>;
}

std::vector<Variant> swiglu_variants() {
    return {
        variant<Swiglu<Work::kTogether, Share::kNone, 2>>(16),
        variant<Swiglu<Work::kTogether, Share::kColumns, 2>>(8),
        variant<Swiglu<Work::kTurns, Share::kColumns, 4>>(16),
    };
}

}  // namespace gemm_tiles
