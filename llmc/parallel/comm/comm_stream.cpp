#include "llmc/parallel/comm/comm_stream.h"

#include "llmc/ops/op_cost.h"
#include "llmc/parallel/comm/comm.h"

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

int64_t CommStream::begin(Ctx& compute, const char* what, int layer, const std::function<void(Ctx&)>& work) {
    Ctx& comm = comm_ctx(compute);
    wait_for_compute(compute, comm);
    if (compute.recorder) compute.recorder->begin_exchange(what, overlap_);
    {
        const CollectivePurpose purpose(comm, what + std::to_string(layer));
        timed(comm, [&] { work(comm); });
    }
    if (compute.recorder) compute.recorder->begun = -1;
    if (&comm == &compute) return ++recorded_;
    OwnedEvent& event = begun_[static_cast<size_t>(recorded_ + 1) % begun_.size()];
    if (!event) event = OwnedEvent::create();
    return record(comm, event);
}

void CommStream::wait(Ctx& compute, int64_t number) {
    if (compute.recorder && number == recorded_) compute.recorder->travelling = -1;
    if (&comm_ctx(compute) == &compute) return;
    order_after(compute, begun_[static_cast<size_t>(number) % begun_.size()], number);
}
