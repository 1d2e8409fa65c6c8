// The log record of a step. A field of it is one row of step_fields(), from which follow the JSON record, the line on
// the screen and the table in docs/training.md.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <variant>

// The GPUs of all ranks over the steps since the last such record. A value is absent if a GPU does not report it; all
// values are absent if no GPU is sampled.
struct GpuRecord {
    std::optional<double> utilization, power_w, sm_clock_mhz;   // means of the GPUs
    std::optional<double> temperature_c, memory_gib;            // of the hottest, the fullest GPU
    std::optional<double> energy_j, joules_per_token;           // of all GPUs
    std::string throttled_by;   // "" if no GPU reports it
};

struct StepRecord {
    int64_t step = 0, train_iters = 0;
    double loss = 0, grad_norm = 0, grad_mul = 1, lr = 0;
    double step_seconds = 0, forward_seconds = 0, backward_seconds = 0;
    std::optional<double> exposed_comm_seconds, mfu;
    double tokens_per_second = 0, samples_per_second = 0;
    double memory_gib = 0, eta_seconds = 0;
    int64_t samples = 0, tokens = 0, counted_tokens = 0;
    bool skipped = false, norm_skipped = false;
    int64_t skips = 0, norm_skips = 0;
    int64_t clipped_heads = 0;
    int64_t dead_experts = 0;
    std::optional<double> norm_limit, z_loss, max_logit, router_loss, router_entropy, expert_load,
        rank_load;
    GpuRecord gpu;
    bool synthetic = false;   // training on synthetic data; only printed, the file has it in the header
};

struct StepField {
    const char* name;   // in the log
    // A StepRecord's optional value that is absent becomes null; what a GpuRecord lacks is left out.
    std::variant<int64_t StepRecord::*, double StepRecord::*, bool StepRecord::*, std::optional<double> StepRecord::*,
                 std::optional<double> GpuRecord::*, std::string GpuRecord::*> member;
    const char* meaning;                           // with the unit
    std::string (*print)(const StepRecord&) = nullptr;   // its part of the line on the screen, if it has one
};
std::span<const StepField> step_fields();

nlohmann::ordered_json step_json(const StepRecord& record);

// step 120/5000 | loss 3.2841 | norm 0.71 | 0.412 s/it, 41% MFU | eta 0:33:31
// At most 80 columns, unless numbers are unusually long. Without a known peak, as on the CPU, tokens per second take
// the place of the MFU; unknown figures are n/a. Skipped steps and synthetic data are noted at the end.
std::string step_line(const StepRecord& record);

// A double as JSON that reads back to the same bits; non-finite ones are the strings "nan", "inf" and "-inf".
nlohmann::ordered_json exact(double x);
// A right-aligned number of at least `width` characters, or n/a.
std::string figure(bool known, int width, const char* format, double x);
