// The hang report of a host: says which of its ranks wait for which, from their heartbeats alone, without reading the
// clock or looking at processes.
#pragma once
#include <string>
#include <vector>

#include "llmc/fault/heartbeat.h"

// One rank of this host as a watchdog sees it.
struct RankView {
    enum class Process { kRuns, kStopped, kGone };
    int rank = 0;
    RankPost post;
    std::string where;         // "process 4711 on node3"
    int end_code = -1;         // -1: the rank has not decided to end
    double idle_s = 0;         // seconds without progress
    double silent_s = 0;       // seconds since the last beat of that rank's watchdog
    Process process = Process::kRuns;
    bool ended() const { return end_code >= 0; }
};

// Multiplies the timeout in slow phases and until the first step is done.
inline constexpr double kSlowFactor = 10;
// Seconds for which ranks that wait for another host let that host report its own ranks first.
inline constexpr double kOthersFirstS = 1.5;

// The reason why the run cannot continue, "" while it can. With timeout_s 0 the only reason is a rank that is gone.
// others: the ranks of other hosts, as "node2: ranks 2,3"; "" if there are none.
std::string hang_report(const std::vector<RankView>& ranks, double timeout_s, const std::string& others = "");

// "step 41, backward, before collective 7 (reduce layers.3)", "collective 7 (reduce layers.3) of step 41".
std::string place_text(const RankPost& post);
// "0-3,5"
std::string ranks_text(const std::vector<int>& ranks);
