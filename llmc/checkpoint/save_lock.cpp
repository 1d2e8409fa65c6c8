#include "llmc/checkpoint/save_lock.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <thread>
#include <utility>

#include "llmc/base/check.h"
#include "llmc/base/system/descriptor.h"
#include "llmc/base/system/host.h"
#include "llmc/base/system/proc_stat.h"

namespace {

constexpr const char* kName = "/.lock";
constexpr int64_t kMaxLine = 4096;

// Differs between containers of one host, whose process numbers have different meanings.
std::string process_space() {
    char space[64] = "pid:[]";
    const ssize_t length = ::readlink("/proc/self/ns/pid", space, sizeof space - 1);
    if (length > 0) space[length] = 0;
    return space;
}

// The content of the file: "host NAME, process PID, since TIME; pid:[NAMESPACE] ID". Only the part before the
// semicolon is shown; the ID tells two holders apart.
std::string own_line() {
    char since[32];
    const std::time_t now = std::time(nullptr);
    std::tm utc{};
    ::gmtime_r(&now, &utc);
    std::strftime(since, sizeof since, "%Y-%m-%d %H:%M:%S UTC", &utc);
    return strf("host %s, process %d, since %s; %s %s", host_name().c_str(), ::getpid(), since,
                process_space().c_str(), random_digits().c_str());
}

std::string shown(const std::string& line) {
    const std::string who = line.substr(0, line.find(';'));
    return who.empty() ? "a run that has just begun" : printable(who);
}

// The text of the file that fd refers to, or of `path`; "" if there is none.
std::string read_line(int fd) {
    char text[kMaxLine];
    const ssize_t got = ::pread(fd, text, sizeof text, 0);
    return std::string(text, static_cast<size_t>(got > 0 ? got : 0));
}
std::string read_line(const std::string& path) {
    const Descriptor file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    return file.fd < 0 ? "" : read_line(file.fd);
}

[[noreturn]] void fail_lock(const char* call, const std::string& path, int error) {
    FAIL(kExitDisk, "cannot %s %s: %s", call, path.c_str(), std::strerror(error));
}

void write_line(int fd, const std::string& path, const std::string& line) {
    if (::ftruncate(fd, 0) != 0 || ::pwrite(fd, line.data(), line.size(), 0) != static_cast<ssize_t>(line.size()))
        fail_lock("write", path, errno);
}

// ---- flock ----

// Opens the file, or creates it and sets *made. Returns -1 if it vanished in between.
int open_file(const std::string& path, bool* made) {
    int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    *made = fd >= 0;
    if (fd < 0 && errno == EEXIST) fd = ::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 && errno != ENOENT) fail_lock("open", path, errno);
    struct stat info{};
    if (fd >= 0 && (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode))) {
        ::close(fd);
        FAIL(kExitDisk, "%s is not a regular file: remove it", path.c_str());
    }
    return fd;
}

// Whether the path names the file of fd: the holder of a lock removes the file when it ends.
bool is_same_file(int fd, const std::string& path) {
    struct stat mine{}, there{};
    return ::fstat(fd, &mine) == 0 && ::lstat(path.c_str(), &there) == 0 && mine.st_ino == there.st_ino
           && mine.st_dev == there.st_dev;
}

class Flock : public SaveLock {
public:
    Flock(std::string path, int fd) : path_(std::move(path)), file_(fd) {}
    ~Flock() override {
        if (is_same_file(file_.fd, path_)) ::unlink(path_.c_str());   // still locked, so the file is ours
    }
    void require_held() const override {
        if (!is_same_file(file_.fd, path_))
            FAIL(kExitDisk, "%s was removed or replaced during the run; nothing more is saved there", path_.c_str());
    }

private:
    const std::string path_;
    const Descriptor file_;
};

bool has_no_flock(int error) {
    return error == ENOLCK || error == EOPNOTSUPP || error == ENOSYS || error == EINVAL;
}

int call_flock(int fd, const std::string& path, const IoHook& hook) {
    if (const int error = hook ? hook("flock", path) : 0) return error;
    while (::flock(fd, LOCK_EX | LOCK_NB) != 0)
        if (errno != EINTR) return errno;
    return 0;
}

// ---- lease ----

std::chrono::nanoseconds modified(const struct stat& info) {
    return std::chrono::seconds(info.st_mtim.tv_sec) + std::chrono::nanoseconds(info.st_mtim.tv_nsec);
}

// Time since the file was renewed, both by the server's clock; negative if there is no such file.
std::chrono::nanoseconds age(const std::string& path) {
    const std::string probe = path + "." + random_digits();
    const int fd = ::open(probe.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) fail_lock("create", probe, errno);
    struct stat now{}, file{};
    const bool known = ::fstat(fd, &now) == 0 && ::lstat(path.c_str(), &file) == 0;
    ::close(fd);
    ::unlink(probe.c_str());
    return known ? std::max(modified(now) - modified(file), std::chrono::nanoseconds(0)) : std::chrono::nanoseconds(-1);
}

