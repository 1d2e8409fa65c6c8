#include "llmc/checkpoint/save_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <utility>

#include "llmc/base/check.h"
#include "llmc/base/system/host.h"

namespace {

[[noreturn]] void fail_lock(const char* call, const std::string& path, int error) {
    FAIL(kExitDisk, "cannot %s %s: %s", call, path.c_str(), std::strerror(error));
}

// Opens or creates the file, which must be a regular one; nothing behind a link is touched.
Descriptor open_file(const std::string& path) {
    Descriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0644));
    if (file.fd < 0) fail_lock("open", path, errno);
    struct stat info{};
    if (::fstat(file.fd, &info) != 0 || !S_ISREG(info.st_mode))
        FAIL(kExitDisk, "%s is not a regular file: remove it", path.c_str());
    return file;
}

// Whether the path names the file of fd: the holder of a lock removes the file when it ends.
bool is_same_file(int fd, const std::string& path) {
    struct stat mine{}, there{};
    return ::fstat(fd, &mine) == 0 && ::lstat(path.c_str(), &there) == 0 && mine.st_ino == there.st_ino
           && mine.st_dev == there.st_dev;
}

std::string read_holder(int fd) {
    char text[512];
    const ssize_t got = ::pread(fd, text, sizeof text, 0);
    return got > 0 ? printable(std::string(text, static_cast<size_t>(got))) : "a run that has just begun";
}

// "host NAME, process PID, since TIME"
void write_holder(int fd, const std::string& path) {
    char since[32];
    const std::time_t now = std::time(nullptr);
    std::tm utc{};
    ::gmtime_r(&now, &utc);
    std::strftime(since, sizeof since, "%Y-%m-%d %H:%M:%S UTC", &utc);
    const std::string line = strf("host %s, process %d, since %s", host_name().c_str(), ::getpid(), since);
    const ssize_t done = ::ftruncate(fd, 0) == 0 ? ::pwrite(fd, line.data(), line.size(), 0) : -1;
    if (done < 0) fail_lock("write", path, errno);
    if (done < static_cast<ssize_t>(line.size())) fail_lock("write", path, ENOSPC);   // which sets no errno
}

// Returns 0 or the error.
int lock(int fd) {
    while (::flock(fd, LOCK_EX | LOCK_NB) != 0)
        if (errno != EINTR) return errno;
    return 0;
}

}  // namespace

std::unique_ptr<SaveLock> SaveLock::take(const std::string& folder, std::string* holder) {
    const std::string path = folder + "/.lock";
    for (;;) {
        Descriptor file = open_file(path);
        const int error = lock(file.fd);
        if (error == EWOULDBLOCK) {
            *holder = read_holder(file.fd);
            return nullptr;
        }
        const bool none = error == ENOLCK || error == EOPNOTSUPP || error == ENOSYS || error == EINVAL;
        if (error != 0 && !none) fail_lock("lock", path, error);
        if (!is_same_file(file.fd, path)) continue;   // its holder has just ended
        write_holder(file.fd, path);
        std::string warning;
        if (none) warning = strf("%s cannot be locked (%s): make sure that no other run saves there", path.c_str(),
                                 std::strerror(error));
        return std::make_unique<SaveLock>(path, std::move(file), std::move(warning));
    }
}

SaveLock::SaveLock(std::string path, Descriptor file, std::string warning)
    : path_(std::move(path)), file_(std::move(file)), warning_(std::move(warning)) {}

SaveLock::~SaveLock() {
    if (warning_.empty() && is_same_file(file_.fd, path_)) ::unlink(path_.c_str());   // still locked, so it is ours
}

void SaveLock::require_held() const {
    if (warning_.empty() && !is_same_file(file_.fd, path_))
        FAIL(kExitDisk, "%s was removed or replaced during the run; nothing more is saved there", path_.c_str());
}
