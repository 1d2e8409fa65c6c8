#include "llmc/fault/heartbeat.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "llmc/base/check.h"
#include "llmc/base/fault_injection.h"
#include "llmc/base/system/descriptor.h"

static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<int32_t>::is_always_lock_free);

namespace {

struct PhaseRow {
    const char* text;
    bool slow;
};
constexpr PhaseRow kPhases[] = {
    {"start", true},   {"load", true},    {"read data", true},   {"forward", false}, {"backward", false},
    {"reduce", false}, {"update", false}, {"wait for device", false}, {"evaluation", false}, {"sample", false},
    {"save", true},    {"end of a save", true}, {"end", true},
};

// The row of this process, which is one rank; only its main thread posts.
std::atomic<Heartbeat*> posted_row{nullptr};
std::atomic<HeartbeatHeader*> posted_header{nullptr};   // of the same table
std::atomic<bool> output_lost_elsewhere{false};

Heartbeat* row() { return posted_row.load(std::memory_order_acquire); }

const PhaseRow& phase_row(Phase phase) {
    const auto index = static_cast<size_t>(phase);
    return kPhases[std::min(index, std::size(kPhases) - 1)];   // the bytes may come from another host
}

// Sends a line to the launch wrapper through the FIFO that it holds open. An older wrapper has no FIFO.
void send_to_launcher(const std::string& line) {
    const std::string file = launcher_file();
    if (file.empty()) return;
    const Descriptor pipe(::open((file + ".events").c_str(), O_WRONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC));
    if (pipe.fd < 0) return;
    [[maybe_unused]] const ssize_t done = ::write(pipe.fd, line.data(), line.size());
}

}  // namespace

const char* phase_text(Phase phase) { return phase_row(phase).text; }
bool phase_is_slow(Phase phase) { return phase_row(phase).slow; }

// ---- posts

void post_step(int64_t step) {
    if (Heartbeat* r = row()) r->begin_step(step);
}
void post_phase(Phase phase) {
    fault_at(phase_text(phase));
    if (Heartbeat* r = row()) r->set_phase(phase);
}
void post_progress() {
    if (Heartbeat* r = row()) r->add_progress();
}
void post_first_step() {
    if (Heartbeat* r = row()) r->set_past_first_step();
}
void post_end(int exit_code) {
    if (Heartbeat* r = row()) r->set_end(exit_code);
}

