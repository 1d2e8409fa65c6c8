// Preloaded by tests/run.py: a rank that waits for others sleeps where OpenMPI would ask again at once. Where the cores
// are shared, such questions take most of the time: four ranks of comm_check beside a compiler ran 4 times as fast.
#include <sched.h>

#include <ctime>

extern "C" int sched_yield() noexcept {
    const timespec pause{0, 50'000};
    ::nanosleep(&pause, nullptr);
    return 0;
}
