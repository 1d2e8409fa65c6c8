// The one table of `bench`: ceilings of this device, every operation of a step with its time and the least time that it
// could take, and what they add up to. The text and the JSON have the same rows.
#pragma once
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "llmc/base/median.h"
#include "llmc/ops/op_timer.h"
#include "llmc/perf/rates.h"

struct BenchRow {
    std::string part = {};   // "ceiling", "matmul", "attention", "memory-bound", "overlapped" (operations on the
                        // communication stream) or "step" (sums of those parts, and the step)
    std::string name = {};
    int64_t calls = 0;             // per step
    double ms = 0, floor_ms = 0;   // of all calls; floor: bytes and FLOPs at the ceilings
    double bytes = 0, flop = 0;    // of all calls
};

// The most that this device reached.
struct Ceilings {
    std::vector<BenchRow> rows;
    double copy_rate = 0;            // bytes per second, read and written
    std::map<Dtype, double> flops;   // FLOP/s of a square matmul, by operand dtype; E5M2 counts as E4M3

    // The least time: bytes at the rate of a copy or, if that takes longer, FLOPs at that of a matmul.
    double floor_ms(double bytes, double flop, Dtype dtype) const;
};

// The ceilings of this device: a copy, and a square matmul of each dtype of the matmuls and attention in `work`. Frees
// the memory that it takes.
Ceilings measure_ceilings(Ctx& ctx, const StepRecorder& work);

// The row of one call, without its time. FLOPs of attention are those of causal attention, half of T x T: two products
// forward, five backward.
BenchRow row_of(const OpCall& call, const Ceilings& ceilings);

// Collects the times of operations over several steps, and of the steps.
class BenchTable {
public:
    explicit BenchTable(Ceilings ceilings) : ceilings_(std::move(ceilings)) {}

    void add_step(double ms, double exposed_communication_ms) {
        steps_ms_.push_back(ms);
        exposed_ms_.push_back(exposed_communication_ms);
    }
    // A step with events around its operations.
    void add_timed_step(double ms, const std::deque<OpCall>& calls, size_t count);

    const std::vector<double>& steps_ms() const { return steps_ms_; }
    double step_ms() const { return median_of(steps_ms_); }
    // Operations are sorted by what they lose against the floor. Their times are without what events add to the fastest
    // step, of which every call has an equal part. The rows of "step" add up to its last one.
    std::vector<BenchRow> rows() const;

private:
    const Ceilings ceilings_;
    std::vector<double> steps_ms_, exposed_ms_, timed_steps_ms_;
    std::map<std::pair<std::string, std::string>, BenchRow> operations_;   // sums of all timed steps, by part and name
    int64_t calls_ = 0;   // of all timed steps
};
