// Who waits for whom: what one rank's watchdog makes of the posts of all. No clocks and no processes in here.
#pragma once
#include <string>
#include <vector>

#include "llmc/fault/heartbeat.h"

// One rank as a watchdog sees it.
struct RankView {
    enum class Process { kUnknown, kRuns, kStopped, kGone };
    RankPost post;
    std::string where;         // "process 4711 on node3"
    double idle_s = 0;         // since anything in its posts moved but the signs of life
    double silent_s = 0;       // since the last sign of life
    Process process = Process::kUnknown;   // kUnknown: on another host
    bool known = true;         // its posts reach this host
    bool ended() const { return post.end_code >= 0; }
};

// How much longer than the timeout one call may last without a sign of progress before the first step is done and in
// slow phases.
inline constexpr double kSlowFactor = 10;

// The line that says why the run cannot go on, "" while it can. timeout_s 0: only because of ranks that are gone.
std::string hang_report(const std::vector<RankView>& ranks, double timeout_s);

// The lowest rank that can still speak, -1 if there is none.
int lowest_living(const std::vector<RankView>& ranks);

// "step 41, backward, before collective 7 (reduce layers.3)", "collective 7 (reduce layers.3) of step 41".
std::string place_text(const RankPost& post);
// "0-3,5"
std::string ranks_text(const std::vector<int>& ranks);
