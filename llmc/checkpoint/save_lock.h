// A --save folder belongs to one run at a time. The run holds FOLDER/.lock from its start to its end. It uses flock,
// which the system releases when the process dies. Where the file system has no flock, the file is a lease that a
// thread renews. The file says who holds it.
#pragma once
#include <chrono>
#include <memory>
#include <string>

#include "llmc/base/system/files.h"

struct SaveLockOptions {
    // The run of a lease that was not renewed for this long counts as dead. A lease is renewed ten times as often. Its
    // age comes from the server's clock alone: the file's time and the present are both read from there.
    std::chrono::milliseconds lease{45000};
    // Calls besides those of IoHook: "flock" and "renew". An errno that it returns for "flock" is the outcome of flock;
    // ENOLCK, EOPNOTSUPP, ENOSYS and EINVAL mean that the file system has no flock.
    IoHook hook;
};

class SaveLock {
public:
    // Takes the lock of an existing folder, without waiting. Returns null if another run holds it, and then sets
    // *holder to its host, process and start. Exit 7 if the file cannot be made.
    static std::unique_ptr<SaveLock> take(const std::string& folder, const SaveLockOptions& options,
                                          std::string* holder);
    // Releases the lock and removes its file, if it is still ours.
    virtual ~SaveLock() = default;

    // Exit 7 if another run has taken the folder, as can happen to a lease whose holder was stopped for too long, or
    // if the file was removed. Called before anything is published in the folder.
    virtual void require_held() const = 0;
};
