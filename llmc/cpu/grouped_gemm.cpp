// Matmuls of experts. CPU.
#include "llmc/ops/grouped_gemm.h"

#include <cstring>

#include "llmc/cpu/common.h"

namespace cpu {

void grouped_gemm(Ctx& ctx, const GroupedGemmArgs& args) {
    check_grouped_gemm(args);
    for_experts(args, args.offsets.as<int32_t>(), [&](const GemmArgs& expert) { gemm(ctx, expert); },
                [](const Tensor& weights) { std::memset(weights.data, 0, static_cast<size_t>(weights.bytes())); });
}

}  // namespace cpu
