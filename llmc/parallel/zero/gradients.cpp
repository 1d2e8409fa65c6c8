// In BF16 and FP8 a bucket is reduced by an exchange of shards, after which every rank sums the ranks' values of its
// shard in fp32, in rank order.
#include "llmc/parallel/zero/gradients.h"

#include <algorithm>

static Tensor first(const Tensor& longest, int64_t elems) { return longest.slice(0, elems); }

// See Gradients::is_alone. With --zero 2 and 3, sums of a wider type than the gradients are apart from them.
static std::vector<bool> alone_buckets(const Config& config, const Buckets& buckets, const Groups& groups) {
    const bool sums_apart = shards_grads(config, buckets.ranks()) && config.grad_dtype != config.grad_shard_dtype;
    std::vector<bool> alone;
    for (const ParamGroup& bucket : buckets.all())
        alone.push_back(buckets.ranks(bucket) == 1 && groups.replicas.world().ranks == 1 && !sums_apart);
    return alone;
}

Gradients::Gradients(const Config& config, const ParamTable& table, const Buckets& buckets, const Groups& groups,
                     CommStream& stream, Arena& arena)
    : config_(config), buckets_(buckets), groups_(groups), stream_(stream),
      sharded_(shards_state(config, buckets.ranks())), alone_(alone_buckets(config, buckets, groups)),
      placement_(shards_grads(config, buckets.ranks()) ? shared_placement(buckets, table, config.overlap, alone_)
                                                       : whole_placement(buckets)),
      order_(buckets.all().size()) {
    const Dtype dtype = config.dtype == Dtype::kFp64 ? Dtype::kFp64 : config.grad_dtype;
    grads_ = arena.take(Purpose::kGradients, dtype, placement_.elems);
    if (shares_memory() || (buckets.ranks() > 1 && dtype == Dtype::kBf16))
        reduced_ = arena.take(Purpose::kGradients, shares_memory() ? config.grad_shard_dtype : Dtype::kFp32,
                              place_reduced());
    if (buckets.ranks() > 1) take_comm_buffers(arena);
}

// Returns the elements of reduced_.
int64_t Gradients::place_reduced() {
    int64_t elems = 0;
    for (const ParamGroup& bucket : buckets_.all()) {
        reduced_begin_.push_back(elems);
        if (!is_alone(bucket)) elems += sharded_ ? buckets_.shard_elems(bucket) : bucket.elems;
    }
    return elems;
}

void Gradients::take_comm_buffers(Arena& arena) {
    int64_t longest_bf16 = 0, longest_fp8 = 0, longest_shard = 0;
    for (const ParamGroup& bucket : buckets_.all()) {
        if (is_alone(bucket)) continue;
        longest_shard = std::max(longest_shard, buckets_.shard_elems(bucket));
        if (comm_dtype(bucket) == GradCommDtype::kBf16) longest_bf16 = std::max(longest_bf16, bucket.elems);
        if (comm_dtype(bucket) == GradCommDtype::kFp8) longest_fp8 = std::max(longest_fp8, bucket.elems);
    }
    auto take = [&](Dtype dtype, int64_t elems) { return arena.take(Purpose::kComm, dtype, elems); };
    if (longest_bf16 > 0) {
        if (grads_.dtype != Dtype::kBf16) send_ = take(Dtype::kBf16, longest_bf16);
        receive_ = take(Dtype::kBf16, longest_bf16);
    }
    if (groups_.replicas.world().ranks > 1 && shard_dtype() == Dtype::kBf16) wide_ = take(Dtype::kFp32, longest_shard);
    if (longest_fp8 == 0) return;
    send_codes_ = take(Dtype::kE4m3, longest_fp8);
    receive_codes_ = take(Dtype::kE4m3, longest_fp8);
    send_scales_ = take(Dtype::kFp32, longest_fp8 / kGradCommChunk);
    receive_scales_ = take(Dtype::kFp32, longest_fp8 / kGradCommChunk);
    if (config_.fp8_stats_interval == 0) return;
    exact_ = take(Dtype::kFp32, longest_fp8);
    compare_scratch_ = take(Dtype::kFp64, 4 * kPartialSums);
    report_ = take(Dtype::kFp64, static_cast<int64_t>(sizeof(GradCommReport) / sizeof(double)));
}

