#include "llmc/fault/watchdog.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <system_error>
#include <utility>

#include "llmc/base/check.h"
#include "llmc/base/system/files.h"
#include "llmc/base/system/host.h"
#include "llmc/base/system/threads.h"

namespace {

constexpr double kTickS = 0.2;     // between observations
constexpr double kPrintS = 2;      // for the rank that has found the cause to print it, before the others end
constexpr double kOthersS = 2.5;   // for the other hosts to print theirs, before the launcher ends all ranks
constexpr double kAbortS = 5;      // for the device's library to abort its collectives
constexpr double kDefaultTimeoutS = 60;

std::atomic<double> timeout_s{kDefaultTimeoutS};
std::atomic<bool> leaving{false};

double seconds(std::chrono::steady_clock::duration d) { return std::chrono::duration<double>(d).count(); }
std::chrono::steady_clock::duration duration_of(double s) {
    return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(s));
}

int64_t start_of(const std::vector<std::string>& fields) {
    return fields.size() > kStatStart ? std::atoll(fields[kStatStart].c_str()) : 0;
}

// Sets a field of the header: one line, cut to its length.
template <size_t kBytes> void put(char (&field)[kBytes], const std::string& text) {
    std::snprintf(field, kBytes, "%s\n", text.substr(0, kBytes - 2).c_str());
}

std::string line_of(const char* path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

}  // namespace

RankProcess own_process() {
    RankProcess own{.host = host_name(), .place = {}, .pid = ::getpid(), .started = start_of(process_stat("self"))};
    // Containers on one machine may have separate shared memory or process numbers.
    struct stat shared {};
    ::stat("/dev/shm", &shared);
    char processes[64] = "";
    if (::readlink("/proc/self/ns/pid", processes, sizeof processes - 1) < 0) processes[0] = '\0';
    own.place = own.host + " " + line_of("/proc/sys/kernel/random/boot_id") + " " + std::to_string(shared.st_dev)
                + " " + processes;
    return own;
}

RankView::Process process_state(int64_t pid, int64_t started) {
    const auto fields = process_stat(std::to_string(pid));
    if (fields.empty()) {   // the process is gone, or no file descriptor is free
        const bool there = ::kill(static_cast<pid_t>(pid), 0) == 0 || errno == EPERM;
        return there ? RankView::Process::kRuns : RankView::Process::kGone;
    }
    if (start_of(fields) != started) return RankView::Process::kGone;
    const char state = fields[kStatState][0];
    if (state == 'Z' || state == 'X') return RankView::Process::kGone;
    return state == 'T' || state == 't' ? RankView::Process::kStopped : RankView::Process::kRuns;
}

void set_comm_timeout(double s) { timeout_s = s; }

void yield_to_watchdog(bool patient) {
    if (!own_row()) return;
    if (patient && !leaving) std::this_thread::sleep_for(std::chrono::seconds(1));
    while (leaving) std::this_thread::sleep_for(std::chrono::seconds(1));   // until the process ends
}

// ---- the threads

Watchdog::Watchdog(std::vector<RankProcess> ranks, size_t own, HeartbeatTable& table, std::string others,
                   const std::string& hosts)
    : ranks_(std::move(ranks)), own_(own), table_(table), others_(std::move(others)),
      seen_(ranks_.size()) {
    for (Seen& seen : seen_) seen.last_progress = seen.last_beat = last_tick_;
    put(table_.header().hosts, "hosts " + hosts);
}

void Watchdog::start() {
    const SignalsBlocked blocked;
    try {
        thread_ = std::thread([this] { run(); });
        error_poller_ = std::thread([this] { poll_errors(); });
    } catch (const std::system_error&) {
        row().set_end(kExitBadInput);
        join();
        throw;
    }
}

Watchdog::~Watchdog() { join(); }

