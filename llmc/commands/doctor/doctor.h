// `train_llama doctor`: reports the hardware and libraries of this machine, what the trainer can use, and whether FP8
// matmuls, attention and collectives compute correct results. One line per result, also for what cannot be checked.
#pragma once
#include <string>
#include <vector>

#include "llmc/base/system/nvml.h"
#include "llmc/commands/command.h"
#include "llmc/ops/device.h"
#include "llmc/parallel/comm/comm.h"

enum class Status { kOk, kNotChecked, kWarning, kFailed };

// What a check found, on one rank or on all of them.
struct CheckResult {
    Status status = Status::kOk;
    std::string text = {};     // one line
    std::string advice = {};   // what to do about it, "" for nothing
    std::string name = {};     // "": that of the check
    int rank = -1;             // the rank it is about, -1: all ranks

    std::string line(bool colour = false) const;   // colour: of the status, for a terminal
};
using CheckResults = std::vector<CheckResult>;

// The job's exit code is 0 if nothing failed, 1 if a check failed.
Job parse_doctor(const Invocation& call, Comm& comm);

// Every rank makes every check in the same order, so a check may use collectives if all ranks call them.
class Doctor {
public:
    struct Check {
        const char *name, *what;
        CheckResults (Doctor::*run)();
    };
    static const std::vector<Check>& checks();

    // comm is not owned. save: the folder for checkpoints; "": none
    explicit Doctor(Comm& comm, std::string save = "") : comm_(comm), save_(std::move(save)) {}
    ~Doctor() {
        if (opened_) device::device_close(ctx_);
    }
    Doctor(const Doctor&) = delete;

    // Makes all checks, prints each result as soon as all ranks have it, or all of them as JSON; returns the exit code.
    int run(bool json);
    // This rank's results of one check; an Error becomes a failed one.
    CheckResults results_of(const Check& check);

private:
    bool gpu() const { return info_.sm > 0; }

    // doctor_machine.cpp; check_gpu opens the devices.
    CheckResults check_build(), check_gpu(), check_driver(), check_gpu_state(), check_environment(), check_disk(),
        check_shared_memory();
    CheckResults check_fp8(), check_experts(), check_attention();                  // doctor_operations.cpp
    CheckResults check_nccl(), check_ranks(), check_collectives(), check_links();  // doctor_ranks.cpp

    Comm& comm_;
    const std::string save_;
    DeviceInfo info_ = device::device_info(-1);   // of this rank's device; without one, of the libraries only
    const bool cuda_build_ = !info_.toolkit.empty();
    Ctx ctx_;
    bool opened_ = false;      // the devices of all ranks are open
    bool connected_ = false;   // and can communicate
};

// ---- the parts that judge, for tests

// Merges the results of all ranks (results_to_json) by name and status. A result that is not the same on all ranks
// names the first rank that has it, with its host, and how many ranks have one with this status.
CheckResults merged(const std::vector<std::string>& ranks, const std::vector<std::string>& hosts);
std::string results_to_json(const CheckResults& results);
CheckResults gpu_state_results(const GpuState& state);
// The first element of a device's result that differs from the CPU's by more than `share` of the CPU's largest value,
// as text; "" if there is none.
std::string result_difference(const char* name, const std::vector<float>& device, const std::vector<float>& cpu,
                              double share);
CheckResult shared_memory_result(int64_t free_bytes, int ranks);
