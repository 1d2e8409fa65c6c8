// Writing checkpoints, all ranks together. A save goes through three stages, each ended by the ranks telling each other
// how it went: rank 0 prepares the directory with files of their final size; every rank writes its own bytes of them
// (save_layout.h) and hashes what it wrote; rank 0 writes the manifest and gives the directory its name. A failure of
// any rank in any stage is an Error on all of them, with one text; what was saved before stays as it was.
//
// With `async` the state is copied to host memory at once and the stages run in a thread, which calls neither the
// device nor other ranks; poll lets the save advance by a stage when all ranks are through with one.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "llmc/base/files.h"
#include "llmc/checkpoint/save_layout.h"
#include "llmc/parallel/comm.h"

struct SaveOptions {
    std::string root;                        // --save
    int64_t seq_length = 0;                  // rope models: config.json promises at least this many positions
    std::string tokenizer;                   // file or directory copied beside the model, "" for none
    int64_t keep = 0;                        // complete checkpoints to keep, 0: all
    bool async = false;                      // written while training continues
    int64_t max_part_bytes = kMaxPartBytes;  // a larger tensor gets a part of its own
    int64_t staging_bytes = kStagingBytes;
    IoHook io_hook;  // for tests and fault injection; with async another thread calls it
};

// The files that `tokenizer` (--tokenizer) stands for: itself, or the known names in that directory. Exit 2
// where there are none or a name is one of ours, so that a run can ask before it starts. "" gives none.
std::vector<std::string> tokenizer_files(const std::string& tokenizer);

struct SavedCheckpoint {
    int64_t step = 0;
    std::string path;
    double seconds = 0;         // from save to the final name
    double stall_seconds = 0;   // of those, inside the calls below
};

class CheckpointSaver {
public:
    // Every rank makes every call. Refuses, with several ranks, a root that not all of them see (exit 2). Takes all
    // host memory that saving needs, pinned. comm is not owned.
    CheckpointSaver(const SaveOptions& options, const ModelConfig& config, const ParamTable& table,
                    const StateAccess& access, Comm& comm);
    // A save that is running is finished where there is one rank, and given up where others would be needed for it.
    ~CheckpointSaver();
    CheckpointSaver(const CheckpointSaver&) = delete;
    CheckpointSaver& operator=(const CheckpointSaver&) = delete;

    // Called on every rank once a checkpoint is complete.
    void on_saved(std::function<void(const SavedCheckpoint&)> told);

    // Finishes a running save and begins one of the state as it is now. Without async it is finished, too.
    void save(int64_t step, const std::string& state_json);
    // Between steps; does not wait for the disk.
    void poll();
    // Waits until no save is running.
    void finish();

    // Error (exit 7) on every rank unless the disk has room for `count` checkpoints more. Asked before the first
    // step, so that a full disk is not found hours later.
    void require_room(int64_t count);

    int64_t buffer_bytes() const;       // of pinned memory on this rank
    int64_t checkpoint_bytes() const;   // of one checkpoint without state.json and tokenizer; never too few

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// Pinned memory of one rank that saves the state of all these (--save-async or not), for the plan.
int64_t save_buffer_bytes(const SaveLayout& layout, const SaveOptions& options, int rank, bool gathers_weights);
