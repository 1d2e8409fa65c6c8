// The directory protocol of checkpoints, by which a checkpoint is either complete or absent:
//
//   ROOT/step-00000120/config.json         Hugging Face configuration
//                      model.safetensors   or model-00001-of-0000N.safetensors + index (parts of 5 GB)
//                      optimizer/...       one file per state (optimizer_state.h), with our names and padded rows
//                      state.json          step, data cursor, resolved options, data fingerprint, plans
//                      tokenizer.json ...  what the model and --tokenizer bring, see model_extras.h
//                      manifest.json       XXH3-128 and size of every other file or of its ranges; written last
//
// A checkpoint is written under ROOT/.tmp-step-..., with every file and directory fsynced, then renamed. Readers trust
// only files that match the manifest.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "llmc/base/system/files.h"
#include "llmc/checkpoint/manifest.h"
#include "llmc/config/config.h"

class Comm;

std::string step_directory_name(int64_t step);                   // "step-00000120"
int64_t step_of_directory(const std::string& name);              // -1 if it is not such a name
int64_t step_of_checkpoint(const std::string& path);             // from its state.json; -1 if there is none
std::vector<int64_t> checkpoint_steps(const std::string& root);  // ascending; empty if root does not exist

struct FoundCheckpoint {
    std::string path;
    std::string state_json;
    std::vector<std::string> skipped;  // newer ones that are damaged, with the reason, one line each
};
// `where` is a checkpoint directory, or "auto" for the newest complete one under root. Exit 5 if the named directory is
// damaged or none under root is usable. "auto" returns path "" if root has no checkpoint. The ranks share the work, and
// all return the same.
FoundCheckpoint find_checkpoint(const std::string& where, const std::string& root, Comm& comm);
// The options of the checkpoint that find_checkpoint will find, unless the hash of a large file is wrong. Never fails.
SavedOptions saved_options(const std::string& where, const std::string& root);

// A checkpoint that is being written: ROOT/.tmp-NAME.PID, by the one run that holds ROOT's lock (save_lock.h). The
// destructor removes it unless it was committed.
class StagedDirectory {
public:
    StagedDirectory(const std::string& root, const std::string& name, const IoHook& hook);
    ~StagedDirectory();
    StagedDirectory(const StagedDirectory&) = delete;
    StagedDirectory& operator=(const StagedDirectory&) = delete;

    std::string path(const std::string& file) const;
    const std::string& directory() const { return temporary_; }
    void make_subdirectory(const std::string& name);
    void write_text(const std::string& file, const std::string& text);
    // Adds to the manifest a file that other code has written and fsynced.
    void add(const std::string& file, const ManifestFile& written);

    // Writes the manifest, fsyncs, and renames the directory to ROOT/NAME, replacing an existing one atomically where
    // the file system can. Returns that path.
    std::string commit();

private:
    void rename_to(const std::string& final_path);

    std::string root_, name_, temporary_;
    IoHook hook_;
    bool committed_ = false;
    std::vector<std::string> subdirectories_;
    Manifest files_;
};

// Removes what killed runs left under root, whose lock this run holds.
void remove_leftovers(const std::string& root);

// Removes checkpoints older than the `keep` newest complete ones up to `step`. Those of later steps, left by a run that
// was resumed at an earlier step, are neither counted nor removed.
void drop_old_checkpoints(const std::string& root, int64_t step, int64_t keep, const IoHook& hook);
