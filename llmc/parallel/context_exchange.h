#pragma once
#include "llmc/model/head_exchange.h"
#include "llmc/parallel/comm/comm_stream.h"
#include "llmc/parallel/groups.h"

// The head exchange of context parallelism over the ranks of a context group, on the compute stream. Owns none of its
// arguments. stream: times the exchanges.
HeadExchange context_exchange(const Groups& groups, CommStream& stream);
