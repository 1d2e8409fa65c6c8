// The hang report of a host from constructed heartbeats.
#include "llmc/base/check.h"
#include "llmc/fault/rank_view.h"
#include "tests/support/doctest.h"

namespace {

constexpr double kTimeout = 30;

CollectiveCall collective(int64_t step, int number, const char* name, Phase phase = Phase::kBackward) {
    CollectiveCall c{.step = step, .number = number, .phase = phase};
    std::snprintf(c.name, sizeof c.name, "%s", name);
    return c;
}

// In backward of step 41, with a recent heartbeat.
RankView computing() {
    RankView view;
    view.post.step = 41, view.post.phase = Phase::kBackward, view.post.past_first_step = 1, view.where = "on north";
    return view;
}

RankView waiting(const CollectiveCall& at, double idle_s, CollectiveQueue RankPost::*queue = &RankPost::host) {
    RankView view = computing();
    view.post.*queue = {.enqueued = 9, .begun = 9, .finished = 8, .current = at, .next = {}};
    view.idle_s = idle_s;
    return view;
}

// As ranks 0, 1, ...
std::string report(std::vector<RankView> ranks, double timeout_s = kTimeout, const std::string& others = "") {
    for (size_t r = 0; r < ranks.size(); r++) ranks[r].rank = static_cast<int>(r);
    return hang_report(ranks, timeout_s, others);
}

}  // namespace

TEST_CASE("hang report: there is none while a rank makes progress") {
    const CollectiveCall reduce = collective(41, 7, "reduce layers.3");
    CHECK(report({}) == "");
    CHECK(report({computing(), computing()}) == "");
    // Others may wait any time for a rank that computes.
    CHECK(report({computing(), waiting(reduce, 1000), waiting(reduce, 1000)}) == "");
    RankView slow = computing();
    slow.idle_s = kTimeout;
    CHECK(report({slow, waiting(reduce, kTimeout)}) == "");
    slow.idle_s = 1e6;
    CHECK(report({slow, waiting(reduce, 1e6)}, 0) == "");   // no limit
    RankView ended = waiting(reduce, 1e6);
    ended.end_code = 0, ended.silent_s = 1e6, ended.process = RankView::Process::kGone;
    CHECK(report({ended, ended}) == "");
}

TEST_CASE("hang report: a rank that is gone is named immediately, with the collective that the others wait in") {
    const CollectiveCall reduce = collective(41, 7, "reduce layers.3");
    std::vector<RankView> ranks = {waiting(reduce, 1.25), computing(), waiting(reduce, 0.5), computing()};
    ranks[1].process = RankView::Process::kGone;
    ranks[3].post.phase = Phase::kForward;
    for (double timeout : {0.0, kTimeout})
        CHECK(report(ranks, timeout) == "rank 1 (on north) is gone, last seen in step 41, backward; ranks 0,2 wait in "
              "collective 7 (reduce layers.3) of step 41 for 0.5 s; rank 3 is in step 41, forward");
}

TEST_CASE("hang report: a rank without heartbeats, and one that is suspended") {
    const CollectiveCall gather = collective(41, 2, "gather layers.0");
    std::vector<RankView> ranks = {waiting(gather, 31), computing()};
    ranks[1].silent_s = 30.5;
    CHECK(report(ranks) == "rank 1 (on north) sends no heartbeat for 30.5 s, last seen in step "
          "41, backward; rank 0 waits in collective 2 (gather layers.0) of step 41 for 31 s (--comm-timeout 30)");
    ranks[1].process = RankView::Process::kStopped;
    CHECK(report(ranks).find("rank 1 (on north) has been suspended by a signal for 30.5 s") == 0);
    ranks[1].silent_s = kTimeout;
    CHECK(report(ranks) == "");
}

