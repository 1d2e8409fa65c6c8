// Measures the bandwidth between the ranks' devices, for doctor and bench.
#pragma once
#include <string>
#include <vector>

#include "llmc/parallel/comm/comm.h"

// Times every collective for messages of 4 MiB to 1 GiB (on the CPU 64 KiB and 4 MiB) and every pair of ranks. Prints a
// table of the collectives on rank 0 unless `table` is false. Returns lines for the log: the rates of the largest size
// and of the pairs, and slow links.
std::vector<std::string> check_comm(Ctx& ctx, Comm& comm, bool table = true);

// ---- its parts, for tests

// The rank that `rank` is paired with in a round, -1 for none. In pair_rounds(ranks) rounds every pair occurs once.
int pair_rounds(int ranks);
int peer_in_round(int rank, int round, int ranks);

// One warning per slow link, or per rank most of whose links are slow. A link is slow below 0.7 of the median of its
// kind, within a host or between hosts. rates[a][b] = rates[b][a]; labels: host and GPU of each rank.
std::vector<std::string> slow_links(const std::vector<std::vector<double>>& rates,
                                    const std::vector<std::string>& hosts, const std::vector<std::string>& labels);
