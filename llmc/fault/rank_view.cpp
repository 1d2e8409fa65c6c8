#include "llmc/fault/rank_view.h"

#include <algorithm>
#include <functional>
#include <tuple>

#include "llmc/base/check.h"

namespace {

using Views = std::vector<RankView>;

std::string text_of(const CollectiveCall& c) { return strf("collective %d (%s)", c.number, c.name); }

// The collective that a rank waits in, null if in none. If the host waits, so does its device.
const CollectiveCall* waits_in(const RankPost& post) {
    return post.host.waits() ? &post.host.current : post.device.waits() ? &post.device.current : nullptr;
}

bool same_call(const CollectiveCall& a, const CollectiveCall& b) {
    return std::tie(a.step, a.number) == std::tie(b.step, b.number) && std::string(a.name) == b.name;
}

std::string step_text(int64_t step, Phase phase) {
    if (step == 0) return phase_text(phase);
    return strf("step %lld, %s", (long long)step, phase_text(phase));
}

using Condition = std::function<bool(const RankView&)>;

// "; ranks 0,1,3 wait in collective 7 (...) of step 41 for 31 s; rank 4 is in step 41, save": all but the culprits.
std::string others_text(const Views& ranks, const Condition& culprit) {
    struct Group {
        std::string text;
        bool waits;
        double since_s;
        std::vector<int> ranks;
    };
    std::vector<Group> groups;
    for (const RankView& view : ranks) {
        if (view.ended() || culprit(view)) continue;
        const Group mine{place_text(view.post), waits_in(view.post) != nullptr, view.idle_s, {view.rank}};
        auto same = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.text == mine.text; });
        if (same == groups.end()) {
            groups.push_back(mine);
            continue;
        }
        same->ranks.push_back(view.rank);
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

// The ranks that have not ended and for which `holds`: one clause for each, then others_text. "" if there are none.
template <typename Clause>
std::string sentence(const Views& ranks, const Condition& holds, const Clause& clause) {
    std::string text;
    for (const RankView& view : ranks)
        if (!view.ended() && holds(view))
            text += (text.empty() ? "" : "; ") + strf("rank %d (", view.rank) + view.where + ")"
                    + clause(view, place_text(view.post));
    return text.empty() ? "" : text + others_text(ranks, holds);
}

// The timeout of a rank that does not wait for another.
double timeout_of(const RankView& view, double timeout_s) {
    const bool slow = !view.post.past_first_step || phase_is_slow(view.post.phase);
    return slow ? kSlowFactor * timeout_s : timeout_s;
}

std::string silent_text(const Views& ranks, double timeout_s) {
    return sentence(ranks, [&](const RankView& v) { return v.silent_s > timeout_s; },
                    [](const RankView& v, const std::string& where) {
        const bool stopped = v.process == RankView::Process::kStopped;
        return strf(" %s for %.3g s, last seen in ", stopped ? "has been suspended by a signal" : "sends no heartbeat",
                    v.silent_s) + where;
    });
}

std::string stuck_text(const Views& ranks, double timeout_s) {
    return sentence(ranks, [&](const RankView& v) { return !waits_in(v.post) && v.idle_s > timeout_of(v, timeout_s); },
                    [](const RankView& v, const std::string& where) {
        return " is in " + where + strf(", without progress for %.3g s", v.idle_s);
    });
}

// Seconds for which a rank that waits may make no progress. Before its first step it may wait for another that is in a
// slow call. A rank of another host, whose heartbeats are not seen here, may be in one whenever this rank could be:
// rank 0 may write a checkpoint or sample while the others wait in the next exchange.
double patience(const RankPost& post, double timeout_s, bool other_hosts) {
    if (!other_hosts) return post.past_first_step ? timeout_s : kSlowFactor * timeout_s;
    double factor = kSlowFactor * kSlowFactor;
    for (const CollectiveQueue* queue : {&post.host, &post.device}) {
        if (!queue->waits() || !post.past_first_step) continue;
        const Phase phase = queue->current.phase;
        factor = std::min(factor, phase == Phase::kData ? kSlowFactor
                                  : phase_is_slow(phase) ? kSlowFactor * kSlowFactor : 1);
    }
    return factor * timeout_s + kOthersFirstS;
}

// All ranks wait: for those of another host, or the network between them is broken, or they called different
// collectives.
std::string deadlock_text(const Views& ranks, double timeout_s, const std::string& others) {
    double idle_s = 1e300, allowed_s = 0;
    bool same = true;
    const CollectiveCall* first = nullptr;
    for (const RankView& view : ranks) {
        if (view.ended()) continue;
        const CollectiveCall* at = waits_in(view.post);
        // A suspended rank is the cause; silent_text names it when it has been silent long enough.
        if (!at || view.process == RankView::Process::kStopped) return "";
        if (!first) first = at;
        same = same && same_call(*at, *first);
        idle_s = std::min(idle_s, view.idle_s);
        allowed_s = std::max(allowed_s, patience(view.post, timeout_s, !others.empty()));
    }
    if (!first || idle_s <= allowed_s) return "";
    const std::string cause = !others.empty() ? "all ranks of this host wait for another host (" + others + ")"
                              : same ? "all ranks wait in the same collective, the connection between them is gone"
                                     : "the ranks wait for each other in different collectives";
    return cause + others_text(ranks, [](const RankView&) { return false; });
}

}  // namespace

std::string place_text(const RankPost& post) {
    if (const CollectiveCall* at = waits_in(post))
        return text_of(*at) + (at->step > 0 ? strf(" of step %lld", ll(at->step)) : "");
    const CollectiveQueue& device = post.device;
    // The host runs ahead of its device; report the place of the device.
    if (device.enqueued > device.begun)
        return step_text(device.next.step, device.next.phase) + ", before " + text_of(device.next);
    return step_text(post.step, post.phase);
}

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

std::string hang_report(const std::vector<RankView>& ranks, double timeout_s, const std::string& others) {
    const std::string gone =
        sentence(ranks, [](const RankView& v) { return v.process == RankView::Process::kGone; },
                 [](const RankView&, const std::string& where) { return " is gone, last seen in " + where; });
    if (!gone.empty() || timeout_s <= 0) return gone;
    std::string text = silent_text(ranks, timeout_s);
    if (text.empty()) text = stuck_text(ranks, timeout_s);
    if (text.empty()) text = deadlock_text(ranks, timeout_s, others);
    return text.empty() ? "" : text + strf(" (--comm-timeout %g)", timeout_s);
}
