#include "llmc/fault/hang_report.h"

#include <algorithm>
#include <tuple>

#include "llmc/base/check.h"

namespace {

using Views = std::vector<RankView>;
constexpr double kStaleS = 2;   // a rank without a heartbeat for so long does not print the report

std::string mark_text(const Mark& mark) { return strf("collective %d (%s)", mark.number, mark.name); }

// The collective that a rank waits in, null if in none. The host's comes first: if the host waits, so does its device.
const Mark* waits_in(const RankPost& post) {
    for (const LanePost& lane : post.lanes)
        if (lane.waits()) return &lane.at;
    return nullptr;
}

std::string step_text(int64_t step, Phase phase) {
    if (step == 0) return phase_text(phase);
    return strf("step %lld, %s", (long long)step, phase_text(phase));
}

bool is_past(const RankPost& post, const Mark& mark) {
    return std::any_of(std::begin(post.lanes), std::end(post.lanes), [&](const LanePost& lane) {
        return lane.finished > 0 && std::tie(lane.at.step, lane.at.number) >= std::tie(mark.step, mark.number);
    });
}

// before: the collective in which other ranks wait for this rank, null if there is none.
std::string place(const RankPost& post, const Mark* before) {
    if (const Mark* mark = waits_in(post))
        return mark_text(*mark) + (mark->step > 0 ? strf(" of step %lld", (long long)mark->step) : "");
    const LanePost& device = post.lanes[kDeviceLane];
    // The host runs ahead of its device; report the place of the device.
    if (device.enqueued > device.begun)
        return step_text(device.next.step, device.next.phase) + ", before " + mark_text(device.next);
    if (before && is_past(post, *before)) before = nullptr;
    return step_text(post.step, post.phase) + (before ? ", before " + mark_text(*before) : "");
}

std::string rank_text(const Views& ranks, int rank) {
    const std::string& where = ranks[static_cast<size_t>(rank)].where;
    return strf("rank %d", rank) + (where.empty() ? "" : " (" + where + ")");
}

// The first collective in which a rank other than the culprits waits.
const Mark* first_waited(const Views& ranks, const std::vector<int>& culprits) {
    const Mark* first = nullptr;
    for (size_t r = 0; r < ranks.size(); r++) {
        if (std::find(culprits.begin(), culprits.end(), static_cast<int>(r)) != culprits.end()) continue;
        const Mark* mark = ranks[r].ended() ? nullptr : waits_in(ranks[r].post);
        if (mark && (!first || std::tie(mark->step, mark->number) < std::tie(first->step, first->number))) first = mark;
    }
    return first;
}

// "; ranks 0,1,3 wait in collective 7 (...) of step 41 for 31 s; rank 4 is in step 41, save": all but the culprits.
std::string others_text(const Views& ranks, const std::vector<int>& culprits) {
    struct Group {
        std::string text;
        bool waits;
        double since_s;
        std::vector<int> ranks;
    };
    std::vector<Group> groups;
    for (size_t r = 0; r < ranks.size(); r++) {
        const RankView& view = ranks[r];
        const int rank = static_cast<int>(r);
        const bool culprit = std::find(culprits.begin(), culprits.end(), rank) != culprits.end();
        if (culprit || view.ended() || !view.known) continue;
        const Group mine{place(view.post, nullptr), waits_in(view.post) != nullptr, view.idle_s, {rank}};
        auto same = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.text == mine.text; });
        if (same == groups.end()) {
            groups.push_back(mine);
            continue;
        }
        same->ranks.push_back(rank);
        same->since_s = std::min(same->since_s, mine.since_s);
    }
    std::string text;
    for (const Group& g : groups) {
        const bool one = g.ranks.size() == 1;
        text += "; " + std::string(one ? "rank " : "ranks ") + ranks_text(g.ranks);
        if (g.waits) text += strf(" %s in %s for %.3g s", one ? "waits" : "wait", g.text.c_str(), g.since_s);
        else text += std::string(one ? " is in " : " are in ") + g.text;
    }
    return text;
}

// One clause per culprit, then others_text.
template <typename Clause>
std::string sentence(const Views& ranks, const std::vector<int>& culprits, const Clause& clause) {
    const Mark* before = first_waited(ranks, culprits);
    std::string text;
    for (int rank : culprits) {
        const RankView& view = ranks[static_cast<size_t>(rank)];
        text += (text.empty() ? "" : "; ") + rank_text(ranks, rank) + clause(view, place(view.post, before));
    }
    return text + others_text(ranks, culprits);
}

