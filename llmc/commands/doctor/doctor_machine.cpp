// Checks of `doctor` on the machine: GPU, driver, environment, disk and shared memory.
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "llmc/base/check.h"
#include "llmc/base/system/files.h"
#include "llmc/base/text.h"
#include "llmc/base/version.h"
#include "llmc/commands/doctor/doctor.h"
#include "llmc/config/environment.h"
#include "llmc/parallel/comm/comm_mpi.h"
#include "llmc/parallel/rank_place.h"
#include "llmc/parallel/rank_preflight.h"

namespace {

using enum Status;

constexpr int64_t kMiB = 1 << 20;

std::string size_text(int64_t bytes) {
    return bytes < 1024 * kMiB ? strf("%.1f MiB", static_cast<double>(bytes) / static_cast<double>(kMiB))
                               : strf("%.1f GiB", gib(bytes));
}

const CheckResult kCpuBuild = {kNotChecked, "this executable was built for the CPU", "make DEVICE=cuda"};

}  // namespace

CheckResults Doctor::check_build() {
    const std::string mpi = mpi_library_text();
    return {{kOk, strf("commit %s for %s; %s", kBuildCommit,
                       cuda_build_ ? ("CUDA " + info_.toolkit + ", " + info_.matmul_library).c_str() : "the CPU",
                       mpi.empty() ? "one rank only (built without OpenMPI)" : mpi.c_str())}};
}

CheckResults Doctor::check_gpu() {
    const bool sign = !cuda_build_ || device::device_count() > 0 || !info_.driver.empty();
    if (comm_.sum(std::vector<int64_t>{sign})[0] == 0)
        return {{kNotChecked, "no GPU and no driver here", "run it on the training machine"}};
    std::vector<std::string> notes;
    std::string error;
    try {
        const int index = cuda_build_ ? place_rank(comm_, notes) : 0;   // throws on all ranks or on none
        info_ = device::device_info(index);
        device::device_open(ctx_, info_.index);
        opened_ = true;
    } catch (const Error& e) {
        error = e.what();
    }
    // Each rank's device stays open if all ranks have one.
    if (const auto opened = comm_.sum(std::vector<int64_t>{opened_})[0]; opened_ && opened < comm_.world().ranks) {
        device::device_close(ctx_);
        opened_ = false;
    }
    if (!error.empty())
        return {{kFailed, error,
                 "see driver below, CUDA_VISIBLE_DEVICES, nvidia-smi; for a container, docker run --gpus all"}};
    if (!cuda_build_)
        return {{kNotChecked, strf("%s, which emulates FP8: %d threads", kCpuBuild.text.c_str(), info_.sm_count),
                 kCpuBuild.advice}};
    CheckResults results = {{kOk, strf("%s at %s, one of %d, compute capability %d.%d, %.1f GiB, %.1f free",
                                       info_.name.c_str(), info_.bus.c_str(), device::device_count(), info_.sm / 10,
                                       info_.sm % 10, gib(info_.memory_bytes), gib(device::device_free_bytes()))}};
    for (const std::string& note : notes)
        if (note.starts_with("WARNING")) results.push_back({kWarning, note.substr(9), "use GPUs of one kind"});
    return results;
}

CheckResults Doctor::check_driver() {
    if (!cuda_build_) return {kCpuBuild};
    const std::string &driver = info_.driver, &toolkit = info_.toolkit;
    if (driver.empty()) return {{kNotChecked, "no driver library libcuda.so.1 here; built with CUDA " + toolkit}};
    const std::string both = "driver for CUDA " + driver + ", built with CUDA " + toolkit;
    const int needed = std::atoi(toolkit.c_str());
    if (std::atoi(driver.c_str()) >= needed) return {{kOk, both}};
    return {{kFailed, both + ": the driver is too old for this executable",
             strf("install a driver for CUDA %d.0 or newer, or build with an older toolkit", needed)}};
}

