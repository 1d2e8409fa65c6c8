// Variants with all sums in the tensor cores, E4M3 x E4M3: forward.
#include "dev/bench/gemm_tiles/tile_kernel.cuh"

namespace gemm_tiles {

namespace {
template <Work work, int rows, int columns, Share share, int stages, int panels>
using Fast = Tiles<Operands::kE4m3, work, rows, columns, share, stages, panels>;
}

std::vector<Variant> fast_variants() {
    using enum Work;
    using enum Share;
    return {variant<Fast<kTogether, 64, 256, kNone, 4, 2>>(8)};
}

}  // namespace gemm_tiles
