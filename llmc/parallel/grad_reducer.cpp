// In BF16 and FP8 a bucket is reduced by an all-to-all, after which every rank sums the ranks' values of its block in
// fp32, in rank order.
#include "llmc/parallel/grad_reducer.h"

#include <algorithm>


namespace {

Tensor first(const Tensor& longest, int64_t elems) { return longest.slice(0, elems); }

}  // namespace

GradReducer::GradReducer(const Config& config, const ShardedState& state, const Groups& groups, CommStream& stream,
                         Arena& arena)
    : config_(config), state_(state), buckets_(state.buckets()), groups_(groups), stream_(stream) {
    if (buckets_.ranks() == 1) return;
    int64_t longest_bf16 = 0, longest_fp8 = 0;
    for (const ParamGroup& bucket : buckets_.all()) {
        if (comm_dtype(bucket) == GradCommDtype::kBf16) longest_bf16 = std::max(longest_bf16, bucket.elems);
        if (comm_dtype(bucket) == GradCommDtype::kFp8) longest_fp8 = std::max(longest_fp8, bucket.elems);
    }
    auto take = [&](Dtype dtype, int64_t elems) { return arena.take(Purpose::kComm, dtype, elems); };
    if (longest_bf16 > 0) {
        if (state.grads().dtype != Dtype::kBf16) send_ = take(Dtype::kBf16, longest_bf16);
        receive_ = take(Dtype::kBf16, longest_bf16);
    }
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

GradReducer::~GradReducer() {
    if (reduced_) device::event_destroy(reduced_);
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

// ---- the step

void GradReducer::begin(Ctx& ctx, bool compare) {
    if (buckets_.ranks() == 1) return;
    reducing_ = true;
    reduced_buckets_ = 0;
    comparing_ = compare && report_;
    if (comparing_) device::fill_bytes(ctx, report_.data, 0, report_.bytes());
}

void GradReducer::layer_ready(Ctx& ctx, int layer) {
    if (!reducing_) return;
    bool waited = false;
    for (const ParamGroup& bucket : buckets_.all()) {
        if (bucket.first_layer != layer) continue;
        Ctx& comm = stream_.comm_ctx(ctx);
        if (!waited) stream_.wait_for_compute(ctx, comm);
        waited = true;
        const CollectivePurpose purpose(comm, "reduce " + layers_text(bucket, config_.shape.num_layers));
        reduce(comm, bucket);
        reduced_buckets_++;
    }
}

void GradReducer::finish(Ctx& ctx) {
    if (buckets_.ranks() == 1) return;
    CHECK(reducing_ && reduced_buckets_ == buckets_.all().size(), "%zu of %zu buckets were reduced", reduced_buckets_,
          buckets_.all().size());
    reducing_ = false;
    Ctx& comm = stream_.comm_ctx(ctx);
    if (&comm == &ctx) return;
    if (!reduced_) reduced_ = device::event_create();
    device::event_record(comm, reduced_);
    stream_.timed(ctx, [&] { device::event_order(ctx, reduced_); });
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

void GradReducer::copy_report(Ctx& ctx, void* host) const {
    if (report_) device::copy_to_host(ctx, host, report_.data, report_bytes());
}

// ---- a bucket

void GradReducer::reduce(Ctx& comm, const ParamGroup& bucket) {
    switch (comm_dtype(bucket)) {
        case GradCommDtype::kFp32:
            stream_.timed(comm, [&] { groups_.shard.reduce_scatter(comm, state_.grads(bucket)); });
            break;
        case GradCommDtype::kBf16: reduce_bf16(comm, bucket); break;
        case GradCommDtype::kFp8: reduce_fp8(comm, bucket); break;
    }
    if (state_.sharded()) return;
    stream_.timed(comm, [&] { groups_.shard.all_gather(comm, state_.reduced_whole(bucket)); });
}

void GradReducer::reduce_bf16(Ctx& comm, const ParamGroup& bucket) {
    Tensor send = state_.grads(bucket);
    if (send.dtype != Dtype::kBf16) {
        ops::cast(comm, {.out = first(send_, bucket.elems), .in = send});
        send = first(send_, bucket.elems);
    }
    const Tensor receive = first(receive_, bucket.elems);
    stream_.timed(comm, [&] { groups_.shard.all_to_all(comm, receive, send); });
    ops::sum_ranks(comm, {.out = state_.reduced_block(bucket), .in = receive, .scales = {},
                          .ranks = buckets_.ranks()});
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
    const Tensor sums = state_.reduced_block(bucket);
    ops::sum_ranks(comm, {.out = sums, .in = codes, .scales = scales, .ranks = buckets_.ranks()});
    if (!comparing_) return;
    const int64_t block = buckets_.block_elems(bucket);
    ops::compare_sums(comm, {.sums = report->sums[form], .a = exact.slice(groups_.shard.world().rank * block, block),
                             .b = sums, .scratch = compare_scratch_});
}
