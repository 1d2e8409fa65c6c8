// The faults that LLMC_FAULTS names, separated by commas, for build/*/faults/train_*:
//   kill:rank=1@backward=7   SIGKILL in the backward pass of step 7; kill:rank=1@evaluation=2 in the second evaluation,
//                            kill:rank=1@save=2 in the second save. Steps are those of this process.
//   stop, term, stall        SIGSTOP, SIGTERM, and a main thread that sleeps for ever while the watchdog goes on
//   nan@step=7               all gradients of step 7 are NaN; spike@step=7: they are 1000 times as large
//   enospc@save=2            writes of the second save fail, because the disk is full
//   bf16@3.down              this linear runs in BF16 although the plan says FP8
// They are for rank 0 if no rank is named, bf16 for all.
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>

#include "llmc/base/check.h"
#include "llmc/base/fault_injection.h"

namespace {

int own_rank() {
    for (const char* variable : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK"})
        if (const char* rank = std::getenv(variable)) return std::atoi(rank);
    return 0;
}

void strike(const std::string& kind) {
    std::fflush(nullptr);
    if (kind == "kill") std::raise(SIGKILL);
    if (kind == "stop") std::raise(SIGSTOP);
    if (kind == "term") std::raise(SIGTERM);
    while (kind == "stall") ::sleep(1000);
}

// Whether this rank has the fault.
bool is_named(const std::string& wanted) {
    const char* const faults = std::getenv("LLMC_FAULTS");
    std::istringstream words(faults ? faults : "");
    for (std::string word; std::getline(words, word, ',');) {
        const size_t at = word.find('@'), rank = word.find(":rank=");
        const int of = rank == std::string::npos ? 0 : std::atoi(word.c_str() + rank + 6);
        const bool ours = of == own_rank() || word.starts_with("bf16");
        if (ours && word.substr(0, std::min(at, rank)) + word.substr(at) == wanted) return true;
    }
    return false;
}

}  // namespace

// Only the main thread comes to other points than "write".
bool fault_hook(const std::string& point) {
    static std::map<std::string, int> passed;
    static std::atomic<int> saves{0};
    if (point == "write") return is_named("enospc@save=" + std::to_string(saves));
    if (point.starts_with("bf16@")) return is_named(point);
    const int step = passed["read data"];
    if (point == "gradient") return is_named("nan@step=" + std::to_string(step));
    if (point == "spike") return is_named("spike@step=" + std::to_string(step));
    const int number = ++passed[point];
    if (point == "save") saves = number;
    for (const char* kind : {"kill", "stop", "term", "stall"})
        if (is_named(strf("%s@%s=%d", kind, point.c_str(), point == "backward" ? step : number))) strike(kind);
    return false;
}
