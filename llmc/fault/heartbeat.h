// What every rank is doing, where the others can read it: one row a rank, in memory that the ranks of a host share and
// that heartbeat_link keeps equal between hosts. Posting is a few stores; with one rank, or before the ranks met,
// nothing.
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
// One call in it may last long without a sign of progress: bringing gigabytes to the disk, shards on a network.
bool phase_is_slow(Phase phase);

// ---- posts of this process, from its main thread

void post_step(int64_t step);              // begins; counted from 1
void post_phase(Phase phase);
void post_progress();                      // still at it: a micro-batch, a block of a file
void post_first_step();                    // is done: from now on nothing takes long
void post_end(int exit_code);              // on its way out by its own decision; also from a signal handler
// The same for the launch wrapper alone, of a process without a row: one rank, or several before they met.
void leave_outcome(int exit_code);

// What the collectives in this scope are for: "reduce layers.3".
class CollectivePurpose {
public:
    explicit CollectivePurpose(const std::string& text);
    ~CollectivePurpose();
    CollectivePurpose(const CollectivePurpose&) = delete;
    CollectivePurpose& operator=(const CollectivePurpose&) = delete;

private:
    const std::string outer_;
};

// ---- rows

// One collective, by how messages name it.
struct Mark {
    int64_t step = 0;
    int32_t number = 0;   // in the step, from 1
    Phase phase = Phase::kStart;
    char name[48] = "";
};

// Collectives of one kind, in the order of the calls. The device may come to them later than the host gave them.
struct LanePost {
    int64_t given = 0, begun = 0, finished = 0;
    Mark at, next;        // the one begun last, and the one after it if it was given
    bool waits() const { return begun > finished; }
};
enum Lane { kHostLane, kDeviceLane, kLanes };

// One reading of a row. As it is, it travels between hosts.
struct RankPost {
    int64_t signs = 0;         // of life, of the watchdog's thread
    int64_t progress = 0;      // of the main thread
    int64_t step = 0;
    Phase phase = Phase::kStart;
    int32_t past_first_step = 0;
    int32_t end_code = -1;     // -1: goes on
    int32_t unused = 0;
    LanePost lanes[kLanes];
};

// In shared memory: lock-free atomics only, zero bytes are a row that says nothing.
class Heartbeat {
public:
    RankPost read() const;
    void write(const RankPost& post);   // of a rank on another host; by one thread of this one

    // Posts, see above.
    void begin_step(int64_t step);
    void set_phase(Phase phase);
    void add_progress() { progress_.fetch_add(1, std::memory_order_release); }
    void add_sign() { signs_.fetch_add(1, std::memory_order_release); }
    void set_past_first_step() { past_first_step_.store(1, std::memory_order_relaxed); }
    // What went wrong stays, though the process then leaves in order.
    void set_end(int code) {
        if (code != 0 || end_code_plus_1_.load(std::memory_order_relaxed) == 0)
            end_code_plus_1_.store(code + 1, std::memory_order_release);
    }
    Phase phase() const { return static_cast<Phase>(phase_.load(std::memory_order_relaxed)); }
    // Number in its lane.
    int64_t give(Lane lane, const char* name);
    void set_begun(Lane lane, int64_t number);
    void set_finished(Lane lane, int64_t number);

private:
    // More than are given ahead: one, and on the device two steps of an 8B model, each parameter by itself in FP8.
    static constexpr int64_t kHostRing = 4, kDeviceRing = 2048;
    struct AtomicMark {
        std::atomic<int64_t> step;
        std::atomic<int32_t> number, phase;
        std::atomic<uint64_t> name[sizeof(Mark::name) / 8];
        Mark load() const;
        void store(const Mark& mark);
    };
    struct AtomicLane {
        std::atomic<int64_t> given, begun, finished;
    };
    const AtomicMark& slot(int lane, int64_t number) const {
        return lane == kHostLane ? host_ring_[number % kHostRing] : device_ring_[number % kDeviceRing];
    }
    AtomicMark& slot(int lane, int64_t number) {
        return const_cast<AtomicMark&>(std::as_const(*this).slot(lane, number));
    }
    std::atomic<int64_t> signs_, progress_, step_;
    std::atomic<int32_t> phase_, past_first_step_, end_code_plus_1_, collectives_;
    AtomicLane lanes_[kLanes];
    AtomicMark host_ring_[kHostRing], device_ring_[kDeviceRing];
};

// ---- the memory of one host

// Environment variable: name of the memory that the launch wrapper made.
inline constexpr const char* kHeartbeatVariable = "LLMFP8_BOARD";

struct HeartbeatHeader {
    static constexpr size_t kTextBytes = 64 << 10;
    char text[kTextBytes];                // what the launch wrapper shows when all ranks are gone: see Watchdog::report
    std::atomic<int32_t> stop;            // not 0: the launch wrapper, which writes here, was told to stop the run
    std::atomic<int32_t> outcome;         // exit code that a rank ended the run with, 0: none did
    std::atomic<int32_t> hang_report_state;   // 0 none, 1 being written, 2 there
    std::atomic<int32_t> told;            // it was printed
    char hang_report[4096];
};

class HeartbeatTable {
public:
    // Memory of this name ("llmfp8-..."), zeroed. A name that exists is taken only if nothing was written to it (the
    // launch wrapper's). Errors of the system: exit 7.
    static HeartbeatTable create(const std::string& name, int ranks);
    static bool exists_empty(const std::string& name);
    static HeartbeatTable open(const std::string& name, int ranks);
    static void remove(const std::string& name);   // what is open stays
    HeartbeatTable() = default;
    HeartbeatTable(HeartbeatTable&& other) noexcept { *this = std::move(other); }
    HeartbeatTable& operator=(HeartbeatTable&& other) noexcept;
    ~HeartbeatTable();

    HeartbeatHeader& header() const { return *static_cast<HeartbeatHeader*>(memory_); }
    Heartbeat& row(int rank) const;

private:
    static HeartbeatTable map(int fd, const std::string& name, int ranks);
    void* memory_ = nullptr;
    size_t bytes_ = 0;
};

// The row that this process's posts go to, and where it is told to stop; null for none.
void set_own_row(Heartbeat* row, const HeartbeatHeader* header = nullptr);
bool stopped_through_heartbeats();
Heartbeat* own_row();
// What the collectives are for now, else `otherwise`.
const char* collective_name(const char* otherwise);
