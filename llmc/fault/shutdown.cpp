#include "llmc/fault/shutdown.h"

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "llmc/base/check.h"
#include "llmc/fault/heartbeat.h"

namespace {

using Clock = std::chrono::steady_clock;

volatile std::sig_atomic_t stop_signal = 0;   // the first signal
constexpr int64_t kRepeatMs = 1000;           // a signal within this time is a copy of the first one
volatile int64_t first_ms = 0;                // when the first SIGTERM or SIGINT arrived, 0: none has
double limit_minutes = 0;
constexpr const char* kStops = "stopping after this step; again: end now\n";
constexpr const char* kSaves = "stopping after this step, then saving; again: end now\n";
constexpr const char* kMpirun = "stopping after this step, then saving, unless mpirun kills the ranks before, as after "
                                "Ctrl-C (scripts/launch/launch_mpi.sh keeps it from that); again: end now\n";
const char* volatile answer = kStops;
const Clock::time_point process_start = Clock::now();

int64_t now_ms() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1000 * static_cast<int64_t>(now.tv_sec) + now.tv_nsec / 1000000;
}

// Batch systems, timeout(1) and mpirun send several copies of one signal: to a process, to its group, and through
// mpirun. Only a later one is a second request.
extern "C" void on_stop_signal(int number) {
    if (number != SIGUSR1) {
        if (first_ms == 0) {
            first_ms = now_ms();
        } else if (now_ms() - first_ms >= kRepeatMs) {
            constexpr char kText[] = "error: a second signal more than 1 s after the first ends the run at once, "
                                     "without a checkpoint\n";
            [[maybe_unused]] const ssize_t done = ::write(STDERR_FILENO, kText, sizeof kText - 1);
            post_end(128 + number);
            _exit(128 + number);
        }
    }
    if (stop_signal) return;
    stop_signal = number;
    const char* const text = answer;
    if (launcher_stops() || !claim_stop_line()) return;   // another process has answered
    [[maybe_unused]] const ssize_t done = ::write(STDERR_FILENO, text, std::strlen(text));
}

bool time_is_up() {
    const std::chrono::duration<double, std::ratio<60>> limit(limit_minutes);
    return limit_minutes > 0 && Clock::now() - process_start >= limit;
}

const char* signal_name(int number) {
    return number == SIGTERM ? "SIGTERM" : number == SIGINT ? "SIGINT" : "SIGUSR1";
}

}  // namespace

void catch_stop_signals() {
    launcher_stops();   // opens the wrapper's file, which the handler must not do
    sigset_t own;
    sigemptyset(&own);
    for (int number : {SIGTERM, SIGINT, SIGUSR1}) {
        struct sigaction action {};
        action.sa_handler = on_stop_signal;
        action.sa_flags = SA_RESTART;   // interrupted reads and writes of files continue
        sigaction(number, &action, nullptr);
        sigaddset(&own, number);
    }
    pthread_sigmask(SIG_UNBLOCK, &own, nullptr);
}

void die_of_stop_signals() {
    for (int number : {SIGTERM, SIGINT, SIGUSR1}) std::signal(number, SIG_DFL);
    if (stop_signal) std::raise(stop_signal);
}

void stop_after(double minutes, bool saves) {
    limit_minutes = minutes;
    const bool by_mpirun = std::getenv("OMPI_COMM_WORLD_SIZE") && !std::getenv(kHeartbeatVariable);
    answer = !saves ? kStops : by_mpirun ? kMpirun : kSaves;
}

bool stop_wanted() { return stop_signal != 0 || launcher_stops() || time_is_up(); }

std::string stop_reason() {
    if (stop_signal) return signal_name(stop_signal);
    if (launcher_stops()) return "a signal to the launch wrapper";
    return time_is_up() ? strf("--exit-duration-in-mins %g", limit_minutes) : "";
}
