#include "llmc/parallel/comm/comm_timer.h"

CommTimer::CommTimer(int64_t spans) {
    for (int64_t i = 0; i < 2 * spans; i++) events_.push_back(OwnedEvent::create());
}

void CommTimer::record(Ctx& ctx, size_t half) {
    CHECK(used_ < events_.size() && used_ % 2 == half, "span %zu of %zu", used_ / 2, events_.size() / 2);
    device::event_record(ctx, events_[used_++]);
}

double CommTimer::seconds() const {
    double ms = 0;
    for (size_t i = 0; i + 1 < used_; i += 2)
        ms += static_cast<double>(device::event_elapsed_ms(events_[i], events_[i + 1]));
    return ms * 1e-3;
}
