// In BF16 and FP8 a bucket is reduced by an exchange of blocks, after which every rank sums the ranks' values of its
// block in fp32, in rank order.
#include "llmc/parallel/zero/grad_reducer.h"

#include <algorithm>

namespace {

Tensor first(const Tensor& longest, int64_t elems) { return longest.slice(0, elems); }

}  // namespace

GradReducer::GradReducer(const Config& config, const ShardedState& state, const Groups& groups, CommStream& stream,
                         Arena& arena)
    : config_(config), state_(state), buckets_(state.buckets()), groups_(groups), stream_(stream) {
    order_.resize(buckets_.all().size());
    if (buckets_.ranks() == 1) return;
    int64_t longest_bf16 = 0, longest_fp8 = 0, longest_block = 0;
    for (const ParamGroup& bucket : buckets_.all()) {
        longest_block = std::max(longest_block, buckets_.block_elems(bucket));
        if (comm_dtype(bucket) == GradCommDtype::kBf16) longest_bf16 = std::max(longest_bf16, bucket.elems);
        if (comm_dtype(bucket) == GradCommDtype::kFp8) longest_fp8 = std::max(longest_fp8, bucket.elems);
    }
    auto take = [&](Dtype dtype, int64_t elems) { return arena.take(Purpose::kComm, dtype, elems); };
    if (longest_bf16 > 0) {
        if (state.grads().dtype != Dtype::kBf16) send_ = take(Dtype::kBf16, longest_bf16);
        receive_ = take(Dtype::kBf16, longest_bf16);
    }
    if (groups.replicas.world().ranks > 1 && shard_dtype() == Dtype::kBf16) wide_ = take(Dtype::kFp32, longest_block);
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
GradCommDtype GradReducer::comm_dtype(const ParamGroup& bucket) const {
    const GradCommDtype unquantized =
        state_.grads().dtype == Dtype::kBf16 ? GradCommDtype::kBf16 : GradCommDtype::kFp32;
    if (config_.grad_comm_dtype == Dtype::kBf16) return GradCommDtype::kBf16;
    if (config_.grad_comm_dtype == Dtype::kFp32 || bucket.form == ParamForm::kOther) return unquantized;
    return GradCommDtype::kFp8;
}

std::vector<Tensor> GradReducer::exchanged() const {
    std::vector<Tensor> tensors;
    if (!state_.shares_grads()) return tensors;
    if (state_.grads().dtype == Dtype::kBf16) tensors.push_back(state_.grads());
    for (const Tensor& buffer : {send_, receive_, send_codes_, receive_codes_, send_scales_, receive_scales_})
        if (buffer) tensors.push_back(buffer);
    return tensors;
}

// ---- the step

void GradReducer::begin(Ctx& ctx, const BackwardPass& pass) {
    pass_ = pass;
    const bool shared = state_.shares_grads();
    if (buckets_.ranks() == 1 || !(shared || pass.last)) return;
    reducing_ = true;
    reduced_buckets_ = 0;
    comparing_ = pass.last && pass.compare && report_;
    if (comparing_) device::fill_bytes(ctx, report_.data, 0, report_.bytes());
}

void GradReducer::before_layer(Ctx& ctx, int layer) {
    if (layer == config_.shape.num_layers) open(ctx, 0);
}

void GradReducer::layer_ready(Ctx& ctx, int layer) {
    if (reducing_) reduce_layer(ctx, layer);
    open(ctx, static_cast<int>(config_.shape.num_layers) - layer + 1);
}

// Makes ctx wait until the places of the buckets that open before `stage` are free, and prepares them.
void GradReducer::open(Ctx& ctx, int stage) {
    const GradPlacement& placement = state_.grad_placement();
    int64_t newest = 0;
    Event* done = nullptr;
    for (size_t bucket = 0; bucket < placement.opens.size(); bucket++) {
        if (placement.opens[bucket] != stage) continue;
        for (int sharer : placement.sharers[bucket]) {
            const auto other = static_cast<size_t>(sharer);
            if (order_[other] <= newest) continue;
            newest = order_[other];
            done = done_[other];
        }
    }
    stream_.order_after(ctx, done, newest);
    for (size_t bucket = 0; bucket < placement.opens.size(); bucket++)
        if (placement.opens[bucket] == stage) clear(ctx, bucket);
}

// Zeroes what backward adds to, and the gaps between parameters.
void GradReducer::clear(Ctx& ctx, size_t bucket) {
    const ParamGroup& group = buckets_.all()[bucket];
    const Tensor grads = state_.grads(group);
    auto zero = [&](int64_t begin, int64_t end) {
        if (begin == end) return;
        const Tensor part = grads.slice(begin, end - begin);
        device::fill_bytes(ctx, part.data, 0, part.bytes());
    };
    int64_t at = 0;
    for (int param : group.params) {
        if (state_.accumulates(param)) continue;
        const int64_t offset = buckets_.layout().offset(param) - group.begin;
        zero(at, offset);
        at = offset + buckets_.layout().elems(param);
    }
    zero(at, group.elems);
}

void GradReducer::reduce_layer(Ctx& ctx, int layer) {
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
        if (&comm == &ctx || !state_.shares_grads()) continue;
        while (done_.size() < order_.size()) done_.push_back(OwnedEvent::create());
        order_[b] = stream_.record(comm, done_[b]);
    }
    reducing_ = reduced_buckets_ < buckets_.all().size();
}

