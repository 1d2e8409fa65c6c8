// The stream of a step's collectives: with overlap a side stream, else the compute stream. Events order the two, and
// the bits are the same either way.
#pragma once
#include <array>
#include <functional>

#include "llmc/parallel/comm/comm_timer.h"

class CommStream {
public:
    explicit CommStream(bool overlap) : overlap_(overlap) {}

    // The side stream, opened on first use, or `compute` itself without overlap or in a rehearsal.
    Ctx& comm_ctx(Ctx& compute);
    // Makes `comm`, from comm_ctx(), wait for the work enqueued on `compute` so far.
    void wait_for_compute(Ctx& compute, Ctx& comm);
    // Numbers the place that the compute stream has reached, and tells whether the side stream already waits for it.
    int64_t compute_point() { return ++point_; }
    bool waits_for(int64_t point) const { return point <= waited_; }
    // Records an event on the side stream; later events have larger numbers. order_after makes `compute` wait for one,
    // unless it already waits for a later one.
    int64_t record(Ctx& comm, Event* event) {
        device::event_record(comm, event);
        return ++recorded_;
    }
    void order_after(Ctx& compute, Event* event, int64_t number) {
        if (number <= passed_) return;
        timed(compute, [&] { device::event_order(compute, event); });
        passed_ = number;
    }

    // Enqueues work(ctx), collectives of the purpose `what`, on the side stream, after the work enqueued on `compute`
    // so far. wait() for the returned number makes `compute` wait for them.
    int64_t begin(Ctx& compute, const char* what, int layer, const std::function<void(Ctx&)>& work);
    void wait(Ctx& compute, int64_t number);

    void set_timer(CommTimer* timer) { timer_ = timer; }   // may be null
    // Runs `work`, timed if ctx is the compute stream: collectives on it, and waiting for the side stream.
    template <typename Work> void timed(Ctx& ctx, Work&& work) {
        const bool counts = timer_ && !ctx.rehearsal && &ctx != &stream_.ctx;
        if (counts) timer_->record(ctx);
        work();
        if (counts) timer_->record(ctx);
    }

private:
    const bool overlap_;
    SideStream stream_;
    OwnedEvent ready_;   // null until the stream is open
    int64_t point_ = 0, waited_ = 0;   // the latest point of the compute stream, and the latest that the side waits for
    int64_t recorded_ = 0, passed_ = 0;   // the latest event of the side stream, and the latest that compute waits for
    // Of begin(), by number; null until needed. Who waits for one that has been recorded again waits longer.
    std::array<OwnedEvent, 8> begun_;
    CommTimer* timer_ = nullptr;
};
