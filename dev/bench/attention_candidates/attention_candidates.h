// Candidates for the fused attention backward of compute capability 9.0, which nothing of the trainer runs. Each gives
// the bits of cuda::attention_backward_fused_sm90 (attention_backward_sm90.cuh) with args.fast = false.
#pragma once
#include "llmc/cuda/attention_backward_sm90.cuh"

namespace cuda {

// The same kernel, in which ptxas can keep addresses in uniform registers (bounded.cu). Head dim 64 and 128.
void attention_backward_fused_bounded(Ctx& ctx, const AttentionBackwardArgs& args, const DqSums& sums,
                                      const AttentionShape& shape);

}  // namespace cuda

namespace attention_candidates {

// A kernel for head dim 64 without borders (backward64.cu). in_flight: additions of a consumer's dQ to memory at a
// time, 1 or 2.
void backward64(Ctx& ctx, const AttentionBackwardArgs& args, const cuda::DqSums& sums,
                const cuda::AttentionShape& shape, int in_flight);

}  // namespace attention_candidates
