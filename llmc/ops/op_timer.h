// Times every operation of a step as it runs: one event before it and one after, on the stream that it was given to.
// What each call was is learned as in a rehearsal, from its arguments (op_work.cpp), so that calls can be held against
// a plan. Where Ctx::timer is null an operation costs one test of that pointer.
//
// On a GPU an event ends what was launched before it: a kernel that would have been launched early (cuda/common.cuh)
// starts only when the one before it is complete. Time of an operation is therefore that of its kernels one after the
// other, with the latency of its first launch and that of the events themselves; bench_ceilings.h measures these.
#pragma once
#include <deque>
#include <string>
#include <vector>

#include "llmc/ops/op_cost.h"

// One call, or a copy or fill that no operation does.
struct OpCall {
    StepRecorder work;               // attention that makes copies is two operations
    const char* transfer = nullptr;  // what it is called
    int64_t bytes = 0;               // of a transfer, read and written
    bool beside = false;             // on another stream than compute's
    double ms = 0;
};

class OpTimer {
public:
    // Of a step that is computed on `compute`. Events are made when first needed.
    explicit OpTimer(const Ctx& compute);
    ~OpTimer();
    OpTimer(const OpTimer&) = delete;
    OpTimer& operator=(const OpTimer&) = delete;

    void restart() { used_ = 0; }
    // Of the calls since restart; waits for those.
    const std::deque<OpCall>& read();
    size_t calls() const { return used_; }

private:
    friend class OpSpan;
    OpCall* next(const Ctx& ctx);

    const Ctx& compute_;
    Ctx noting_;                  // a rehearsal's
    std::deque<OpCall> calls_;    // the first used_ of them
    std::vector<Event*> events_;  // begin and end of each
    size_t used_ = 0;
    bool open_ = false;           // inside a call; what that does by calls of its own is part of it
};

// A call is timed while this lives; nothing without a timer.
class OpSpan {
public:
    template <typename Args> OpSpan(Ctx& ctx, OpKind kind, const Args& args) : OpSpan(ctx) {
        if (call_) rehearse_op(noting(), kind, args);
        begin();
    }
    // A transfer.
    OpSpan(Ctx& ctx, const char* transfer, int64_t bytes);
    ~OpSpan();
    OpSpan(const OpSpan&) = delete;
    OpSpan& operator=(const OpSpan&) = delete;

private:
    explicit OpSpan(Ctx& ctx);
    Ctx& noting();
    void begin();

    Ctx& ctx_;
    OpTimer* timer_ = nullptr;   // that it began with
    OpCall* call_ = nullptr;     // null: part of another, or nothing to time
    size_t number_ = 0;
};
