// The heartbeat table of a host, and the file of the launch wrapper.
#include <fcntl.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "llmc/base/check.h"
#include "llmc/fault/heartbeat.h"
#include "llmc/fault/rank_view.h"
#include "tests/support/doctest.h"

TEST_CASE("heartbeats: one process of a host prints why the run ends") {
    CHECK(claim_last_line());   // without a row nobody else can have printed it
    CHECK(claim_last_line());
    const HeartbeatTable table = HeartbeatTable::create(2);
    set_own_row(&table, 1);
    CHECK(claim_last_line());
    set_own_row(&table, 0);
    CHECK(!claim_last_line());
    set_own_row(nullptr, 0);
}

TEST_CASE("heartbeats: the launch wrapper reads the whole outcome or none, and the first error") {
    const HeartbeatTable table = HeartbeatTable::create(1);
    HeartbeatHeader& header = table.header();
    const int file = ::open(table.path().c_str(), O_RDONLY);
    const auto text = [&] {
        char read[9] = "";
        CHECK(::pread(file, read, 8, offsetof(HeartbeatHeader, outcome)) == 8);
        return std::string(read);
    };
    std::atomic<bool> done{false};
    std::thread writer([&] {
        for (int i = 0; i < 200000; i++, header.outcome = 0) header.set_outcome(130);
        done = true;
    });
    std::string other;
    while (!done)
        if (const std::string read = text(); read != "" && read != "end 130\n") other = read;
    writer.join();
    CHECK(other == "");
    header.set_outcome(kExitOk);
    CHECK(text() == "end 000\n");
    for (int code : {kExitDisk, kExitPeerLost, kExitOk}) header.set_outcome(code);
    CHECK(text() == "end 007\n");
    ::close(file);
}

TEST_CASE("heartbeats: a row of zeros is empty, and posts are read back") {
    const HeartbeatTable table = HeartbeatTable::create(2);
    Heartbeat& row = table.row(1);
    CHECK(row.end_code() == -1);
    CHECK(row.read().step == 0);
    CHECK(!row.read().host.waits());
    CHECK(place_text(row.read()) == "start");

    set_own_row(&table, 1);
    post_step(3);
    post_phase(Phase::kBackward);
    CHECK(post_device_collective("sum of 4 fp32") == 1);
    CHECK(place_text(row.read()) == "step 3, backward, before collective 1 (sum of 4 fp32)");
    post_host_collective("reduce layers.1");
    CHECK(row.read().host.waits());
    CHECK(place_text(row.read()) == "collective 2 (reduce layers.1) of step 3");
    post_host_collective_end();
    post_device(1, 0);
    CHECK(place_text(row.read()) == "collective 1 (sum of 4 fp32) of step 3");
    post_device(1, 1);
    CHECK(place_text(row.read()) == "step 3, backward");
    post_first_step();
    post_end(kExitDisk);
    post_end(kExitOk);
    CHECK(row.read().past_first_step == 1);
    CHECK(row.end_code() == kExitDisk);
    const int64_t progress = row.read().progress;
    post_progress();
    CHECK(row.read().progress == progress + 1);
    post_step(4);
    post_host_collective("again");
    CHECK(row.read().host.current.number == 1);   // numbered within the step
    CHECK(table.row(0).read().step == 0);
    set_own_row(nullptr, 0);
    post_step(9);   // ignored
    CHECK(row.read().step == 4);
}

TEST_CASE("heartbeats: a reader sees whole posts") {
    const HeartbeatTable table = HeartbeatTable::create(1);
    std::atomic<bool> done{false};
    std::thread poster([&] {
        RankPost post;
        for (int i = 1; i <= 20000; i++) {
            post.step = post.host.begun = post.device.next.step = i;
            table.row(0).write(post);
        }
        done = true;
    });
    int wrong = 0;
    while (!done) {
        const RankPost post = table.row(0).read();
        wrong += post.step != post.host.begun || post.step != post.device.next.step;
    }
    poster.join();
    CHECK(wrong == 0);
    CHECK(table.row(0).read().step == 20000);
}

TEST_CASE("heartbeats: the names of all enqueued collectives are kept") {
    const HeartbeatTable table = HeartbeatTable::create(1);
    set_own_row(&table, 0);
    post_step(5);
    for (int i = 1; i <= 1000; i++) CHECK(post_device_collective(strf("gather %d", i).c_str()) == i);
    post_device(1, 0);
    CollectiveQueue queue = table.row(0).read().device;
    CHECK(std::string(queue.current.name) == "gather 1");
    CHECK(queue.next.number == 2);
    post_device(700, 699);
    post_device(1000, 999);
    queue = table.row(0).read().device;
    CHECK(queue.current.number == 1000);
    CHECK(queue.waits());
    CHECK(queue.next.number == 0);   // none
    set_own_row(nullptr, 0);
}

TEST_CASE("heartbeats: other processes see the memory while its creator lives, and nothing of it stays") {
    std::string path;
    {
        HeartbeatTable ours = HeartbeatTable::create(3);
        path = ours.path();
        const pid_t child = ::fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            HeartbeatTable theirs = HeartbeatTable::open(path, 3);
            theirs.row(2).set_end(17);
            ::_exit(0);
        }
        ::waitpid(child, nullptr, 0);
        CHECK(ours.row(2).end_code() == 17);
        CHECK(ours.row(1).end_code() == -1);
    }
    CHECK_THROWS_AS(HeartbeatTable::open(path, 3), Error);
}

TEST_CASE("launcher file: only an unnamed file with the launch wrapper's mark is written to") {
    char path[] = "/tmp/llmfp8-test-XXXXXX";
    const int fd = ::mkstemp(path);
    REQUIRE(fd >= 0);
    const std::string open_path = "/proc/self/fd/" + std::to_string(fd);
    CHECK(open_launcher_file(nullptr) == -1);
    CHECK(open_launcher_file("") == -1);
    CHECK(open_launcher_file("/etc/hosts") == -1);
    CHECK(::write(fd, kLauncherMagic, 8) == 8);
    CHECK(open_launcher_file(open_path.c_str()) == -1);   // it has a name
    ::unlink(path);
    const int found = open_launcher_file(open_path.c_str());
    CHECK(found >= 0);
    ::close(found);
    CHECK(::pwrite(fd, "x", 1, 0) == 1);
    CHECK(open_launcher_file(open_path.c_str()) == -1);
    ::close(fd);
}