void GradReducer::finish(Ctx& ctx) {
    if (buckets_.ranks() == 1) return;
    CHECK(reduced_buckets_ == buckets_.all().size(), "%zu of %zu buckets were reduced", reduced_buckets_,
          buckets_.all().size());
    Ctx& comm = stream_.comm_ctx(ctx);
    if (&comm == &ctx) return;
    if (!reduced_) reduced_ = OwnedEvent::create();
    stream_.order_after(ctx, reduced_, stream_.record(comm, reduced_));
}

void GradReducer::all_reduce_norm(Ctx& ctx, StepState* state) {
    static_assert(offsetof(StepState, sum_squares) == offsetof(StepState, loss_sum) + sizeof(double));
    if (buckets_.ranks() == 1) return;
    const CollectivePurpose purpose(ctx, "loss and gradient norm");
    stream_.timed(ctx, [&] {
        groups_.world.sum(ctx, {&state->loss_sum, Dtype::kFp64, 2});
        groups_.world.sum(ctx, {&state->bad_tokens, Dtype::kInt32, 1});
    });
}

// With overlap the compute stream waits once a layer at most, otherwise for up to three collectives a bucket.
int64_t GradReducer::timer_spans() const {
    if (!state_.shares_grads()) return 0;
    const int64_t waits = config_.overlap ? config_.shape.num_layers + 2
                                          : 3 * static_cast<int64_t>(buckets_.all().size());
    return config_.global_batch_size / (config_.micro_batch_size * groups_.data_ranks) * waits;
}

void GradReducer::copy_report(Ctx& ctx, void* host) const {
    if (report_) device::copy_to_host(ctx, host, report_.data, report_bytes());
}

// ---- a bucket

void GradReducer::reduce(Ctx& comm, const ParamGroup& bucket) {
    switch (comm_dtype(bucket)) {
        case GradCommDtype::kFp32: reduce_fp32(comm, bucket); break;
        case GradCommDtype::kBf16: reduce_bf16(comm, bucket); break;
        case GradCommDtype::kFp8: reduce_fp8(comm, bucket); break;
    }
    if (!state_.sharded())
        stream_.timed(comm, [&] { groups_.shard.all_gather(comm, state_.reduced_whole(bucket)); });
    if (pass_.last && groups_.replicas.world().ranks > 1) sum_replicas(comm, bucket);
}

