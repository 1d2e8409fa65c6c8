// The hang report from constructed heartbeats, and the heartbeat table.
#include <atomic>
#include <cstdlib>
#include <fcntl.h>
#include <memory>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/fault/hang_report.h"
#include "llmc/fault/heartbeat.h"
#include "tests/support/doctest.h"

namespace {

constexpr double kTimeout = 30;

Mark mark(int64_t step, int number, const char* name) {
    Mark m;
    m.step = step;
    m.number = number;
    m.phase = Phase::kBackward;
    std::snprintf(m.name, sizeof m.name, "%s", name);
    return m;
}

// In backward of step 41, with a recent heartbeat.
RankView computing() {
    RankView view;
    view.post.step = 41;
    view.post.phase = Phase::kBackward;
    view.post.past_first_step = 1;
    view.process = RankView::Process::kRuns;
    view.where = "on north";
    return view;
}

RankView waiting(const Mark& at, double idle_s, Lane lane = kHostLane) {
    RankView view = computing();
    view.post.lanes[lane] = {.enqueued = 9, .begun = 9, .finished = 8, .at = at, .next = {}};
    view.idle_s = idle_s;
    return view;
}

}  // namespace

TEST_CASE("hang report: there is none while a rank makes progress") {
    const Mark reduce = mark(41, 7, "reduce layers.3");
    CHECK(hang_report({}, kTimeout) == "");
    CHECK(hang_report({computing(), computing()}, kTimeout) == "");
    // Others may wait any time for a rank that computes.
    CHECK(hang_report({computing(), waiting(reduce, 1000), waiting(reduce, 1000)}, kTimeout) == "");
    RankView slow = computing();
    slow.idle_s = kTimeout;
    CHECK(hang_report({slow, waiting(reduce, kTimeout)}, kTimeout) == "");
    slow.idle_s = 1e6;
    CHECK(hang_report({slow, waiting(reduce, 1e6)}, 0) == "");   // no limit
    RankView ended = waiting(reduce, 1e6);
    ended.post.end_code = 0;
    ended.silent_s = 1e6;
    ended.process = RankView::Process::kGone;
    CHECK(hang_report({ended, ended}, kTimeout) == "");
}

TEST_CASE("hang report: a rank that is gone is named immediately, with the collective that the others wait in") {
    const Mark reduce = mark(41, 7, "reduce layers.3");
    std::vector<RankView> ranks = {waiting(reduce, 1.25), computing(), waiting(reduce, 0.5), computing()};
    ranks[1].process = RankView::Process::kGone;
    ranks[3].post.phase = Phase::kForward;
    for (double timeout : {0.0, kTimeout})
        CHECK(hang_report(ranks, timeout) == "rank 1 (on north) is gone, last seen in step 41, backward, before "
              "collective 7 (reduce layers.3); ranks 0,2 wait in collective 7 (reduce layers.3) of step 41 for 0.5 "
              "s; rank 3 is in step 41, forward");
    // It had finished that collective.
    ranks[1].post.lanes[kHostLane] = {.enqueued = 7, .begun = 7, .finished = 7, .at = reduce, .next = {}};
    CHECK(hang_report(ranks, kTimeout).rfind("rank 1 (on north) is gone, last seen in step 41, backward; ranks 0,2",
                                         0) == 0);
}

TEST_CASE("hang report: a rank without heartbeats, and one that is suspended") {
    const Mark gather = mark(41, 2, "gather layers.0");
    std::vector<RankView> ranks = {waiting(gather, 31), computing()};
    ranks[1].silent_s = 30.5;
    ranks[1].process = RankView::Process::kUnknown;   // on another host
    CHECK(hang_report(ranks, kTimeout) == "rank 1 (on north) sends no heartbeat for 30.5 s, last seen in step "
          "41, backward, before collective 2 (gather layers.0); rank 0 waits in collective 2 (gather layers.0) of step "
          "41 for 31 s (--comm-timeout 30)");
    ranks[1].process = RankView::Process::kStopped;
    CHECK(hang_report(ranks, kTimeout).find("rank 1 (on north) has been suspended by a signal for 30.5 s") == 0);
    ranks[1].known = false;   // its host is not connected
    CHECK(hang_report(ranks, kTimeout) == "");
    ranks[1].known = true;
    ranks[1].silent_s = kTimeout;
    CHECK(hang_report(ranks, kTimeout) == "");
}

