// The exposed communication time of one step: what the compute stream spent waiting for the side stream or, without
// overlap, in collectives.
#pragma once
#include <vector>

#include "llmc/ops/owned.h"

class CommTimer {
public:
    void restart() { used_ = 0; }
    // The begin or the end of a span; the two alternate.
    void record(Ctx& ctx) {
        if (used_ == events_.size()) events_.push_back(OwnedEvent::create());   // in the first steps
        device::event_record(ctx, events_[used_++]);
    }
    // Once the device has finished the step.
    double seconds() const {
        double ms = 0;
        for (size_t i = 0; i + 1 < used_; i += 2)
            ms += static_cast<double>(device::event_elapsed_ms(events_[i], events_[i + 1]));
        return ms * 1e-3;
    }

private:
    std::vector<OwnedEvent> events_;   // begin and end of each span
    size_t used_ = 0;
};
