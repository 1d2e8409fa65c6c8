#include "llmc/train/pass_events.h"

PassEvents::PassEvents() {
    for (OwnedEvent& event : events_) event = OwnedEvent::create();
}

void PassEvents::enter(Ctx& ctx, Phase phase) {
    const bool begun = next_ > kForward || phase == Phase::kForward;
    if (begun && next_ <= kBackwardEnd) device::event_record(ctx, events_[next_++]);
    if (phase == Phase::kReduce) next_ = kForward;   // the first event of the next step
}

double PassEvents::ms(int from, int to) const {
    return static_cast<double>(device::event_elapsed_ms(events_[from], events_[to]));
}
