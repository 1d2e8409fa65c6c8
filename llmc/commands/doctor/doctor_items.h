// The items of `doctor`: rows of a table, each with a function that returns findings. Every rank checks every item in
// the same order, so an item may use collectives if all ranks call them.
#pragma once
#include <string>
#include <vector>

#include "llmc/base/system/nvml.h"
#include "llmc/ops/device.h"
#include "llmc/parallel/comm/comm.h"

enum class Status { kOk, kNotChecked, kWarning, kFailed };   // from good to bad
const char* status_name(Status status);   // "ok", "not checked", "warning", "failed"

struct Finding {
    Status status = Status::kOk;
    std::string text;     // one line
    std::string advice;   // what to do about it, "" for nothing
    std::string name;     // "": that of the item
    int rank = -1;        // the rank it is about, -1: all ranks
};
using Findings = std::vector<Finding>;

Finding ok(const std::string& text);
Finding warning(const std::string& text, const std::string& advice);
Finding failed(const std::string& text, const std::string& advice);
Finding not_checked(const std::string& text, const std::string& advice = "");

struct DoctorOptions {
    bool json = false, help = false;
    std::string save;      // the folder for checkpoints
    std::string html = {};   // a file for the report as a page
    std::string corrupt;   // the item whose result is corrupted, to see that it then fails
};

// The state that the items share.
struct Patient {
    Comm& comm;
    DoctorOptions options;
    bool cuda_build = false;   // this executable is for GPUs
    DeviceInfo info;           // of this rank's device; without one, of the libraries only
    Ctx ctx;
    bool opened = false;       // the devices of all ranks are open
    bool connected = false;    // and can communicate

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
// Parses the words after "doctor"; exit 2 for an unknown option.
DoctorOptions doctor_options(std::vector<std::string> words);
// Checks one item on this rank; an Error becomes a finding.
Findings look_at(const Item& item, Patient& patient);

// ---- doctor_report.cpp
// Merges the findings of all ranks: if they are equal into one, else into the worst with its rank and host.
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
    std::vector<std::pair<std::string, Finding>> rows_;   // Item::checks and the finding
};

// ---- doctor_gpu.cpp
Findings look_at_gpu(Patient&);   // opens the devices
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
