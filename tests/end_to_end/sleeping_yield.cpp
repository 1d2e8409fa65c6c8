// Preloaded into ranks by tests/run.py: one that waits for others sleeps where OpenMPI would ask again at once. Where
// cores are shared, asking takes most of the time: beside a compiler, four ranks of comm_check ran 4 times as fast.
#include <sched.h>

#include <algorithm>
#include <ctime>

namespace {

using Nanoseconds = long;
constexpr Nanoseconds kShortest = 20'000, kLongest = 1'000'000;

Nanoseconds now() {
    timespec time{};
    ::clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

// The pauses of one wait double; OpenMPI asks again within a few microseconds of a pause.
extern "C" int sched_yield() noexcept {
    thread_local Nanoseconds pause = kShortest, end = 0;
    pause = now() - end < kShortest ? std::min(2 * pause, kLongest) : kShortest;
    const timespec time{0, pause};
    ::nanosleep(&time, nullptr);
    end = now();
    return 0;
}
