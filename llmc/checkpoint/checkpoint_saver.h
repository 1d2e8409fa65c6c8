// Writes checkpoints on all ranks together, without collectives on the device. A save has stages, after each of which
// the ranks exchange outcomes:
// 1. Rank 0 creates the directory with files of their final size.
// 2. Every rank writes and hashes the states that it holds, and the weights, which it rounds from its masters
//    (save_layout.h).
// 3. Only with transposed tensors (GPT-2), whose bytes no rank holds in one piece: each is written by one rank, from
//    the masters in the file of stage 2.
// 4. Rank 0 writes the manifest and renames the directory.
// A failure of any rank in any stage is the same Error on all ranks, and earlier checkpoints stay as they were.
//
// With `async`, save copies the state to host memory and the stages run in a thread that calls neither the device nor
// other ranks; poll starts the next stage when all ranks have finished one.
#pragma once
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "llmc/base/system/files.h"
#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/checkpoint/huggingface/model_extras.h"
#include "llmc/checkpoint/rank_outcome.h"
#include "llmc/checkpoint/save_layout.h"
#include "llmc/checkpoint/save_lock.h"
#include "llmc/checkpoint/write_buffer.h"
#include "llmc/parallel/comm/comm.h"

struct SaveOptions {
    std::string root;                        // --save
    int64_t seq_length = 0;                  // rope models: config.json declares at least this many positions
    int64_t keep = 0;                        // newest complete checkpoints to keep, 0: all
    bool async = false;                      // write while training continues
    int64_t max_part_bytes = kMaxPartBytes;  // of a model file; a larger tensor gets a file of its own
    int64_t staging_bytes = kStagingBytes;
    const SaveLock* lock = nullptr;          // of root, on rank 0; outlives the saver
    IoHook io_hook = {};  // for tests; with async another thread calls it
};

struct SavedCheckpoint {
    int64_t step = 0;
    std::string path;
    double seconds = 0;         // from save to the final name
    double stall_seconds = 0;   // the part of these that training waited in save, poll and finish
};

class CheckpointSaver {
public:
    // All ranks make all calls. Exit 2 if not all ranks see the same root. Allocates all host memory that saving needs,
    // pinned. comm is not owned.
    CheckpointSaver(const SaveOptions& options, const ModelConfig& config, const ParamTable& table,
                    const StateAccess& access, Comm& comm);
    // With one rank, finishes a running save. With several, abandons it, since finishing would need the other ranks.
    ~CheckpointSaver();
    CheckpointSaver(const CheckpointSaver&) = delete;
    CheckpointSaver& operator=(const CheckpointSaver&) = delete;

    // Adds what read_model_extras returns for these arguments to all later checkpoints. Rank 0 reads the files now,
    // because they may be gone later; all ranks raise its error.
    void carry(const std::string& directory, const std::string& tokenizer, const TokenizerFacts& facts);
    // Sets a function that every rank calls when a checkpoint is complete.
    void on_saved(std::function<void(const SavedCheckpoint&)> callback) { on_saved_ = std::move(callback); }

    // Finishes a running save and starts one of the current state; without async, finishes the new save, too.
    void save(int64_t step, const std::string& state_json);
    // Advances a running save, between training steps, without waiting for the disk.
    void poll();
    // Waits until no save is running.
    void finish();

    // Exit 7 on every rank unless the disk has room for `count` more checkpoints. Call it before the first step, or a
    // full disk is found hours later.
    void require_room(int64_t count);

    int64_t buffer_bytes() const { return buffer_bytes_; }   // pinned memory of this rank
    int64_t checkpoint_bytes() const;   // upper bound for one checkpoint, without state.json and extras

private:
    using Clock = std::chrono::steady_clock;
    enum class Stage { kIdle, kPrepare, kWrite, kTranspose, kCommit };

    // Runs the work of a stage: in a thread with `async`, else once its outcome is needed.
    void start(Stage stage, std::string (CheckpointSaver::*work)());
    void next();
    void advance(const std::vector<std::string>& texts);
    void leave();   // adds the time since entered_ to stall_seconds_

    std::string prepare();
    std::string write();
    std::string transpose();
    std::string commit();
    std::string written_ranges();
    void fill();
    void fill_text(const std::string& file, const std::string& text);
    void fill_range(const StateFile& file, const SavedRange& range);

    const SaveOptions options_;
    const ModelConfig config_;
    const StateAccess access_;
    Comm& comm_;
    const SaveLayout layout_;
    ModelExtras extras_;   // on rank 0
    const int64_t buffer_bytes_;
    char* const memory_;   // pinned, owned
    WriteBuffer buffer_;
    std::function<void(const SavedCheckpoint&)> on_saved_;

    Stage stage_ = Stage::kIdle;
    int64_t step_ = 0;
    std::string state_json_;
    std::string directory_;                       // in which the files are until they are complete
    std::vector<std::string> written_;            // written_ranges() of every rank in every stage, by rank and stage
    Clock::time_point started_, entered_, left_;  // start of the save; start and end of the latest call
    double stall_seconds_ = 0;
    RankOutcome filled_;                          // async: of copying the state to the buffer
    std::unique_ptr<StagedDirectory> staged_;     // on rank 0
    std::future<RankOutcome> job_;   // of the stage
};

// Pinned memory that `rank` needs to save its bytes of `layout`, for the plan. Of all else that saving allocates, only
// headers and hashes grow with the model.
int64_t save_buffer_bytes(const SaveLayout& layout, const SaveOptions& options, int rank);
