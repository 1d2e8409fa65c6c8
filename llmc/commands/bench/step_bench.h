// Where the time of a step goes: each kind of operation with its measured and its least time, sorted by the difference,
// then gaps and exposed communication. All of them add up to the step.
#pragma once
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "llmc/base/median.h"
#include "llmc/base/system/nvml.h"
#include "llmc/commands/bench/ceilings.h"
#include "llmc/config/config.h"
#include "llmc/ops/op_timer.h"

enum class OpClass { kMatmul, kAttention, kMemory };
inline constexpr OpClass kOpClasses[] = {OpClass::kMatmul, OpClass::kAttention, OpClass::kMemory};
const char* op_class_name(OpClass op_class);

struct BenchRow {
    std::string name;
    OpClass op_class = OpClass::kMemory;
    bool overlapped = false;  // on the communication stream, so not in the step's sum
    int64_t calls = 0;        // per step
    double ms = 0, floor_ms = 0;   // of all calls
    int64_t bytes = 0;             // moved by all calls, where the operation is no matmul
    double difference_ms() const { return ms - floor_ms; }
};

// Collects the calls of several steps.
class BenchRows {
public:
    explicit BenchRows(const Ceilings& ceilings) : ceilings_(ceilings) {}
    // Exit 1 unless every step has the same calls.
    void add_step(const std::deque<OpCall>& calls, size_t count);
    // Rows with the largest difference first. Times are medians over the steps, without the time that events add.
    std::vector<BenchRow> rows() const;

private:
    struct Sums {
        BenchRow row;
        std::vector<double> ms;   // by step
    };
    const Ceilings& ceilings_;
    std::map<std::pair<bool, std::string>, Sums> sums_;
    size_t steps_ = 0;
};

// The measurements of one rank; a step takes equally long on all ranks.
struct StepBench {
    Ceilings ceilings;
    std::vector<double> step_ms;          // without events around operations
    std::vector<double> exposed_ms;       // of these steps, exposed communication
    std::vector<double> forward_ms, backward_ms;   // of these steps, the passes of the first micro-batch
    std::vector<double> micro_batch_ms;   // of these steps, the mean time of a micro-batch
    std::vector<double> timed_step_ms;    // with events around every operation
    std::vector<BenchRow> rows;
    double micro_batches = 0;   // per step and rank
    double tokens = 0, flops_per_token = 0, peak_flops = 0;   // per step, all ranks; peak 0: unknown
    GpuSamples clocks;

    double ms() const { return median_of(step_ms); }
    // Exposed communication: the median step less the median of the steps' other time, so that the two add up.
    double exposed() const;
    // ms and floor_ms of all operations of a class that are not overlapped.
    BenchRow class_total(OpClass op_class) const;
    int64_t calls() const;
    // The time of a step besides its operations and exposed communication. Negative if early launches overlap kernels
    // by more than the gaps between others.
    double gaps_ms() const;
    double tokens_per_second() const { return 1e3 * tokens / ms(); }
    double mfu() const { return peak_flops > 0 ? tokens_per_second() * flops_per_token / peak_flops : 0; }
};

// The run that was measured.
struct BenchSubject {
    const Config& config;
    std::string commit;
    const DeviceInfo& device;
    int ranks = 1;
    const std::vector<std::string>& notes;
};
// What `bench` prints, and its JSON; in bench_report.cpp.
std::string bench_text(const BenchSubject& run, const StepBench& bench);
std::string bench_json(const BenchSubject& run, const StepBench& bench);
