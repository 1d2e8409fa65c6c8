// The checkpoints of a run: their state besides the tensors, saving, and resuming.
#pragma once
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "llmc/checkpoint/checkpoint_saver.h"
#include "llmc/config/config.h"
#include "llmc/data/dataloader.h"
#include "llmc/model/parameters/params.h"
#include "llmc/parallel/comm/comm.h"
#include "llmc/train/log/run_log.h"
#include "llmc/train/log/loss_watch.h"
#include "llmc/train/trainer.h"

// The progress of a run.
struct Progress {
    int64_t step = 0;        // steps enqueued
    int64_t samples = 0;     // the data cursor
    int64_t adam_step = 0;   // updates applied
    int64_t moments_begin = 0;   // of them, before AdamW's moments of the matrices of layers started at 0
    int64_t skips = 0;       // steps skipped
    int64_t norm_skips = 0;  // those of --skip-grad-norm
    int64_t consecutive_skips = 0;          // because of values that are not finite
    std::vector<float> norms = {};          // the latest finite norms, the oldest first
    std::vector<std::string> missed = {};   // evaluations of this step that a stop interrupted
    LossWatch loss_watch = {};
};

class RunCheckpoints {
public:
    // Owns none of its arguments. With --save, allocates the host memory for saving; lock: SaveFolder's.
    RunCheckpoints(const Config& config, const ParamTable& table, const DataLoader& data, Comm& comm,
                   Ctx& ctx, Trainer& trainer, const SaveLock* lock);

    // For a run without --resume: adds the files of the model of --load, those of --tokenizer and what the data says of
    // its tokenizer to all checkpoints (model_extras.h). resume() does the same with the checkpoint that it loads.
    void begin();
    // Loads the checkpoint of --resume; returns nothing if "auto" finds none. fp8_given: the user has set --fp8-recipe.
    // Adds lines for the log to notes. Before it loads the state, calls begin_at with the number of steps done.
    std::optional<Progress> resume(bool fp8_given, std::vector<std::string>& notes,
                                   const std::function<void(int64_t)>& begin_at);

    // Does nothing without --save, or if this step is saved already. The log must outlive this object. With
    // --save-async it waits for the previous save, and returns once the state is copied.
    void save(const Progress& progress, RunLog& log);
    // Called after every step: continues an asynchronous save. Exit 7 if the disk fails.
    void poll();
    // Waits for the asynchronous save.
    void finish();
    // Which checkpoint a run that diverged leaves, for its error: "the newest checkpoint is out/step-00000120".
    std::string newest_text() const;

private:
    void restore_fp8(const nlohmann::json& state, bool fp8_given, std::vector<std::string>& notes);
    std::string state_json(const Progress& progress);

    const Config& config_;
    const ParamTable& table_;
    const DataLoader& data_;
    Comm& comm_;
    Ctx& ctx_;
    Trainer& trainer_;
    std::unique_ptr<CheckpointSaver> saver_;
    int64_t saved_step_ = -1;   // under --save
};
