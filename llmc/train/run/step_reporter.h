// Reports steps once the device has finished them: their records, warnings, and the end of a run that diverges. A step
// is reported after the next one has been enqueued, so that the device never waits for the host.
#pragma once
#include <deque>
#include <optional>
#include <string>
#include <utility>

#include "llmc/model/parameters/fp8_recipe.h"
#include "llmc/train/log/fp8_monitor.h"
#include "llmc/train/log/gpu_monitor.h"
#include "llmc/train/log/run_log.h"
#include "llmc/train/run/run_checkpoints.h"
#include "llmc/train/run/run_device.h"
#include "llmc/train/run/step_time_check.h"

class StepReporter {
public:
    // Owns none of its arguments. Reports change skips, adam_step and loss_watch of `progress`. All ranks make all
    // calls.
    StepReporter(const Config& config, const ParamTable& table, const Fp8Plan& fp8_plan, Comm& comm, RunDevice& device,
                 RunLog& log, RunCheckpoints& checkpoints, PredictedStep predicted, Progress& progress);

    // Called before a step is prepared, when the trainer begins to enqueue a phase of it, and when it is enqueued;
    // enqueued() reports the step before.
    void begin(bool first);
    void enter_phase();
    void enqueued(const Staging::Buffer& step);
    // Waits for the step that is not reported yet, if there is one, and reports it. Exit 2 if its data had token ids
    // outside the vocabulary; exit 4 if the run has diverged.
    void drain();
    // Logs that the matmuls of the first step, or of the first after a switch, ran in FP8 as planned; exit 3 if they
    // did not.
    void check_fp8_matmuls();
    // The steps from here on are in another precision, with this time.
    void switched(PredictedStep predicted) { time_check_.emplace(std::move(predicted)); }

private:
    StepRecord record_of(const Staging::Buffer& step);
    void report(const Staging::Buffer& step);
    void watch_loss(const StepRecord& record);
    void check_time(const Staging::Buffer& step, double ms);
    [[noreturn]] void diverged(const std::string& text);

    const Config& config_;
    const Fp8Plan& fp8_plan_;
    Comm& comm_;
    RunDevice& device_;
    RunLog& log_;
    RunCheckpoints& checkpoints_;
    Progress& progress_;
    Fp8Monitor fp8_monitor_;
    GpuMonitor gpu_monitor_;
    std::optional<StepTimeCheck> time_check_;   // of the current precision
    const double flops_per_token_;
    std::deque<double> recent_seconds_;   // of the last 20 steps
    const Staging::Buffer* pending_ = nullptr;   // the step that is enqueued and not reported yet
};
