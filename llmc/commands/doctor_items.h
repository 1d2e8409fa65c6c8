// The items of `doctor`: rows of a table, each with a function that looks and returns what it found. Every rank runs
// every item in the same order, so an item may use collectives as long as all ranks come to them.
#pragma once
#include <string>
#include <vector>

#include "llmc/base/nvml.h"
#include "llmc/ops/device.h"
#include "llmc/parallel/comm.h"

// From good to bad.
enum class Status { kOk, kNotChecked, kWarning, kFailed };
const char* status_name(Status status);   // "ok", "not checked", "warning", "failed"

struct Finding {
    Status status = Status::kOk;
    std::string text;     // what was found, one line
    std::string advice;   // what to do about it, "" for nothing
    std::string name;     // "" for that of the item
    int rank = -1;        // the one it speaks of, -1: all of them
};
using Findings = std::vector<Finding>;

Finding ok(const std::string& text);
Finding warning(const std::string& text, const std::string& advice);
Finding failed(const std::string& text, const std::string& advice);
Finding not_checked(const std::string& text, const std::string& advice = "");

struct DoctorOptions {
    bool json = false, help = false;
    std::string save;    // the folder that checkpoints are to go to
    std::string corrupt;   // the item whose result is corrupted, to see that it then fails
};

// What the items share.
struct Patient {
    Comm& comm;
    DoctorOptions options;
    bool cuda_build = false;   // this executable is for GPUs
    DeviceInfo info;           // of this rank's device, or of the libraries alone where there is none
    Ctx ctx;
    bool opened = false;       // by all ranks
    bool connected = false;    // the devices of all ranks

    explicit Patient(Comm& of) : comm(of) {}
    ~Patient();
    bool gpu() const { return info.sm > 0; }
    bool corrupted(const std::string& item) const { return options.corrupt == item; }
};

struct Item {
    const char* name;
    const char* checks;
    Findings (*look)(Patient&);
    bool can_be_corrupted = false;
};
const std::vector<Item>& doctor_items();
// From the words after "doctor". Exit 2 for what is no option.
DoctorOptions doctor_options(const std::vector<std::string>& words);
// What one item finds on this rank, errors turned into findings and names filled in.
Findings look_at(const Item& item, Patient& patient);

// ---- doctor_report.cpp
// Merges the findings of all ranks: equal ones once, else the worst with its rank and host.
Findings merged(const std::vector<Findings>& ranks, const std::vector<std::string>& hosts);
std::string findings_to_json(const Findings& findings);   // between ranks
Findings findings_from_json(const std::string& text);

class Report {
public:
    void add(const Item& item, const Findings& findings);
    bool failed() const { return count(Status::kFailed) > 0; }
    static std::string line(const Finding& finding);
    std::string last_line() const;
    std::string json(const Patient& patient) const;

private:
    int64_t count(Status status) const;
    std::vector<std::pair<std::string, Finding>> rows_;   // what the item checks
};

// ---- doctor_gpu.cpp
Findings look_at_gpu(Patient&);   // opens it
Findings look_at_driver(Patient&);
Findings look_at_matmul_library(Patient&);
Findings look_at_recipes(Patient&);
Findings look_at_gpu_state(Patient&);
Findings gpu_state_findings(const GpuState& state);
std::string kernel_driver_version(const std::string& text);   // from the text of /proc/driver/nvidia/version

// ---- doctor_results.cpp
Findings look_at_fp8_matmuls(Patient&);
Findings look_at_attention(Patient&);
Findings look_at_fp8_attention(Patient&);

// ---- doctor_ranks.cpp
Findings look_at_mpi(Patient&);
Findings look_at_nccl(Patient&);
Findings look_at_ranks(Patient&);
Findings look_at_collectives(Patient&);
Findings look_at_links(Patient&);

// ---- doctor_machine.cpp
Findings look_at_build(Patient&);
Findings look_at_processors(Patient&);
Findings look_at_environment(Patient&);
Findings look_at_disk(Patient&);
Findings look_at_shared_memory(Patient&);
Findings look_at_locked_memory(Patient&);
Findings look_at_open_files(Patient&);
Finding shared_memory_finding(int64_t total_bytes, int64_t free_bytes, int ranks);
Finding locked_memory_finding(int64_t bytes, bool infiniband);   // bytes < 0: no limit
Finding open_files_finding(int64_t files, int ranks);            // files < 0: no limit
