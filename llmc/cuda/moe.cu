// Mixtures of experts: refused before a run starts (RunDevice::open) until there are kernels.
#include "llmc/base/check.h"
#include "llmc/ops/ops.h"

namespace cuda {

#define NO_KERNEL(name, Args) \
    void name(Ctx&, const Args&) { FAIL(kExitBug, #name ": there is no kernel"); }
NO_KERNEL(router_forward, RouterForwardArgs)
NO_KERNEL(router_stats, RouterStatsArgs)
NO_KERNEL(router_backward, RouterBackwardArgs)
NO_KERNEL(router_summary, RouterSummaryArgs)
NO_KERNEL(sort_experts, SortExpertsArgs)
NO_KERNEL(gather_rows, GatherRowsArgs)
NO_KERNEL(combine_rows, CombineRowsArgs)
NO_KERNEL(expert_activation_forward, ExpertActivationForwardArgs)
NO_KERNEL(expert_activation_backward, ExpertActivationBackwardArgs)
#undef NO_KERNEL

}  // namespace cuda
