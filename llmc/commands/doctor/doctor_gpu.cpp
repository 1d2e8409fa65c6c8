// Items of `doctor` on the GPU, its driver and libraries, and the features that each of them enables.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "llmc/base/check.h"
#include "llmc/base/text.h"
#include "llmc/commands/doctor/doctor_items.h"
#include "llmc/model/parameters/fp8_recipe.h"
#include "llmc/parallel/gpu_assignment.h"

namespace {

constexpr const char* kBuiltForCpu = "this executable was built for the CPU";
constexpr const char* kBuildForGpu = "make DEVICE=cuda";

std::string capability(int sm) { return strf("%d.%d", sm / 10, sm % 10); }

// Whether any rank's host shows a sign of a GPU; the same answer on all ranks.
bool any_gpu(Comm& comm) {
    std::error_code error;
    const bool mine = device::device_count() > 0 || std::filesystem::exists("/dev/nvidia0", error)
                      || !device::device_info(-1).driver.empty();
    return comm.sum(std::vector<int64_t>{mine})[0] > 0;
}

Findings unusable_gpu(const std::string& why) {
    return {failed(why, "see driver below, CUDA_VISIBLE_DEVICES, nvidia-smi; for a container, docker run --gpus all")};
}

// Opens this rank's device if all ranks can; collective. Returns "" or why this rank's cannot be used.
std::string open_device(Patient& patient, int index) {
    std::string error;
    try {
        patient.info = device::device_info(index);
        device::device_open(patient.ctx, patient.info.index);
        patient.opened = true;
    } catch (const Error& e) {
        error = e.what();
    }
    const bool all = patient.comm.sum(std::vector<int64_t>{patient.opened})[0] == patient.comm.world().ranks;
    if (patient.opened && !all) {
        device::device_close(patient.ctx);
        patient.opened = false;
    }
    return error;
}

}  // namespace

Findings look_at_gpu(Patient& patient) {
    if (!patient.cuda_build) {
        const std::string error = open_device(patient, 0);
        if (!error.empty()) return unusable_gpu(error);
        return {not_checked(strf("%s, which emulates FP8: %d threads", kBuiltForCpu, patient.info.sm_count),
                            kBuildForGpu)};
    }
    if (!any_gpu(patient.comm)) return {not_checked("no GPU and no driver here", "run it on the training machine")};
    std::vector<std::string> notes;
    int index = 0;
    try {
        index = place_rank(patient.comm, notes);   // throws on all ranks or on none
    } catch (const Error& e) {
        return unusable_gpu(e.what());
    }
    if (const std::string error = open_device(patient, index); !error.empty()) return unusable_gpu(error);
    const DeviceInfo& info = patient.info;
    const int seen = device::device_count();
    const std::string others = seen > 1 && patient.comm.world().ranks == 1
                                   ? strf("; one of %d: mpirun -np %d checks all of them", seen, seen) : "";
    Findings findings = {ok(strf("%s at %s, compute capability %s, %.1f GiB, %.1f free, %d multiprocessors%s",
                                 info.name.c_str(), info.bus.c_str(), capability(info.sm).c_str(),
                                 gib(info.memory_bytes),
                                 gib(device::device_free_bytes()), info.sm_count,
                                 others.c_str()))};
    for (const std::string& note : notes)
        if (note.rfind("WARNING", 0) == 0) findings.push_back(warning(note.substr(9), "use GPUs of one kind"));
    return findings;
}

// "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build": the first number with a point.
std::string kernel_driver_version(const std::string& text) {
    std::istringstream words(text.substr(0, text.find('\n')));
    for (std::string word; words >> word;) {
        const bool number = word.find_first_not_of("0123456789.") == std::string::npos;
        if (number && word.find('.') != std::string::npos) return word;
    }
    return "";
}

Findings look_at_driver(Patient& patient) {
    const std::string &driver = patient.info.driver, &toolkit = patient.info.toolkit;
    if (!patient.cuda_build) return {not_checked(kBuiltForCpu, kBuildForGpu)};
    std::ifstream file("/proc/driver/nvidia/version");
    std::ostringstream text;
    text << file.rdbuf();
    const std::string kernel = kernel_driver_version(text.str());
    const std::string loaded = kernel.empty() ? "" : " (" + kernel + ")";
    if (driver.empty() && kernel.empty()) return {not_checked("no driver here; built with CUDA " + toolkit)};
    if (driver.empty())
        return {failed("the kernel module has version " + kernel + ", but the driver library libcuda.so.1 is not found",
                       "in a container, docker run --gpus all; else install the driver's user-space libraries")};
    const std::string both = strf("driver for CUDA %s%s, built with CUDA %s", driver.c_str(), loaded.c_str(),
                                  toolkit.c_str());
    if (std::atoi(driver.c_str()) >= std::atoi(toolkit.c_str())) return {ok(both)};
    return {failed(both + ": the driver is too old for this executable",
                   strf("install a driver for CUDA %d.0 or newer, or build with an older toolkit",
                        std::atoi(toolkit.c_str())))};
}