// bf16 gradients gain nothing from a wider type. Gradients of embeddings, norms and biases are never in FP8: they are
// few or sparse.
GradCommDtype Gradients::comm_dtype(const ParamGroup& bucket) const {
    const GradCommDtype unquantized = grads_.dtype == Dtype::kBf16 ? GradCommDtype::kBf16 : GradCommDtype::kFp32;
    if (config_.grad_comm_dtype == Dtype::kFp32 || buckets_.ranks(bucket) == 1) return unquantized;
    if (config_.grad_comm_dtype == Dtype::kBf16) return GradCommDtype::kBf16;
    if (bucket.form == ParamForm::kOther) return unquantized;
    return GradCommDtype::kFp8;
}

// ---- views

Tensor Gradients::grads(const ParamGroup& bucket) const {
    return grads_.slice(placement_.offsets[buckets_.number(bucket)], bucket.elems);
}

Tensor Gradients::grad(int param) const {
    const ParamGroup& bucket = layout().group_of(param);
    return grads(bucket).slice(layout().offset(param) - bucket.begin, layout().elems(param));
}

Tensor Gradients::shard_of(const ParamGroup& bucket, const Tensor& whole) const {
    const int64_t elems = buckets_.shard_elems(bucket);
    return whole.slice(groups_.shard_of(bucket).world().rank * elems, elems);
}

Tensor Gradients::reduced_whole(const ParamGroup& bucket) const {
    if (!reduced_ || is_alone(bucket)) return grads(bucket);
    return reduced_.slice(reduced_begin_[buckets_.number(bucket)], bucket.elems);
}

Tensor Gradients::reduced_shard(const ParamGroup& bucket) const {
    if (reduced_ && sharded_ && !is_alone(bucket))
        return reduced_.slice(reduced_begin_[buckets_.number(bucket)], buckets_.shard_elems(bucket));
    return shard_of(bucket, reduced_whole(bucket));
}

Tensor Gradients::reduced(const ShardRange& range) const {
    const ParamGroup& bucket = buckets_.all()[static_cast<size_t>(range.bucket)];
    if (reduced_ && !is_alone(bucket))
        return reduced_.slice(reduced_begin_[buckets_.number(bucket)] + range.shard
                                  - (sharded_ ? buckets_.shard_begin(bucket) : bucket.begin), range.elems);
    return grad(range.param).slice(range.begin, range.elems);
}

std::vector<Tensor> Gradients::norm_shards() const {
    if (buckets_.ranks() == 1) return {grads_};
    std::vector<Tensor> shards;
    for (const ParamGroup& bucket : buckets_.all()) shards.push_back(reduced_shard(bucket));
    return shards;
}

std::vector<Tensor> Gradients::exchanged() const {
    std::vector<Tensor> tensors;
    if (!shares_memory()) return tensors;
    if (grads_.dtype == Dtype::kBf16) tensors.push_back(first(grads_, placement_.shared));
    for (const Tensor& buffer : {send_, receive_, send_codes_, receive_codes_, send_scales_, receive_scales_})
        if (buffer) tensors.push_back(buffer);
    return tensors;
}

// ---- the step

void Gradients::zero(Ctx& ctx) {
    const Tensor own = grads_.slice(placement_.shared, placement_.elems - placement_.shared);
    device::fill_bytes(ctx, own.data, 0, own.bytes());
}

void Gradients::begin(Ctx& ctx, const BackwardPass& pass) {
    pass_ = pass;
    if (buckets_.ranks() == 1 || !(shares_memory() || pass.last)) return;
    reducing_ = true;
    reduced_buckets_ = 0;
    comparing_ = pass.last && pass.compare && report_;
    if (comparing_) device::fill_bytes(ctx, report_.data, 0, report_.bytes());
}

void Gradients::before_layer(Ctx& ctx, int layer) {
    if (layer == config_.shape.num_layers) prepare_stage(ctx, 0);
}

void Gradients::after_layer(Ctx& ctx, int layer) {
    if (reducing_) reduce_layer(ctx, layer);
    prepare_stage(ctx, static_cast<int>(config_.shape.num_layers) - layer + 1);
}

