#include "llmc/ops/arena.h"

#include <algorithm>

const char* purpose_name(Purpose purpose) {
    switch (purpose) {
        case Purpose::kWeights: return "weights";
        case Purpose::kGradients: return "gradients";
        case Purpose::kMaster: return "master weights";
        case Purpose::kMoments: return "Adam moments";
        case Purpose::kOffload: return "offload buffers";
        case Purpose::kActivations: return "activations";
        case Purpose::kFp8: return "FP8 scales, histories";
        case Purpose::kComm: return "communication";
        case Purpose::kInputs: return "inputs and step state";
        case Purpose::kScratch: return "scratch";
    }
    return "?";
}

Tensor Arena::bump(Dtype dtype, int64_t elems) {
    const int64_t bytes = round_up(elems * dtype_bytes(dtype), kAlignBytes);
    CHECK(used_ + bytes <= limit_, "arena of %lld bytes is full: %lld used, %lld asked", (long long)limit_,
          (long long)used_, (long long)bytes);
    // In a rehearsal pointers are offsets from null. They are never dereferenced and match the real layout.
    char* data = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(base_) + static_cast<uintptr_t>(used_));
    used_ += bytes;
    peak_ = std::max(peak_, used_);
    return {data, dtype, elems};
}

Tensor Arena::take(Purpose purpose, Dtype dtype, int64_t elems) {
    CHECK(used_ == permanent_, "permanent %s taken while scratch is alive", purpose_name(purpose));
    Tensor tensor = bump(dtype, elems);
    purpose_bytes_[static_cast<size_t>(purpose)] += used_ - permanent_;
    permanent_ = used_;
    return tensor;
}

Tensor Arena::scratch(Dtype dtype, int64_t elems) {
    Tensor tensor = bump(dtype, elems);
    purpose_bytes_[static_cast<size_t>(Purpose::kScratch)] = peak_ - permanent_;
    return tensor;
}

void Arena::release(Ctx& ctx, int64_t used) {
    if (poisons() && used_ > used) {
        device::fill_bytes(ctx, static_cast<char*>(base_) + used, 0xff, used_ - used);
    }
    used_ = used;
}
