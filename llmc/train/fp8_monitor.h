// Monitors FP8 during a run: that the planned matmuls ran in FP8, and the statistics of its tensors.
#pragma once
#include <string>
#include <vector>

#include "llmc/model/fp8_state.h"
#include "llmc/train/log.h"
#include "llmc/train/trainer.h"

class Fp8Watch {
public:
    // plan: what the options ask for, whatever runs.
    Fp8Watch(const Config& config, const Fp8Plan& plan) : config_(config), plan_(plan) {}

    // Before and after the first step of this process. after_first_step: exit 3 unless the FP8 matmuls that were
    // executed, counted where they are started, are those of the plan; returns a line that says so.
    void before_first_step(const Ctx& ctx) { count_before_ = device::fp8_matmuls(ctx); }
    std::string after_first_step(const Ctx& ctx, int64_t micro_batches);

    // From the report of a step that the device finished: the record of a step that counted, and a warning where a
    // value was not finite or a tensor is off.
    void report(RunLog& log, const Fp8State& state, const StagedStep& staged, int64_t step) const;

private:
    const Config& config_;
    const Fp8Plan plan_;
    int64_t count_before_ = 0;
};

// What is wrong with the tensors of a report and what to do, one line; "" if nothing is.
std::string fp8_health_line(const std::vector<Fp8State::TensorReport>& reports, const Fp8Plan& plan);
