#include "llmc/fault/heartbeat.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "llmc/base/check.h"
#include "llmc/base/fault_injection.h"

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

// What this process, which is one rank, has posted.
std::mutex own_mutex;   // protects the next three
RankPost posted;
int32_t collectives_of_step = 0;
std::deque<CollectiveCall> on_device;   // enqueued and not finished, the oldest first
std::atomic<Heartbeat*> own_heartbeat{nullptr};
std::atomic<HeartbeatHeader*> own_header{nullptr};   // of the same table

template <typename Change> void post(const Change& change) {
    Heartbeat* const row = own_row();
    if (!row) return;
    const std::lock_guard<std::mutex> lock(own_mutex);
    change();
    posted.progress++;
    row->write(posted);
}

CollectiveCall next_collective(const char* name) {
    CollectiveCall collective{.step = posted.step, .number = ++collectives_of_step, .phase = posted.phase};
    std::snprintf(collective.name, sizeof collective.name, "%s", name);
    return collective;
}

int launcher_fd() {
    static const int fd = open_launcher_file(std::getenv(kHeartbeatVariable));
    return fd;
}

uint64_t outcome_word(int exit_code) {
    const std::string text = strf("end %03d\n", exit_code);
    uint64_t word = 0;
    std::memcpy(&word, text.data(), std::min(text.size(), sizeof word));
    return word;
}

constexpr size_t kPageBytes = 4096;
size_t rounded(size_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

[[noreturn]] void fail_memory(const char* what, const std::string& path, int error) {
    FAIL(kExitDisk, "cannot %s the shared memory for heartbeats, %s: %s", what, path.c_str(), std::strerror(error));
}

}  // namespace

const char* phase_text(Phase phase) { return kPhases[static_cast<size_t>(phase)].text; }
bool phase_is_slow(Phase phase) { return kPhases[static_cast<size_t>(phase)].slow; }

// ---- posts

void post_step(int64_t step) { post([&] { posted.step = step, collectives_of_step = 0; }); }
void post_phase(Phase phase) {
    post([&] { posted.phase = phase; });
    fault_at(phase_text(phase));
}
void post_progress() { post([] {}); }
void post_first_step() { post([] { posted.past_first_step = 1; }); }
void post_host_collective(const char* name) {
    post([&] {
        posted.host.current = next_collective(name);
        posted.host.begun = ++posted.host.enqueued;
    });
}
void post_host_collective_end() { post([] { posted.host.finished = posted.host.begun; }); }
int64_t post_device_collective(const char* name) {
    post([&] {
        CollectiveQueue& queue = posted.device;
        on_device.push_back(next_collective(name));
        if (++queue.enqueued == queue.begun + 1) queue.next = on_device.back();
    });
    return posted.device.enqueued;   // which only this thread changes
}
void post_device(int64_t begun, int64_t finished) {
    CollectiveQueue& queue = posted.device;
    {
        const std::lock_guard<std::mutex> lock(own_mutex);
        if (begun <= queue.begun && finished <= queue.finished) return;
    }
    post([&] {
        // on_device begins with the collective after the last finished one.
        const auto collective = [&](int64_t number) {
            return on_device[static_cast<size_t>(number - queue.finished - 1)];
        };
        if (begun > queue.begun) queue.current = collective(begun);
        queue.next = queue.enqueued > begun ? collective(begun + 1) : CollectiveCall();
        on_device.erase(on_device.begin(), on_device.begin() + (finished - queue.finished));
        queue.begun = begun, queue.finished = finished;
    });
}
void post_end(int exit_code) {
    if (Heartbeat* const row = own_row()) row->set_end(exit_code);
}
RankPost own_post() {
    const std::lock_guard<std::mutex> lock(own_mutex);
    return posted;
}

void set_own_row(const HeartbeatTable* table, size_t index) {
    {
        const std::lock_guard<std::mutex> lock(own_mutex);
        posted = {}, collectives_of_step = 0;
        on_device.clear();
    }
    own_header.store(table ? &table->header() : nullptr, std::memory_order_release);
    own_heartbeat.store(table ? &table->row(index) : nullptr, std::memory_order_release);
}
Heartbeat* own_row() { return own_heartbeat.load(std::memory_order_acquire); }

bool claim_last_line() {
    HeartbeatHeader* const header = own_header.load(std::memory_order_acquire);
    return !header || header->claim_line();
}
bool claim_stop_line() {
    HeartbeatHeader* const header = own_header.load(std::memory_order_acquire);
    return !header || (header->printed.load() == 0 && header->answered.exchange(1) == 0);
}