CheckResults gpu_state_results(const GpuState& s) {
    CheckResults results;
    const auto add = [&](const char* name, bool good, const std::string& text, const char* advice) {
        results.push_back({good ? kOk : kWarning, text, good ? "" : advice, name});
    };
    const auto clock = [](const std::optional<int64_t>& now, const std::optional<int64_t>& largest) {
        return now && largest ? strf("%lld of %lld MHz", ll(*now), ll(*largest)) : std::string("unknown");
    };
    constexpr uint64_t kSlow = kThrottleClocksSet | kThrottleHardware | kThrottleSoftwareThermal
                               | kThrottleHardwareThermal | kThrottlePowerBrake;   // any but the power limit
    const uint64_t slow = s.throttle.value_or(0) & kSlow;
    add("GPU clocks", slow == 0,
        "multiprocessors " + clock(s.sm_mhz, s.max_sm_mhz) + " now, memory " + clock(s.memory_mhz, s.max_memory_mhz)
            + (s.celsius ? strf(", %lld C", ll(*s.celsius)) : "")
            + (slow == 0 ? "" : ": reduced by " + throttle_text(slow)), "nvidia-smi -q -d PERFORMANCE,CLOCK");
    if (s.power_limit_mw && s.default_power_limit_mw)
        add("GPU power", *s.power_limit_mw >= *s.default_power_limit_mw,
            strf("limit %lld W, by default %lld W", ll(*s.power_limit_mw / 1000), ll(*s.default_power_limit_mw / 1000)),
            "nvidia-smi -pl sets it: matmuls run into it first");
    if (s.persistence)
        add("GPU persistence", *s.persistence, *s.persistence ? "on" : "off: the driver is loaded again at every start",
            "nvidia-smi -pm 1");
    if (s.mig)
        add("GPU MIG", !*s.mig,
            *s.mig ? "on: an instance has a part of the GPU, and NCCL does not connect instances" : "off",
            "nvidia-smi -mig 0");
    if (s.ecc)
        add("GPU ECC", *s.ecc, *s.ecc ? "on" : "off: memory errors go unnoticed", "nvidia-smi -e 1, then restart");
    if (const int64_t errors = s.uncorrected_errors.value_or(0); s.ecc && *s.ecc && errors > 0)
        results.back() = {kFailed, count_text(errors, "uncorrected error") + " since the driver was loaded",
                          "nvidia-smi -q -d ECC,PAGE_RETIREMENT,ROW_REMAPPER; reset or replace it", "GPU ECC"};
    return results;
}

CheckResults Doctor::check_gpu_state() {
    GpuState state;
    const std::string error = gpu() ? read_gpu_state(info_.bus, state) : "no GPU";
    if (!error.empty()) return {{kNotChecked, "clocks, persistence, MIG and ECC: " + error}};
    return gpu_state_results(state);
}

CheckResults Doctor::check_environment() {
    CheckResults results;
    for (const VariableEffect& e : environment_effects(own_environment(), comm_.world().ranks, cuda_build_))
        results.push_back({e.warn ? kWarning : kOk, "\"" + e.value + "\" is " + e.effect,
                           e.warn ? "unset " + e.name : "", "environment " + e.name});
    if (const std::string line = environment_difference(comm_, own_environment()); !line.empty())
        results.push_back({kWarning, line.substr(line.find(' ') + 1),   // after "WARNING:"
                           "start all ranks with the same environment (mpirun -x)", "environment of ranks"});
    if (results.empty()) results = {{kOk, "no variable of NCCL, Transformer Engine or this trainer is set"}};
    return results;
}

CheckResults Doctor::check_disk() {
    constexpr int64_t kLittle = 4096 * kMiB;   // a few checkpoints of a small model
    if (save_.empty()) return {{kNotChecked, "--save DIR checks the folder in which checkpoints will be saved"}};
    const std::string there = existing_part(save_);
    if (!is_directory(there)) return {{kFailed, printable(there) + " is not a folder", "name another one"}};
    if (::access(there.c_str(), W_OK | X_OK) != 0)
        return {{kFailed, printable(there) + " cannot be written: " + std::strerror(errno),
                 "name another folder, or change its permissions"}};
    const int64_t free = free_bytes(there);
    const std::string text = size_text(free) + " are free for " + printable(save_);
    const std::string need = "a checkpoint takes 14 bytes per parameter with FP32 moments";
    if (free >= kLittle) return {{kOk, text + "; " + need}};
    return {{kWarning, text, "make room: " + need + ", and the previous one is kept until the next is complete"}};
}

// Docker's default is 64 MiB; NCCL takes some MiB of shared memory for each pair of ranks of a host.
CheckResult shared_memory_result(int64_t free_bytes, int ranks) {
    const std::string text = size_text(free_bytes) + " of /dev/shm are free";
    if (free_bytes >= 512 * kMiB) return {kOk, text};
    const std::string advice = "docker run --shm-size 1g or --ipc host; remove old files from /dev/shm";
    if (free_bytes < kMiB && ranks > 1)
        return {kFailed, text + ": the ranks of a host cannot share heartbeats", advice};
    return {kWarning, text + ": too little for NCCL between several GPUs of a host", advice};
}

CheckResults Doctor::check_shared_memory() {
    if (::access("/dev/shm", W_OK | X_OK) != 0)
        return {{kFailed, strf("/dev/shm: %s", std::strerror(errno)), "mount a tmpfs there that this user can write"}};
    return {shared_memory_result(free_bytes("/dev/shm"), comm_.world().ranks)};
}
