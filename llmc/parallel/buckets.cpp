#include "llmc/parallel/buckets.h"

#include <algorithm>
#include <array>

#include "llmc/base/check.h"

namespace {

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
int64_t stored_elems(const Param& p) { return round_up(p.elems(), kParamAlign); }

// When the gradients are complete and the weights are read first, as ParamStore numbers layers.
int layer_of(const ParamTable& table, int param) {
    if (param == table.wte || param == table.wpe) return -1;
    const int layer = table.params[static_cast<size_t>(param)].layer;
    return layer >= 0 ? layer : static_cast<int>(table.blocks.size());
}

BucketKind kind_of(const ParamTable& table, const Fp8Plan& plan, int param) {
    if (param == table.wte) return BucketKind::kOthers;   // also where a head is tied to it
    for (const LinearPlan& linear : plan.linears)
        if (linear.weight == param) return linear.fp8 ? BucketKind::kFp8Linears : BucketKind::kLinears;
    return BucketKind::kOthers;
}

// In the order of the layers; elems without the end that makes it divisible.
std::vector<Bucket> collect(const ParamTable& table, const Fp8Plan& plan, int64_t bucket_bytes) {
    std::vector<int> order;
    for (size_t i = 0; i < table.params.size(); i++) order.push_back(static_cast<int>(i));
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return layer_of(table, a) < layer_of(table, b); });
    std::vector<Bucket> buckets;
    std::array<int, kBucketKinds> open;   // bucket that takes more of a kind, -1: none
    open.fill(-1);
    for (int param : order) {
        const BucketKind kind = kind_of(table, plan, param);
        const int layer = layer_of(table, param);
        int& taking = open[static_cast<size_t>(kind)];
        // Layers far apart, BF16 at both ends for instance, are ready at different times.
        if (taking >= 0 && buckets[static_cast<size_t>(taking)].last_layer + 1 < layer) taking = -1;
        if (taking < 0) {
            taking = static_cast<int>(buckets.size());
            buckets.push_back({.kind = kind, .first_layer = layer, .params = {}});
        }
        Bucket& bucket = buckets[static_cast<size_t>(taking)];
        bucket.params.push_back(param);
        bucket.last_layer = layer;
        bucket.elems += stored_elems(table.params[static_cast<size_t>(param)]);
        if (bucket.elems * dtype_bytes(Dtype::kFp32) >= bucket_bytes) taking = -1;
    }
    std::stable_sort(buckets.begin(), buckets.end(), [](const Bucket& a, const Bucket& b) {
        return a.first_layer != b.first_layer ? a.first_layer < b.first_layer : a.kind < b.kind;
    });
    return buckets;
}

}  // namespace

Buckets::Buckets(ParamTable& table, const Fp8Plan& plan, int ranks, int64_t bucket_bytes)
    : ranks_(ranks), buckets_(collect(table, plan, bucket_bytes)), bucket_of_(table.params.size(), -1),
      places_(table.params.size()) {
    int64_t working = 0;
    for (size_t b = 0; b < buckets_.size(); b++) {
        Bucket& bucket = buckets_[b];
        bucket.begin = flat_elems_;
        int64_t offset = bucket.begin;
        for (int param : bucket.params) {
            Param& p = table.params[static_cast<size_t>(param)];
            p.offset = offset;
            bucket_of_[static_cast<size_t>(param)] = static_cast<int>(b);
            places_[static_cast<size_t>(param)] = {offset, p.elems()};
            offset += stored_elems(p);
        }
        bucket.elems = round_up(bucket.elems, ranks * kParamAlign);
        int64_t& same_form = bucket.kind == BucketKind::kFp8Linears ? fp8_elems_ : working;
        bucket.weight_begin = same_form;
        same_form += bucket.elems;
        flat_elems_ += bucket.elems;
    }
    table.flat_elems = flat_elems_;
}

int64_t Buckets::weight_offset(int param) const {
    const Bucket& bucket = of_param(param);
    return bucket.weight_begin + place(param).offset - bucket.begin;
}

std::vector<Piece> Buckets::pieces(int rank) const {
    CHECK(rank >= 0 && rank < ranks_, "rank %d of %d", rank, ranks_);
    std::vector<Piece> pieces;
    for (size_t b = 0; b < buckets_.size(); b++) {
        const Bucket& bucket = buckets_[b];
        const int64_t block = block_elems(bucket);
        const int64_t begin = bucket.begin + rank * block, end = begin + block;
        for (int param : bucket.params) {
            const int64_t first = std::max(begin, place(param).offset);
            const int64_t last = std::min(end, place(param).offset + place(param).elems);
            if (first >= last) continue;
            pieces.push_back({.bucket = static_cast<int>(b), .param = param, .begin = first - place(param).offset,
                              .elems = last - first, .shard = bucket.begin / ranks_ + first - begin});
        }
    }
    return pieces;
}

std::vector<Piece> Buckets::whole_pieces() const {
    std::vector<Piece> pieces;
    for (size_t b = 0; b < buckets_.size(); b++)
        for (int param : buckets_[b].params)
            pieces.push_back({.bucket = static_cast<int>(b), .param = param, .begin = 0, .elems = place(param).elems,
                              .shard = place(param).offset});
    return pieces;
}