TEST_CASE("hang report: a rank that is stuck; slow phases and the first step take ten times as long") {
    const CollectiveCall reduce = collective(41, 7, "reduce layers.3");
    RankView stuck = computing();
    stuck.idle_s = 30.1;
    CHECK(report({stuck, waiting(reduce, 40)}) == "rank 0 (on north) is in step 41, backward, "
          "without progress for 30.1 s; rank 1 waits in collective 7 (reduce "
          "layers.3) of step 41 for 40 s (--comm-timeout 30)");
    RankView first = stuck, saves = stuck;
    first.post.past_first_step = 0;
    saves.post.phase = Phase::kSave;
    for (RankView slow : {first, saves}) {
        CHECK(report({slow, waiting(reduce, 40)}) == "");
        slow.idle_s = kSlowFactor * kTimeout + 1;
        const std::string text = report({slow, waiting(reduce, 400)});
        CHECK(text.find("without progress for 301 s") != std::string::npos);
    }
    // The report names the place of the device, not that of its host, which is ahead.
    stuck.post.device = {.enqueued = 12, .begun = 9, .finished = 9, .current = collective(40, 8, "gather layers.0"),
                                     .next = reduce};
    stuck.post.step = 42;
    CHECK(report({stuck, waiting(reduce, 40, &RankPost::device)}).find("rank 0 (on north) is in step 41, "
          "backward, before collective 7 (reduce layers.3), without") == 0);
}

TEST_CASE("hang report: if all ranks wait, the cause is the connection or the order of calls") {
    const CollectiveCall reduce = collective(41, 7, "reduce layers.3"), gather = collective(41, 8, "gather layers.0");
    CHECK(report({waiting(reduce, 31), waiting(reduce, 30)}) == "");
    CHECK(report({waiting(reduce, 31), waiting(reduce, 32)}) == "all ranks wait in the same collective, the "
          "connection between them is gone; ranks 0,1 wait in collective 7 (reduce layers.3) of step 41 for 31 s "
          "(--comm-timeout 30)");
    // A rank that was suspended while it waited is named when its silence has lasted as long.
    RankView suspended = waiting(reduce, 32);
    suspended.process = RankView::Process::kStopped;
    suspended.silent_s = 29;
    CHECK(report({waiting(reduce, 32), suspended}) == "");
    suspended.silent_s = 31;
    CHECK(report({waiting(reduce, 34), suspended}).find("rank 1 (on north) has been suspended by a "
          "signal for 31 s") == 0);
    CHECK(report({waiting(reduce, 31), waiting(gather, 32)}) == "the ranks wait for each other in different "
        "collectives; rank 0 waits in collective 7 (reduce layers.3) of step 41 for 31 s; rank 1 waits in "
        "collective 8 (gather layers.0) of step 41 for 32 s (--comm-timeout 30)");
}

TEST_CASE("hang report: ranks that all wait for another host, which reports its own ranks first") {
    const std::string others = "south: ranks 2,3";
    const auto text = [&](const RankView& one, const RankView& two) { return report({one, two}, kTimeout, others); };
    const CollectiveCall reduce = collective(41, 7, "reduce layers.3");
    CHECK(text(waiting(reduce, 31), waiting(reduce, 31)) == "");
    CHECK(text(waiting(reduce, 31.6), computing()) == "");
    CHECK(text(waiting(reduce, 31.6), waiting(reduce, 40)) ==
          "all ranks of this host wait for another host (south: ranks 2,3); ranks 0,1 wait in collective 7 (reduce "
          "layers.3) of step 41 for 31.6 s (--comm-timeout 30)");
    RankView stuck = computing();
    stuck.idle_s = 30.1;
    CHECK(text(waiting(reduce, 30.1), stuck).rfind("rank 1 (on north) is in step 41, backward, without", 0) == 0);
    // The other host may read data, save or sample for long while these ranks wait in the next exchange.
    const RankView reads = waiting(collective(42, 1, "exchange", Phase::kData), 301);
    const RankView saves = waiting(collective(42, 1, "exchange", Phase::kSave), 3001);
    CHECK(text(reads, reads) == "");
    CHECK(text(saves, saves) == "");
    RankView late = reads;
    late.idle_s = 302;
    CHECK(text(late, late).rfind("all ranks of this host wait", 0) == 0);
    // Unless the device waits in a collective of the step.
    late = reads;
    late.idle_s = 32;
    late.post.device = waiting(reduce, 0, &RankPost::device).post.device;
    CHECK(text(late, late).rfind("all ranks of this host wait", 0) == 0);
    late.post.past_first_step = 0;
    CHECK(text(late, late) == "");
}

TEST_CASE("hang report: consecutive ranks are printed as a range") {
    CHECK(ranks_text({0, 1, 2, 3, 5, 7, 8}) == "0-3,5,7,8");
    CHECK(ranks_text({}) == "");
}
