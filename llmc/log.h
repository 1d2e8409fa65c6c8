// What a run tells: one fixed-width line a step on standard output, and JSON lines at full precision.
#pragma once
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "llmc/config.h"
#include "llmc/device.h"

struct StepRecord {
    int64_t step = 0;              // 1-based: steps done
    int64_t train_iters = 0;
    double loss = 0, grad_norm = 0, grad_mul = 1, lr = 0;
    double step_seconds = 0;       // wall time of this step
    double tokens_per_second = 0;
    double samples_per_second = 0;
    double mfu = -1;               // share of the peak of the matmul dtype; negative: unknown device, printed n/a
    double memory_gib = 0;
    double eta_seconds = 0;
    int64_t samples = 0, tokens = 0;   // consumed since the start of training
    int64_t counted_tokens = 0;        // targets that count in this step
    bool skipped = false;              // the update was not applied
    int64_t skips = 0;                 // since the start of this process
};

struct EvalRecord {
    int64_t step = 0;
    double loss = 0;
    int64_t counted_tokens = 0;
    double seconds = 0;
};

// Facts of the header record that only the loop knows.
struct RunHeader {
    std::string command, commit, config_json, gemm_plan_note;
    DeviceInfo device;
    int world = 1;
    int64_t params = 0, arena_bytes = 0;
    double flops_per_token = 0;
};

class RunLog {
public:
    // path "" writes no file. append: after a resume; records of steps beyond `resume_step` in an existing file are
    // cut off first, so that no step is there twice.
    RunLog(const std::string& path, bool append, int64_t resume_step);
    ~RunLog();
    void header(const RunHeader& header);
    void step(const StepRecord& record, bool print);   // every step goes to the file; `print` also to stdout
    void eval(const EvalRecord& record);
    void checkpoint(int64_t step, const std::string& path, double seconds);
    void event(const std::string& kind, const std::string& text);   // warnings, stops; printed as well
    void sample(int64_t step, const std::string& text);

private:
    std::FILE* file_ = nullptr;
    std::string path_;
};

// "step 120/5000 | loss 3.2841 | norm 0.71 | lr 3.0e-04 | 0.412 s/it | 318k tok/s | 41.2% MFU | 61.3 GiB | eta 00:33:31"
std::string step_line(const StepRecord& record);

// Dense matmul peak in FLOP/s of a device for a dtype; 0 when the device is not in the audited table.
double peak_flops(const std::string& device_name, Dtype dtype);
