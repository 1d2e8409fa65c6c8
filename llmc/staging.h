// Host memory of the steps in flight: global batches on their way to the device and results on their way back.
#pragma once
#include <array>
#include <vector>

#include "llmc/config.h"
#include "llmc/dataloader.h"
#include "llmc/trainer.h"

// Two slots, used in turn, so that the host prepares a step while the device runs the one before.
class Staging {
public:
    // Pinned memory for two global batches and their reports.
    Staging(const Config& config, int64_t fp8_report_bytes);
    ~Staging();
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;

    struct Slot {
        StagedStep staged;
        Event* begin = nullptr;      // recorded by the loop
        Event* done = nullptr;
        int64_t step = 0;       // 0-based
        int64_t samples = 0;    // in this step
        int64_t samples_after = 0;   // consumed since the start of training, this step included
    };
    Slot& slot(int64_t step) { return slots_[static_cast<size_t>(step % 2)]; }

    // Reads samples [first, first + count) into the slot of `step` and sets the step's inputs. Exit 2 if no target
    // counts.
    Slot& fill(const DataLoader& loader, int64_t step, int64_t first, int64_t count, double lr);

private:
    const Config& config_;
    std::array<Slot, 2> slots_;
    char* memory_ = nullptr;
    std::vector<int64_t> scratch_;
};
