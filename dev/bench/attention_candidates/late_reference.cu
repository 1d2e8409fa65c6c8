// The attention forward as it is, but at head dim 64 without the largest score of a tile: the reference of the softmax
// stays that of the first tile unless exponentials become very large, and only then are the scores computed again and
// compared. Where no score exceeds the reference by more than RowSoftmax allows, the bits are the same; otherwise P is
// rounded relative to another power of two.
#include "llmc/cuda/attention_sm90.cuh"

namespace cuda {
namespace {

struct RowSoftmaxLate : RowSoftmax {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    // Whether in any row of the warpgroup the exponentials of a tile, which `sum` includes and `before` does not, are
    // so large that larger ones might not be finite. bf16 and fp32 hold smaller ones with their full precision.
    __device__ bool overflows(const float (&before)[2], int barrier) const {
        constexpr float kLarge = 0x1p40f;
        const bool fits = sum[0] - before[0] < kLarge && sum[1] - before[1] < kLarge;   // false for NaN
        return ptx::named_any<128>(barrier, !fits);
    }
#endif
};

}  // namespace
}  // namespace cuda

#define LLMC_LATE_REFERENCE
#define attention_forward_sm90 attention_forward_late_reference
#include "llmc/cuda/attention_forward_sm90.cu"