// Whether `line` is of a process of this host that has ended.
bool ended_here(const std::string& line) {
    const std::string prefix = "host " + host_name() + ", process ";
    if (line.rfind(prefix, 0) != 0 || line.find("; " + process_space() + " ") == std::string::npos) return false;
    const int pid = std::atoi(line.c_str() + prefix.size());
    if (pid <= 0) return false;
    const auto stat = process_stat(std::to_string(pid));
    const bool unreaped = !stat.empty() && stat[kStatState] == "Z";
    return unreaped || (::kill(pid, 0) != 0 && errno == ESRCH);
}

class Lease : public SaveLock {
public:
    Lease(std::string path, std::string line, const SaveLockOptions& options)
        : path_(std::move(path)), line_(std::move(line)), hook_(options.hook),
          renewer_([this, pause = options.lease / 10] { renew_until_end(pause); }) {}
    ~Lease() override {
        {
            const std::lock_guard<std::mutex> guard(mutex_);
            ended_ = true;
        }
        changed_.notify_all();
        renewer_.join();
        if (read_line(path_) == line_) ::unlink(path_.c_str());
    }
    void require_held() const override {
        const std::string there = read_line(path_);
        if (there != line_)
            FAIL(kExitDisk, "%s is no longer this run's: %s holds it; nothing more is saved there", path_.c_str(),
                 there.empty() ? "nobody" : shown(there).c_str());
    }

private:
    void renew_until_end(std::chrono::milliseconds pause) {
        std::unique_lock<std::mutex> guard(mutex_);
        while (!changed_.wait_for(guard, pause, [this] { return ended_; })) {
            // A failure shows in require_held, or the next renewal mends it.
            if ((hook_ && hook_("renew", path_)) || read_line(path_) != line_) continue;
            ::utimensat(AT_FDCWD, path_.c_str(), nullptr, AT_SYMLINK_NOFOLLOW);
        }
    }

    const std::string path_, line_;
    const IoHook hook_;
    std::mutex mutex_;
    std::condition_variable changed_;
    bool ended_ = false;
    std::thread renewer_;
};

// Writes `line` to a new file.
void write_new(const std::string& path, const std::string& line) {
    const Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644));
    if (file.fd < 0) fail_lock("create", path, errno);
    write_line(file.fd, path, line);
}

ino_t inode_of(const std::string& path) {
    struct stat info{};
    return ::lstat(path.c_str(), &info) == 0 ? info.st_ino : 0;
}

// Replaces the lease of a dead run, the file `inode` with the text `dead`, by one with `line`. Of several runs that
// try, only the one that creates the guard file may do so, and it reads the lease again, since another run may have
// been faster. Returns false if this run may not. A guard whose creator was killed is removed after the time of a
// lease.
bool replace_lease(const std::string& path, ino_t inode, const std::string& dead, const std::string& line,
                   std::chrono::milliseconds lease) {
    const std::string guard = path + ".replacing-" + std::to_string(inode), mine = path + "." + random_digits();
    const int fd = ::open(guard.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0 && errno != EEXIST) fail_lock("create", guard, errno);
    if (fd < 0) {
        if (age(guard) > lease) ::unlink(guard.c_str());
        return false;
    }
    ::close(fd);
    const bool right = inode_of(path) == inode && read_line(path) == dead;
    if (right) {
        write_new(mine, line);
        if (::rename(mine.c_str(), path.c_str()) != 0) fail_lock("rename", mine, errno);
    }
    ::unlink(guard.c_str());
    return right;
}

// Takes over the existing lease `path` if its run is dead. Else returns false and names that run in *holder.
bool take_over(const std::string& path, const std::string& line, std::chrono::milliseconds lease,
               std::string* holder) {
    const ino_t inode = inode_of(path);
    const std::string there = read_line(path);   // empty while its holder has yet to write it
    const auto unrenewed = age(path);
    *holder = shown(there);
    if (inode == 0 || unrenewed < std::chrono::nanoseconds(0)) return false;
    return (unrenewed >= lease || ended_here(there)) && replace_lease(path, inode, there, line, lease);
}

}  // namespace

std::unique_ptr<SaveLock> SaveLock::take(const std::string& folder, const SaveLockOptions& options,
                                         std::string* holder) {
    const std::string path = folder + kName;
    for (;;) {
        bool made = false;
        Descriptor file(open_file(path, &made));
        if (file.fd < 0) continue;   // its holder has just ended
        const int error = call_flock(file.fd, path, options.hook);
        if (error == EWOULDBLOCK) {
            *holder = shown(read_line(file.fd));
            return nullptr;
        }
        if (error == 0) {
            if (!is_same_file(file.fd, path)) continue;
            write_line(file.fd, path, own_line());
            return std::make_unique<Flock>(path, std::exchange(file.fd, -1));
        }
        if (!has_no_flock(error)) fail_lock("lock", path, error);
        const std::string line = own_line();
        if (made) write_line(file.fd, path, line);
        else if (!take_over(path, line, options.lease, holder)) return nullptr;
        return std::make_unique<Lease>(path, line, options);
    }
}
