// Variants for bf16 operands that are both contiguous along K: forward.
#include "dev/bench/gemm_tiles/gemm_tiles.h"
#if defined(LLMC_SM90A)   // these use instructions that older devices lack
#include "dev/bench/gemm_tiles/variant.cuh"
#endif

namespace gemm_tiles {

#if defined(LLMC_SM90A)
namespace {
template <int rows, int columns, Share share, int stages, int panels>
using Bf16 = Tiles<Operands::kBf16, Work::kTogether, rows, columns, share, stages, panels>;
}

std::vector<Variant> bf16_variants() {
    constexpr Share kA = Share::kRows, kB = Share::kColumns;
    return {
        variant<Bf16<64, 256, kB, 4, 2>>(8),
        variant<Bf16<128, 128, kA, 4, 2>>(8),
        variant<Bf16<128, 192, kA, 3, 3>>(8),
    };
}
#else
std::vector<Variant> bf16_variants() { return {}; }
#endif

}  // namespace gemm_tiles
