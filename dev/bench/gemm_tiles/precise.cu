// Variants that add the tensor cores' sums in fp32 every 128 or 256 elements of K, E5M2 x E4M3: dgrad and wgrad.
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
    constexpr Share kA = Share::kRows, kB = Share::kColumns;
    return {
        variant<Precise<64, 256, kB, 4, 2, 128>>(8),
        variant<Precise<128, 128, kA, 4, 2, 256>>(8),
        variant<Precise<64, 256, kB, 4, 2, 256>>(8),
    };
}
#else
std::vector<Variant> precise_variants() { return {}; }
#endif

}  // namespace gemm_tiles
