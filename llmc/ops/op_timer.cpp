#include "llmc/ops/op_timer.h"

#include <exception>

OpTimer::OpTimer(const Ctx& compute) : compute_(compute) { rehearsal_.rehearsal = true; }

OpCall* OpTimer::next(const Ctx& ctx) {
    if (open_) return nullptr;
    if (used_ == calls_.size()) {
        calls_.emplace_back();
        for (int i = 0; i < 2; i++) events_.push_back(OwnedEvent::create());
    }
    OpCall& call = calls_[used_++];
    call.work.gemms.clear();
    call.work.ops.clear();
    call.transfer = nullptr;
    call.on_side_stream = &ctx != &compute_;
    rehearsal_.recorder = &call.work;
    open_ = true;
    return &call;
}

const std::deque<OpCall>& OpTimer::read() {
    for (size_t i = 0; i < used_; i++) {
        device::event_wait(events_[2 * i + 1]);
        calls_[i].ms = static_cast<double>(device::event_elapsed_ms(events_[2 * i], events_[2 * i + 1]));
    }
    return calls_;
}

OpSpan::OpSpan(Ctx& ctx) : ctx_(ctx), timer_(ctx.timer) {
    if (timer_) call_ = timer_->next(ctx);
    if (call_) number_ = timer_->used_ - 1;
}

OpSpan::OpSpan(Ctx& ctx, const char* transfer, int64_t bytes) : OpSpan(ctx) {
    if (!call_) return;
    call_->transfer = transfer;
    call_->bytes = bytes;
    begin();
}

OpSpan::~OpSpan() {
    if (!call_ || std::uncaught_exceptions() > 0) return;
    device::event_record(ctx_, timer_->events_[2 * number_ + 1]);
    timer_->open_ = false;
}

Ctx& OpSpan::rehearsal() { return timer_->rehearsal_; }

void OpSpan::begin() {
    if (call_) device::event_record(ctx_, timer_->events_[2 * number_]);
}
