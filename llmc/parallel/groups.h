// The process groups of a run. Every collective names its group.
#pragma once
#include <memory>

#include "llmc/config/config.h"
#include "llmc/model/expert_exchange.h"
#include "llmc/model/head_exchange.h"
#include "llmc/model/parameters/flat_layout.h"
#include "llmc/parallel/comm/comm.h"
#include "llmc/parallel/comm/comm_stream.h"

struct GroupSizes {
    int context = 1;   // ranks that share a sequence
    int shard = 0;     // ranks that share one copy of what --zero shards; 0: all. A multiple of the other two.
    int expert = 1;    // ranks that share the experts of each layer
};

// The group sizes of a run on `ranks` ranks.
GroupSizes group_sizes(const Config& config, int ranks);

// Groups consist of neighbouring ranks: rank r is in context group r / context, expert group r / expert and shard group
// r / shard.
class Groups {
public:
    // Collective. `all` is not owned, and its number of ranks must be a multiple of all sizes.
    explicit Groups(Comm& all, const GroupSizes& sizes = {});
    // Connects the devices of the groups, once those of all ranks are connected; see Comm::connect.
    void connect(Ctx& ctx, int seconds) const;

private:
    // Communicators of groups that have several ranks but not all of them. The context group and the expert group have
    // their own even if they have all ranks, because their collectives run beside the others, and one communicator
    // would put all in one order.
    const std::unique_ptr<Comm> own_context_, own_expert_, own_shard_, own_expert_data_, own_replicas_;

public:
    Comm& world;      // all ranks
    Comm& context;    // ranks that share a sequence (context parallelism)
    Comm& expert;     // ranks that share the experts of each layer (expert parallelism)
    Comm& shard;      // ranks that shard state among them (ZeRO)
    Comm& expert_data;   // those of them that hold the same experts
    Comm& replicas;   // ranks that hold the same shard, one of each shard group
    // The number of context groups, each of which trains on other samples, and the number of this rank's group.
    const int data_ranks, data_rank;

    // The ranks that share a group of parameters as shards.
    Comm& shard_of(const ParamGroup& group) const { return group.parts > 1 ? expert_data : shard; }
};

// The head exchange of context parallelism over the ranks of a context group, on the compute stream. Owns none of its
// arguments. stream: times the exchanges.
HeadExchange context_exchange(const Groups& groups, CommStream& stream);
// The exchange of expert parallelism over the ranks of an expert group, on this stream.
ExpertExchange make_expert_exchange(const Groups& groups, CommStream& stream);