TEST_CASE("hang report: a rank that is stuck; slow phases and the first step take ten times as long") {
    const Mark reduce = mark(41, 7, "reduce layers.3");
    RankView stuck = computing();
    stuck.idle_s = 30.1;
    CHECK(hang_report({stuck, waiting(reduce, 40)}, kTimeout) == "rank 0 (on north) is in step 41, backward, before "
          "collective 7 (reduce layers.3), without progress for 30.1 s; rank 1 waits in collective 7 (reduce "
          "layers.3) of step 41 for 40 s (--comm-timeout 30)");
    RankView first = stuck, saves = stuck;
    first.post.past_first_step = 0;
    saves.post.phase = Phase::kSave;
    for (RankView slow : {first, saves}) {
        CHECK(hang_report({slow, waiting(reduce, 40)}, kTimeout) == "");
        slow.idle_s = kSlowFactor * kTimeout + 1;
        const std::string text = hang_report({slow, waiting(reduce, 400)}, kTimeout);
        CHECK(text.find("without progress for 301 s") != std::string::npos);
    }
    // The report names the place of the device, not that of its host, which is ahead.
    stuck.post.lanes[kDeviceLane] = {.enqueued = 12, .begun = 9, .finished = 9, .at = mark(40, 8, "gather layers.0"),
                                     .next = reduce};
    stuck.post.step = 42;
    CHECK(hang_report({stuck, waiting(reduce, 40, kDeviceLane)}, kTimeout).find("rank 0 (on north) is in step 41, "
          "backward, before collective 7 (reduce layers.3), without") == 0);
}

TEST_CASE("hang report: if all ranks wait, the cause is the connection or the order of calls") {
    const Mark reduce = mark(41, 7, "reduce layers.3"), gather = mark(41, 8, "gather layers.0");
    CHECK(hang_report({waiting(reduce, 31), waiting(reduce, 30)}, kTimeout) == "");
    CHECK(hang_report({waiting(reduce, 31), waiting(reduce, 32)}, kTimeout) ==
          "all ranks wait in the same collective, the "
          "connection between them is gone; ranks 0,1 wait in collective 7 (reduce layers.3) of step 41 "
          "for 31 s "
          "(--comm-timeout 30)");
    // A rank that was suspended while it waited is named when its silence has lasted as long.
    RankView suspended = waiting(reduce, 32);
    suspended.process = RankView::Process::kStopped;
    suspended.silent_s = 29;
    CHECK(hang_report({waiting(reduce, 32), suspended}, kTimeout) == "");
    suspended.silent_s = 31;
    CHECK(hang_report({waiting(reduce, 34), suspended}, kTimeout).find("rank 1 (on north) has been suspended by a "
          "signal for 31 s") == 0);
    CHECK(
        hang_report({waiting(reduce, 31), waiting(gather, 32)}, kTimeout) ==
        "the ranks wait for each other in different "
        "collectives; rank 0 waits in collective 7 (reduce layers.3) of step 41 for 31 s; rank 1 waits in "
        "collective 8 (gather layers.0) of step 41 for 32 s (--comm-timeout 30)");
    RankView far = waiting(reduce, 31);
    far.known = false;
    CHECK(hang_report({waiting(reduce, 31), far}, kTimeout) == "");
}

TEST_CASE("hang report: the lowest rank that can print; consecutive ranks are printed as a range") {
    std::vector<RankView> ranks(4, computing());
    CHECK(lowest_living(ranks) == 0);
    ranks[0].process = RankView::Process::kStopped;
    ranks[1].silent_s = 5;
    ranks[2].post.end_code = 2;
    CHECK(lowest_living(ranks) == 3);
    ranks[3].process = RankView::Process::kGone;
    CHECK(lowest_living(ranks) == -1);
    CHECK(ranks_text({0, 1, 2, 3, 5, 7, 8}) == "0-3,5,7,8");
    CHECK(ranks_text({}) == "");
}

// ---- the heartbeat table

TEST_CASE("heartbeats: one process of a host prints why the run ends") {
    CHECK(claim_last_line());   // without a row nobody else can have printed it
    CHECK(claim_last_line());
    const HeartbeatTable table = HeartbeatTable::create("", 2);
    set_own_row(&table, 1);
    CHECK(claim_last_line());
    set_own_row(&table, 0);
    CHECK(!claim_last_line());
    set_own_row(nullptr, 0);
}

