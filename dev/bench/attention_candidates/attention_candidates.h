// Candidates for attention at head dim 64 on compute capability 9.0, which nothing of the trainer runs.
#pragma once
#include "llmc/cuda/attention_backward_sm90.cuh"

namespace attention_candidates {

// As cuda::attention_backward_fused_sm90 with args.fast = false, head dim 64 and no borders: the same bits. In flight:
// additions of a consumer's dQ to memory at a time, 1 or 2.
void backward64(Ctx& ctx, const AttentionBackwardArgs& args, const cuda::DqSums& sums,
                const cuda::AttentionShape& shape, int in_flight);

}  // namespace attention_candidates
