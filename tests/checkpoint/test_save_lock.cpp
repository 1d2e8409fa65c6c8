// The lock of a --save folder, by flock and by a lease: it has at most one holder, whatever happens to other
// processes.
#include "llmc/checkpoint/save_lock.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include "llmc/base/check.h"
#include "tests/support/checkpoint_test.h"

namespace {

using namespace checkpoint_test;
using std::chrono::milliseconds;

constexpr int kErrors[] = {0, ENOLCK, EOPNOTSUPP};   // 0: by flock; the others: by a lease

SaveLockOptions options_for(int flock_error, milliseconds lease = milliseconds(60000)) {
    SaveLockOptions options{.lease = lease, .hook = {}};
    if (flock_error)
        options.hook = [=](const char* call, const std::string&) {
            return std::string(call) == "flock" ? flock_error : 0;
        };
    return options;
}

std::unique_ptr<SaveLock> take(const TempDir& dir, const SaveLockOptions& options, std::string* holder = nullptr) {
    std::string ignored;
    return SaveLock::take(dir.path, options, holder ? holder : &ignored);
}

// A child that takes the lock and holds it until it is killed.
struct Holder {
    Holder(const TempDir& dir, const SaveLockOptions& options) {
        int ends[2];
        REQUIRE(pipe(ends) == 0);
        pid = fork();
        REQUIRE(pid >= 0);
        if (pid == 0) {
            const auto lock = take(dir, options);
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
    for (const int error : kErrors) {
        CAPTURE(error);
        const TempDir dir;
        Holder holder(dir, options_for(error));
        std::string who;
        CHECK(!take(dir, options_for(error), &who));
        CHECK(who.find(strf("process %d, since 20", holder.pid)) != std::string::npos);
        CHECK(who.find("pid:[") == std::string::npos);
        holder.kill();
        CHECK(take(dir, options_for(error)));
    }
}

TEST_CASE("releasing the lock leaves nothing in the folder") {
    for (const int error : kErrors) {
        CAPTURE(error);
        const TempDir dir;
        for (int round = 0; round < 2; round++) {
            const auto lock = take(dir, options_for(error));
            REQUIRE(lock);
            CHECK(code_of(*lock) == 0);
            CHECK(list_directory(dir.path) == std::vector<std::string>{".lock"});
        }
        CHECK(list_directory(dir.path).empty());
    }
}

TEST_CASE("a holder whose file was removed or replaced saves nothing more, and leaves the other file alone") {
    for (const int error : kErrors) {
        CAPTURE(error);
        const TempDir dir;
        auto lock = take(dir, options_for(error));
        REQUIRE(lock);
        CHECK(unlink((dir / ".lock").c_str()) == 0);
        CHECK(code_of(*lock) == kExitDisk);
        const auto other = take(dir, options_for(error));
        REQUIRE(other);
        CHECK(code_of(*lock) == kExitDisk);
        lock.reset();
        CHECK(code_of(*other) == 0);
    }
}

// Each process takes the lock many times and counts the holders before and after.
TEST_CASE("of many processes at most one holds the lock at any time, also while others are killed") {
    struct Shared { std::atomic<int> inside, overlaps, taken; };
    for (const int error : kErrors) {
        CAPTURE(error);
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
                    const auto lock = take(dir, options_for(error));
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
}

TEST_CASE("a lease of another host is taken over when it has expired") {
    const TempDir dir;
    setenv("LLMFP8_HOST", "elsewhere", 1);
    Holder holder(dir, options_for(ENOLCK, milliseconds(400)));
    setenv("LLMFP8_HOST", "here", 1);
    const auto mine = options_for(ENOLCK, milliseconds(400));
    std::string who;
    for (int look = 0; look < 12; look++) {   // it is renewed meanwhile
        std::this_thread::sleep_for(milliseconds(100));
        CHECK(!take(dir, mine, &who));
    }
    CHECK(who.rfind("host elsewhere, process ", 0) == 0);
    holder.kill();
    CHECK(!take(dir, mine));
    std::unique_ptr<SaveLock> lock;
    const auto begin = std::chrono::steady_clock::now();
    while (!lock && std::chrono::steady_clock::now() - begin < std::chrono::seconds(10)) {
        std::this_thread::sleep_for(milliseconds(20));
        lock = take(dir, mine);
    }
    REQUIRE(lock);
    CHECK(code_of(*lock) == 0);
    unsetenv("LLMFP8_HOST");
}

TEST_CASE("a holder that could not renew its lease learns that it has lost the folder") {
    const TempDir dir;
    auto deaf = options_for(EOPNOTSUPP, milliseconds(100));
    deaf.hook = [](const char* call, const std::string&) { return std::string(call) == "flock" ? EOPNOTSUPP : EIO; };
    auto lock = take(dir, deaf);
    REQUIRE(lock);
    std::this_thread::sleep_for(milliseconds(150));
    CHECK(code_of(*lock) == 0);   // late, but nobody took it
    const auto other = take(dir, options_for(EOPNOTSUPP, milliseconds(100)));
    REQUIRE(other);
    CHECK(code_of(*lock) == kExitDisk);
    lock.reset();
    CHECK(code_of(*other) == 0);
}

TEST_CASE("a link or a FIFO in the place of the lock is refused, and nothing behind it is touched") {
    const TempDir dir;
    const std::string target = dir / "target", place = dir / ".lock";
    spill(target, "precious");
    auto code = [&] {
        try {
            take(dir, {});
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
