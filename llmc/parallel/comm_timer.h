// Time that the compute stream of one step spent on communication: waiting for the side stream, or, where there is only
// one, in the collectives themselves. Read once the device got past the step.
#pragma once
#include <vector>

#include "llmc/ops/device.h"

class CommTimer {
public:
    // Room for so many spans.
    explicit CommTimer(int64_t spans);
    ~CommTimer();
    CommTimer(const CommTimer&) = delete;
    CommTimer& operator=(const CommTimer&) = delete;

    void restart() { used_ = 0; }
    void begin(Ctx& ctx) { record(ctx, 0); }
    void end(Ctx& ctx) { record(ctx, 1); }
    double seconds() const;

private:
    void record(Ctx& ctx, size_t half);

    std::vector<Event*> events_;   // begin and end of each span
    size_t used_ = 0;
};
