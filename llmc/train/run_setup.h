// The device of a run, its memory and its trainer.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "llmc/train/batch_queue.h"
#include "llmc/train/plan.h"

class RunDevice {
public:
    // Owns none of its arguments.
    RunDevice(const Config& config, const ParamTable& table, const Fp8Plan& fp8_plan, Comm& comm)
        : config_(config), table_(table), fp8_plan_(fp8_plan), comm_(comm) {}
    ~RunDevice();
    RunDevice(const RunDevice&) = delete;
    RunDevice& operator=(const RunDevice&) = delete;

    // Opens this rank's device, connects it to those of the other ranks, and makes the memory plan. Exit 2 if the
    // device does not support the FP8 options.
    void open(std::vector<std::string>& notes);
    // Allocates the memory and creates trainer and staging; weights are not set. Exit 2 if there is not enough memory.
    void prepare();

    Ctx ctx;
    DeviceInfo info;
    MemoryPlan plan;
    Arena arena;
    int64_t used_bytes = 0;   // of the device
    std::unique_ptr<Trainer> trainer;
    std::unique_ptr<Staging> staging;

private:
    const Config& config_;
    const ParamTable& table_;
    const Fp8Plan& fp8_plan_;
    Comm& comm_;
    std::unique_ptr<const Groups> groups_;   // open() makes them
    bool opened_ = false;
    void* arena_memory_ = nullptr;
};