// Sums in fp32, also for a bf16 shard.
void GradReducer::sum_replicas(Ctx& comm, const ParamGroup& bucket) {
    const Tensor block = state_.reduced_block(bucket), sums = wide_ ? first(wide_, block.elems) : block;
    if (wide_) ops::cast(comm, {.out = sums, .in = block});
    stream_.timed(comm, [&] { groups_.replicas.sum(comm, sums); });
    if (wide_) ops::cast(comm, {.out = block, .in = sums});
}

// This rank's block of a whole bucket.
Tensor GradReducer::block_of(const ParamGroup& bucket, const Tensor& whole) const {
    const int64_t block = buckets_.block_elems(bucket);
    return whole.slice(groups_.shard.world().rank * block, block);
}

void GradReducer::add_block(Ctx& comm, const ParamGroup& bucket, const Tensor& block) {
    ops::sum_ranks(comm, {.out = state_.reduced_block(bucket), .in = block, .scales = {}, .ranks = 1,
                          .accumulate = adds()});
}

void GradReducer::reduce_fp32(Ctx& comm, const ParamGroup& bucket) {
    stream_.timed(comm, [&] { groups_.shard.reduce_scatter(comm, state_.grads(bucket)); });
    if (state_.shares_grads()) add_block(comm, bucket, block_of(bucket, state_.grads(bucket)));
}

void GradReducer::reduce_bf16(Ctx& comm, const ParamGroup& bucket) {
    Tensor send = state_.grads(bucket);
    if (send.dtype != Dtype::kBf16) {
        ops::cast(comm, {.out = first(send_, bucket.elems), .in = send});
        send = first(send_, bucket.elems);
    }
    const Tensor receive = first(receive_, bucket.elems);
    stream_.timed(comm, [&] { groups_.shard.exchange_blocks(comm, receive, send); });
    ops::sum_ranks(comm, {.out = state_.reduced_block(bucket), .in = receive, .scales = {},
                          .own = block_of(bucket, send), .own_rank = groups_.shard.world().rank,
                          .ranks = buckets_.ranks(), .accumulate = adds()});
}

void GradReducer::reduce_fp8(Ctx& comm, const ParamGroup& bucket) {
    const int64_t n = bucket.elems, chunks = n / kGradCommChunk;
    const auto form = static_cast<size_t>(bucket.form);
    GradCommReport* report = comparing_ ? static_cast<GradCommReport*>(report_.data) : nullptr;
    const Tensor exact = comparing_ ? first(exact_, n) : Tensor{};
    if (comparing_) {
        ops::cast(comm, {.out = exact, .in = state_.grads(bucket)});
        groups_.shard.reduce_scatter(comm, exact);
    }
    ops::quantize_chunks(comm, {.out = first(send_codes_, n), .scales = first(send_scales_, chunks),
                                .in = state_.grads(bucket), .counts = report ? &report->counts[form] : nullptr});
    const Tensor codes = first(receive_codes_, n), scales = first(receive_scales_, chunks);
    stream_.timed(comm, [&] {
        groups_.shard.all_to_all(comm, codes, first(send_codes_, n));
        groups_.shard.all_to_all(comm, scales, first(send_scales_, chunks));
    });
    // A comparison needs the sums before they are added to those of earlier micro-batches and rounded to a bf16 shard,
    // so they are kept in another rank's block of `exact`, which is unused.
    const bool apart = comparing_ && (adds() || shard_dtype() == Dtype::kBf16);
    const int64_t block = buckets_.block_elems(bucket), next = (groups_.shard.world().rank + 1) % buckets_.ranks();
    const Tensor sums = apart ? exact.slice(next * block, block) : state_.reduced_block(bucket);
    ops::sum_ranks(comm, {.out = sums, .in = codes, .scales = scales, .ranks = buckets_.ranks(),
                          .accumulate = adds() && !apart});
    if (!comparing_) return;
    ops::compare_sums(comm, {.sums = report->sums[form], .a = block_of(bucket, exact), .b = sums,
                             .scratch = compare_scratch_});
    if (apart) add_block(comm, bucket, sums);
}
