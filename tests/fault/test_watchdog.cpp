// Progress of a device, the watchdog, and launch checks.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <thread>
#include <utility>

#include "llmc/base/system/files.h"
#include "llmc/fault/watchdog.h"
#include "llmc/parallel/comm/device_progress.h"
#include "llmc/parallel/rank_preflight.h"
#include "tests/support/config_test.h"
#include "tests/support/data_test.h"
#include "tests/support/local_ranks.h"

namespace {

// A table with the row of this process.
struct OwnRow {
    HeartbeatTable table = HeartbeatTable::create(1);
    Heartbeat& row = table.row(0);
    OwnRow() { set_own_row(&table, 0); }
    ~OwnRow() { set_own_row(nullptr, 0); }
};

}  // namespace

// ---- devices

TEST_CASE("device progress: the row follows the device through any number of collectives") {
    const OwnRow own;
    const Heartbeat& row = own.row;
    Ctx ctx;
    device::device_open(ctx, 0);
    {
        DeviceProgress device(ctx);
        int wrong = 0;
        for (int64_t number = 1; number <= 9000; number++) {
            wrong += post_device_collective("reduce") != number;
            device.post();
            const CollectiveQueue before = row.read().device;
            wrong += before.begun != number - 1 || before.finished != number - 1;
            device.begin(ctx, number);
            device::synchronize(ctx);
            device.post();
            wrong += !row.read().device.waits();
            device.finish(ctx, number);
            device::synchronize(ctx);
        }
        CHECK(wrong == 0);
        for (int i = 0; i < 3; i++) CHECK(post_device_collective("gather") == 9001 + i);
        device.begin(ctx, 9001);   // ahead of the device
        device::synchronize(ctx);
        device.post();
        CHECK(row.read().device.begun == 9001);
        CHECK(row.read().device.finished == 9000);
        const int64_t before = row.read().progress;
        device.post();
        CHECK(row.read().progress == before);
        device.advance(ctx);
        device.advance(ctx);
        device::synchronize(ctx);
        device.post();
        device.post();
        CHECK(row.read().progress == before + 1);
    }
    device::device_close(ctx);
}

// ---- hosts

TEST_CASE("watchdog: a later process with the same number is another one") {
    const RankProcess mine = own_process();
    CHECK(process_state(mine.pid, mine.started) == RankView::Process::kRuns);
    CHECK(process_state(mine.pid, mine.started - 1) == RankView::Process::kGone);
}

TEST_CASE("watchdog: a process is not reported as gone if no file descriptor is free to read its state") {
    const RankProcess mine = own_process();
    rlimit before{};
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
    const rlimit none{0, before.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
    const RankView::Process state = process_state(mine.pid, mine.started);
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
    CHECK(state == RankView::Process::kRuns);
}

// A process can end after its file in /proc was opened, which makes reading it fail (ESRCH).
TEST_CASE("watchdog: a process that ends during the check is reported as gone") {
    for (int trial = 0; trial < 300; trial++) {
        int said[2], hold[2];
        REQUIRE(::pipe(said) == 0);
        REQUIRE(::pipe(hold) == 0);
        const pid_t child = ::fork();
        REQUIRE(child >= 0);
        if (child == 0) {   // ends when the other end of `hold` is closed
            ::close(hold[1]);
            int64_t own = own_process().started;
            const bool written = ::write(said[1], &own, sizeof own) == sizeof own;
            ::_exit(written && ::read(hold[0], &own, 1) == 0 ? 0 : 1);
        }
        ::close(hold[0]);
        int64_t started = 0;
        REQUIRE(::read(said[0], &started, sizeof started) == sizeof started);
        ::close(said[0]);
        ::close(said[1]);
        CHECK(process_state(child, started) == RankView::Process::kRuns);
        std::thread reaper([&] {
            ::close(hold[1]);
            ::waitpid(child, nullptr, 0);
        });
        while (process_state(child, started) != RankView::Process::kGone) {}
        reaper.join();
    }
}

TEST_CASE("watchdog: a library call that blocks does not stop the heartbeat") {
    OwnRow own;
    std::promise<void> asked, answer;
    Watchdog watchdog({own_process()}, 0, own.table);
    watchdog.start();
    watchdog.set_device({.error = [&, once = true]() mutable -> std::string {
                             if (!std::exchange(once, false)) return "";
                             asked.set_value();
                             answer.get_future().wait();
                             return "";
                         }, .abort_collectives = {}, .post = {}});
    REQUIRE(asked.get_future().wait_for(std::chrono::seconds(5)) == std::future_status::ready);
    const int64_t before = own.row.beats();
    for (int i = 0; i < 250 && own.row.beats() < before + 3; i++)
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(own.row.beats() >= before + 3);
    answer.set_value();
}

// MPI_Finalize waits for daemons of mpirun, which may be gone when the ranks need them no longer.
TEST_CASE("watchdog: a rank that hangs at its exit is ended with its exit code") {
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        set_comm_timeout(0.5);
        OwnRow own;
        Watchdog watchdog({own_process()}, 0, own.table);
        watchdog.start();
        std::this_thread::sleep_for(std::chrono::seconds(1));   // ends nothing before the rank says so
        own.row.set_end(4);
        std::this_thread::sleep_for(std::chrono::seconds(20));
        ::_exit(99);
    }
    const auto start = std::chrono::steady_clock::now();
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 4);
    CHECK(std::chrono::steady_clock::now() - start > std::chrono::milliseconds(1400));
}

TEST_CASE("watchdog: file access by other threads is progress in slow phases only") {
    const data_test::TempDir dir;
    OwnRow own;
    Watchdog watchdog({own_process()}, 0, own.table);
    watchdog.start();
    auto wait_for_two_ticks = [&] {   // after which the watchdog has seen all blocks
        const int64_t before = own.row.beats();
        for (int i = 0; i < 250 && own.row.beats() < before + 2; i++)
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        REQUIRE(own.row.beats() >= before + 2);
    };
    auto progress_of = [&](Phase phase) {
        wait_for_two_ticks();
        post_phase(phase);
        const int64_t before = own.row.read().progress;
        std::thread([&] {
            std::filesystem::remove(dir / "block.bin");   // write_file makes a new file
            write_file(dir / "block.bin", "block");
        }).join();
        wait_for_two_ticks();
        return own.row.read().progress - before;
    };
    CHECK(progress_of(Phase::kSave) >= 1);
    CHECK(progress_of(Phase::kData) >= 1);
    CHECK(progress_of(Phase::kBackward) == 0);
}

TEST_CASE("launch checks: NCCL_* variables that differ between ranks") {
    LocalRanks(3).run([](Comm& comm) {
        const bool last = comm.world().rank == 2;
        CHECK_EQ(environment_difference(comm, {"NCCL_DEBUG=INFO", last ? "HOME=/a" : "HOME=/b"}), "");
        const std::string line = environment_difference(comm, {"NCCL_DEBUG=INFO", last ? "NCCL_ALGO=Tree"
                                                                                       : "NCCL_ALGO=Ring"});
        CHECK(contains(line, "WARNING: rank 2 "));
        CHECK(contains(line, "has another set of NCCL_ variables than rank 0 "));
        CHECK(contains(line, R"("NCCL_ALGO=Tree NCCL_DEBUG=INFO" against "NCCL_ALGO=Ring NCCL_DEBUG=INFO")"));
    });
}
