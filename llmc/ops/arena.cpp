#include "llmc/ops/arena.h"

#include <algorithm>

const char* purpose_name(Purpose purpose) {
    constexpr const char* kNames[] = {"weights", "gradients", "master weights", "moments", "EMA of weights",
                                      "offload buffers", "activations", "FP8 scales, histories", "communication",
                                      "inputs and step state", "scratch"};
    static_assert(std::size(kNames) == kPurposes);
    return kNames[static_cast<size_t>(purpose)];
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
    permanent_ = used_;
    purpose_bytes_[static_cast<size_t>(purpose)] += std::max<int64_t>(0, permanent_ - reserved_);
    reserved_ = std::max(reserved_, permanent_);
    return tensor;
}

char* Arena::take_host(int64_t bytes) {
    if (rehearses()) return nullptr;
    if (host_taken_ == host_.size()) host_.emplace_back();
    HostMemory& host = host_[host_taken_++];
    if (host.bytes < bytes) {
        host.memory.reset();
        host = {PinnedPtr<char>(static_cast<char*>(device::pinned_alloc(bytes))), bytes};
    }
    return host.memory.get();
}

void Arena::restart() {
    used_ = peak_ = permanent_ = reserved_ = 0;
    purpose_bytes_ = {};
    host_taken_ = 0;
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
