// A row of a table of variants.
#pragma once
#include "dev/bench/gemm_tiles/gemm_tiles.h"
#include "llmc/cuda/gemm_tile_kernel.cuh"

namespace gemm_tiles {

using namespace cuda::tiles;

// "fast 128x256 s4 B2 g8": 4 stages, B shared by clusters of 2, groups of 8 tiles along M.
template <typename T> Variant variant(int group) {
    std::string name = T::kPromoteBytes > 0 ? strf("promote%d", T::kPromote) : "fast";
    if (T::kOperands == Operands::kBf16) name = "bf16";
    name += strf(" %dx%d s%d p%d", T::kRows, T::kColumns, T::kStages, T::kPanels);
    if (T::kPingPong) name += " turns";
    if (T::kShare != Share::kNone) name += T::kShare == Share::kRows ? " A2" : " B2";
    name += strf(" g%d", group);
    return {.name = name, .operands = T::kOperands, .rows = T::kRows, .columns = T::kColumns,
            .promote = T::kPromote, .swiglu = false, .group = group, .launch = launch<T>};
}

}  // namespace gemm_tiles
