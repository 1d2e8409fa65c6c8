#include "llmc/fault/watchdog.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <system_error>
#include <utility>

#include "llmc/base/check.h"
#include "llmc/base/system/files.h"
#include "llmc/base/system/host.h"
#include "llmc/base/system/proc_stat.h"
#include "llmc/base/system/signals_blocked.h"

namespace {

constexpr double kTickS = 0.2, kRowsS = 0.5;   // at most between observations; between sending rows to other hosts
constexpr double kPrintS = 2;                  // for one rank to print the hang report, before the others end
constexpr double kAbortS = 5;                  // for the device's library to abort its collectives
constexpr double kFollowS = 3;                 // until a rank follows another that has decided to end
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

std::string line_of(const char* path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

}  // namespace

RankCard own_card() {
    RankCard card;
    card.host = host_name();
    card.pid = ::getpid();
    card.started = start_of(process_stat("self"));
    // Containers on one machine may have separate shared memory or process numbers.
    struct stat shared {};
    ::stat("/dev/shm", &shared);
    char processes[64] = "";
    if (::readlink("/proc/self/ns/pid", processes, sizeof processes - 1) < 0) processes[0] = '\0';
    card.place = card.host + " " + line_of("/proc/sys/kernel/random/boot_id") + " " + std::to_string(shared.st_dev)
                 + " " + processes;
    return card;
}

std::vector<int> number_hosts(std::vector<RankCard>& cards) {
    std::vector<int> firsts;
    for (size_t r = 0; r < cards.size(); r++) {
        auto same = [&](int first) { return cards[static_cast<size_t>(first)].place == cards[r].place; };
        const auto found = std::find_if(firsts.begin(), firsts.end(), same);
        cards[r].host_number = static_cast<int>(found - firsts.begin());
        if (found == firsts.end()) firsts.push_back(static_cast<int>(r));
    }
    return firsts;
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

// ---- the thread

Watchdog::Watchdog(int rank, std::vector<RankCard> cards, HeartbeatTable& heartbeats,
                   std::unique_ptr<HeartbeatLink> link, bool kept)
    : rank_(rank),
      cards_(std::move(cards)),
      firsts_(number_hosts(cards_)),
      heartbeats_(heartbeats),
      link_(std::move(link)),
      kept_(kept),
      known_(cards_.size(), true),
      lost_(cards_.size(), false),
      seen_(cards_.size()) {
    last_tick_ = Clock::now();
    for (Seen& seen : seen_) seen.last_progress = seen.last_beat = last_tick_;
    stop_event_ = ::eventfd(0, EFD_CLOEXEC);
    if (stop_event_ < 0) throw Error(kExitDisk, strf("watchdog: cannot create an eventfd: %s", std::strerror(errno)));
}

void Watchdog::start() {
    const SignalsBlocked blocked;
    try {
        thread_ = std::thread([this] { run(); });
        error_poller_ = std::thread([this] { poll_errors(); });
    } catch (const std::system_error&) {
        own_row().set_end(kExitBadInput);
        join();
        tell_end();
        throw;
    }
}

Watchdog::~Watchdog() {
    join();
    ::close(stop_event_);
}

void Watchdog::join() {
    ::eventfd_write(stop_event_, 1);
    if (thread_.joinable()) thread_.join();
    {
        const std::lock_guard<std::mutex> lock(error_mutex_);
        stop_polling_ = true;
    }
    error_wake_.notify_one();
    if (error_poller_.joinable()) error_poller_.join();
}

// After it returns, the functions set before are no longer called.
void Watchdog::set_device(Device device) {
    {
        const std::lock_guard<std::mutex> lock(error_mutex_);
        error_ = std::move(device.error);
    }
    const std::lock_guard<std::mutex> lock(device_mutex_);
    device_ = std::move(device);
}

void Watchdog::forget_host(int host_number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t r = 0; r < cards_.size(); r++)
        if (cards_[r].host_number == host_number) known_[r] = false;
}

bool Watchdog::local(int rank) const {
    return cards_[static_cast<size_t>(rank)].host_number == cards_[static_cast<size_t>(rank_)].host_number;
}

void Watchdog::run() {
    do {
        const std::lock_guard<std::mutex> lock(mutex_);
        tick();
    } while (wait_for_next_tick());
    tell_end();
}

// Sends the exit codes of this host's ranks to the other hosts and the launch wrapper.
void Watchdog::tell_end() {
    if (link_) {
        send_rows();
        receive_rows();
    }
    if (!kept_) return;
    observe();
    if (const int code = heartbeats_.row(rank_).read().end_code; code > 0) heartbeats_.header().outcome.store(code);
    write_summary(views());
}

// False if the thread shall end. The loss of another host wakes the watchdog at once: a launcher may leave the ranks
// only a few tenths of a second to report it.
bool Watchdog::wait_for_next_tick() {
    std::vector<pollfd> events{{stop_event_, POLLIN, 0}};
    if (link_)
        for (int socket : link_->sockets()) events.push_back({socket, POLLIN, 0});
    ::poll(events.data(), events.size(), static_cast<int>(kTickS * 1000));
    return events[0].revents == 0;
}

// Runs in its own thread: a library that does not answer must not stop the heartbeat of this rank.
void Watchdog::poll_errors() {
    std::unique_lock<std::mutex> asking(error_mutex_);
    while (!stop_polling_) {
        if (const std::string error = error_ ? error_() : ""; !error.empty()) {
            const std::lock_guard<std::mutex> lock(device_mutex_);
            device_error_ = error;
            device_error_since_ = Clock::now();
            return;
        }
        error_wake_.wait_for(asking, duration_of(kTickS), [this] { return stop_polling_; });
    }
}

// The error of the device's library, after a delay in which a lost peer, which would explain it, can be noticed.
std::string Watchdog::confirmed_error() {
    const std::lock_guard<std::mutex> lock(device_mutex_);
    if (device_error_.empty() || Clock::now() - device_error_since_ < duration_of(1)) return "";
    return strf("rank %d: ", rank_) + device_error_;
}

void Watchdog::tick() {
    post_own();
    const Clock::time_point now = Clock::now();
    if (link_ && now - last_rows_ > duration_of(kRowsS)) {
        last_rows_ = now;
        send_rows();
    }
    if (link_) receive_rows();
    observe();
    const std::vector<RankView> ranks = views();
    if (heartbeats_.header().hang_report_state.load(std::memory_order_acquire) != 0) end_run();
    check_link_and_ends();
    check_own_end();
    if (kept_ && (lowest_living(ranks) == rank_ || ranks[static_cast<size_t>(rank_)].ended())) write_summary(ranks);
    std::string text = hang_report(ranks, timeout_s);
    if (text.empty()) text = confirmed_error();
    if (text.empty()) return;
    store_hang_report(text);
    end_run();
}

void Watchdog::post_own() {
    Heartbeat& row = own_row();
    row.add_beat();
    if (launcher_output_is_lost()) row.set_output_lost();
    const int64_t blocks = file_blocks();
    if (std::exchange(file_blocks_, blocks) != blocks && phase_is_slow(row.phase())) row.add_progress();
    const std::lock_guard<std::mutex> lock(device_mutex_);
    if (device_.post) device_.post(row);
}

// ---- other hosts

void Watchdog::send_rows() {
    for (int peer : link_->peers()) {
        std::string rows;
        for (size_t r = 0; r < cards_.size(); r++) {
            // Rank 0 forwards the rows of the other hosts.
            const int host = cards_[r].host_number;
            if (host == peer || (rank_ != 0 && !local(static_cast<int>(r))) || !known_[r]) continue;
            const RankPost post = heartbeats_.row(static_cast<int>(r)).read();
            const auto rank = static_cast<int64_t>(r);
            rows.append(reinterpret_cast<const char*>(&rank), sizeof rank);
            rows.append(reinterpret_cast<const char*>(&post), sizeof post);
        }
        link_->send(peer, HeartbeatLink::kRows, rows);
    }
}

void Watchdog::receive_rows() {
    link_->receive(
        [this](int peer, HeartbeatLink::Kind kind, const std::string& bytes) { receive(peer, kind, bytes); });
}

void Watchdog::receive(int peer, HeartbeatLink::Kind kind, const std::string& bytes) {
    if (kind == HeartbeatLink::kHangReport) {
        store_hang_report(bytes);
        return;
    }
    constexpr size_t kItem = sizeof(int64_t) + sizeof(RankPost);
    if (kind != HeartbeatLink::kRows || bytes.size() % kItem != 0) return;
    for (size_t at = 0; at < bytes.size(); at += kItem) {
        int64_t rank;
        RankPost post;
        std::memcpy(&rank, bytes.data() + at, sizeof rank);
        std::memcpy(&post, bytes.data() + at + sizeof rank, sizeof post);
        if (rank < 0 || rank >= static_cast<int64_t>(cards_.size()) || local(static_cast<int>(rank))) continue;
        if (rank_ == 0 && cards_[static_cast<size_t>(rank)].host_number != peer) continue;
        heartbeats_.row(static_cast<int>(rank)).write(post);
    }
}

// ---- observing the other ranks

void Watchdog::observe() {
    const Clock::time_point now = Clock::now();
    // If this process was suspended, it has not observed the progress of the others meanwhile.
    const Clock::duration slept = now - last_tick_;
    const bool stopped = slept > duration_of(10 * kTickS);
    last_tick_ = now;
    for (size_t r = 0; r < seen_.size(); r++) {
        Seen& seen = seen_[r];
        if (stopped) {
            seen.last_progress += slept;
            seen.last_beat += slept;
        }
        const RankPost post = heartbeats_.row(static_cast<int>(r)).read();
        bool progressed = post.progress != seen.post.progress;
        for (int i = 0; i < kLanes; i++) {
            const LanePost &a = post.lanes[i], &b = seen.post.lanes[i];
            progressed = progressed || a.enqueued != b.enqueued || a.begun != b.begun || a.finished != b.finished;
        }
        if (progressed) seen.last_progress = now;
        if (post.output_lost) set_launcher_output_lost();
        if (post.beats != seen.post.beats) seen.last_beat = now;
        if (post.end_code >= 0 && seen.post.end_code < 0) seen.ended_s = seconds(now.time_since_epoch());
        seen.post = post;
    }
}

std::vector<RankView> Watchdog::views() const {
    std::vector<RankView> ranks(seen_.size());
    for (size_t r = 0; r < seen_.size(); r++) {
        RankView& view = ranks[r];
        view.post = seen_[r].post;
        view.where = strf("process %lld on ", (long long)cards_[r].pid) + cards_[r].host;
        view.idle_s = seconds(last_tick_ - seen_[r].last_progress);
        view.silent_s = seconds(last_tick_ - seen_[r].last_beat);
        view.known = known_[r];
        if (local(static_cast<int>(r))) view.process = process_state(cards_[r].pid, cards_[r].started);
        else if (lost_[r]) view.process = RankView::Process::kGone;
    }
    return ranks;
}

void Watchdog::check_link_and_ends() {
    for (size_t r = 0; r < seen_.size(); r++) {
        // The first rank of a host holds the connection.
        const int host = cards_[r].host_number;
        if (link_ && link_->lost(rank_ == 0 ? host : 0) && (rank_ == 0 || host == 0)
            && firsts_[static_cast<size_t>(host)] == static_cast<int>(r)) lost_[r] = true;
        // The launcher ends all ranks after one has failed; if that takes too long, they end by themselves.
        const double now_s = seconds(last_tick_.time_since_epoch());
        if (seen_[r].post.end_code <= 0) continue;
        heartbeats_.header().outcome.store(seen_[r].post.end_code);
        // A rank prints its error before it posts its exit code.
        if (!local(static_cast<int>(r))) heartbeats_.header().printed.store(1);
        if (static_cast<int>(r) != rank_ && now_s - seen_[r].ended_s > kFollowS) {
            leaving = true;
            abort_device_collectives();
            ::_exit(seen_[r].post.end_code);
        }
    }
}

// After all ranks have finished, they close their communicators. That waits for daemons of the launcher, which may be
// gone.
void Watchdog::check_own_end() const {
    const Seen& own = seen_[static_cast<size_t>(rank_)];
    if (own.post.end_code < 0 || timeout_s <= 0) return;
    if (seconds(last_tick_.time_since_epoch()) - own.ended_s < timeout_s) return;
    std::fflush(stdout);
    ::_exit(own.post.end_code);
}

// ---- ending the run

// Writes text that outlives the ranks: "outcome 006" or "outcome end", the hang report (may be empty), and a line per
// rank, each at a fixed offset.
void Watchdog::write_summary(const std::vector<RankView>& ranks) {
    HeartbeatHeader& header = heartbeats_.header();
    size_t end = 0;
    auto put = [&](size_t bytes, const std::string& text) {
        if (end + bytes > sizeof header.text) return;
        std::string line = text.substr(0, bytes - 1);
        line.resize(bytes - 1, ' ');
        line += '\n';
        std::memcpy(header.text + end, line.data(), bytes);
        end += bytes;
    };
    constexpr size_t kLine = 256;
    const auto is_through = [](const RankView& view) { return view.post.end_code == 0; };
    const bool through = std::all_of(ranks.begin(), ranks.end(), is_through);
    const int outcome = header.outcome.load();
    put(kLine, through ? "outcome end" : strf("outcome %03d", outcome));
    put(sizeof header.hang_report,
        header.hang_report_state.load(std::memory_order_acquire) == 2 ? header.hang_report : "");
    for (size_t r = 0; r < ranks.size(); r++) {
        const RankView& view = ranks[r];
        const bool waits = view.post.lanes[kHostLane].waits() || view.post.lanes[kDeviceLane].waits();
        put(kLine, strf("rank %zu (%s): ", r, view.where.c_str()) + (waits ? "waits in " : "") + place_text(view.post)
                       + (view.ended() ? strf(", ended with %d", view.post.end_code) : ""));
    }
    if ((through || outcome != 0) && !std::exchange(announced_, true)) announce_outcome();
}

// Stores the hang report for all ranks of this host, unless one is stored; end_run sends it to the other hosts.
void Watchdog::store_hang_report(const std::string& text) {
    HeartbeatHeader& header = heartbeats_.header();
    int32_t none = 0;
    if (!header.hang_report_state.compare_exchange_strong(none, 1)) return;
    std::snprintf(header.hang_report, sizeof header.hang_report, "%s", text.c_str());
    int32_t no_outcome = 0;
    header.outcome.compare_exchange_strong(no_outcome, int{kExitPeerLost});
    header.hang_report_state.store(2, std::memory_order_release);
}

void Watchdog::print_hang_report() {
    HeartbeatHeader& header = heartbeats_.header();
    if (!header.claim_line()) return;
    const std::string line = strf("error: %s; all ranks end\n", header.hang_report);
    std::fflush(stdout);
    [[maybe_unused]] const ssize_t done = ::write(STDERR_FILENO, line.data(), line.size());
}

void Watchdog::end_run() {
    leaving = true;
    HeartbeatHeader& header = heartbeats_.header();
    const Clock::time_point start = Clock::now();
    bool forwarded = false;
    while (seconds(Clock::now() - start) < kPrintS) {
        const bool there = header.hang_report_state.load(std::memory_order_acquire) == 2;
        if (there && link_ && !forwarded) {
            for (int peer : link_->peers()) link_->send(peer, HeartbeatLink::kHangReport, header.hang_report);
            forwarded = true;
        }
        own_row().add_beat();
        observe();
        const std::vector<RankView> ranks = views();
        const int printer = lowest_living(ranks);
        if (there && printer == rank_) print_hang_report();
        // A printer on another host cannot be observed: forwarding the report must suffice.
        if (header.printed.load() || (there && printer >= 0 && !local(printer) && forwarded)) break;
        std::this_thread::sleep_for(duration_of(kTickS / 4));
    }
    if (!header.printed.load() && local(std::max(0, lowest_living(views())))) print_hang_report();
    if (kept_) write_summary(views());
    kill_suspended();
    abort_device_collectives();
    ::_exit(kExitPeerLost);
}

// A suspended process would hold its GPU forever.
void Watchdog::kill_suspended() {
    const std::vector<RankView> ranks = views();
    for (size_t r = 0; r < ranks.size(); r++)
        if (ranks[r].process == RankView::Process::kStopped) ::kill(static_cast<pid_t>(cards_[r].pid), SIGKILL);
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
