// --inject: faults on demand, so that a cluster's restart scripts can be drilled before the long run. A fault strikes
// once.
//   kill:rank=3@step=50   SIGKILL          stop:rank=3@step=50    SIGSTOP: the process does nothing any more
//   term:rank=0@eval      SIGTERM          stall:rank=3@step=50   its main thread hangs, its watchdog goes on
//   nan:grad@77           a gradient is not a number            enospc@save   a write finds no space left
// Where: step=S or S (counted from 1, in the first backward), save, save=N (the N-th of this process), eval, eval=N.
// kill, stop, stall and term need a rank; the others strike rank 0 if none is named (nan:grad:rank=1@77).
#pragma once
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

struct Fault {
    enum class Kind { kKill, kStop, kStall, kTerm, kNan, kEnospc };
    enum class At { kStep, kSave, kEvaluation };
    Kind kind;
    At at;
    int rank = 0;
    int64_t number = 1;   // step, or the how many-th save or evaluation
    std::string text;     // as it was written
};

// What is wrong with one word of --inject, with the word in it: error exit 2.
Fault parse_fault(const std::string& word);

// The faults of one rank.
class Faults {
public:
    Faults(const std::vector<std::string>& words, int rank);

    void in_backward(int64_t step) { strike(Fault::At::kStep, step); }
    void in_evaluation() { strike(Fault::At::kEvaluation, ++evaluations_); }
    void in_save() { strike(Fault::At::kSave, ++saves_); }
    // The gradients of this step get a value that is not a number.
    bool corrupts_gradient(int64_t step) const;
    // errno of this call to the disk, 0: it goes through. Any thread.
    int disk_error(const char* call) const;

private:
    void strike(Fault::At at, int64_t number);

    std::vector<Fault> faults_;
    std::vector<bool> done_;
    const int rank_;
    int64_t evaluations_ = 0;
    std::atomic<int64_t> saves_ = 0;
};
