// What the host prepares for a step and what it gets back.
#pragma once
#include <functional>

#include "llmc/fault/heartbeat.h"
#include "llmc/ops/ops.h"
#include "llmc/parallel/comm/comm_timer.h"
#include "llmc/train/host_inputs.h"

// This rank's part of one global batch in pinned host memory, and the results of the step.
struct StagedStep : HostInputs {
    StepState* inputs = nullptr;   // host part of StepState, copied to the device at the start of the step
    StepState* result = nullptr;   // copied to the host at the end
    void* fp8_report = nullptr;    // Fp8State::report_bytes(), copied to the host at the end
    void* grad_comm_report = nullptr;   // Gradients::report_bytes(), copied if count_fp8
    CommTimer* comm_timer = nullptr;
    std::function<void(Phase)> on_phase = {};   // called when the host begins to enqueue a phase
    bool count_fp8 = false;        // the reports have counts, and the scales after the step
    int64_t micro_batches = 0;     // of this rank
    int64_t calibration_micro_batch = 0;   // the first one with a counted target in its whole sequences
    int64_t counted_tokens = 0;    // of all ranks
    double lr = 0;
};
