// Fault injection (--inject), to test a cluster's restart scripts before a long run. Each fault is triggered once.
//   kill:rank=3@step=50   SIGKILL              stop:rank=3@step=50    SIGSTOP, which suspends the whole process
//   term:rank=0@eval      SIGTERM              stall:rank=3@step=50   the main thread hangs, the watchdog keeps running
//   nan:grad@77           a gradient is NaN    enospc@save            a write fails because the disk is full
//   bf16:linear=3.down    the linear runs in BF16 although the plan says FP8
// After the @: step=S or S (the first backward pass of step S; steps count from 1), save or save=N (the N-th save of
// this process), eval or eval=N. kill, stop, stall and term need a rank; nan and enospc act on rank 0 unless one is
// named (nan:grad:rank=1@77); bf16 acts on all ranks and has no @.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

struct Fault {
    enum class Kind { kKill, kStop, kStall, kTerm, kNan, kEnospc, kBf16 };
    enum class At { kStep, kSave, kEvaluation, kStart };
    Kind kind;
    At at;
    int rank = 0;
    int64_t number = 1;        // of the step, save or evaluation
    std::string linear = {};   // kBf16 only
    std::string text;          // as the user wrote it
};

// Parses one word of --inject; an error (exit 2) quotes the word.
Fault parse_fault(const std::string& word);

// Returns NAME of the first bf16:linear=NAME in `words`, or "".
std::string injected_bf16_linear(const std::vector<std::string>& words);

// The faults of one rank.
class Faults {
public:
    Faults(const std::vector<std::string>& words, int rank);

    void in_backward(int64_t step) { trigger(Fault::At::kStep, step); }
    void in_evaluation() { trigger(Fault::At::kEvaluation, ++evaluations_); }
    void in_save() { trigger(Fault::At::kSave, ++saves_); }
    // Whether a gradient of this step must become NaN.
    bool corrupts_gradient(int64_t step) const;
    // Returns the errno with which this disk call must fail, or 0. Thread-safe.
    int disk_error(const char* call) const;

private:
    void trigger(Fault::At at, int64_t number);

    std::vector<Fault> faults_;
    std::vector<bool> done_;
    const int rank_;
    int64_t evaluations_ = 0;
    std::atomic<int64_t> saves_ = 0;
};
