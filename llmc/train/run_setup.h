// The device of a run, the memory that its plan asks for, and the trainer in it.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "llmc/train/batch_queue.h"
#include "llmc/train/plan.h"

class RunDevice {
public:
    // Nothing is owned.
    RunDevice(const Config& config, const ParamTable& table, const Fp8Plan& fp8_plan, Comm& comm)
        : config_(config), table_(table), fp8_plan_(fp8_plan), comm_(comm), groups_(comm) {}
    ~RunDevice();
    RunDevice(const RunDevice&) = delete;
    RunDevice& operator=(const RunDevice&) = delete;

    // Opens this rank's device and connects it with those of the others, and plans. Exit 2 where it cannot do what
    // FP8 needs.
    void open(std::vector<std::string>& notes);
    // Takes the memory and makes trainer and staging; the weights are not set. Exit 2 where memory does not suffice.
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
    const Groups groups_;
    bool opened_ = false;
    void* arena_memory_ = nullptr;
};
