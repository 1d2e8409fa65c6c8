// The fused attention backward as it is, except that the loop over items has a bound that no block reaches. With it
// ptxas 13.0 keeps the number of a step, and all addresses that follow from it, in uniform registers.
#define LLMC_BOUNDED_ITEMS
#define attention_backward_fused_sm90 attention_backward_fused_bounded
#include "llmc/cuda/attention_backward_fused_sm90.cu"
