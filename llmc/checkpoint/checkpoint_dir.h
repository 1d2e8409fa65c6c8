// The directory protocol of checkpoints: complete or absent. Knows files and hashes, nothing of models.
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
