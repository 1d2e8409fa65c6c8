// The device of a run, its memory and its trainer.
#pragma once
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llmc/train/staging.h"
#include "llmc/train/plan.h"

class RunDevice {
public:
    // Owns none of its arguments.
    RunDevice(const Config& config, const ParamTable& table, const Fp8Plan& fp8_plan, Comm& comm)
        : config_(config), table_(table), fp8_plan_(fp8_plan), comm_(comm), bf16_plan_(fp8_plan.in_bf16()) {}
    ~RunDevice();
    RunDevice(const RunDevice&) = delete;
    RunDevice& operator=(const RunDevice&) = delete;

    // Opens this rank's device, connects it to those of the other ranks, and makes the memory plan. Exit 2 if the
    // device does not support the FP8 options.
    void open(std::vector<std::string>& notes);
    // Allocates the memory and creates trainer and staging; weights are not set. Exit 2 if there is not enough memory.
    void prepare(std::vector<std::string>& notes);
    // Makes the trainer anew, for steps in BF16 or in FP8 (fp8_steps), in the same memory and at the same address. It
    // has the optimizer states of the one before; weights are not set. Collective.
    void make_trainer(bool bf16);
    bool bf16() const { return bf16_; }   // whether the trainer is for the steps in BF16 of a run that switches
    const Config& step_config() const { return bf16_ ? bf16_config_ : config_; }
    const Fp8Plan& step_fp8_plan() const { return bf16_ ? bf16_plan_ : fp8_plan_; }
    const MemoryPlan& step_plan() const { return bf16_ ? plan.bf16[0] : plan; }
    // Called after every step. After the first one all memory is allocated: exit 1 unless the arena has exactly the
    // size that is planned for steps of this precision, and if a later step allocates.
    void check_memory();
    bool sealed() const { return allocations_ >= 0; }   // whether a step has been checked
    // What the process uses of the device, for the log after the first step; "" on the CPU without a limit.
    std::string memory_text() const;
    // A warning if another process or a library has allocated device memory since the second step; else "".
    std::string growth_text() const;

    Ctx ctx;
    DeviceInfo info;
    MemoryPlan plan;
    Arena arena;
    int64_t used_bytes = 0;   // of the device
    std::optional<Trainer> trainer;   // at one address for the whole run
    std::unique_ptr<Staging> staging;

private:
    const Config& config_;
    const ParamTable& table_;
    const Fp8Plan& fp8_plan_;
    Comm& comm_;
    std::optional<Groups> groups_;
    bool opened_ = false;
    bool bf16_ = false;
    Config bf16_config_;   // of the steps in BF16
    const Fp8Plan bf16_plan_;
    // By bf16_: the most that trainers of this precision have used of the arena, and whether that was checked.
    std::array<int64_t, 2> peaks_{};
    std::array<bool, 2> checked_{};
    bool shared_ = false;   // the communicator owns the arena's memory
    std::optional<int64_t> used_before_;   // of the GPU, by all processes, before it was opened
    int64_t other_bytes_ = 0;              // of the GPU, before the arena was allocated
    void* arena_memory_ = nullptr;         // owned; null if the communicator owns the arena's memory
    int64_t allocations_ = -1;             // the number of allocations after the first step
    int64_t free_bytes_ = -1;              // of the device, after the second step
};

// Whether the planned memory of a run is there, on the GPU and in host memory: "" or why the run cannot start.
std::string gpu_memory_error(const Config& config, const MemoryPlan& plan, int64_t free_bytes);
// available_bytes: memory of the host, which local_ranks ranks share; below 0: not known.
std::string host_memory_error(const MemoryPlan& plan, int local_ranks, int64_t available_bytes);

// GPU memory that this process has taken since `before` was read; without NVML, all that is in use. 0 on the CPU.
int64_t gpu_bytes_in_use(const DeviceInfo& device, const std::optional<int64_t>& before);