// Makes ctx wait until the memory of the buckets that `stage` is the first to write is free, and clears it.
void Gradients::prepare_stage(Ctx& ctx, int stage) {
    int64_t newest = 0;
    Event* done = nullptr;
    for (size_t bucket = 0; bucket < placement_.first_stage.size(); bucket++) {
        if (placement_.first_stage[bucket] != stage) continue;
        for (int overlapping : placement_.overlapping[bucket]) {
            const auto other = static_cast<size_t>(overlapping);
            if (order_[other] <= newest) continue;
            newest = order_[other];
            done = done_[other];
        }
    }
    stream_.order_after(ctx, done, newest);
    for (size_t bucket = 0; bucket < placement_.first_stage.size(); bucket++)
        if (placement_.first_stage[bucket] == stage) clear(ctx, bucket);
}

// Zeroes what backward adds to, and the gaps between parameters.
void Gradients::clear(Ctx& ctx, size_t bucket) {
    const ParamGroup& group = buckets_.all()[bucket];
    const Tensor memory = grads(group);
    auto zero = [&](int64_t begin, int64_t end) {
        if (begin == end) return;
        const Tensor part = memory.slice(begin, end - begin);
        device::fill_bytes(ctx, part.data, 0, part.bytes());
    };
    int64_t at = 0;
    for (int param : group.params) {
        if (accumulates(param)) continue;
        const int64_t offset = layout().offset(param) - group.begin;
        zero(at, offset);
        at = offset + layout().elems(param);
    }
    zero(at, group.elems);
}

void Gradients::reduce_layer(Ctx& ctx, int layer) {
    bool waited = false;
    for (size_t b = 0; b < buckets_.all().size(); b++) {
        const ParamGroup& bucket = buckets_.all()[b];
        if (bucket.first_layer != layer) continue;
        Ctx& comm = stream_.comm_ctx(ctx);
        if (!waited) stream_.wait_for_compute(ctx, comm);
        waited = true;
        const CollectivePurpose purpose(comm, "reduce " + layers_text(bucket, config_.shape.num_layers));
        reduce(comm, bucket);
        reduced_buckets_++;
        if (&comm == &ctx || !shares_memory() || is_alone(bucket)) continue;
        while (done_.size() < order_.size()) done_.push_back(OwnedEvent::create());
        order_[b] = stream_.record(comm, done_[b]);
    }
    reducing_ = reduced_buckets_ < buckets_.all().size();
}

void Gradients::finish(Ctx& ctx) {
    if (buckets_.ranks() == 1) return;
    CHECK(reduced_buckets_ == buckets_.all().size(), "%zu of %zu buckets were reduced", reduced_buckets_,
          buckets_.all().size());
    Ctx& comm = stream_.comm_ctx(ctx);
    if (&comm == &ctx) return;
    if (!all_reduced_) all_reduced_ = OwnedEvent::create();
    stream_.order_after(ctx, all_reduced_, stream_.record(comm, all_reduced_));
}

void Gradients::all_reduce_norm(Ctx& ctx, StepState* state) {
    static_assert(offsetof(StepState, sum_squares) == offsetof(StepState, loss_sum) + sizeof(double)
                  && offsetof(StepState, z_sum) == offsetof(StepState, loss_sum) + 2 * sizeof(double));
    if (buckets_.ranks() == 1) return;
    const CollectivePurpose purpose(ctx, "loss and gradient norm");
    stream_.timed(ctx, [&] {
        groups_.world.sum(ctx, {&state->loss_sum, Dtype::kFp64, config_.z_loss > 0 ? 3 : 2});
        groups_.world.sum(ctx, {&state->bad_tokens, Dtype::kInt32, 1});
    });
}

void Gradients::copy_report(Ctx& ctx, void* host) const {
    if (report_) device::copy_to_host(ctx, host, report_.data, report_bytes());
}

// ---- a bucket

void Gradients::reduce(Ctx& comm, const ParamGroup& bucket) {
    if (is_alone(bucket)) return;
    switch (comm_dtype(bucket)) {
        case GradCommDtype::kFp32: reduce_fp32(comm, bucket); break;
        case GradCommDtype::kBf16: reduce_bf16(comm, bucket); break;
        case GradCommDtype::kFp8: reduce_fp8(comm, bucket); break;
    }
    if (!sharded_)
        stream_.timed(comm, [&] { groups_.shard_of(bucket).all_gather(comm, reduced_whole(bucket)); });
    if (pass_.last && groups_.replicas.world().ranks > 1) sum_replicas(comm, bucket);
}

