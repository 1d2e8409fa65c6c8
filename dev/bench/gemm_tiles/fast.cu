// Variants with all sums in the tensor cores, E4M3 x E4M3: forward.
#include "dev/bench/gemm_tiles/gemm_tiles.h"
#if defined(LLMC_SM90A)   // these use instructions that older devices lack
#include "dev/bench/gemm_tiles/tile_kernel.cuh"
#endif

namespace gemm_tiles {

#if defined(LLMC_SM90A)
namespace {
template <Work work, int rows, int columns, Share share, int stages, int panels>
using Fast = Tiles<Operands::kE4m3, work, rows, columns, share, stages, panels>;
}

std::vector<Variant> fast_variants() {
    constexpr Work kTogether = Work::kTogether, kTurns = Work::kTurns;
    constexpr Share kNone = Share::kNone, kA = Share::kRows, kB = Share::kColumns;
    return {
        variant<Fast<kTogether, 64, 256, kNone, 4, 2>>(16),
        variant<Fast<kTogether, 64, 256, kB, 4, 2>>(8),
        variant<Fast<kTogether, 64, 256, kB, 4, 2>>(4),
        variant<Fast<kTogether, 64, 256, kB, 4, 2>>(32),
        variant<Fast<kTogether, 64, 256, kB, 3, 4>>(8),
        variant<Fast<kTogether, 64, 256, kA, 4, 2>>(16),
        variant<Fast<kTogether, 128, 128, kNone, 4, 2>>(8),
        variant<Fast<kTogether, 128, 128, kA, 4, 2>>(8),
        variant<Fast<kTogether, 64, 192, kNone, 4, 4>>(16),
        variant<Fast<kTogether, 64, 192, kB, 4, 4>>(8),
        variant<Fast<kTogether, 128, 192, kNone, 3, 3>>(8),
        variant<Fast<kTogether, 128, 192, kA, 3, 3>>(8),
        variant<Fast<kTogether, 128, 192, kA, 3, 3>>(16),
        variant<Fast<kTogether, 128, 192, kA, 3, 3>>(32),
        variant<Fast<kTogether, 128, 192, kB, 3, 3>>(4),
        variant<Fast<kTurns, 128, 128, kB, 5, 4>>(8),
        variant<Fast<kTurns, 64, 256, kB, 4, 4>>(16),
        variant<Fast<kTurns, 128, 192, kB, 4, 4>>(8),
    };
}
#else
std::vector<Variant> fast_variants() { return {}; }
#endif

}  // namespace gemm_tiles
