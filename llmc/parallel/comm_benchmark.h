// --check-comm: how fast the devices of the ranks exchange data, measured before training.
#pragma once
#include <string>
#include <vector>

#include "llmc/parallel/comm.h"

// Times every collective for messages of 1 MiB to 1 GiB (on the CPU of 64 KiB to 4 MiB) and every pair of ranks, prints
// the tables on rank 0 unless `tables` is false, and returns lines for the log: the rates of the largest size, the slow
// links.
std::vector<std::string> check_comm(Ctx& ctx, Comm& comm, bool tables = true);

// ---- its parts, for tests

// Bytes that one rank sends for each byte of the message, which is the whole of what a rank holds in a collective.
enum class Collective { kAllReduce, kReduceScatter, kAllGather, kAllToAll };
double bus_factor(Collective collective, int ranks);

// Whom rank meets in a round, -1 for nobody. In pair_rounds(ranks) rounds every two ranks meet once.
int pair_rounds(int ranks);
int opponent(int rank, int round, int ranks);

// rates[a][b]: of the link between a and b, both halves filled in. A link is slow below 0.7 of the median of its kind,
// within a host or between hosts; a rank most of whose links are slow is named once. `labels`: host and GPU.
std::vector<std::string> slow_links(const std::vector<std::vector<double>>& rates,
                                    const std::vector<std::string>& hosts, const std::vector<std::string>& labels);
