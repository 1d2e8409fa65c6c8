// The exposed communication time of one step: what the compute stream spent waiting for the side stream or, without
// overlap, in collectives.
#pragma once
#include <vector>

#include "llmc/ops/owned.h"

class CommTimer {
public:
    // spans: the most that a step has.
    explicit CommTimer(int64_t spans);

    void restart() { used_ = 0; }
    void begin(Ctx& ctx) { record(ctx, 0); }
    void end(Ctx& ctx) { record(ctx, 1); }
    double seconds() const;   // once the device has finished the step

private:
    void record(Ctx& ctx, size_t half);

    std::vector<OwnedEvent> events_;   // begin and end of each span
    size_t used_ = 0;
};