TEST_CASE("heartbeats: a row of zeros is empty, and posts are read back") {
    const HeartbeatTable table = HeartbeatTable::create("", 2);
    Heartbeat* const row = &table.row(1);
    RankPost post = row->read();
    CHECK(post.end_code == -1);
    CHECK(post.step == 0);
    CHECK(!post.lanes[kHostLane].waits());
    CHECK(place_text(post) == "start");

    set_own_row(&table, 1);
    post_step(3);
    post_phase(Phase::kBackward);
    const int64_t number = row->enqueue(kHostLane, "reduce layers.1");
    CHECK(row->enqueue(kDeviceLane, "sum of 4 fp32") == 1);
    CHECK(place_text(row->read()) == "step 3, backward, before collective 2 (sum of 4 fp32)");
    row->set_begun(kHostLane, number);
    CHECK(row->read().lanes[kHostLane].waits());
    CHECK(place_text(row->read()) == "collective 1 (reduce layers.1) of step 3");
    row->set_finished(kHostLane, number);
    row->set_begun(kDeviceLane, 1);
    row->set_finished(kDeviceLane, 1);
    CHECK(place_text(row->read()) == "step 3, backward");
    post_first_step();
    post_end(kExitDisk);
    post = row->read();
    CHECK(post.past_first_step == 1);
    CHECK(post.end_code == kExitDisk);

    const auto copy = std::make_unique<Heartbeat>();   // on another host
    copy->write(post);
    const RankPost again = copy->read();
    CHECK(again.step == 3);
    CHECK(again.end_code == kExitDisk);
    CHECK(again.progress == post.progress);
    CHECK(std::string(again.lanes[kHostLane].at.name) == "reduce layers.1");
    post_step(4);
    CHECK(row->enqueue(kHostLane, "again") == 2);
    CHECK(row->read().lanes[kHostLane].next.number == 1);   // numbered within the step
    CHECK(table.row(0).read().step == 0);
    set_own_row(nullptr, 0);
    post_step(9);   // ignored
    CHECK(row->read().step == 4);
}

TEST_CASE("heartbeats: a reader always sees finished <= begun <= enqueued") {
    const auto row = std::make_unique<Heartbeat>();
    std::atomic<bool> done{false};
    std::thread poster([&] {
        for (int i = 0; i < 20000; i++) {
            const int64_t number = row->enqueue(kHostLane, "x");
            row->set_begun(kHostLane, number);
            row->set_finished(kHostLane, number);
        }
        done = true;
    });
    int wrong = 0;
    while (!done) {
        const LanePost lane = row->read().lanes[kHostLane];
        wrong += lane.finished > lane.begun || lane.begun > lane.enqueued;
    }
    poster.join();
    CHECK(wrong == 0);
    CHECK(row->read().lanes[kHostLane].finished == 20000);
}

TEST_CASE("heartbeats: the names of all enqueued collectives are kept") {
    const auto row = std::make_unique<Heartbeat>();
    // Two steps of an 8B model with a bucket per parameter and all communication in FP8.
    const int enqueued = 2 * (2 * 224 + 67 + 291);
    row->begin_step(5);
    for (int i = 1; i <= enqueued; i++) row->enqueue(kDeviceLane, strf("gather %d", i).c_str());
    row->set_begun(kDeviceLane, 1);
    LanePost lane = row->read().lanes[kDeviceLane];
    CHECK(std::string(lane.at.name) == "gather 1");
    CHECK(lane.next.number == 2);
    row->set_begun(kDeviceLane, enqueued);
    lane = row->read().lanes[kDeviceLane];
    CHECK(lane.at.number == enqueued);
    CHECK(lane.next.number == 0);   // none
}

TEST_CASE("heartbeats: other processes see the memory while its creator lives, and nothing of it stays") {
    std::string path;
    {
        HeartbeatTable ours = HeartbeatTable::create("", 3);
        path = ours.path();
        const pid_t child = ::fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            HeartbeatTable theirs = HeartbeatTable::open(path, 3);
            theirs.row(2).begin_step(17);
            ::_exit(0);
        }
        ::waitpid(child, nullptr, 0);
        CHECK(ours.row(2).read().step == 17);
        CHECK(ours.row(1).read().step == 0);
    }
    CHECK_THROWS_AS(HeartbeatTable::open(path, 3), Error);
}

TEST_CASE("heartbeats: only a name that a launch wrapper gives is that of its file") {
    for (const char* name : {"", "x", "/etc/hosts", "../../etc/hosts", "llmfp8-/../../etc/hosts", "hosts/llmfp8-a"}) {
        ::setenv(kHeartbeatVariable, name, 1);
        CHECK(launcher_file() == "");
    }
    ::unsetenv(kHeartbeatVariable);
}

TEST_CASE("heartbeats: the launch wrapper's file gets the outcome, or the table") {
    const std::string name = "llmfp8-test-" + std::to_string(::getpid());
    ::setenv(kHeartbeatVariable, name.c_str(), 1);
    const std::string path = launcher_file();
    ::unsetenv(kHeartbeatVariable);
    CHECK(launcher_file().empty());
    CHECK(!HeartbeatTable::is_empty_file(path));
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
    REQUIRE(fd >= 0);
    CHECK(HeartbeatTable::is_empty_file(path));
    ::setenv(kHeartbeatVariable, name.c_str(), 1);
    write_outcome(kExitDisk);
    ::unsetenv(kHeartbeatVariable);
    char text[16] = "";
    CHECK(::pread(fd, text, sizeof text - 1, 0) == 12);
    CHECK(std::string(text) == "outcome 007\n");
    CHECK(!HeartbeatTable::is_empty_file(path));
    CHECK(::ftruncate(fd, 0) == 0);
    CHECK(HeartbeatTable::create(path, 2).row(1).read().end_code == -1);
    ::close(fd);
    ::unlink(path.c_str());
}
