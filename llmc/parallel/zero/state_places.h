// Where the elements of an optimizer state are in memory that has those of the parameters with this state alone.
// Indices are those of a rank's shards (ShardRange::shard).
#pragma once
#include <algorithm>

#include "llmc/model/parameters/params.h"
#include "llmc/parallel/zero/buckets.h"

class StatePlaces {
public:
    StatePlaces() = default;   // each element is stored
    // If all parameters have the state, each element is stored at its index.
    StatePlaces(const ParamTable& table, const std::vector<ShardRange>& ranges, StateKind kind)
        : whole_(std::all_of(table.params.begin(), table.params.end(), [&](const Param& p) { return p.has(kind); })) {
        for (const ShardRange& range : ranges) {
            if (!table.params[static_cast<size_t>(range.param)].has(kind)) continue;
            const int64_t at = runs_.empty() ? 0 : runs_.back().at + runs_.back().elems;
            runs_.push_back({range.shard, round_up(range.elems, kParamAlign), at});
        }
    }

    // The number of elements that are stored before those of `index`, in whole units of kParamAlign if `index` is.
    int64_t at(int64_t index) const {
        if (whole_) return index;
        const auto next = std::upper_bound(runs_.begin(), runs_.end(), index,
                                           [](int64_t i, const Run& run) { return i < run.begin; });
        if (next == runs_.begin()) return 0;
        const Run& run = *(next - 1);
        return run.at + std::min(index - run.begin, run.elems);
    }

private:
    struct Run {
        int64_t begin, elems, at;   // elems: a multiple of kParamAlign
    };
    bool whole_ = true;
    std::vector<Run> runs_;   // ascending
};
