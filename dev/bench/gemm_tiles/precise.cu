// Variants that add the tensor cores' sums in fp32 every 128 or 256 elements of K, E5M2 x E4M3: dgrad and wgrad.
#include "dev/bench/gemm_tiles/gemm_tiles.h"
#if defined(LLMC_SM90A)   // these use instructions that older devices lack
#include "dev/bench/gemm_tiles/tile_kernel.cuh"
#endif

namespace gemm_tiles {

#if defined(LLMC_SM90A)
namespace {
template <Work work, int rows, int columns, Share share, int stages, int panels, int promote>
using Precise = Tiles<Operands::kE5m2E4m3, work, rows, columns, share, stages, panels, promote>;
}

std::vector<Variant> precise_variants() {
    constexpr Work kTogether = Work::kTogether, kTurns = Work::kTurns;
    constexpr Share kNone = Share::kNone, kA = Share::kRows, kB = Share::kColumns;
    return {
        variant<Precise<kTogether, 128, 128, kNone, 4, 2, 128>>(8),
        variant<Precise<kTogether, 128, 128, kA, 4, 2, 128>>(8),
        variant<Precise<kTogether, 128, 128, kA, 4, 2, 128>>(4),
        variant<Precise<kTogether, 128, 128, kA, 4, 2, 128>>(32),
        variant<Precise<kTogether, 64, 256, kB, 4, 2, 128>>(8),
        variant<Precise<kTogether, 64, 192, kB, 4, 4, 128>>(8),
        variant<Precise<kTurns, 128, 128, kB, 5, 4, 128>>(8),
        variant<Precise<kTogether, 128, 128, kA, 4, 2, 256>>(8),
        variant<Precise<kTogether, 64, 256, kB, 4, 2, 256>>(8),
    };
}
#else
std::vector<Variant> precise_variants() { return {}; }
#endif

}  // namespace gemm_tiles
