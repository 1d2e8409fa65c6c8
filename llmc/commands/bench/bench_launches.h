// What measurements of single operations share: memory with random operands, and times of launches.
#pragma once
#include <functional>
#include <vector>

#include "llmc/ops/ops.h"
#include "llmc/ops/owned.h"

// Device memory that is freed at the end of the scope.
class DeviceMemory {
public:
    Tensor take(Dtype dtype, int64_t elems);
    // (N, C) normal numbers, because a GPU at its power limit is faster with zeros. In FP8 they are cast with the scale
    // of `slot`; C must be a multiple of 16 then.
    Tensor random(Ctx& ctx, Dtype dtype, int64_t N, int64_t C, Fp8Slot* slot, uint64_t key);

private:
    std::vector<DevicePtr<>> taken_;
};

// The slot of an FP8 tensor of normal numbers.
class CastSlot {
public:
    CastSlot(Ctx& ctx, DeviceMemory& memory);
    Fp8Slot* get() const { return slot_; }
    Tensor scale_inv() const { return {&slot_->scale_inv, Dtype::kFp32, 1}; }

private:
    Fp8Slot* slot_;
};

struct Span {
    OwnedEvent begin = OwnedEvent::create(), end = OwnedEvent::create();
};

using Launch = std::function<void()>;

double launches_ms(Ctx& ctx, const Span& span, int64_t launches, const Launch& launch);

// Measures milliseconds per launch: five series of each of `launches`, alternating, because a power-limited GPU
// changes its clocks over time. A series takes about `series_ms`. The first launch of each is not counted.
std::vector<std::vector<double>> series_in_turn(Ctx& ctx, double series_ms, const std::vector<Launch>& launches);
// The best of five series that take 50 ms each (on a CPU 5 ms).
double best_ms(Ctx& ctx, const Launch& launch);
