// The hang report: says which ranks wait for which, from the heartbeats of all ranks alone, without reading the clock
// or looking at processes.
#pragma once
#include <string>
#include <vector>

#include "llmc/fault/heartbeat.h"

// One rank as a watchdog sees it.
struct RankView {
    enum class Process { kUnknown, kRuns, kStopped, kGone };
    RankPost post;
    std::string where;         // "process 4711 on node3"
    double idle_s = 0;         // seconds without progress
    double silent_s = 0;       // seconds since the watchdog thread of that rank last posted
    Process process = Process::kUnknown;   // kUnknown: on another host
    bool known = true;         // its heartbeats reach this host
    bool ended() const { return post.end_code >= 0; }
};

// Multiplies the timeout in slow phases and until the first step is done.
inline constexpr double kSlowFactor = 10;

// The reason why the run cannot continue, "" while it can. With timeout_s 0 the only reason is a rank that is gone.
std::string hang_report(const std::vector<RankView>& ranks, double timeout_s);

// The lowest rank that can still print the report, -1 if there is none.
int lowest_living(const std::vector<RankView>& ranks);

// "step 41, backward, before collective 7 (reduce layers.3)", "collective 7 (reduce layers.3) of step 41".
std::string place_text(const RankPost& post);
// "0-3,5"
std::string ranks_text(const std::vector<int>& ranks);
