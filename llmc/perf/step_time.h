// Predicts the time of an optimizer step: the operations of its rehearsal at the measured rates of their kernels, and
// exposed communication.
#pragma once
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "llmc/perf/rates.h"
#include "llmc/train/plan.h"
#include "llmc/train/run/step_time_check.h"

// The parts of a step's time, in the order of the plan's table.
enum class StepPart {
    kMatmuls, kAttention, kElementwise, kQuantization, kSums, kOptimizer, kOverhead, kCommunication, kCommTraffic,
    kHostLink,
};
inline constexpr int kStepParts = 10;

struct StepTime {
    const Gpu* gpu = nullptr;
    std::array<double, kStepParts> ms{};   // by StepPart; communication and host link: exposed only, and the
                                           // memory traffic of hidden communication
    double reduce_ms = 0, gather_ms = 0;   // communication, hidden or exposed
    double exchange_ms = 0;                // of heads, exposed
    double tokens_ms = 0, exposed_tokens_ms = 0;   // of tokens of experts, all and what is not hidden
    double matrices_ms = 0;                // of Muon's matrices, hidden or exposed
    double update_matmuls_ms = 0;          // of the optimizer's part: what hides matrices_ms
    std::array<double, 3> expert_ms{}, expert_flop{};   // of grouped matmuls, by GemmLayout
    double host_link_ms = 0;               // of the copies of --offload in either direction, hidden or exposed
    double& operator[](StepPart part) { return ms[static_cast<size_t>(part)]; }
    double total_ms() const;
    double communication_ms() const { return reduce_ms + gather_ms + exchange_ms + tokens_ms + matrices_ms; }
    std::vector<std::pair<std::string, double>> named_ms() const;   // the parts that are not zero
};

inline constexpr int kRanksPerHost = 8;   // in these predictions
// Bytes per second sent by a rank to ranks of the same host, in training. dev/results/2026-11-21-h200-zero.md,
// speed-1-no-overlap: each of two ranks sends 1.057 GB of gradients and 1.057 GB of weights, and its compute waits for
// 8.54 ms. This time includes waiting for the peer; an all-reduce alone reaches 304 GiB/s.
inline constexpr double kLinkRate = 2 * 1.057e9 / 8.54e-3;

// From these rates, scaled if they are another GPU's. The total is 0 for FP64, which has no kernels on GPUs.
StepTime predict_step(const Config& config, const MemoryPlan& plan, const Gpu& gpu, const Rates& rates);
StepTime predict_step(const Config& config, const MemoryPlan& plan, const Gpu& gpu);   // from the rates for this GPU

// The GPU that --gpu names, else the one that was found, else the measured one. Exit 2, with all names, for an unknown
// name.
const Gpu& planned_gpu(const Config& config, const DeviceInfo& found);

// For a run on this device; without a prediction if the device is unknown.
PredictedStep predicted_step(const Config& config, const MemoryPlan& plan, const DeviceInfo& device);
