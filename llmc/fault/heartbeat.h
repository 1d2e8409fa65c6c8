// The heartbeat table: one row per rank that says what the rank is doing, in memory that the ranks of a host share and
// that heartbeat_link copies between hosts. Posting is a few stores; it does nothing with one rank, or before the ranks
// are connected.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

enum class Phase : int32_t {
    kStart, kLoad, kData, kForward, kBackward, kReduce, kUpdate, kDevice, kEvaluation, kSample, kSave, kSaveEnd, kEnd
};
const char* phase_text(Phase phase);
// Whether a single call in this phase may take long: writing gigabytes, or reading shards over a network.
bool phase_is_slow(Phase phase);

// ---- posts of this process, made by its main thread

void post_step(int64_t step);              // a step begins; counted from 1
void post_phase(Phase phase);
void post_progress();                      // a micro-batch or a block of a file is done
void post_first_step();                    // the first step is done: the timeout is no longer extended
void post_end(int exit_code);              // this process has decided to end; also from a signal handler
// Writes the exit code for the launch wrapper only. It is for a process without a row, which is the only rank or not
// connected yet.
void write_outcome(int exit_code);
// Tell the launch wrapper that this process has begun, so that the wrapper notices when it dies, and that the wrapper's
// file has the outcome.
void announce_to_launcher();
void announce_outcome();

// ---- rows

// One collective, as messages name it.
struct Mark {
    int64_t step = 0;
    int32_t number = 0;   // in the step, from 1
    Phase phase = Phase::kStart;
    char name[64] = "";
};

// Either the collectives that block the host, or those enqueued on the device; counted in the order of the calls.
struct LanePost {
    int64_t enqueued = 0, begun = 0, finished = 0;
    Mark at, next;        // the one begun last, and the one after it if it is enqueued
    bool waits() const { return begun > finished; }
};
enum Lane { kHostLane, kDeviceLane, kLanes };

// A copy of a row; its bytes are also sent between hosts.
struct RankPost {
    int64_t beats = 0;         // incremented by the watchdog thread while the process runs
    int64_t progress = 0;      // incremented by the main thread
    int64_t step = 0;
    Phase phase = Phase::kStart;
    int32_t past_first_step = 0;
    int32_t end_code = -1;     // -1: the rank has not decided to end
    int32_t output_lost = 0;   // nobody reads the launch wrapper's standard output, see launcher_output_is_lost
    LanePost lanes[kLanes];
};

// A row in shared memory: lock-free atomics only. Zero bytes: nothing was posted.
class Heartbeat {
public:
    RankPost read() const;
    void write(const RankPost& post);   // for the row of a rank on another host; called by one thread of this host

    // The posts above.
    void begin_step(int64_t step);
    void set_phase(Phase phase);
    void add_progress() { progress_.fetch_add(1, std::memory_order_release); }
    void add_beat() { beats_.fetch_add(1, std::memory_order_release); }
    void set_past_first_step() { past_first_step_.store(1, std::memory_order_relaxed); }
    void set_output_lost() { output_lost_.store(1, std::memory_order_relaxed); }
    // Keeps an error code even if the process then ends with 0.
    void set_end(int code) {
        if (code != 0 || end_code_plus_1_.load(std::memory_order_relaxed) == 0)
            end_code_plus_1_.store(code + 1, std::memory_order_release);
    }
    Phase phase() const { return static_cast<Phase>(phase_.load(std::memory_order_relaxed)); }
    // Counts a collective at its call, and returns its number in the lane.
    int64_t enqueue(Lane lane, const char* name);
    void set_begun(Lane lane, int64_t number);
    void set_finished(Lane lane, int64_t number);

private:
    // More than can be enqueued at a time: one on the host, and on the device two steps of an 8B model in FP8 with a
    // collective per parameter.
    static constexpr int64_t kHostRing = 4, kDeviceRing = 2048;
    struct AtomicMark {
        std::atomic<int64_t> step;
        std::atomic<int32_t> number, phase;
        std::atomic<uint64_t> name[sizeof(Mark::name) / 8];
        Mark load() const;
        void store(const Mark& mark);
    };
    struct AtomicLane {
        std::atomic<int64_t> enqueued, begun, finished;
    };
    const AtomicMark& slot(int lane, int64_t number) const {
        return lane == kHostLane ? host_ring_[number % kHostRing] : device_ring_[number % kDeviceRing];
    }
    AtomicMark& slot(int lane, int64_t number) {
        return const_cast<AtomicMark&>(std::as_const(*this).slot(lane, number));
    }
    std::atomic<int64_t> beats_, progress_, step_;
    std::atomic<int32_t> phase_, past_first_step_, end_code_plus_1_, collectives_, output_lost_;
    AtomicLane lanes_[kLanes];
    AtomicMark host_ring_[kHostRing], device_ring_[kDeviceRing];
};

// ---- the memory of one host

// Environment variable: the name under /dev/shm of the file that the launch wrapper has created.
inline constexpr const char* kHeartbeatVariable = "LLMFP8_HEARTBEATS";
std::string launcher_file();   // its path, "" without a launch wrapper
// Whether the launch wrapper has found that its standard output was closed or cannot be written. If the wrapper is on
// another host, a rank of that host says so in its row.
bool launcher_output_is_lost();
void set_launcher_output_lost();   // a rank has said so

struct HeartbeatHeader {
    static constexpr size_t kTextBytes = 64 << 10;
    char text[kTextBytes];                // printed by the launch wrapper at the end, see Watchdog::write_summary
    std::atomic<int32_t> outcome;         // exit code with which a rank ended the run, 0 if none did
    std::atomic<int32_t> hang_report_state;   // 0 no report, 1 being written, 2 complete
    std::atomic<int32_t> printed;         // 1: the line that says why the run ends, see claim_line
    char hang_report[4096];

    // Whether the caller shall print that line: true for the first call on a host, unless another host is known to
    // have printed it.
    bool claim_line() {
        int32_t not_printed = 0;
        return printed.compare_exchange_strong(not_printed, 1);
    }
};

class HeartbeatTable {
public:
    // Creates zeroed memory in the empty file `path`, which the launch wrapper made, or without a path in unnamed
    // memory, which does not outlive its processes. Exit 7 if the system cannot do that.
    static HeartbeatTable create(const std::string& path, int ranks);
    // Whether `path` is such an empty file.
    static bool is_empty_file(const std::string& path);
    static HeartbeatTable open(const std::string& path, int ranks);
    // The path at which other processes of this host and user open the table while this object lives.
    std::string path() const;
    HeartbeatTable() = default;
    HeartbeatTable(HeartbeatTable&& other) noexcept { *this = std::move(other); }
    HeartbeatTable& operator=(HeartbeatTable&& other) noexcept;
    ~HeartbeatTable();

    HeartbeatHeader& header() const { return *static_cast<HeartbeatHeader*>(memory_); }
    Heartbeat& row(int rank) const;

private:
    static HeartbeatTable map(int fd, const std::string& path, int ranks);
    void* memory_ = nullptr;
    size_t bytes_ = 0;
    int fd_ = -1;
};

// Sets this process's row of `table`, which must outlive its use. Null: the process has no row.
void set_own_row(const HeartbeatTable* table, int rank);
Heartbeat* own_row();
// HeartbeatHeader::claim_line of this process's table; true if it has no row.
bool claim_last_line();
