// Measures the bandwidth between the ranks' devices, for doctor and bench.
#pragma once
#include <string>
#include <vector>

#include "llmc/parallel/comm/comm.h"

// Times every collective for messages of 4 MiB to 1 GiB (on the CPU 64 KiB and 4 MiB) and every pair of ranks. Returns
// a line for each size, a line on the pairs, and a warning if there are slow links. Needs several ranks.
std::vector<std::string> check_comm(Ctx& ctx, Comm& comm);

// A warning that names the links below 0.7 of the median of their kind (within a host, between hosts), and the rank
// that has most of them; "" if there are none. rates[a][b] = rates[b][a]; labels: host and GPU of each rank.
std::string slow_links(const std::vector<std::vector<double>>& rates, const std::vector<std::string>& hosts,
                       const std::vector<std::string>& labels);