Findings look_at_matmul_library(Patient& patient) {
    if (!patient.cuda_build) return {not_checked(kBuiltForCpu, kBuildForGpu)};
    const int64_t version = patient.info.cublaslt_version;
    std::vector<std::string> enabled, missing;
    for (const RecipeRow& row : recipe_rows()) (version >= row.min_cublaslt ? enabled : missing).push_back(row.name);
    const std::string text = patient.info.matmul_library + ": enables BF16"
                             + (enabled.empty() ? "" : ", FP8 " + list_text(enabled, ", "));
    if (missing.empty()) return {ok(text)};
    return {warning(text + "; too old for " + list_text(missing, ", "), "build with CUDA 12.9 or newer")};
}

// A GPU that cannot run per-tensor scaling fails; blockwise scaling is optional.
Findings look_at_recipes(Patient& patient) {
    Findings findings;
    for (const RecipeRow& row : recipe_rows()) {
        const long long library = row.min_cublaslt;
        const std::string needs = strf("needs compute capability %s, cuBLASLt %lld.%lld.%lld",
                                       capability(row.min_sm).c_str(), library / 10000, library / 100 % 100,
                                       library % 100);
        const std::string error = fp8_device_error({.recipe = row.recipe}, patient.info);
        Finding finding = ok("runs here; " + needs);
        if (!patient.gpu()) finding = not_checked(needs + ", and a GPU to check it");
        else if (!error.empty() && row.x == Granularity::kTensor)
            finding = failed(error, "train in BF16 here, --fp8-recipe none");
        else if (!error.empty()) finding = warning(error, "use --fp8-recipe delayed or tensorwise here");
        finding.name = std::string("recipe ") + row.name;
        findings.push_back(finding);
    }
    return findings;
}

namespace {

std::string clock_text(const std::optional<int64_t>& now, const std::optional<int64_t>& largest) {
    if (!now || !largest) return "unknown";
    return strf("%lld of %lld MHz", ll(*now), ll(*largest));
}

Finding clocks_finding(const GpuState& s) {
    const std::string clocks = "multiprocessors " + clock_text(s.sm_mhz, s.max_sm_mhz) + " now, memory "
                               + clock_text(s.memory_mhz, s.max_memory_mhz)
                               + (s.celsius ? strf(", %lld C", ll(*s.celsius)) : "");
    constexpr uint64_t kSlow = kThrottleClocksSet | kThrottleHardware | kThrottleSoftwareThermal
                               | kThrottleHardwareThermal | kThrottlePowerBrake;   // any but the power limit
    const uint64_t slow = s.throttle.value_or(0) & kSlow;
    if (slow == 0) return ok(clocks);
    return warning(clocks + ": reduced by " + throttle_text(slow), "nvidia-smi -q -d PERFORMANCE,CLOCK");
}

Finding power_finding(int64_t limit_mw, int64_t default_mw) {
    const std::string limit = strf("limit %lld W, by default %lld W", ll(limit_mw / 1000), ll(default_mw / 1000));
    if (limit_mw >= default_mw) return ok(limit);
    return warning(limit, "nvidia-smi -pl sets it: matmuls run into it first");
}

Finding ecc_finding(bool on, int64_t errors) {
    if (!on) return warning("off: memory errors go unnoticed", "nvidia-smi -e 1, then restart");
    if (errors == 0) return ok("on, no uncorrected error since the driver was loaded");
    return failed(strf("%s since the driver was loaded", count_text(errors, "uncorrected error").c_str()),
                  "nvidia-smi -q -d ECC,PAGE_RETIREMENT,ROW_REMAPPER; reset or replace it");
}

}  // namespace

Findings gpu_state_findings(const GpuState& s) {
    Findings findings;
    auto add = [&](const char* name, Finding finding) {
        finding.name = name;
        findings.push_back(finding);
    };
    add("GPU clocks", clocks_finding(s));
    if (s.power_limit_mw && s.default_power_limit_mw)
        add("GPU power", power_finding(*s.power_limit_mw, *s.default_power_limit_mw));
    if (s.persistence)
        add("GPU persistence", *s.persistence ? ok("on")
                                              : warning("off: the driver is loaded again at every start",
                                                        "nvidia-smi -pm 1"));
    if (s.mig)
        add("GPU MIG", *s.mig ? warning("on: an instance has a part of the GPU, and NCCL does not connect instances",
                                        "nvidia-smi -mig 0")
                              : ok("off"));
    if (s.ecc) add("GPU ECC", ecc_finding(*s.ecc, s.uncorrected_errors.value_or(0)));
    return findings;
}

Findings look_at_gpu_state(Patient& patient) {
    if (!patient.gpu()) return {not_checked("clocks, persistence, MIG and ECC: no GPU")};
    GpuState state;
    const std::string error = read_gpu_state(patient.info.bus, state);
    if (!error.empty()) return {not_checked("clocks, persistence, MIG and ECC: " + error)};
    return gpu_state_findings(state);
}
