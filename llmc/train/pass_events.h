// Events around the passes of a step's first micro-batch.
#pragma once
#include "llmc/fault/heartbeat.h"
#include "llmc/ops/owned.h"

class PassEvents {
public:
    PassEvents();
    // Called when the trainer begins to enqueue `phase`. The last backward pass ends where gradients are reduced.
    void enter(Ctx& ctx, Phase phase);
    // Milliseconds of a step that has finished. The loss counts as part of the backward pass.
    double forward_ms() const { return ms(kForward, kBackward); }
    double backward_ms() const { return ms(kBackward, kBackwardEnd); }

private:
    enum { kForward, kBackward, kBackwardEnd, kEvents };
    double ms(int from, int to) const;
    OwnedEvent events_[kEvents];
    int next_ = kForward;
};
