#include "tests/support/deferred_stream.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <utility>

#include "llmc/base/check.h"
#include "llmc/ops/op_timer.h"

namespace cpu {

// Work in the order of the calls. The thread that made them executes it when it waits.
struct DeferredStream {
    bool deferred = false;
    int64_t* orders = nullptr;
    std::deque<std::function<void()>> given;
    bool running = false;   // executing the first item, whose nested calls belong to it
    std::shared_ptr<DeferredStream> self;   // until closed; points in the stream may live longer
};

namespace {
using Clock = std::chrono::steady_clock;

// A point in a stream.
struct Point {
    std::shared_ptr<DeferredStream> stream;
    bool reached = true;
    Clock::time_point when = {};
};

struct CpuEvent {
    std::shared_ptr<Point> point = std::make_shared<Point>();
};
CpuEvent* of(Event* event) { return reinterpret_cast<CpuEvent*>(event); }

void run_next(DeferredStream& stream) {
    CHECK(!stream.running, "a stream waits for later work of its own");
    const std::function<void()> work = std::move(stream.given.front());
    stream.given.pop_front();
    const struct Running {
        bool& flag;
        ~Running() { flag = false; }
    } running{stream.running = true};
    work();
}

// Takes the point by value, because the work may record the event again.
void run_up_to(const std::shared_ptr<Point> point) {
    while (!point->reached && !point->stream->given.empty()) run_next(*point->stream);
}

DeferredStream* stream_of(const Ctx& ctx) {
    return ctx.sm == 0 ? static_cast<DeferredStream*>(ctx.stream) : nullptr;   // not a GPU's
}
DeferredStream& open_stream(Ctx& ctx) {
    if (!ctx.stream) {
        const auto stream = std::make_shared<DeferredStream>();
        stream->self = stream;
        ctx.stream = stream.get();
    }
    return *stream_of(ctx);
}

template <typename Work> void in_order(Ctx& ctx, Work&& work) {
    if (deferred_stream(ctx)) put_off(ctx, std::forward<Work>(work));
    else work();
}

// Called by destructors. After an error the remaining work is dropped, because other ranks may not take part in its
// collectives.
void close_stream(Ctx& ctx) {
    try {
        if (std::uncaught_exceptions() == 0) synchronize(ctx);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "warning: closing a stream: %s\n", error.what());
    }
    if (DeferredStream* stream = stream_of(ctx)) {
        stream->given.clear();
        const std::shared_ptr<DeferredStream> last = std::move(stream->self);
    }
    ctx = Ctx{};
}
}  // namespace

DeferredStream* deferred_stream(const Ctx& ctx) {
    DeferredStream* const stream = stream_of(ctx);
    return stream && stream->deferred ? stream : nullptr;
}
void put_off(Ctx& ctx, std::function<void()> work) {
    DeferredStream& stream = *stream_of(ctx);
    if (stream.running) work();
    else stream.given.push_back(std::move(work));
}
void defer(Ctx& ctx) {
    if (ctx.sm == 0) open_stream(ctx).deferred = true;
}
void count_orders(Ctx& ctx, int64_t* orders) {
    if (ctx.sm == 0) open_stream(ctx).orders = orders;
}

void device_close(Ctx& ctx) { close_stream(ctx); }
void side_open(Ctx& side, const Ctx& ctx) {
    side = ctx;
    side.recorder = nullptr;
    side.stream = nullptr;
    if (ctx.rehearsal) return;
    const DeferredStream* const compute = stream_of(ctx);
    open_stream(side).deferred = !deferred_stream(ctx);
    open_stream(side).orders = compute ? compute->orders : nullptr;
}
void side_close(Ctx& side) { close_stream(side); }

void copy_on_device(Ctx& ctx, void* to, const void* from, int64_t bytes) {
    CHECK(bytes >= 0, "copy of %lld bytes", (long long)bytes);
    if (ctx.rehearsal || bytes == 0) return;
    in_order(ctx, [=, &ctx] {
        const OpSpan span(ctx, "copy", 2 * bytes);
        std::memcpy(to, from, static_cast<size_t>(bytes));
    });
}
void fill_bytes(Ctx& ctx, void* device, int value, int64_t bytes) {
    CHECK(bytes >= 0, "fill of %lld bytes", (long long)bytes);
    if (ctx.rehearsal || bytes == 0) return;
    in_order(ctx, [=, &ctx] {
        const OpSpan span(ctx, "fill", bytes);
        std::memset(device, value, static_cast<size_t>(bytes));
    });
}
void synchronize(Ctx& ctx) {
    DeferredStream* const stream = deferred_stream(ctx);
    while (stream && !stream->running && !stream->given.empty()) run_next(*stream);
}

Event* event_create() { return reinterpret_cast<Event*>(new CpuEvent); }
void event_destroy(Event* event) { delete of(event); }
void event_record(Ctx& ctx, Event* event) {
    if (ctx.rehearsal) return;
    DeferredStream* const stream = deferred_stream(ctx);
    const auto point = std::make_shared<Point>(Point{.stream = stream ? stream->self : nullptr, .reached = false});
    of(event)->point = point;
    in_order(ctx, [point] {
        point->when = Clock::now();
        point->reached = true;
    });
}
void event_wait(Event* event) { run_up_to(of(event)->point); }
void event_order(Ctx& ctx, Event* event) {
    const DeferredStream* const stream = stream_of(ctx);
    if (stream && stream->orders && (*stream->orders)-- == 0) return;
    const std::shared_ptr<Point> point = of(event)->point;
    if (point->stream.get() == deferred_stream(ctx)) return;
    in_order(ctx, [point] { run_up_to(point); });   // a deferred stream waits when it gets there
}
bool event_reached(Event* event) { return of(event)->point->reached; }
float event_elapsed_ms(Event* begin, Event* end) {
    return std::chrono::duration<float, std::milli>(of(end)->point->when - of(begin)->point->when).count();
}
}  // namespace cpu

// Operations copy their arguments and are timed when they run.
#define OP(name, Args)                                                  \
    void ops::name(Ctx& ctx, const Args& args) {                        \
        if (ctx.rehearsal) return rehearse_op(ctx, OpKind::name, args); \
        cpu::in_order(ctx, [&ctx, args] {                               \
            const auto run = [&] {                                      \
                const OpSpan span(ctx, OpKind::name, args);             \
                device::name(ctx, args);                                \
            };                                                          \
            if (around_operations) around_operations(ctx, #name, run);  \
            else run();                                                 \
        });                                                             \
    }
#include "llmc/ops/ops.inl"
#undef OP
