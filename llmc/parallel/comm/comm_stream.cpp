#include "llmc/parallel/comm/comm_stream.h"

Ctx& CommStream::comm_ctx(Ctx& compute) {
    if (!overlap_ || compute.rehearsal) return compute;
    if (!ready_) {
        stream_.open(compute);
        ready_ = OwnedEvent::create();
    }
    stream_.ctx.timer = compute.timer;
    return stream_.ctx;
}

void CommStream::wait_for_compute(Ctx& compute, Ctx& comm) {
    if (&comm == &compute) return;
    device::event_record(compute, ready_);
    device::event_order(comm, ready_);
    waited_ = point_;
}
