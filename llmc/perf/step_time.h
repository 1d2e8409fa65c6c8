// Predicts the time of an optimizer step: the operations of its rehearsal at the measured rates of their kernels, and
// exposed communication.
#pragma once
#include <array>
#include <string>

#include "llmc/perf/rates.h"
#include "llmc/train/plan.h"
#include "llmc/train/run/step_time_check.h"

// The parts of a step's time, in the order of the plan's table.
enum class StepPart {
    kForwardMatmuls, kBackwardMatmuls, kForwardAttention, kBackwardAttention, kNorms, kActivations, kPositions,
    kQuantization, kHead, kEmbedding, kSums, kOptimizer, kWeightQuantization, kOverhead, kCommunication,
    kCommTraffic, kHostLink,
};
inline constexpr int kStepParts = 17;
const char* step_part_name(StepPart part);

struct StepTime {
    const Gpu* gpu = nullptr;
    std::array<double, kStepParts> ms{};   // by StepPart; communication and host link: exposed only, and the
                                           // memory traffic of hidden communication
    double reduce_ms = 0, gather_ms = 0;   // communication, hidden or exposed
    double exchange_ms = 0;                // of heads, exposed
    double host_link_ms = 0;               // of the copies of --offload in either direction, hidden or exposed
    double& operator[](StepPart part) { return ms[static_cast<size_t>(part)]; }
    double total_ms() const;
};

// The ranks of a host in these predictions, and bytes per second sent by a rank to ranks of the same host, in training.
inline constexpr int kRanksPerHost = 8;
extern const double kLinkRate;

// From these rates, scaled if they are another GPU's. The total is 0 for FP64, which has no kernels on GPUs.
StepTime predict_step(const Config& config, const MemoryPlan& plan, const Gpu& gpu, const Rates& rates);
inline StepTime predict_step(const Config& config, const MemoryPlan& plan, const Gpu& gpu) {
    return predict_step(config, plan, gpu, rates_for(gpu));
}

// The GPU that --gpu names, else the one that was found, else the measured one. Exit 2, with all names, for an unknown
// name.
const Gpu& planned_gpu(const Config& config, const DeviceInfo& found);

// For a run on this device; without a prediction if the device is unknown.
PredictedStep predicted_step(const Config& config, const MemoryPlan& plan, const DeviceInfo& device);
PredictedStep predicted_step(const StepTime& time);
