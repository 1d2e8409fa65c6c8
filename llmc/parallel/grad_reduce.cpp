// How a bucket of gradients travels: every rank gets the copies of its block from all others and adds them in rank
// order in fp32, whatever the copies are in.
#include "llmc/parallel/zero.h"

namespace {

Tensor cut(const Tensor& longest, int64_t elems) { return longest.slice(0, elems); }

}  // namespace

// bf16 gradients gain nothing from a finer wire. Those of embeddings, norms and biases are few or sparse: they stay out
// of FP8.
GradCommDtype Zero::grad_comm_dtype(const Bucket& bucket) const {
    const GradCommDtype unquantised = state_.grads.dtype == Dtype::kBf16 ? GradCommDtype::kBf16 : GradCommDtype::kFp32;
    if (config_.grad_comm_dtype == Dtype::kBf16) return GradCommDtype::kBf16;
    if (config_.grad_comm_dtype == Dtype::kFp32 || bucket.kind == BucketKind::kOthers) return unquantised;
    return GradCommDtype::kFp8;
}

void Zero::take_staging(Arena& arena) {
    int64_t longest_bf16 = 0, longest_fp8 = 0;
    for (const Bucket& bucket : buckets_.all()) {
        if (grad_comm_dtype(bucket) == GradCommDtype::kBf16) longest_bf16 = std::max(longest_bf16, bucket.elems);
        if (grad_comm_dtype(bucket) == GradCommDtype::kFp8) longest_fp8 = std::max(longest_fp8, bucket.elems);
    }
    auto take = [&](Dtype dtype, int64_t elems) { return arena.take(Purpose::kComm, dtype, elems); };
    if (longest_bf16 > 0) {
        if (state_.grads.dtype != Dtype::kBf16) send_ = take(Dtype::kBf16, longest_bf16);
        receive_ = take(Dtype::kBf16, longest_bf16);
    }
    if (longest_fp8 == 0) return;
    send_codes_ = take(Dtype::kE4m3, longest_fp8);
    receive_codes_ = take(Dtype::kE4m3, longest_fp8);
    send_scales_ = take(Dtype::kFp32, longest_fp8 / kGradCommChunk);
    receive_scales_ = take(Dtype::kFp32, longest_fp8 / kGradCommChunk);
    if (config_.fp8_health_interval == 0) return;
    exact_ = take(Dtype::kFp32, longest_fp8);
    compare_scratch_ = take(Dtype::kFp64, 4 * kPartialSums);
    report_ = take(Dtype::kFp64, static_cast<int64_t>(sizeof(GradCommReport) / sizeof(double)));
}

void Zero::reduce_bucket(Ctx& comm_stream, const Bucket& bucket) {
    switch (grad_comm_dtype(bucket)) {
        case GradCommDtype::kFp32:
            timed(comm_stream, [&] { comm_.reduce_scatter(comm_stream, gradients(bucket)); });
            break;
        case GradCommDtype::kBf16: reduce_bf16(comm_stream, bucket); break;
        case GradCommDtype::kFp8: reduce_fp8(comm_stream, bucket); break;
    }
    if (sharded_) return;
    const Tensor& sums = state_.reduced ? state_.reduced : state_.grads;
    timed(comm_stream, [&] { comm_.all_gather(comm_stream, sums.slice(bucket.begin, bucket.elems)); });
}

void Zero::reduce_bf16(Ctx& comm_stream, const Bucket& bucket) {
    Tensor send = gradients(bucket);
    if (send.dtype != Dtype::kBf16) {
        ops::cast(comm_stream, {.out = cut(send_, bucket.elems), .in = send});
        send = cut(send_, bucket.elems);
    }
    const Tensor receive = cut(receive_, bucket.elems);
    timed(comm_stream, [&] { comm_.all_to_all(comm_stream, receive, send); });
    ops::sum_ranks(comm_stream, {.out = own_sum(bucket), .in = receive, .scales = {}, .ranks = buckets_.ranks()});
}

void Zero::reduce_fp8(Ctx& comm_stream, const Bucket& bucket) {
    const int64_t n = bucket.elems, chunks = n / kGradCommChunk;
    const auto kind = static_cast<size_t>(bucket.kind);
    GradCommReport* report = comparing_ ? static_cast<GradCommReport*>(report_.data) : nullptr;
    const Tensor exact = comparing_ ? cut(exact_, n) : Tensor{};
    if (comparing_) {
        ops::cast(comm_stream, {.out = exact, .in = gradients(bucket)});
        comm_.reduce_scatter(comm_stream, exact);
    }
    ops::quantize_chunks(comm_stream, {.out = cut(send_codes_, n), .scales = cut(send_scales_, chunks),
                                .in = gradients(bucket), .counts = report ? &report->counts[kind] : nullptr});
    const Tensor codes = cut(receive_codes_, n), scales = cut(receive_scales_, chunks);
    timed(comm_stream, [&] {
        comm_.all_to_all(comm_stream, codes, cut(send_codes_, n));
        comm_.all_to_all(comm_stream, scales, cut(send_scales_, chunks));
    });
    ops::sum_ranks(comm_stream, {.out = own_sum(bucket), .in = codes, .scales = scales, .ranks = buckets_.ranks()});
    if (!comparing_) return;
    const int64_t block = buckets_.block_elems(bucket);
    ops::compare_sums(comm_stream, {.sums = report->sums[kind], .a = exact.slice(comm_.world().rank * block, block),
                             .b = own_sum(bucket), .scratch = compare_scratch_});
}
