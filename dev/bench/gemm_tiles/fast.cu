// Variants with all sums in the tensor cores, E4M3 x E4M3: forward.
#include "dev/bench/gemm_tiles/gemm_tiles.h"
#if defined(LLMC_SM90A)   // these use instructions that older devices lack
#include "dev/bench/gemm_tiles/variant.cuh"
#endif

namespace gemm_tiles {

#if defined(LLMC_SM90A)
namespace {
template <Work work, int rows, int columns, Share share, int stages, int panels>
using Fast = Tiles<Operands::kE4m3, work, rows, columns, share, stages, panels>;
}

std::vector<Variant> fast_variants() {
    constexpr Work kTogether = Work::kTogether, kTurns = Work::kTurns;
    constexpr Share kA = Share::kRows, kB = Share::kColumns;
    return {
        variant<Fast<kTogether, 64, 256, kB, 4, 2>>(8),
        variant<Fast<kTogether, 64, 256, kB, 3, 4>>(8),
        variant<Fast<kTogether, 128, 128, kA, 4, 2>>(8),
        variant<Fast<kTurns, 128, 192, kB, 4, 4>>(8),
    };
}
#else
std::vector<Variant> fast_variants() { return {}; }
#endif

}  // namespace gemm_tiles
