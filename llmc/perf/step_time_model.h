// How long an optimizer step is predicted to take: the operations of its rehearsal, each at the rate that was measured
// of its kernel, and what communication adds.
#pragma once
#include <string>
#include <vector>

#include "llmc/base/median.h"
#include "llmc/perf/kernel_rates.h"
#include "llmc/train/plan.h"

// What a step's time is spent on, in the order of the table.
enum class StepPart {
    kForwardMatmuls, kBackwardMatmuls, kForwardAttention, kBackwardAttention, kNorms, kActivations, kPositions,
    kCopies, kHead, kEmbedding, kSums, kOptimizer, kWeightCopies, kBeside, kCommunication,
};
inline constexpr int kStepParts = 15;
const char* step_part_name(StepPart part);

struct StepTime {
    const Gpu* gpu = nullptr;
    std::array<double, kStepParts> ms{};   // by StepPart; communication: what compute does not hide
    double reduce_ms = 0, gather_ms = 0;   // communication, hidden or not
    double total_ms() const;
};

// Of a plan for CUDA's working types; FP64 has no kernels on GPUs and no time (total 0).
StepTime predict_step(const Config& config, const MemoryPlan& plan, const Gpu& gpu,
                      const Rates& rates = measured_rates());

// The GPU that --gpu names, else the one that was found, else the measured one. Exit 2, with all names, for another.
const Gpu& planned_gpu(const Config& config, const DeviceInfo& found);

// Predicted against measured, of the eleventh to the twentieth step that a process makes, told once.
class StepTimeCheck {
public:
    StepTimeCheck() = default;   // no time is predicted
    explicit StepTimeCheck(const StepTime& predicted)
        : predicted_ms_(predicted.total_ms()), scaled_(predicted.gpu && !predicted.gpu->measured) {}
    // A step and its time. True after the twentieth.
    bool add(int64_t step, double ms);
    double predicted_ms() const { return predicted_ms_; }   // 0: none
    double measured_ms() const { return median_of(ms_); }
    // "predicted 571.3 ms a step, measured 573.0 ms (median of steps 11-20), -0.3 %"
    std::string text() const;

private:
    static constexpr int kFirst = 11, kLast = 20;
    double predicted_ms_ = 0;
    bool scaled_ = false;   // the rates
    int steps_ = 0;
    int64_t last_step_ = 0;
    std::vector<double> ms_;
};

// For a run on this device; nothing is predicted on one that there are no rates for.
StepTimeCheck check_of(const Config& config, const MemoryPlan& plan, const DeviceInfo& device);