// Sums in fp32, also for a bf16 shard.
void Gradients::sum_replicas(Ctx& comm, const ParamGroup& bucket) {
    const Tensor shard = reduced_shard(bucket), sums = wide_ ? first(wide_, shard.elems) : shard;
    if (wide_) ops::cast(comm, {.out = sums, .in = shard});
    stream_.timed(comm, [&] { groups_.replicas.sum(comm, sums); });
    if (wide_) ops::cast(comm, {.out = shard, .in = sums});
}

void Gradients::add_shard(Ctx& comm, const ParamGroup& bucket, const Tensor& shard) {
    ops::sum_ranks(comm, {.out = reduced_shard(bucket), .in = shard, .scales = {}, .ranks = 1, .accumulate = adds()});
}

void Gradients::reduce_fp32(Ctx& comm, const ParamGroup& bucket) {
    stream_.timed(comm, [&] { groups_.shard_of(bucket).reduce_scatter(comm, grads(bucket)); });
    if (shares_memory()) add_shard(comm, bucket, shard_of(bucket, grads(bucket)));
}

void Gradients::reduce_bf16(Ctx& comm, const ParamGroup& bucket) {
    Tensor send = grads(bucket);
    if (send.dtype != Dtype::kBf16) {
        ops::cast(comm, {.out = first(send_, bucket.elems), .in = send});
        send = first(send_, bucket.elems);
    }
    const Tensor receive = first(receive_, bucket.elems);
    stream_.timed(comm, [&] { groups_.shard_of(bucket).exchange_shards(comm, receive, send); });
    ops::sum_ranks(comm, {.out = reduced_shard(bucket), .in = receive, .scales = {},
                          .own = shard_of(bucket, send), .own_rank = groups_.shard_of(bucket).world().rank,
                          .ranks = buckets_.ranks(bucket), .accumulate = adds()});
}

void Gradients::reduce_fp8(Ctx& comm, const ParamGroup& bucket) {
    const int64_t n = bucket.elems, chunks = n / kGradCommChunk;
    const auto form = static_cast<size_t>(bucket.form);
    GradCommReport* report = comparing_ ? static_cast<GradCommReport*>(report_.data) : nullptr;
    const Tensor exact = comparing_ ? first(exact_, n) : Tensor{};
    if (comparing_) {
        ops::cast(comm, {.out = exact, .in = grads(bucket)});
        groups_.shard_of(bucket).reduce_scatter(comm, exact);
    }
    ops::quantize_chunks(comm, {.out = first(send_codes_, n), .scales = first(send_scales_, chunks),
                                .in = grads(bucket), .counts = report ? &report->counts[form] : nullptr});
    const Tensor codes = first(receive_codes_, n), scales = first(receive_scales_, chunks);
    stream_.timed(comm, [&] {
        groups_.shard_of(bucket).all_to_all(comm, codes, first(send_codes_, n));
        groups_.shard_of(bucket).all_to_all(comm, scales, first(send_scales_, chunks));
    });
    // The comparison needs this micro-batch's sums in fp32. If reduced_shard() has sums of several micro-batches or is
    // in bf16, they are computed in `exact` first: after the reduce-scatter only this rank's shard of it is in use, so
    // the next rank's is free.
    const bool apart = comparing_ && (adds() || shard_dtype() == Dtype::kBf16);
    const int64_t elems = buckets_.shard_elems(bucket), ranks = buckets_.ranks(bucket);
    const int64_t next = (groups_.shard_of(bucket).world().rank + 1) % ranks;
    const Tensor sums = apart ? exact.slice(next * elems, elems) : reduced_shard(bucket);
    ops::sum_ranks(comm, {.out = sums, .in = codes, .scales = scales, .ranks = ranks,
                          .accumulate = adds() && !apart});
    if (!comparing_) return;
    ops::compare_sums(comm, {.sums = report->sums[form], .a = shard_of(bucket, exact), .b = sums,
                             .scratch = compare_scratch_});
    if (apart) add_shard(comm, bucket, sums);
}
