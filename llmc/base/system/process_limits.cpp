#include "llmc/base/system/process_limits.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <new>
#include <system_error>

void check_process_limits() {
    // A rank of MPI has 27 files open while it saves, and a few more for every rank of its host.
    constexpr rlim_t kFiles = 64;
    rlimit files{};
    if (::getrlimit(RLIMIT_NOFILE, &files) != 0) return;
    REQUIRE(files.rlim_max >= kFiles, "ulimit -n %lld: a run needs %lld open files: raise it with ulimit -n",
            static_cast<long long>(files.rlim_max), ll(kFiles));
    files.rlim_cur = files.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &files);
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

void start_with_passive_threads(const char* const* argv) {
    if (std::getenv("OMP_WAIT_POLICY") || std::getenv("GOMP_SPINCOUNT")) return;
    if (::setenv("OMP_WAIT_POLICY", "passive", 0) != 0) return;
    // Through the link, the name of the process would be "exe".
    char path[4096] = "";
    if (::readlink("/proc/self/exe", path, sizeof path - 1) <= 0) return;
    // execv does not change the words, its declaration is older than const.
    ::execv(path, const_cast<char* const*>(argv));
}
