// Times every operation of a step as it runs, by one event before and one after the operation on its stream. Each call
// is described as in a rehearsal (op_cost.cpp), so that calls can be compared with a plan. If Ctx::timer is null, an
// operation only tests that pointer.
//
// On a GPU an event disables early launches (cuda/common.cuh): the kernel after the event starts only when the kernel
// before it is complete. The time of an operation is therefore that of its kernels in sequence, plus the latency of the
// first launch and of the events themselves. `bench` shares what the events add equally over the calls.
#pragma once
#include <deque>
#include <vector>

#include "llmc/ops/op_cost.h"
#include "llmc/ops/owned.h"

// One call of an operation, or a copy or fill outside of operations.
struct OpCall {
    StepRecorder work;               // attention with a QuantOut counts as two operations
    const char* transfer = nullptr;  // "copy" or "fill"; null for an operation
    int64_t bytes = 0;               // of a transfer, read and written
    bool on_side_stream = false;     // on another stream than the compute stream
    double ms = 0;
};

class OpTimer {
public:
    // Times steps whose compute stream is that of `compute`. Events are created when first needed.
    explicit OpTimer(const Ctx& compute);

    void restart() { used_ = 0; }
    // Returns the calls since restart, the first calls() elements; waits for them to finish.
    const std::deque<OpCall>& read();
    size_t calls() const { return used_; }

private:
    friend class OpSpan;
    OpCall* next(const Ctx& ctx);

    const Ctx& compute_;
    Ctx rehearsal_;               // records what a call does
    std::deque<OpCall> calls_;    // the first used_ are valid
    std::vector<OwnedEvent> events_;   // begin and end of each call
    size_t used_ = 0;
    bool open_ = false;           // inside a call; nested calls are part of it
};

// Times one call during its lifetime. Without a timer it does nothing.
class OpSpan {
public:
    template <typename Args> OpSpan(Ctx& ctx, OpKind kind, const Args& args) : OpSpan(ctx) {
        if (call_) rehearse_op(rehearsal(), kind, args);
        begin();
    }
    OpSpan(Ctx& ctx, const char* transfer, int64_t bytes);
    ~OpSpan();
    OpSpan(const OpSpan&) = delete;
    OpSpan& operator=(const OpSpan&) = delete;

private:
    explicit OpSpan(Ctx& ctx);
    Ctx& rehearsal();
    void begin();

    Ctx& ctx_;
    OpTimer* timer_ = nullptr;
    OpCall* call_ = nullptr;     // null: part of another call, or no timer
    size_t number_ = 0;
};
