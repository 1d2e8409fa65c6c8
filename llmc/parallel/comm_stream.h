// The stream that the collectives of a step run on: with overlap one of its own, beside compute, else that of compute.
// Events alone order the two, and the bits are the same either way.
#pragma once
#include "llmc/parallel/comm_timer.h"

class CommStream {
public:
    explicit CommStream(bool overlap) : overlap_(overlap) {}
    ~CommStream();
    CommStream(const CommStream&) = delete;
    CommStream& operator=(const CommStream&) = delete;

    // The stream beside `compute`, or `compute` itself; a rehearsal opens nothing.
    Ctx& beside(Ctx& compute);
    // Makes `comm`, which beside() gave, wait for what `compute` was given so far.
    void follow(Ctx& compute, Ctx& comm);

    // What keeps the compute stream from computing is timed: collectives on it, and waiting for the other stream.
    void set_timer(CommTimer* timer) { timer_ = timer; }   // may be null
    template <typename Work> void timed(Ctx& ctx, Work&& work) {
        const bool counts = timer_ && !ctx.rehearsal && &ctx != &stream_;
        if (counts) timer_->begin(ctx);
        work();
        if (counts) timer_->end(ctx);
    }

private:
    const bool overlap_;
    Ctx stream_;
    Event* ready_ = nullptr;   // null until the stream is open
    CommTimer* timer_ = nullptr;
};
