// Streams of the CPU that defer their work, in the place of llmc/cpu/stream.cpp and llmc/ops/ops.cpp. The CPU has no
// streams that run by themselves; one of two takes an extreme of what events allow, so that one that is missing shows:
// what a side stream is given is done as late as possible, and everything else at once.
#pragma once
#include <functional>

#include "llmc/ops/device.h"

namespace cpu {
struct DeferredStream;
// The one that ctx puts its work off to; null where everything is done when a call returns.
DeferredStream* deferred_stream(const Ctx& ctx);
// Of a ctx that is deferred: done when something waits for it, in order. What it refers to must be there until then.
// What such work calls is part of it, and done at once.
void put_off(Ctx& ctx, std::function<void()> work);

// After device_open and before the side stream is opened; nothing on a GPU. From now on it is the reverse: ctx is
// deferred, and its side stream is not.
void defer(Ctx& ctx);
// Each event_order of ctx and its side stream counts *orders down, and is left out where it is 0.
void count_orders(Ctx& ctx, int64_t* orders);
}  // namespace cpu
