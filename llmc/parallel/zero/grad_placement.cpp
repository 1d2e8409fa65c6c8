#include "llmc/parallel/zero/grad_placement.h"

#include <algorithm>
#include <numeric>

namespace {

// The first and the last stage of a backward pass in which a bucket occupies memory.
struct Lifetime {
    int first, last;
    bool meets(const Lifetime& other) const { return first <= other.last && other.first <= last; }
};

// The last norm of a layer writes the bias gradient of the layer below, and the head's weight may be the embedding's.
Lifetime lifetime(const ParamGroup& bucket, const ParamTable& table, bool overlap) {
    const int head_layer = static_cast<int>(table.layers.size());
    int first = head_layer - bucket.last_layer;
    if (bucket.form == ParamForm::kOther && bucket.last_layer >= 0) first = std::max(0, first - 1);
    const bool tied = table.head == table.wte;
    if (tied && std::count(bucket.params.begin(), bucket.params.end(), table.wte) > 0) first = 0;
    return {first, head_layer - bucket.first_layer + (overlap ? 1 : 0)};
}

// Elements [begin, end) of the gradient memory.
struct Extent {
    int64_t begin, end;
    bool meets(const Extent& other) const { return begin < other.end && other.begin < end; }
};

}  // namespace

GradPlacement whole_placement(const Buckets& buckets) {
    GradPlacement placement;
    placement.elems = buckets.layout().flat_elems();
    for (const ParamGroup& bucket : buckets.all()) placement.offsets.push_back(bucket.begin);
    return placement;
}

// Largest first, each at the lowest offset that is free during its lifetime.
GradPlacement shared_placement(const Buckets& buckets, const ParamTable& table, bool overlap,
                               const std::vector<bool>& alone) {
    const std::vector<ParamGroup>& all = buckets.all();
    std::vector<Lifetime> lifetimes;
    for (const ParamGroup& bucket : all) lifetimes.push_back(lifetime(bucket, table, overlap));
    std::vector<size_t> order(all.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return all[a].elems > all[b].elems; });

    GradPlacement placement;
    std::vector<Extent> extents(all.size(), {0, 0});   // empty: not placed yet
    for (size_t bucket : order) {
        if (alone[bucket]) continue;
        std::vector<Extent> taken;
        for (size_t other = 0; other < all.size(); other++)
            if (lifetimes[bucket].meets(lifetimes[other])) taken.push_back(extents[other]);
        std::sort(taken.begin(), taken.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
        Extent& place = extents[bucket];
        place = {0, all[bucket].elems};
        for (const Extent& extent : taken)
            if (extent.meets(place)) place = {extent.end, extent.end + all[bucket].elems};
        placement.shared = std::max(placement.shared, place.end);
    }
    placement.elems = placement.shared;
    placement.overlapping.resize(all.size());
    for (size_t bucket = 0; bucket < all.size(); bucket++) {
        placement.offsets.push_back(alone[bucket] ? placement.elems : extents[bucket].begin);
        placement.first_stage.push_back(alone[bucket] ? -1 : lifetimes[bucket].first);
        if (alone[bucket]) placement.elems += all[bucket].elems;
        if (alone[bucket]) continue;
        for (size_t other = 0; other < all.size(); other++)
            if (extents[bucket].meets(extents[other])) placement.overlapping[bucket].push_back(static_cast<int>(other));
    }
    return placement;
}
