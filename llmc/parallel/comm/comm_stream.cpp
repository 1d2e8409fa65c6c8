#include "llmc/parallel/comm/comm_stream.h"

CommStream::~CommStream() {
    if (!ready_) return;
    device::event_destroy(ready_);
    device::side_close(stream_);
}

Ctx& CommStream::comm_ctx(Ctx& compute) {
    if (!overlap_ || compute.rehearsal) return compute;
    if (!ready_) {
        device::side_open(stream_, compute);
        ready_ = device::event_create();
    }
    stream_.timer = compute.timer;
    return stream_;
}

void CommStream::wait_for_compute(Ctx& compute, Ctx& comm) {
    if (&comm == &compute) return;
    device::event_record(compute, ready_);
    device::event_order(comm, ready_);
    waited_ = mark_;
}
