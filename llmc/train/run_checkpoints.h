// The checkpoints of a run: what they contain besides the tensors, when one is written, how a run resumes from one.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llmc/base/fault_injection.h"
#include "llmc/checkpoint/checkpoint_save.h"
#include "llmc/config/config.h"
#include "llmc/data/dataloader.h"
#include "llmc/model/params.h"
#include "llmc/parallel/comm.h"
#include "llmc/train/log.h"
#include "llmc/train/trainer.h"

// Pinned host memory that saving takes on the rank that needs most of it; 0 without --save.
int64_t planned_save_bytes(const Config& config, const ParamTable& table, const Buckets& buckets);
// Of the tensors of one checkpoint on disk, --save or not.
int64_t planned_checkpoint_bytes(const Config& config, const ParamTable& table, const Buckets& buckets);
// How many --save leaves on disk when the run ends.
int64_t planned_checkpoints(const Config& config);

// How far a run has come.
struct Progress {
    int64_t step = 0;        // steps enqueued
    int64_t samples = 0;     // the data cursor
    int64_t adam_step = 0;   // updates made
    int64_t skips = 0;       // updates not made
    int64_t consecutive_skips = 0;          // of these, the last ones, with no update since
    std::vector<std::string> missed = {};   // evaluations of this step that a stop cut short
};

// What --save needs, before a step is spent on it: a folder that holds no checkpoints which this run would write over
// or leave for a later one to go on from, and a tokenizer that is there. Exit 2.
void require_save(const Config& config, Comm& comm);

class RunCheckpoints {
public:
    // Nothing is owned. Takes the host memory of saving, if there is --save.
    RunCheckpoints(const Config& config, const ParamTable& table, const DataLoader& data, Comm& comm,
                   Ctx& ctx, Trainer& trainer, Faults& faults);

    // Brings the state of --resume to the device; nothing where "auto" finds no checkpoint. fp8_given: the user chose
    // whether there is FP8. What the log should say goes to notes.
    std::optional<Progress> resume(bool fp8_given, std::vector<std::string>& notes);

    // Nothing without --save, or where this step was saved there already. The log must outlive this object.
    // With --save-async it returns once the state is copied, and has waited for the save before.
    void save(const Progress& progress, RunLog& log);
    // After every step: lets a save behind training go on. An error of the disk ends the run here.
    void poll();
    // Waits for it.
    void finish();

private:
    void restore_fp8(const std::string& saved_json, bool fp8_given, std::vector<std::string>& notes);
    std::string state_json(const Progress& progress);

    const Config& config_;
    const ParamTable& table_;
    const DataLoader& data_;
    Comm& comm_;
    Ctx& ctx_;
    Trainer& trainer_;
    Faults& faults_;
    std::unique_ptr<CheckpointSaver> saver_;
    int64_t saved_step_ = -1;   // under --save
};
