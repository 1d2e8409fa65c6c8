// Candidates for attention on compute capability 9.0, which nothing of the trainer runs. Those for the fused backward
// give the bits of cuda::attention_backward_fused_sm90 (attention_backward_sm90.cuh) with args.fast = false.
#pragma once
#include "llmc/cuda/attention_backward_sm90.cuh"

namespace cuda {

// The same kernel, in which ptxas can keep addresses in uniform registers (bounded.cu). Head dim 64 and 128.
void attention_backward_fused_bounded(Ctx& ctx, const AttentionBackwardArgs& args, const DqSums& sums,
                                      const AttentionShape& shape);

// The forward without the largest scores of tiles at head dim 64 (late_reference.cu).
void attention_forward_late_reference(Ctx& ctx, const AttentionForwardArgs& args, const AttentionShape& shape);

}  // namespace cuda

namespace attention_candidates {

// A kernel for head dim 64 without borders (backward64.cu). in_flight: additions of a consumer's dQ to memory at a
// time, 1 or 2.
void backward64(Ctx& ctx, const AttentionBackwardArgs& args, const cuda::DqSums& sums,
                const cuda::AttentionShape& shape, int in_flight);

}  // namespace attention_candidates
