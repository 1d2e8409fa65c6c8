// The lock of a --save folder: it has at most one holder, whatever happens to other processes.
#include "llmc/checkpoint/save_lock.h"

#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include "llmc/base/check.h"
#include "tests/support/checkpoint_test.h"

namespace { int flock_error = 0; }

// Takes the place of libc's function in this executable, so that a test can have a file system without locks.
extern "C" int flock(int fd, int operation) {
    if (flock_error == 0) return static_cast<int>(syscall(SYS_flock, fd, operation));
    errno = flock_error;
    return -1;
}

namespace {

using namespace checkpoint_test;

std::unique_ptr<SaveLock> take(const TempDir& dir, std::string* holder = nullptr) {
    std::string ignored;
    return SaveLock::take(dir.path, holder ? holder : &ignored);
}

// A child that takes the lock and holds it until it is killed.
struct Holder {
    explicit Holder(const TempDir& dir) {
        int ends[2];
        REQUIRE(pipe(ends) == 0);
        pid = fork();
        REQUIRE(pid >= 0);
        if (pid == 0) {
            const auto lock = take(dir);
            const char taken = lock ? 'y' : 'n';
            if (write(ends[1], &taken, 1) != 1) _exit(1);
            for (;;) pause();
        }
        close(ends[1]);
        char taken = 0;
        REQUIRE(read(ends[0], &taken, 1) == 1);
        CHECK(taken == 'y');
        close(ends[0]);
    }
    ~Holder() { kill(); }
    void kill() {
        if (pid <= 0) return;
        ::kill(pid, SIGKILL);
        waitpid(pid, nullptr, 0);
        pid = 0;
    }
    pid_t pid = 0;
};

int code_of(const SaveLock& lock) {
    try {
        lock.require_held();
    } catch (const Error& error) {
        return error.exit_code;
    }
    return 0;
}

}  // namespace

TEST_CASE("a locked folder is refused and its holder named; the lock of a killed process is free immediately") {
    const TempDir dir;
    Holder holder(dir);
    std::string who;
    CHECK(!take(dir, &who));
    CHECK(who.find(strf("process %d, since 20", holder.pid)) != std::string::npos);
    holder.kill();
    CHECK(take(dir));
    CHECK(list_directory(dir.path).empty());   // the released lock leaves nothing
}

TEST_CASE("a holder whose file was removed or replaced saves nothing more, and leaves the other file alone") {
    const TempDir dir;
    auto lock = take(dir);
    REQUIRE(lock);
    CHECK(code_of(*lock) == 0);
    CHECK(lock->warning().empty());
    CHECK(unlink((dir / ".lock").c_str()) == 0);
    CHECK(code_of(*lock) == kExitDisk);
    const auto other = take(dir);
    REQUIRE(other);
    CHECK(code_of(*lock) == kExitDisk);
    lock.reset();
    CHECK(code_of(*other) == 0);
}

TEST_CASE("without flock a run may save, is told that nothing protects the folder, and does not stop others") {
    const TempDir dir;
    for (const int error : {ENOLCK, EOPNOTSUPP, ENOSYS}) {
        flock_error = error;
        const auto one = take(dir), two = take(dir);
        REQUIRE(one);
        REQUIRE(two);
        CHECK(one->warning().find("cannot be locked") != std::string::npos);
        CHECK(code_of(*one) == 0);
        CHECK(code_of(*two) == 0);
    }
    flock_error = EIO;
    CHECK_THROWS_AS(take(dir), Error);
    flock_error = 0;
}

// Each process takes the lock many times and counts the holders before and after.
TEST_CASE("of many processes at most one holds the lock at any time, also while others are killed") {
    struct Shared { std::atomic<int> inside, overlaps, taken; };
    const TempDir dir;
    void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    Shared& shared = *new (memory) Shared{};
    std::vector<pid_t> children;
    for (int child = 0; child < 12; child++) {
        const pid_t pid = fork();
        REQUIRE(pid >= 0);
        if (pid == 0) {
            while (shared.taken < 60) {
                const auto lock = take(dir);
                if (!lock) continue;
                shared.overlaps += shared.inside++ > 0;
                shared.taken++;
                std::this_thread::sleep_for(std::chrono::microseconds(300));
                shared.inside--;
                if (shared.taken % 7 == 0 && child % 4 == 0) ::raise(SIGKILL);   // with the lock
            }
            _exit(0);
        }
        children.push_back(pid);
    }
    for (const pid_t pid : children) waitpid(pid, nullptr, 0);
    CHECK(shared.overlaps == 0);
    CHECK(shared.taken >= 60);
    munmap(memory, sizeof(Shared));
}

TEST_CASE("a link or a FIFO in the place of the lock is refused, and nothing behind it is touched") {
    const TempDir dir;
    const std::string target = dir / "target", place = dir / ".lock";
    spill(target, "precious");
    auto code = [&] {
        try {
            take(dir);
        } catch (const Error& error) {
            return error.exit_code;
        }
        return 0;
    };
    REQUIRE(symlink(target.c_str(), place.c_str()) == 0);
    CHECK(code() == kExitDisk);
    CHECK(read_text_file(target, 100) == "precious");
    REQUIRE(unlink(place.c_str()) == 0);
    REQUIRE(mkfifo(place.c_str(), 0600) == 0);
    CHECK(code() == kExitDisk);
}
