// A --save folder belongs to one run at a time. The run holds FOLDER/.lock by flock from its start to its end; the
// system releases it when the process dies. The file says who holds it.
#pragma once
#include <memory>
#include <string>

#include "llmc/base/system/descriptor.h"

class SaveLock {
public:
    // Takes the lock of an existing folder, without waiting. Returns null if another run holds it, and then sets
    // *holder to its host, process and start. Exit 7 if the file cannot be made.
    static std::unique_ptr<SaveLock> take(const std::string& folder, std::string* holder);
    SaveLock(std::string path, Descriptor file, std::string warning);
    // Releases the lock and removes its file, if that is still ours.
    ~SaveLock();
    SaveLock(const SaveLock&) = delete;
    SaveLock& operator=(const SaveLock&) = delete;

    // Exit 7 if the file was removed or replaced. Called before anything is published in the folder.
    void require_held() const;
    // That the file system has no flock, so that nothing keeps another run from saving there; else "".
    const std::string& warning() const { return warning_; }

private:
    const std::string path_;
    const Descriptor file_;
    const std::string warning_;
};
