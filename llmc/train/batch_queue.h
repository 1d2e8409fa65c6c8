// Pinned host memory of the steps in flight: batches for the device and results from it.
#pragma once
#include <array>
#include <optional>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/data/dataloader.h"
#include "llmc/fault/heartbeat.h"
#include "llmc/train/trainer.h"

// Events around the passes of a step's first micro-batch, and at the end of its last micro-batch.
class PassEvents {
public:
    PassEvents();
    // Called when the trainer begins to enqueue `phase`. The last backward pass ends where gradients are reduced.
    void enter(Ctx& ctx, Phase phase);
    // Milliseconds of a step that has finished. The loss counts as part of the backward pass.
    double forward_ms() const { return ms(kForward, kBackward); }
    double backward_ms() const { return ms(kBackward, kBackwardEnd); }
    double micro_batches_ms() const { return ms(kForward, kReduce); }

private:
    enum { kForward, kBackward, kBackwardEnd, kReduce, kEvents };
    double ms(int from, int to) const;
    OwnedEvent events_[kEvents];
    int next_ = kForward;
};

// Two alternating slots: the host prepares a step while the device runs the one before.
class Staging {
public:
    // Allocates this rank's part of two global batches and the reports of their steps. Owns none of its arguments.
    Staging(const Config& config, const Groups& groups, Trainer& trainer);

    struct Slot {
        StagedStep staged;
        OwnedEvent begin = OwnedEvent::create(), done = OwnedEvent::create();   // recorded by the training loop
        PassEvents passes;
        std::optional<CommTimer> comm_timer;   // with several ranks
        int64_t step = 0;       // 0-based
        int64_t samples = 0;    // in this step
        int64_t samples_after = 0;   // consumed since the start of training, this step included
    };
    Slot& slot(int64_t step) { return slots_[static_cast<size_t>(step % 2)]; }

    // Reads this rank's part of samples [first, first + count) into the slot of `step`. The rank has the micro-batches
    // whose number modulo Groups::data_ranks is data_rank.
    Slot& read(const DataLoader& loader, int64_t step, int64_t first, int64_t count);
    // Sets the step's inputs. counted: targets of all ranks that are not ignored, at least one.
    void set_inputs(Slot& slot, int64_t counted, double lr) const;

private:
    const Config& config_;
    const Groups& groups_;
    SequenceReader reader_;
    std::array<Slot, 2> slots_;
    PinnedPtr<char> memory_;
    std::vector<int64_t> scratch_;
};
