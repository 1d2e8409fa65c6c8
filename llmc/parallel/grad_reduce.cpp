// How a bucket of gradients travels: every rank gets the copies of its block from all others and adds them in rank
// order in fp32, whatever the copies are in.
#include "llmc/parallel/zero.h"

namespace {

Tensor cut(const Tensor& longest, int64_t elems) { return longest.slice(0, elems); }

}  // namespace

// bf16 gradients gain nothing from a finer wire. Those of embeddings, norms and biases are few or sparse: they stay out
// of FP8.
GradWire Zero::grad_wire(const Bucket& bucket) const {
    const GradWire unquantised = state_.grads.dtype == Dtype::kBf16 ? GradWire::kBf16 : GradWire::kFp32;
    if (config_.grad_comm_dtype == Dtype::kBf16) return GradWire::kBf16;
    if (config_.grad_comm_dtype == Dtype::kFp32 || bucket.kind == BucketKind::kOthers) return unquantised;
    return GradWire::kFp8;
}

void Zero::take_staging(Arena& arena) {
    int64_t longest_bf16 = 0, longest_fp8 = 0;
    for (const Bucket& bucket : buckets_.all()) {
        if (grad_wire(bucket) == GradWire::kBf16) longest_bf16 = std::max(longest_bf16, bucket.elems);
        if (grad_wire(bucket) == GradWire::kFp8) longest_fp8 = std::max(longest_fp8, bucket.elems);
    }
    auto take = [&](Dtype dtype, int64_t elems) { return arena.take(Purpose::kWire, dtype, elems); };
    if (longest_bf16 > 0) {
        if (state_.grads.dtype != Dtype::kBf16) send_ = take(Dtype::kBf16, longest_bf16);
        receive_ = take(Dtype::kBf16, longest_bf16);
    }
    if (longest_fp8 == 0) return;
    send_codes_ = take(Dtype::kE4m3, longest_fp8);
    receive_codes_ = take(Dtype::kE4m3, longest_fp8);
    send_factors_ = take(Dtype::kFp32, longest_fp8 / kWireChunk);
    receive_factors_ = take(Dtype::kFp32, longest_fp8 / kWireChunk);
    if (config_.fp8_health_interval == 0) return;
    exact_ = take(Dtype::kFp32, longest_fp8);
    compare_scratch_ = take(Dtype::kFp64, 4 * kPartialSums);
    report_ = take(Dtype::kFp64, static_cast<int64_t>(sizeof(WireReport) / sizeof(double)));
}

void Zero::reduce_bucket(Ctx& wire, const Bucket& bucket) {
    switch (grad_wire(bucket)) {
        case GradWire::kFp32: timed(wire, [&] { comm_.reduce_scatter(wire, gradients(bucket)); }); break;
        case GradWire::kBf16: reduce_bf16(wire, bucket); break;
        case GradWire::kFp8: reduce_fp8(wire, bucket); break;
    }
    if (sharded_) return;
    const Tensor& sums = state_.reduced ? state_.reduced : state_.grads;
    timed(wire, [&] { comm_.all_gather(wire, sums.slice(bucket.begin, bucket.elems)); });
}

void Zero::reduce_bf16(Ctx& wire, const Bucket& bucket) {
    Tensor send = gradients(bucket);
    if (send.dtype != Dtype::kBf16) {
        ops::cast(wire, {.out = cut(send_, bucket.elems), .in = send});
        send = cut(send_, bucket.elems);
    }
    const Tensor receive = cut(receive_, bucket.elems);
    timed(wire, [&] { comm_.all_to_all(wire, receive, send); });
    ops::sum_ranks(wire, {.out = own_sum(bucket), .in = receive, .factors = {}, .ranks = buckets_.ranks()});
}

void Zero::reduce_fp8(Ctx& wire, const Bucket& bucket) {
    const int64_t n = bucket.elems, chunks = n / kWireChunk;
    const auto kind = static_cast<size_t>(bucket.kind);
    WireReport* report = comparing_ ? static_cast<WireReport*>(report_.data) : nullptr;
    const Tensor exact = comparing_ ? cut(exact_, n) : Tensor{};
    if (comparing_) {
        ops::cast(wire, {.out = exact, .in = gradients(bucket)});
        comm_.reduce_scatter(wire, exact);
    }
    ops::quantize_chunks(wire, {.out = cut(send_codes_, n), .factors = cut(send_factors_, chunks),
                                .in = gradients(bucket), .counts = report ? &report->counts[kind] : nullptr});
    const Tensor codes = cut(receive_codes_, n), factors = cut(receive_factors_, chunks);
    timed(wire, [&] {
        comm_.all_to_all(wire, codes, cut(send_codes_, n));
        comm_.all_to_all(wire, factors, cut(send_factors_, chunks));
    });
    ops::sum_ranks(wire, {.out = own_sum(bucket), .in = codes, .factors = factors, .ranks = buckets_.ranks()});
    if (!comparing_) return;
    const int64_t block = buckets_.block_elems(bucket);
    ops::compare_sums(wire, {.sums = report->sums[kind], .a = exact.slice(comm_.world().rank * block, block),
                             .b = own_sum(bucket), .scratch = compare_scratch_});
}
