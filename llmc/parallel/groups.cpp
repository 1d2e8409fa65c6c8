#include "llmc/parallel/groups.h"

#include "llmc/base/check.h"

namespace {

// Opens this rank's group of `size` ranks at distances of `stride`. Returns null if that would be all ranks, unless
// `apart` asks for a separate communicator.
std::unique_ptr<Comm> open_group(Comm& all, int size, int stride, bool apart = false) {
    const World& world = all.world();
    if (size == world.ranks && (size == 1 || !apart)) return nullptr;
    if (size == 1) return open_single();
    const int first = world.rank / (size * stride) * size * stride + world.rank % stride;
    std::vector<int> members;
    for (int i = 0; i < size; i++) members.push_back(first + i * stride);
    return all.subgroup(members);
}

int shard_size(const Comm& all, const GroupSizes& sizes) { return sizes.shard > 0 ? sizes.shard : all.world().ranks; }

Comm& checked(Comm& all, const GroupSizes& sizes) {
    const int ranks = all.world().ranks, shard = shard_size(all, sizes);
    CHECK(ranks % shard == 0 && shard % sizes.context == 0 && shard % sizes.expert == 0,
          "%d ranks in groups of %d, %d and %d", ranks, sizes.context, sizes.expert, shard);
    return all;
}

}  // namespace

GroupSizes group_sizes(const Config& config, int ranks) {
    return {.context = static_cast<int>(config.context_parallel),
            .shard = ranks > 1 ? static_cast<int>(config.zero_group) : 0,
            .expert = static_cast<int>(config.expert_parallel)};
}

Groups::Groups(Comm& all, const GroupSizes& sizes)
    : own_context_(open_group(checked(all, sizes), sizes.context, 1, true)),
      own_expert_(open_group(all, sizes.expert, 1, true)), own_shard_(open_group(all, shard_size(all, sizes), 1)),
      own_expert_data_(sizes.expert == 1 ? nullptr
                                         : open_group(all, shard_size(all, sizes) / sizes.expert, sizes.expert)),
      own_replicas_(open_group(all, all.world().ranks / shard_size(all, sizes), shard_size(all, sizes))),
      world(all), context(own_context_ ? *own_context_ : all), expert(own_expert_ ? *own_expert_ : all),
      shard(own_shard_ ? *own_shard_ : all), expert_data(own_expert_data_ ? *own_expert_data_ : shard),
      replicas(own_replicas_ ? *own_replicas_ : all), data_ranks(all.world().ranks / sizes.context),
      data_rank(all.world().rank / sizes.context) {}

void Groups::connect(Ctx& ctx, int seconds) const {
    for (const auto* group : {&own_context_, &own_expert_, &own_shard_, &own_expert_data_, &own_replicas_})
        if (*group) (*group)->connect(ctx, seconds);
}

HeadExchange context_exchange(const Groups& groups, CommStream& stream) {
    Comm& context = groups.context;
    return {context.world().ranks, context.world().rank,
            [&context, &stream](Ctx& ctx, int layer, int64_t sequences, Tensor out, Tensor in) {
                const CollectivePurpose purpose(ctx, kExchangePurpose + std::to_string(layer));
                const int64_t elems = in.elems / sequences;
                stream.timed(ctx, [&] {
                    for (int64_t b = 0; b < sequences; b++)
                        context.all_to_all(ctx, out.slice(b * elems, elems), in.slice(b * elems, elems));
                });
            }};
}

ExpertExchange make_expert_exchange(const Groups& groups, CommStream& stream) {
    Comm& experts = groups.expert;
    return {experts.world().ranks, experts.world().rank,
            [&experts, &stream](Ctx& ctx, const char* what, int layer, Tensor shards) {
                return stream.begin(ctx, what, layer, [&](Ctx& comm) { experts.all_gather(comm, shards); });
            },
            [&experts, &stream](Ctx& ctx, const char* what, int layer, Tensor out, Tensor in) {
                return stream.begin(ctx, what, layer, [&](Ctx& comm) { experts.all_to_all(comm, out, in); });
            },
            [&stream](Ctx& ctx, int64_t number) { stream.wait(ctx, number); }};
}
