// Streams of the CPU: every call is synchronous. Tests replace this file with tests/support/deferred_stream.cpp.
#include <chrono>
#include <cstring>

#include "llmc/base/check.h"
#include "llmc/ops/op_timer.h"

namespace cpu {
namespace {
// struct Event is opaque and differs between devices, hence the cast.
using Time = std::chrono::steady_clock::time_point;
Time& of(Event* event) { return *reinterpret_cast<Time*>(event); }
}  // namespace

void device_close(Ctx& ctx) { ctx = Ctx{}; }
void side_open(Ctx& side, const Ctx& ctx) {
    side = ctx;
    side.recorder = nullptr;
}
void side_close(Ctx& side) { side = Ctx{}; }
void synchronize(Ctx&) {}

void copy_on_device(Ctx& ctx, void* to, const void* from, int64_t bytes) {
    CHECK(bytes >= 0, "copy of %lld bytes", (long long)bytes);
    if (ctx.rehearsal || bytes == 0) return;
    const OpSpan span(ctx, "copy", 2 * bytes);
    std::memcpy(to, from, static_cast<size_t>(bytes));
}
void fill_bytes(Ctx& ctx, void* device, int value, int64_t bytes) {
    CHECK(bytes >= 0, "fill of %lld bytes", (long long)bytes);
    if (ctx.rehearsal || bytes == 0) return;
    const OpSpan span(ctx, "fill", bytes);
    std::memset(device, value, static_cast<size_t>(bytes));
}

Event* event_create() { return reinterpret_cast<Event*>(new Time); }
void event_destroy(Event* event) { delete &of(event); }
void event_record(Ctx& ctx, Event* event) {
    if (!ctx.rehearsal) of(event) = std::chrono::steady_clock::now();
}
void event_wait(Event*) {}
void event_order(Ctx&, Event*) {}
bool event_reached(Event*) { return true; }
float event_elapsed_ms(Event* begin, Event* end) {
    return std::chrono::duration<float, std::milli>(of(end) - of(begin)).count();
}
}  // namespace cpu
