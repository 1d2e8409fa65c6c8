#include "llmc/parallel/zero/buckets.h"

Buckets::Buckets(const FlatLayout& layout, int ranks) : layout_(layout), ranks_(ranks) {
    for (const ParamGroup& bucket : all()) {
        CHECK(bucket.elems % unit(ranks) == 0, "%lld elements for %d ranks", (long long)bucket.elems, ranks);
        shard_begin_.push_back(shard_begin_.back() + shard_elems(bucket));
        fp8_begin_.push_back(fp8_begin_.back() + (bucket.form == ParamForm::kFp8Linear ? shard_elems(bucket) : 0));
    }
}

std::vector<ShardRange> Buckets::shard_ranges(int rank) const {
    CHECK(rank >= 0 && rank < ranks_, "rank %d of %d", rank, ranks_);
    std::vector<ShardRange> ranges;
    for (const ParamGroup& bucket : all()) {
        const int64_t begin = bucket.begin + shard_of(bucket, rank) * shard_elems(bucket);
        const int64_t end = begin + shard_elems(bucket);
        for (int param : bucket.params) {
            const int64_t offset = layout_.offset(param);
            const int64_t first = std::max(begin, offset), last = std::min(end, offset + layout_.elems(param));
            if (first >= last) continue;
            ranges.push_back({.bucket = layout_.group_number(param), .param = param, .begin = first - offset,
                              .elems = last - first, .shard = shard_begin(bucket) + first - begin});
        }
    }
    return ranges;
}
