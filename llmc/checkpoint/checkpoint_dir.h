// The directory protocol of checkpoints: complete or absent, never half. Knows files and hashes, nothing of models.
//
//   ROOT/step-00000120/config.json         Hugging Face configuration
//                      model.safetensors   or model-00001-of-0000N.safetensors + index (parts of 5 GB)
//                      optimizer/...       a file of each slot (state_slots.h): whole stored shapes by our names
//                      state.json          step, cursor, resolved options, data fingerprint, plans
//                      tokenizer.json ...  copied where the request names a tokenizer
//                      manifest.json       XXH3-128 and size of every other file, or of its parts; written last
//
// Written under ROOT/.tmp-step-..., every file and the directory fsynced, then renamed. Readers trust a directory only
// when its manifest matches what they read of it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "llmc/base/files.h"
#include "llmc/checkpoint/manifest.h"

class Comm;

std::string step_directory_name(int64_t step);                   // "step-00000120"
int64_t step_of_directory(const std::string& name);              // -1 if it is no such name
int64_t step_of_checkpoint(const std::string& path);             // from its state, whatever its name; -1: there is none
std::vector<int64_t> checkpoint_steps(const std::string& root);  // rising; none if root does not exist

struct FoundCheckpoint {
    std::string path;
    std::string state_json;
    std::vector<std::string> skipped;  // newer ones that were damaged, with the reason, one line each
};
// `where` is a checkpoint directory, or "auto": the newest complete one under root. A named directory that is
// damaged, or no usable one at all: Error with exit 5. "auto" with no checkpoint at all returns path "". The ranks
// share the work, and all find the same.
FoundCheckpoint find_checkpoint(const std::string& where, const std::string& root, Comm& comm);

// A checkpoint in the making: ROOT/.tmp-NAME.PID. Locked while this process lives, so that a later run can
// tell leftovers from another run's work. Not committed, it is removed by the destructor.
class StagedDirectory {
public:
    StagedDirectory(const std::string& root, const std::string& name, const IoHook& hook);
    ~StagedDirectory();
    StagedDirectory(const StagedDirectory&) = delete;
    StagedDirectory& operator=(const StagedDirectory&) = delete;

    std::string path(const std::string& file) const;  // where to write `file`
    const std::string& directory() const { return temporary_; }
    void make_subdirectory(const std::string& name);
    void write_text(const std::string& file, const std::string& text);
    void copy_file(const std::string& source, const std::string& file);
    // A file that was written by other means and is on the disk.
    void add(const std::string& file, const ManifestFile& written);

    // Manifest, fsync, rename to ROOT/NAME, replacing one of that name in one step. Returns that path.
    std::string commit();

private:
    void publish(const std::string& final_path);

    std::string root_, name_, temporary_;
    IoHook hook_;
    int lock_ = -1;
    bool committed_ = false;
    std::vector<std::string> subdirectories_;
    Manifest files_;
};

// For those who read a model, of ours or not: where `directory` is a checkpoint, its files whose names begin with
// `prefix` must match the manifest (exit 5, naming the first that does not). The ranks of each host share the work, for
// hosts may have copies of their own; without comm this process looks alone.
void require_undamaged(const std::string& directory, const std::string& prefix, Comm* comm = nullptr);

// Removes what killed runs left under root; leaves what a living process holds.
void remove_leftovers(const std::string& root);

// Removes checkpoints older than the `keep` newest complete ones up to `step`. Those of later steps (a run
// that went back) neither count nor go.
void drop_old_checkpoints(const std::string& root, int64_t step, int64_t keep, const IoHook& hook);
