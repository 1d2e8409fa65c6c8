#include "llmc/base/system/process_limits.h"

#include <sys/resource.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

// A rank of MPI has 27 files open while it saves, and a few more for every rank of its host.
constexpr rlim_t kFiles = 64;
// Every thread gets a stack of this size; OpenMP keeps about 100 bytes for each thread on the stack of the first one.
constexpr rlim_t kStackBytes = 1 << 20;
// OpenMPI 4.1 with two ranks takes 210 MB. With less it crashes, or ends the rank with exit code 1 and many lines.
constexpr rlim_t kRankBytes = rlim_t{512} << 20;

// Whether the limit is less than `least`. `found`: the limit.
bool less_than(decltype(RLIMIT_NOFILE) resource, rlim_t least, rlim_t& found) {
    rlimit limit{};
    if (::getrlimit(resource, &limit) != 0) return false;
    found = limit.rlim_cur;
    return found != RLIM_INFINITY && found < least;
}

#ifdef _OPENMP
// Starts and ends `count` threads with stacks of the size that OpenMP uses, because OpenMP itself crashes, or ends the
// process with a message of its own, if it cannot start its threads. Returns how many could be started.
int threads_started(int count) {
    std::atomic<bool> over{false};
    std::vector<std::jthread> threads;
    try {
        while (static_cast<int>(threads.size()) < count) threads.emplace_back([&] { over.wait(false); });
    } catch (const std::exception&) {   // lack of threads or of memory
    }
    over = true;
    over.notify_all();
    return static_cast<int>(threads.size());
}
#endif

void check_threads() {
#ifdef _OPENMP
    constexpr int kMostThreads = 4096;   // trying more than any machine has cores could take minutes
    const int threads = omp_get_max_threads();
    const char* const given = std::getenv("OMP_NUM_THREADS");
    const std::string set = given ? std::string("OMP_NUM_THREADS=") + given : "OMP_NUM_THREADS is not set";
    REQUIRE(threads <= kMostThreads && threads_started(threads - 1) == threads - 1, "%d threads of OpenMP cannot be "
            "started (%.80s): set OMP_NUM_THREADS to fewer, or raise the limit on processes (ulimit -u, a container's) "
            "or memory (ulimit -v)", threads, set.c_str());
#endif
}

}  // namespace

void check_process_limits() {
    rlim_t found = 0;
    REQUIRE(!less_than(RLIMIT_NOFILE, kFiles, found), "ulimit -n %lld: a run needs %lld open files: raise it with "
            "ulimit -n", ll(static_cast<int64_t>(found)), ll(static_cast<int64_t>(kFiles)));
    REQUIRE(!less_than(RLIMIT_STACK, kStackBytes, found), "ulimit -s %lld: the stack needs %lld kB: raise it with "
            "ulimit -s", ll(static_cast<int64_t>(found >> 10)), ll(static_cast<int64_t>(kStackBytes >> 10)));
    check_threads();
}

void check_address_space() {
    rlim_t found = 0;
    REQUIRE(!less_than(RLIMIT_AS, kRankBytes, found), "ulimit -v %lld: a rank of OpenMPI needs %lld kB of address "
            "space: raise it with ulimit -v", ll(static_cast<int64_t>(found >> 10)),
            ll(static_cast<int64_t>(kRankBytes >> 10)));
}

Error as_error(const std::exception& exception) {
    if (const auto* ours = dynamic_cast<const Error*>(&exception)) return *ours;
    const auto* system = dynamic_cast<const std::system_error*>(&exception);
    if (dynamic_cast<const std::bad_alloc*>(&exception))
        return {kExitBadInput, "out of memory on the host: free some, or raise the limit (ulimit -v)"};
    if (system && system->code() == std::errc::resource_unavailable_try_again)
        return {kExitBadInput, "a thread cannot be started: raise the limit on processes (ulimit -u, a container's) or "
                               "memory (ulimit -v)"};
    return {kExitBug, exception.what()};
}