void write_outcome(int exit_code) {
    const std::string path = row() ? "" : launcher_file();
    const int fd = path.empty() ? -1 : ::open(path.c_str(), O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return;
    const std::string line = exit_code == kExitOk ? "outcome end\n" : strf("outcome %03d\n", exit_code);
    [[maybe_unused]] const ssize_t done = ::write(fd, line.data(), line.size());
    ::close(fd);
    announce_outcome();
}

void announce_to_launcher() {
    if (launcher_file().empty()) return;
    // The wrapper opens the reading end by its number. It reads the end of the pipe when this process dies, so the
    // descriptors are never closed.
    char processes[64] = "";
    int ends[2];
    if (::readlink("/proc/self/ns/pid", processes, sizeof processes - 1) < 0 || ::pipe2(ends, O_CLOEXEC) != 0) return;
    send_to_launcher(strf("rank %s %d %d\n", processes, static_cast<int>(::getpid()), ends[0]));
}

void announce_outcome() { send_to_launcher("outcome\n"); }

std::string launcher_file() {
    const char* const name = std::getenv(kHeartbeatVariable);
    // Another name could be that of a user's file, which would be overwritten.
    const bool known = name && std::strncmp(name, "llmfp8-", 7) == 0 && !std::strchr(name, '/');
    return known ? std::string("/dev/shm/") + name : "";
}

bool launcher_output_is_lost() {
    if (output_lost_elsewhere) return true;
    const std::string file = launcher_file();
    struct stat status;
    return !file.empty() && ::stat((file + ".output").c_str(), &status) == 0 && status.st_size > 0;
}

void set_launcher_output_lost() { output_lost_elsewhere = true; }

void set_own_row(const HeartbeatTable* table, int rank) {
    posted_header.store(table ? &table->header() : nullptr, std::memory_order_release);
    posted_row.store(table ? &table->row(rank) : nullptr, std::memory_order_release);
}
Heartbeat* own_row() { return row(); }

bool claim_last_line() {
    HeartbeatHeader* const header = posted_header.load(std::memory_order_acquire);
    return !header || header->claim_line();
}

// ---- rows

Mark Heartbeat::AtomicMark::load() const {
    Mark mark;
    mark.step = step.load(std::memory_order_relaxed);
    mark.number = number.load(std::memory_order_relaxed);
    mark.phase = static_cast<Phase>(phase.load(std::memory_order_relaxed));
    for (size_t i = 0; i < std::size(name); i++) {
        const uint64_t word = name[i].load(std::memory_order_relaxed);
        std::memcpy(mark.name + 8 * i, &word, 8);
    }
    mark.name[sizeof mark.name - 1] = '\0';
    return mark;
}

void Heartbeat::AtomicMark::store(const Mark& mark) {
    step.store(mark.step, std::memory_order_relaxed);
    number.store(mark.number, std::memory_order_relaxed);
    phase.store(static_cast<int32_t>(mark.phase), std::memory_order_relaxed);
    for (size_t i = 0; i < std::size(name); i++) {
        uint64_t word;
        std::memcpy(&word, mark.name + 8 * i, 8);
        name[i].store(word, std::memory_order_relaxed);
    }
}

RankPost Heartbeat::read() const {
    RankPost post;
    post.beats = beats_.load(std::memory_order_acquire);
    post.progress = progress_.load(std::memory_order_acquire);
    post.step = step_.load(std::memory_order_relaxed);
    post.phase = phase();
    post.past_first_step = past_first_step_.load(std::memory_order_relaxed);
    post.end_code = end_code_plus_1_.load(std::memory_order_acquire) - 1;
    post.output_lost = output_lost_.load(std::memory_order_relaxed);
    for (int i = 0; i < kLanes; i++) {
        LanePost& lane = post.lanes[i];
        // Read in this order, finished <= begun <= enqueued holds.
        lane.finished = lanes_[i].finished.load(std::memory_order_acquire);
        lane.begun = lanes_[i].begun.load(std::memory_order_acquire);
        lane.enqueued = lanes_[i].enqueued.load(std::memory_order_acquire);
        if (lane.begun > 0) lane.at = slot(i, lane.begun).load();
        if (lane.enqueued > lane.begun) lane.next = slot(i, lane.begun + 1).load();
    }
    return post;
}

void Heartbeat::write(const RankPost& post) {
    step_.store(post.step, std::memory_order_relaxed);
    phase_.store(static_cast<int32_t>(post.phase), std::memory_order_relaxed);
    past_first_step_.store(post.past_first_step, std::memory_order_relaxed);
    end_code_plus_1_.store(post.end_code + 1, std::memory_order_release);
    output_lost_.store(post.output_lost, std::memory_order_relaxed);
    for (int i = 0; i < kLanes; i++) {
        const LanePost& lane = post.lanes[i];
        if (lane.begun > 0) slot(i, lane.begun).store(lane.at);
        if (lane.enqueued > lane.begun) slot(i, lane.begun + 1).store(lane.next);
        lanes_[i].enqueued.store(lane.enqueued, std::memory_order_release);
        lanes_[i].begun.store(lane.begun, std::memory_order_release);
        lanes_[i].finished.store(lane.finished, std::memory_order_release);
    }
    progress_.store(post.progress, std::memory_order_release);
    beats_.store(post.beats, std::memory_order_release);
}

void Heartbeat::begin_step(int64_t step) {
    step_.store(step, std::memory_order_relaxed);
    collectives_.store(0, std::memory_order_relaxed);
    add_progress();
}
void Heartbeat::set_phase(Phase phase) {
    phase_.store(static_cast<int32_t>(phase), std::memory_order_relaxed);
    add_progress();
}

int64_t Heartbeat::enqueue(Lane lane, const char* name) {
    Mark mark;
    mark.step = step_.load(std::memory_order_relaxed);
    mark.number = collectives_.fetch_add(1, std::memory_order_relaxed) + 1;
    mark.phase = phase();
    std::snprintf(mark.name, sizeof mark.name, "%s", name);
    const int64_t number = lanes_[lane].enqueued.load(std::memory_order_relaxed) + 1;
    slot(lane, number).store(mark);
    lanes_[lane].enqueued.store(number, std::memory_order_release);
    add_progress();
    return number;
}
void Heartbeat::set_begun(Lane lane, int64_t number) { lanes_[lane].begun.store(number, std::memory_order_release); }
void Heartbeat::set_finished(Lane lane, int64_t number) {
    lanes_[lane].finished.store(number, std::memory_order_release);
}

// ---- memory

namespace {

constexpr size_t kPageBytes = 4096;
size_t rounded(size_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

[[noreturn]] void fail_memory(const char* what, const std::string& path, int error) {
    FAIL(kExitDisk, "cannot %s the shared memory for heartbeats, %s: %s", what, path.c_str(), std::strerror(error));
}

}  // namespace

HeartbeatTable& HeartbeatTable::operator=(HeartbeatTable&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
    std::swap(fd_, other.fd_);
    return *this;
}
HeartbeatTable::~HeartbeatTable() {
    if (memory_) ::munmap(memory_, bytes_);
    if (fd_ >= 0) ::close(fd_);
}

Heartbeat& HeartbeatTable::row(int rank) const {
    char* rows = static_cast<char*>(memory_) + rounded(sizeof(HeartbeatHeader));
    return reinterpret_cast<Heartbeat*>(rows)[rank];
}

HeartbeatTable HeartbeatTable::map(int fd, const std::string& path, int ranks) {
    HeartbeatTable heartbeats;
    heartbeats.fd_ = fd;
    heartbeats.bytes_ = rounded(sizeof(HeartbeatHeader)) + static_cast<size_t>(ranks) * sizeof(Heartbeat);
    // Allocates the pages now: if one could not be allocated later, SIGBUS would kill the process.
    int error = ::posix_fallocate(fd, 0, static_cast<off_t>(heartbeats.bytes_));
    void* memory = MAP_FAILED;
    if (error == 0) {
        memory = ::mmap(nullptr, heartbeats.bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (memory == MAP_FAILED) error = errno;
    }
    if (error != 0) fail_memory("map", path, error);
    heartbeats.memory_ = memory;
    return heartbeats;
}

bool HeartbeatTable::is_empty_file(const std::string& path) {
    struct stat status {};
    return ::lstat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) && status.st_size == 0;
}

HeartbeatTable HeartbeatTable::create(const std::string& path, int ranks) {
    if (!path.empty()) return open(path, ranks);
    const int fd = ::memfd_create("llmfp8-heartbeats", MFD_CLOEXEC);
    if (fd < 0) fail_memory("create", "memfd", errno);
    return map(fd, "memfd", ranks);
}

HeartbeatTable HeartbeatTable::open(const std::string& path, int ranks) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) fail_memory("open", path, errno);
    return map(fd, path, ranks);
}

std::string HeartbeatTable::path() const {
    return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(fd_);
}
