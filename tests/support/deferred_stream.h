// Streams of the CPU that defer their work; they replace llmc/cpu/stream.cpp and llmc/ops/ops.cpp. Work on a side
// stream runs as late as events allow, and all other work at once, so that a missing event is detected.
#pragma once
#include <functional>

#include "llmc/ops/device.h"

namespace cpu {
struct DeferredStream;
// Returns the stream to which ctx defers its work; null if its calls are synchronous.
DeferredStream* deferred_stream(const Ctx& ctx);
// Defers work of a deferred ctx until something waits for it. What it refers to must live until then. Nested calls run
// at once.
void put_off(Ctx& ctx, std::function<void()> work);

// Defers ctx instead of its side stream. Call it after device_open and before side_open; no-op on a GPU.
void defer(Ctx& ctx);
// Each event_order of ctx and its side stream decrements *orders and is skipped if it was 0.
void count_orders(Ctx& ctx, int64_t* orders);
}  // namespace cpu

// If set, it is called for every operation that is not rehearsed, and executes it with `run`.
inline std::function<void(Ctx& ctx, const char* name, const std::function<void()>& run)> around_operations;
