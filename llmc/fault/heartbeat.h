// The heartbeat table of a host: a row for each of its ranks says what the rank is doing, in memory that the ranks of
// the host share. Posting is a few stores; it does nothing with one rank, or before the ranks are connected.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

enum class Phase : int32_t {
    kStart, kLoad, kData, kForward, kBackward, kReduce, kUpdate, kDevice, kEvaluation, kSample, kSave, kSaveEnd, kEnd
};
const char* phase_text(Phase phase);
// Whether a single call in this phase may take long: writing gigabytes, or reading shards over a network.
bool phase_is_slow(Phase phase);

// ---- what a rank posts

// One collective, as messages name it.
struct CollectiveCall {
    int64_t step = 0;
    int32_t number = 0;   // in the step, from 1
    Phase phase = Phase::kStart;
    char name[64] = "";
};

// Either the collectives that block the host, or those enqueued on the device; counted in the order of the calls.
struct CollectiveQueue {
    int64_t enqueued = 0, begun = 0, finished = 0;
    CollectiveCall current, next;   // the one begun last, and the one after it if it is enqueued
    bool waits() const { return begun > finished; }
};

struct RankPost {
    int64_t progress = 0;   // incremented by everything that is posted
    int64_t step = 0;
    Phase phase = Phase::kStart;
    int32_t past_first_step = 0;
    CollectiveQueue host, device;
};

// Posts of this process, made by its main thread; the watchdog's thread makes those of the device.
void post_step(int64_t step);              // a step begins; counted from 1
void post_phase(Phase phase);
void post_progress();                      // a micro-batch or a block of a file is done
void post_first_step();                    // the first step is done: the timeout is no longer extended
void post_host_collective(const char* name);      // its call begins
void post_host_collective_end();
int64_t post_device_collective(const char* name); // it is about to be enqueued; returns its number
void post_device(int64_t begun, int64_t finished);   // numbers of the latest ones that the device has begun, finished
void post_end(int exit_code);              // this process has decided to end; also from a signal handler
RankPost own_post();                       // empty if this process has no row

// ---- the memory of a host

// A row in shared memory. Zero bytes: nothing was posted.
class Heartbeat {
public:
    RankPost read() const;   // mixes two posts if the rank was killed or suspended while it wrote
    void write(const RankPost& post);   // by one thread at a time

    // The thread of the watchdog beats while the process runs.
    void beat() { beats_.fetch_add(1, std::memory_order_release); }
    int64_t beats() const { return beats_.load(std::memory_order_acquire); }

    // Keeps an error code even if the process then ends with 0.
    void set_end(int code);
    int end_code() const { return end_code_plus_1_.load(std::memory_order_acquire) - 1; }   // -1: it goes on

private:
    static constexpr size_t kWords = sizeof(RankPost) / 8;
    static_assert(sizeof(RankPost) % 8 == 0);
    std::atomic<uint64_t> version_, words_[kWords];   // the version is odd while the words are written
    std::atomic<int64_t> beats_;
    std::atomic<int32_t> end_code_plus_1_;
};

// The beginning of the table. Fields of text end with a line break and zeros; the launch wrapper prints them, also
// while ranks write.
struct HeartbeatHeader {
    static constexpr size_t kLines = 128;
    char magic[8], stop[8];       // by the launch wrapper: kLauncherMagic; "stop", see launcher_stops
    std::atomic<uint64_t> outcome;   // the text "end 006\n"; 000 if all ranks of the host ended with 0
    char hosts[16 << 10];         // "hosts node1 node2"
    char report[4096];            // the hang report
    char lines[kLines][256];      // what each rank did last
    std::atomic<int32_t> report_state;   // 0 none, 1 being written, 2 complete
    std::atomic<int32_t> printed;        // 1: the line that says why the run ends, see claim_line
    std::atomic<int32_t> answered;       // 1: a rank has answered a signal

    // Keeps the first exit code that is not 0.
    void set_outcome(int exit_code);
    // Whether the caller shall print that line: true for the first call on a host.
    bool claim_line() { return printed.exchange(1) == 0; }
};

class HeartbeatTable {
public:
    // Creates zeroed memory: in the file of the launch wrapper if this process is the first of its host to take it, or
    // else in unnamed memory, which does not outlive its processes. Exit 7 if the system cannot do that.
    static HeartbeatTable create(size_t ranks);
    static HeartbeatTable open(const std::string& path, size_t ranks);
    // The path at which other processes of this host and user open the table while this object lives.
    std::string path() const;

    HeartbeatHeader& header() const { return *static_cast<HeartbeatHeader*>(memory_.get()); }
    Heartbeat& row(size_t index) const;

private:
    static HeartbeatTable map(int fd, const std::string& path, size_t ranks);
    std::shared_ptr<void> memory_;   // unmaps it, and closes the descriptor
    int fd_ = -1;
};

// Sets this process's row of `table`, which must outlive its use. Null: the process has no row.
void set_own_row(const HeartbeatTable* table, size_t index);
Heartbeat* own_row();
// HeartbeatHeader::claim_line of this process's table; true if it has no row.
bool claim_last_line();
// The same for the answer to a signal, for a signal handler; false once a line says why the run ends: mpirun then sends
// SIGTERM to the other ranks.
bool claim_stop_line();

// ---- the launch wrapper (scripts/launch/launch_mpi.sh)

// Environment variable: the path /proc/PID/fd/N of the wrapper's unnamed file, which becomes the table of its host.
inline constexpr const char* kHeartbeatVariable = "LLMFP8_HEARTBEATS";
inline constexpr char kLauncherMagic[] = "llmfp8.\n";
// A descriptor of that file, -1 if the path names any other file, which must not be written to, or none.
int open_launcher_file(const char* path);
// Whether the wrapper has been told to stop the run.
bool launcher_stops();
// Writes the exit code for the wrapper only. It is for a process without a row, which is the only rank or not connected
// yet.
void write_outcome(int exit_code);