// ---- rows

void Heartbeat::write(const RankPost& post) {
    uint64_t words[kWords];
    std::memcpy(words, &post, sizeof post);
    const uint64_t version = version_.load(std::memory_order_relaxed) | 1;
    version_.store(version, std::memory_order_relaxed);
    for (size_t i = 0; i < kWords; i++) words_[i].store(words[i], std::memory_order_release);
    version_.store(version + 1, std::memory_order_release);
}

RankPost Heartbeat::read() const {
    uint64_t words[kWords];
    // A writer that was preempted gets its core back from a reader that yields.
    for (int tries = 0; tries < 1000; tries++, std::this_thread::yield()) {
        const uint64_t version = version_.load(std::memory_order_acquire);
        for (size_t i = 0; i < kWords; i++) words[i] = words_[i].load(std::memory_order_acquire);
        if (version % 2 == 0 && version_.load(std::memory_order_relaxed) == version) break;
    }
    RankPost post;
    std::memcpy(static_cast<void*>(&post), words, sizeof post);
    return post;
}

void Heartbeat::set_end(int code) {
    if (code != 0 || end_code_plus_1_.load(std::memory_order_relaxed) == 0)
        end_code_plus_1_.store(code + 1, std::memory_order_release);
}

void HeartbeatHeader::set_outcome(int exit_code) {
    const uint64_t ended = outcome_word(kExitOk), word = outcome_word(exit_code);
    uint64_t before = outcome.load();
    while ((before == 0 || before == ended) && !outcome.compare_exchange_weak(before, word)) {
    }
}

// ---- memory

Heartbeat& HeartbeatTable::row(size_t index) const {
    char* rows = static_cast<char*>(memory_.get()) + rounded(sizeof(HeartbeatHeader));
    return reinterpret_cast<Heartbeat*>(rows)[index];
}

HeartbeatTable HeartbeatTable::map(int fd, const std::string& path, size_t ranks) {
    const size_t bytes = rounded(sizeof(HeartbeatHeader)) + ranks * sizeof(Heartbeat);
    // Allocates the pages now: if one could not be allocated later, SIGBUS would kill the process.
    if (const int error = ::posix_fallocate(fd, 0, static_cast<off_t>(bytes)); error != 0)
        fail_memory("allocate", path, error);
    void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) fail_memory("map", path, errno);
    HeartbeatTable table;
    table.fd_ = fd;
    table.memory_.reset(memory, [bytes, fd](void* mapped) { ::munmap(mapped, bytes), ::close(fd); });
    return table;
}

HeartbeatTable HeartbeatTable::create(size_t ranks) {
    const int launcher = launcher_fd();
    if (launcher >= 0 && ::flock(launcher, LOCK_EX | LOCK_NB) == 0)
        return map(::fcntl(launcher, F_DUPFD_CLOEXEC, 3), "the launch wrapper's file", ranks);
    const int fd = ::memfd_create("llmfp8-heartbeats", MFD_CLOEXEC);
    if (fd < 0) fail_memory("create", "memfd", errno);
    return map(fd, "memfd", ranks);
}

HeartbeatTable HeartbeatTable::open(const std::string& path, size_t ranks) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) fail_memory("open", path, errno);
    return map(fd, path, ranks);
}

std::string HeartbeatTable::path() const {
    return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(fd_);
}

// ---- the launch wrapper

int open_launcher_file(const char* path) {
    const int fd = path ? ::open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK) : -1;
    struct stat status {};
    char magic[sizeof HeartbeatHeader::magic] = "";
    // A file of a user has a name, so its number of links is not 0.
    if (fd < 0 || (::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink == 0
                   && ::pread(fd, magic, sizeof magic, 0) == sizeof magic
                   && std::memcmp(magic, kLauncherMagic, sizeof magic) == 0))
        return fd;
    ::close(fd);
    return -1;
}

bool launcher_stops() {
    char stop[4] = "";
    return launcher_fd() >= 0
           && ::pread(launcher_fd(), stop, sizeof stop, offsetof(HeartbeatHeader, stop)) == sizeof stop
           && std::memcmp(stop, "stop", sizeof stop) == 0;
}

void write_outcome(int exit_code) {
    if (own_row() || launcher_fd() < 0) return;
    const uint64_t word = outcome_word(exit_code);
    [[maybe_unused]] const ssize_t done =
        ::pwrite(launcher_fd(), &word, sizeof word, offsetof(HeartbeatHeader, outcome));
}
