// The --save folder, which a run holds from its start to its end.
#pragma once
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "llmc/checkpoint/save_lock.h"
#include "llmc/config/config.h"
#include "llmc/parallel/comm/comm.h"

// Whether a checkpoint is directly in the folder. It may be given as "step-10/" or relative to the folder.
bool lies_in(std::filesystem::path checkpoint, const std::string& folder);

class SaveFolder {
public:
    // Does nothing without --save. Exit 2 if saving cannot work: another run holds the folder's lock; the folder has
    // checkpoints that this run would overwrite, or later ones from which --resume auto would continue instead of this
    // run's; or the tokenizer is missing. With --resume auto it waits up to a minute for a run that is still ending, as
    // when a job is requeued. Adds a note if the file system has no locks. All ranks call it.
    SaveFolder(const Config& config, Comm& comm, std::vector<std::string>& notes);
    ~SaveFolder();   // releases the lock, and removes the folders that the constructor made if they are empty
    SaveFolder(const SaveFolder&) = delete;
    SaveFolder& operator=(const SaveFolder&) = delete;

    const SaveLock* lock() const { return lock_.get(); }   // null without --save and on ranks other than 0

private:
    // Takes the lock. Returns "" or why not; *busy: because another run holds it.
    std::string take(const Config& config, bool* busy);

    std::vector<std::string> made_;   // folders that were not there, the innermost first
    std::unique_ptr<SaveLock> lock_;
};
