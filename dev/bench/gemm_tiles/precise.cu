// Variants that add the tensor cores' sums in fp32 every 128 elements of K, E5M2 x E4M3: dgrad and wgrad. Those of the
// trainer, every 256, are in gemm_tiles.cpp.
#include "dev/bench/gemm_tiles/gemm_tiles.h"
#if defined(LLMC_SM90A)   // these use instructions that older devices lack
#include "dev/bench/gemm_tiles/variant.cuh"
#endif

namespace gemm_tiles {

#if defined(LLMC_SM90A)
namespace {
template <int rows, int columns, Share share, int stages, int panels, int promote>
using Precise = Tiles<Operands::kE5m2E4m3, Work::kTogether, rows, columns, share, stages, panels, promote>;
}

std::vector<Variant> precise_variants() {
    constexpr Share kB = Share::kColumns;
    return {
        variant<Precise<64, 256, kB, 4, 2, 128>>(8),
    };
}
#else
std::vector<Variant> precise_variants() { return {}; }
#endif

}  // namespace gemm_tiles
