// The log of a run: one line per step on standard output, and JSON lines at full precision.
#pragma once
#include <array>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/base/check.h"
#include "llmc/config/config.h"
#include "llmc/ops/arena.h"
#include "llmc/ops/device.h"
#include "llmc/parallel/comm/rehearsal_comm.h"
#include "llmc/train/log/step_record.h"

struct EvalRecord {
    int64_t step = 0;
    double loss = 0;
    int64_t counted_tokens = 0;
    double seconds = 0;
};

struct HellaswagRecord {
    int64_t step = 0;
    int64_t correct = 0, examples = 0;
    double seconds = 0;
};

// The block scales of a tensor, all powers of two, over all casts of a step. Blocks of zeros have none.
struct BlockScales {
    int64_t blocks = 0;
    double min = 1, median = 1, max = 1;   // median: the lower one of an even number; 1 if all blocks are zeros
    double at_ends = 0;                    // share that has the smallest or the largest scale there is
    double zeros = 0;                      // share without a scale
};

// One FP8 tensor in one optimizer step.
struct Fp8TensorRecord {
    std::string name, format;              // "3.down.dy", "e5m2"
    double amax = 0, scale = 1;            // scale: of the next step (delayed) or the latest cast; blocks: the median
    std::optional<BlockScales> block_scales = {};
    double saturated = 0, flushed = 0;     // fractions of the values cast
    int64_t nonfinite = 0;                 // number of values
};

// Gradients of one kind that were reduced in FP8 in one optimizer step, compared with the same sums in fp32.
struct GradCommRecord {
    std::string name;                      // "linears in FP8"
    double relative_l2 = 0, cosine = 1;
    double saturated = 0, flushed = 0;     // fractions of the values cast
    int64_t nonfinite = 0;                 // number of values
};

// Predicted and measured step time and device memory, once per run.
struct PlanRecord {
    int64_t step = 0;
    double predicted_ms = 0, measured_ms = 0;        // predicted 0: there are no measured rates of this device
    int64_t planned_bytes = 0, used_bytes = 0;       // used: including what libraries allocated
    std::vector<std::pair<std::string, double>> predicted_parts_ms = {};
    std::string text;                                // the times, for the screen
};

// Fields of the header record.
struct RunHeader {
    std::string command, commit, config_json, gemm_plan_note;
    std::string fp8_plan;          // fp8_plan_text; "" without FP8
    DeviceInfo device;
    int world = 1;
    bool synthetic_data = false;
    // What is in the files that --train-data, --valid-data and --load name: DataLoader::identity_json and
    // hf_weights_fingerprint; "" without the option. The log has it under the names of the options.
    std::string train_data, valid_data, loaded_weights;
    std::vector<PlannedCollective> communication;   // of a step
    int64_t params = 0, arena_bytes = 0;
    std::array<int64_t, kPurposes> purpose_bytes{};   // of the arena
    double flops_per_token = 0;
    std::vector<std::string> changed = {};   // options that differ from the preset, as the banner has them
};

// Whether the log at `path` is of a run with this --save; true if there is no log or it does not say.
bool log_saves_in(const std::string& path, const std::string& save);

// Why there can be no log at `path`, or "". Causes: the path is a folder; a file there is not the log of a run; or its
// folder is missing, and is neither in the working folder nor under `save`, where the run would make it.
std::string log_place_error(const std::string& path, const std::string& save);

// One JSON object per line: {"type": "header" | "step" | "eval" | "hellaswag" | "fp8" | "grad_wire" | "plan" |
// "checkpoint" | "event" | "sample", "step": ..., fields as named in the structs above}. Doubles read back to the same
// bits; non-finite ones are the strings "nan", "inf" and "-inf". Each record is flushed. Errors of the disk: exit 7. A
// path that the user gave may be a link to a file, which is followed; the run never follows a link at a name of its
// own.
class RunLog {
public:
    // path "": no file; missing directories are created. append (after a resume): removes records of steps after
    // `resume_step`, and those of that step whose type is among `again`, since the run writes them again. The old file
    // is kept under another name without append, and with `keep`, since removed records may belong to another run. Exit
    // 2 if the file is not a log.
    RunLog(const std::string& path, bool append, int64_t resume_step, const std::vector<std::string>& again = {},
           bool keep = false);
    ~RunLog();
    RunLog(const RunLog&) = delete;
    RunLog& operator=(const RunLog&) = delete;
    const std::string& earlier_log() const { return earlier_log_; }   // name under which the old file is kept, or ""
    void header(const RunHeader& header);
    void step(const StepRecord& record, bool print);   // every step goes to the file; `print` also to stdout
    void eval(const EvalRecord& record);
    void hellaswag(const HellaswagRecord& record);
    void fp8(int64_t step, const std::vector<Fp8TensorRecord>& tensors);   // file only
    void grad_comm_record(int64_t step, const std::vector<GradCommRecord>& kinds);   // file only
    void plan(const PlanRecord& record);
    // stall_seconds: part of `seconds` in which training stalled. May follow records of later steps.
    void checkpoint(int64_t step, const std::string& path, double seconds, double stall_seconds);
    // Notes, warnings, and the end: "stop", "diverged" or "failed".
    void event(const std::string& kind, const std::string& text, bool print = true);
    // Logs that the run ends with this error, as the event "failed", unless an earlier event has said how the run ends
    // or the disk has failed.
    void failed(const Error& error);
    void sample(int64_t step, const std::string& text);

private:
    void write(const std::string& line);   // one record, without the newline
    // A line of standard output. If that is gone, the run goes on: says so once, on standard error and in the file.
    void print_line(const std::string& line);

    std::FILE* file_ = nullptr;
    std::string path_, earlier_log_;
    bool ended_ = false;   // the last event says how the run ended
    int64_t step_ = 0;                     // of the latest record; also that of header and events
};

// "eval step 250 | loss 3.2100 | perplexity 24.78 | 20480 tokens | 1.234 s"
std::string eval_line(const EvalRecord& record);
// "hellaswag step 250 | accuracy 0.2955 | 2967 of 10042 examples | 12.345 s"
std::string hellaswag_line(const HellaswagRecord& record);
// Makes generated text safe for a terminal: valid UTF-8, with control characters except newline and tab as dots.
std::string screen_text(const std::string& text);
