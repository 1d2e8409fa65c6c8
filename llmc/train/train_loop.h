// A training run from its options to its last checkpoint: opens data, device, state and log, and then enqueues steps,
// with evaluations and checkpoints between them.
#pragma once
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "llmc/config/config.h"
#include "llmc/train/run/run_data.h"
#include "llmc/train/run/run_evaluations.h"
#include "llmc/train/run/save_folder.h"
#include "llmc/train/run/start_times.h"
#include "llmc/train/run/step_reporter.h"

class TrainLoop {
public:
    // The time of a step of a planned run on a device.
    using Predict = std::function<PredictedStep(const Config&, const MemoryPlan&, const DeviceInfo&)>;
    // command: the whole command line, for the log. comm is not owned.
    TrainLoop(ParsedConfig parsed, const Fp8Plan& fp8_plan, std::string command, Predict predict, Comm& comm);

    // Trains until --train-iters, or until a rank is asked to stop. All ranks call it.
    void run();

private:
    void start();
    void open_data();
    void open_device();
    void start_state();
    bool resume();
    void begin_at(int64_t step);
    void warm_up_other();
    PredictedStep predicted_step(bool bf16) const;
    void open_log();
    nlohmann::ordered_json header() const;
    void write_notes(const std::string& summary);
    std::string attention_note() const;

    bool train_step();
    Staging::Buffer* next_batch();
    void switch_precision();
    void after_first_step();
    void calibrate_again_after_skip(const Staging::Buffer& step);
    void evaluate_and_save();
    RunEvaluations::Place evaluation_place();
    void finish();

    ParsedConfig parsed_;   // its notes: of the start, until the log is open
    Config& config_ = parsed_.config;
    const std::string command_;
    const Predict predict_;
    Comm& comm_;
    const ParamTable table_;
    const Fp8Plan fp8_plan_;              // what the options ask for
    RunDevice device_;
    RunData data_;
    std::optional<RunEvaluations> evaluations_;
    std::unique_ptr<RunLog> log_;
    std::optional<SaveFolder> save_folder_;
    std::optional<RunCheckpoints> checkpoints_;   // after log_: its destructor may finish a save and log it
    std::optional<StepReporter> reporter_;
    Progress progress_;
    StartTimes start_;
    bool resumed_ = false, stopping_ = false;
    std::string data_error_;   // why data cannot be read any more, on all ranks the same
};
