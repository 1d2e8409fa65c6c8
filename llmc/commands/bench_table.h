// Where the time of a step goes: every kind of operation with what it took and what it takes at least, sorted by the
// difference, then gaps and communication. Rows and what remains add up to the step.
#pragma once
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "llmc/base/median.h"
#include "llmc/base/nvml.h"
#include "llmc/commands/bench_ceilings.h"
#include "llmc/config/config.h"
#include "llmc/ops/op_timer.h"

enum class OpClass { kMatmul, kAttention, kMemory };
inline constexpr int kOpClasses = 3;
const char* op_class_name(OpClass op_class);

struct BenchRow {
    std::string name;
    OpClass op_class = OpClass::kMemory;
    bool beside = false;      // beside the compute stream: no part of the step's sum
    int64_t calls = 0;        // a step
    double ms = 0, floor_ms = 0;   // of all of them
    double difference_ms() const { return ms - floor_ms; }
};

// Collects the calls of steps.
class BenchRows {
public:
    explicit BenchRows(const Ceilings& ceilings) : ceilings_(ceilings) {}
    // Every step has the same calls, else exit 1.
    void add_step(const std::deque<OpCall>& calls, size_t count);
    // Sorted by the difference, the largest first. Times are medians of the steps', less what the events add.
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

// One rank's view; steps are as long on all.
struct StepBench {
    Ceilings ceilings;
    std::vector<double> step_ms;          // untouched
    std::vector<double> exposed_ms;       // of these, communication that compute did not hide
    std::vector<double> micro_batch_ms;   // of these, forward and backward of one
    std::vector<double> timed_step_ms;    // with events around every operation
    std::vector<BenchRow> rows;
    double micro_batches = 0;   // of a step and rank
    double tokens = 0, flops_per_token = 0, peak_flops = 0;   // of a step, all ranks; 0: no peak is known
    ClockSamples clocks;

    double ms() const { return median_of(step_ms); }
    // What is left of the step's median without it, so that both are of the same steps where these differ.
    double exposed() const;
    double class_ms(OpClass op_class) const;
    double class_floor_ms(OpClass op_class) const;
    int64_t calls() const;
    // What the step takes beyond its operations one after the other and communication. Below 0 where kernels that are
    // launched early gain more of each other than is lost between the others.
    double gaps_ms() const;
    double tokens_per_second() const { return 1e3 * tokens / ms(); }
    double mfu() const { return peak_flops > 0 ? tokens_per_second() * flops_per_token / peak_flops : 0; }
};

// What was measured, beside the measurements.
struct BenchSubject {
    const Config& config;
    std::string commit;
    const DeviceInfo& device;
    int ranks = 1;
    const std::vector<std::string>& notes;
};
std::string bench_text(const BenchSubject& run, const StepBench& bench);
std::string bench_json(const BenchSubject& run, const StepBench& bench);