template <typename Condition> std::vector<int> running_ranks(const Views& ranks, const Condition& holds) {
    std::vector<int> found;
    for (size_t r = 0; r < ranks.size(); r++)
        if (!ranks[r].ended() && holds(ranks[r])) found.push_back(static_cast<int>(r));
    return found;
}

// The timeout of a rank that does not wait for another.
double timeout_of(const RankView& view, double timeout_s) {
    const bool slow = !view.post.past_first_step || phase_is_slow(view.post.phase);
    return slow ? kSlowFactor * timeout_s : timeout_s;
}

std::string silent_text(const Views& ranks, double timeout_s) {
    const auto silent = running_ranks(ranks, [&](const RankView& v) { return v.known && v.silent_s > timeout_s; });
    if (silent.empty()) return "";
    return sentence(ranks, silent, [](const RankView& v, const std::string& where) {
        const bool stopped = v.process == RankView::Process::kStopped;
        return strf(" %s for %.3g s, last seen in ", stopped ? "has been suspended by a signal" : "sends no heartbeat",
                    v.silent_s) + where;
    });
}

std::string stuck_text(const Views& ranks, double timeout_s) {
    const auto stuck = running_ranks(ranks, [&](const RankView& v) {
        return v.known && !waits_in(v.post) && v.idle_s > timeout_of(v, timeout_s);
    });
    if (stuck.empty()) return "";
    return sentence(ranks, stuck, [](const RankView& v, const std::string& where) {
        return " is in " + where + strf(", without progress for %.3g s", v.idle_s);
    });
}

// All ranks wait: the network between them is broken, or they called different collectives.
std::string deadlock_text(const Views& ranks, double timeout_s) {
    double idle_s = 1e300, allowed_s = 0;
    int waiting = 0;
    bool same = true;
    const Mark* first = nullptr;
    for (const RankView& view : ranks) {
        if (view.ended()) continue;
        const Mark* mark = waits_in(view.post);
        // A suspended rank is the cause; silent_text names it when it has been silent long enough.
        if (!mark || !view.known || view.process == RankView::Process::kStopped) return "";
        if (!first) first = mark;
        same = same && std::tie(mark->step, mark->number) == std::tie(first->step, first->number)
               && std::string(mark->name) == first->name;
        idle_s = std::min(idle_s, view.idle_s);
        // Before its first step a rank may wait for another that is in a slow call.
        allowed_s = std::max(allowed_s, view.post.past_first_step ? timeout_s : kSlowFactor * timeout_s);
        waiting++;
    }
    if (waiting == 0 || idle_s <= allowed_s) return "";
    return std::string(same ? "all ranks wait in the same collective, the connection between them is gone"
                            : "the ranks wait for each other in different collectives") + others_text(ranks, {});
}

}  // namespace

std::string place_text(const RankPost& post) { return place(post, nullptr); }

std::string ranks_text(const std::vector<int>& ranks) {
    std::string text;
    for (size_t i = 0; i < ranks.size();) {
        size_t last = i;
        while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) last++;
        text += (text.empty() ? "" : ",") + std::to_string(ranks[i]);
        if (last > i) text += (last > i + 1 ? "-" : ",") + std::to_string(ranks[last]);
        i = last + 1;
    }
    return text;
}

int lowest_living(const std::vector<RankView>& ranks) {
    for (size_t r = 0; r < ranks.size(); r++) {
        const RankView& view = ranks[r];
        const bool bad = view.process == RankView::Process::kGone || view.process == RankView::Process::kStopped;
        if (!view.ended() && view.known && !bad && view.silent_s < kStaleS) return static_cast<int>(r);
    }
    return -1;
}

std::string hang_report(const std::vector<RankView>& ranks, double timeout_s) {
    const auto gone = running_ranks(ranks, [](const RankView& v) { return v.process == RankView::Process::kGone; });
    if (!gone.empty())
        return sentence(ranks, gone, [](const RankView&, const std::string& where) {
            return " is gone, last seen in " + where;
        });
    if (timeout_s <= 0) return "";
    for (auto* text_of : {silent_text, stuck_text, deadlock_text})
        if (std::string text = text_of(ranks, timeout_s); !text.empty())
            return text + strf(" (--comm-timeout %g)", timeout_s);
    return "";
}
