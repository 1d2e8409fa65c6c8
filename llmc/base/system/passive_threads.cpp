#include "llmc/base/system/passive_threads.h"

#include <unistd.h>

#include <cstdlib>

void start_with_passive_threads(const char* const* argv) {
    if (std::getenv("OMP_WAIT_POLICY") || std::getenv("GOMP_SPINCOUNT")) return;
    if (::setenv("OMP_WAIT_POLICY", "passive", 0) != 0) return;
    // Through the link, the name of the process would be "exe".
    char path[4096] = "";
    if (::readlink("/proc/self/exe", path, sizeof path - 1) <= 0) return;
    // execv does not change the words, its declaration is older than const.
    ::execv(path, const_cast<char* const*>(argv));
}