void Watchdog::join() {
    {
        const std::lock_guard<std::mutex> lock(device_mutex_);
        stopping_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
    { const std::lock_guard<std::mutex> lock(error_mutex_); }   // the poller waits, or will see stopping_
    error_wake_.notify_one();
    if (error_poller_.joinable()) error_poller_.join();
    post_to_launcher();
}

void Watchdog::set_device(Device device) {
    {
        const std::lock_guard<std::mutex> lock(error_mutex_);
        error_ = std::move(device.error);
    }
    const std::lock_guard<std::mutex> lock(device_mutex_);
    device_ = std::move(device);
}

void Watchdog::run() {
    const auto stops = [this] { return stopping_.load(); };
    for (bool stop = false; !stop;) {
        tick();
        std::unique_lock<std::mutex> lock(device_mutex_);
        stop = wake_.wait_for(lock, duration_of(kTickS), stops);
    }
}

// Runs in its own thread: a library that does not answer must not stop the heartbeat of this rank.
void Watchdog::poll_errors() {
    std::unique_lock<std::mutex> asking(error_mutex_);
    while (!stopping_) {
        if (const std::string error = error_ ? error_() : ""; !error.empty()) {
            const std::lock_guard<std::mutex> lock(device_mutex_);
            device_error_ = error;
            device_error_since_ = Clock::now();
            return;
        }
        error_wake_.wait_for(asking, duration_of(kTickS), [this] { return stopping_.load(); });
    }
}

// The error of the device's library, after a delay in which a lost peer, which would explain it, can be noticed.
std::string Watchdog::confirmed_error() {
    const std::lock_guard<std::mutex> lock(device_mutex_);
    if (device_error_.empty() || Clock::now() - device_error_since_ < duration_of(1)) return "";
    return strf("rank %d: ", ranks_[own_].rank) + device_error_ + "; it is in " + place_text(own_post());
}

void Watchdog::tick() {
    post_own();
    observe();
    post_to_launcher();
    end_late_exit();
    HeartbeatHeader& header = table_.header();
    int32_t state = header.report_state.load(std::memory_order_acquire);
    std::string text = state == 0 ? hang_report(views(), timeout_s, others_) : "";
    if (state == 0 && text.empty()) text = confirmed_error();
    if (state == 0 && text.empty()) return;
    leaving = true;
    // One rank of the host stores and prints the report.
    if (state == 0 && header.report_state.compare_exchange_strong(state, 1)) print_report(text);
    end_run();
}

void Watchdog::post_own() {
    row().beat();
    const int64_t blocks = file_blocks();
    if (std::exchange(file_blocks_, blocks) != blocks && phase_is_slow(own_post().phase)) post_progress();
    {
        const std::lock_guard<std::mutex> lock(device_mutex_);
        if (device_.post) device_.post();
    }
}

// ---- observing the ranks of this host

void Watchdog::observe() {
    const Clock::time_point now = Clock::now();
    // If this process was suspended, it has not observed the progress of the others meanwhile.
    const Clock::duration slept = now - last_tick_ > duration_of(10 * kTickS) ? now - last_tick_ : Clock::duration(0);
    last_tick_ = now;
    for (size_t r = 0; r < seen_.size(); r++) {
        Seen& seen = seen_[r];
        const Heartbeat& row = table_.row(r);
        const int64_t progress = row.read().progress, beats = row.beats();
        seen.last_progress = std::exchange(seen.progress, progress) == progress ? seen.last_progress + slept : now;
        seen.last_beat = std::exchange(seen.beats, beats) == beats ? seen.last_beat + slept : now;
        if (row.end_code() >= 0 && seen.end_code < 0) seen.ended = now;
        seen.end_code = row.end_code();
    }
}

std::vector<RankView> Watchdog::views() const {
    std::vector<RankView> views;
    for (size_t r = 0; r < seen_.size(); r++) {
        const RankProcess& process = ranks_[r];
        views.push_back({.rank = process.rank, .post = table_.row(r).read(),
                         .where = strf("process %lld on ", ll(process.pid)) + process.host,
                         .end_code = seen_[r].end_code, .idle_s = seconds(last_tick_ - seen_[r].last_progress),
                         .silent_s = seconds(last_tick_ - seen_[r].last_beat),
                         .process = process_state(process.pid, process.started)});
    }
    return views;
}

// What each rank of this host did last, and the exit code: one that is not 0, or 0 once all have ended.
void Watchdog::post_to_launcher() {
    bool all = true;
    for (size_t r = 0; r < ranks_.size(); r++) {
        const int code = table_.row(r).end_code();
        if (code > 0) table_.header().set_outcome(code);
        all = all && code == 0;
        const RankPost post = table_.row(r).read();
        const bool waits = post.host.waits() || post.device.waits();
        if (r < HeartbeatHeader::kLines)
            put(table_.header().lines[r], strf("rank %d (process %lld on ", ranks_[r].rank, ll(ranks_[r].pid))
                + ranks_[r].host + "): " + (waits ? "waits in " : "") + place_text(post)
                + (code >= 0 ? strf(", ended with %d", code) : ""));
    }
    if (all) table_.header().set_outcome(kExitOk);
}

// After all ranks have finished, they close their communicators. That waits for daemons of the launcher, which may be
// gone.
void Watchdog::end_late_exit() {
    const Seen& own = seen_[own_];
    if (own.end_code < 0 || timeout_s <= 0 || seconds(last_tick_ - own.ended) < timeout_s) return;
    std::fflush(stdout);
    ::_exit(own.end_code);
}

// ---- ending the run

void Watchdog::print_report(const std::string& text) {
    HeartbeatHeader& header = table_.header();
    put(header.report, (others_.empty() ? "" : "on " + ranks_[own_].host + ": ") + text);
    header.set_outcome(kExitPeerLost);
    if (header.claim_line()) {
        std::string line = header.report;
        line.back() = ';';
        line = "error: " + line + " all ranks end\n";
        std::fflush(stdout);
        [[maybe_unused]] const ssize_t done = ::write(STDERR_FILENO, line.data(), line.size());
    }
    header.report_state.store(2, std::memory_order_release);
}

void Watchdog::end_run() {
    const Clock::time_point start = Clock::now();
    const auto passed = [&](double s) { return seconds(Clock::now() - start) > s; };
    while (table_.header().report_state.load(std::memory_order_acquire) != 2 && !passed(kPrintS))
        std::this_thread::sleep_for(duration_of(kTickS / 4));
    if (!others_.empty()) std::this_thread::sleep_for(duration_of(kOthersS));
    for (const RankProcess& process : ranks_)   // a suspended process would hold its GPU forever
        if (process_state(process.pid, process.started) == RankView::Process::kStopped)
            ::kill(static_cast<pid_t>(process.pid), SIGKILL);
    abort_device_collectives();
    ::_exit(kExitPeerLost);
}

void Watchdog::abort_device_collectives() {
    std::function<void()> abort;
    {
        const std::lock_guard<std::mutex> lock(device_mutex_);
        abort = device_.abort_collectives;
    }
    if (!abort) return;
    auto done = std::make_shared<std::atomic<bool>>(false);
    std::thread([abort, done] {
        abort();
        *done = true;
    }).detach();
    const Clock::time_point start = Clock::now();
    while (!*done && seconds(Clock::now() - start) < kAbortS) std::this_thread::sleep_for(duration_of(kTickS / 4));
}
