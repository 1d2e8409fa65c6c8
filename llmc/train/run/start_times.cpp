#include "llmc/train/run/start_times.h"

#include <time.h>
#include <unistd.h>

#include <cstdlib>

#include "llmc/base/check.h"
#include "llmc/base/system/host.h"

namespace {

// Seconds since the machine started.
double now() {
    timespec t{};
    clock_gettime(CLOCK_BOOTTIME, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// When this process began, on the same clock; `fallback` if that cannot be read.
double process_start(double fallback) {
    const std::vector<std::string> fields = process_stat("self");
    const double ticks = fields.size() > kStatStart ? std::strtod(fields[kStatStart].c_str(), nullptr) : 0;
    const double start = ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
    return ticks > 0 && start <= fallback ? start : fallback;
}

}  // namespace

void StartTimes::done(const char* part) {
    const double t = now();
    if (last_ < 0) last_ = process_start(t);
    parts_.push_back({part, t - last_});
    last_ = t;
}

std::string StartTimes::text() const {
    double total = 0;
    std::string list;
    for (const Part& part : parts_) {
        total += part.seconds;
        list += strf("%s%s %.1f", list.empty() ? ": " : ", ", part.name, part.seconds);
    }
    return strf("first step done after %.1f s%s", total, list.c_str());
}
