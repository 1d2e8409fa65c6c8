// Pinned host memory of the steps in flight: batches for the device and results from it.
#pragma once
#include <array>
#include <optional>

#include "llmc/config/config.h"
#include "llmc/data/dataloader.h"
#include "llmc/train/pass_events.h"
#include "llmc/train/trainer.h"

// Two alternating buffers: the host prepares a step while the device runs the one before.
class Staging {
public:
    // Allocates this rank's part of two global batches and the reports of their steps. Owns none of its arguments.
    Staging(const Config& config, const Groups& groups, Trainer& trainer);

    struct Buffer {
        StagedStep staged;
        OwnedEvent begin = OwnedEvent::create(), done = OwnedEvent::create();   // recorded by the training loop
        PassEvents passes;
        std::optional<CommTimer> comm_timer;   // with several ranks
        int64_t step = 0;       // 0-based
        int64_t samples = 0;    // in this step
        int64_t samples_after = 0;   // consumed since the start of training, this step included
    };
    Buffer& buffer(int64_t step) { return buffers_[static_cast<size_t>(step % 2)]; }

    // Reads this rank's part of samples [first, first + count) into the buffer of `step`: the micro-batches whose
    // number modulo Groups::data_ranks is data_rank.
    Buffer& read(const DataLoader& loader, int64_t step, int64_t first, int64_t count);
    // Sets the step's inputs. counted: targets of all ranks that are not ignored, at least one.
    void set_inputs(Buffer& buffer, int64_t counted, double lr) const;

private:
    const Config& config_;
    const Groups& groups_;
    SequenceReader reader_;
    std::array<Buffer, 2> buffers_;
    PinnedPtr<char> memory_;
};
