#include "llmc/data/document_packing.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>

namespace {

constexpr size_t kWindow = 1024;   // documents

// Documents that wait for a sample.
class Window {
public:
    // A part of a document that does not begin it may not follow another document in a sample.
    void add(TokenRange range, bool may_follow) {
        waiting_[range.first] = range.count;
        if (may_follow) by_count_.emplace(range.count, range.first);
    }
    size_t size() const { return waiting_.size(); }
    TokenRange take_first() { return take({waiting_.begin()->first, waiting_.begin()->second}); }
    // Returns the longest that may follow and has at most `most` tokens, of equal ones the last; count 0: none.
    TokenRange take_longest(int64_t most) {
        const auto longer = by_count_.upper_bound({most, std::numeric_limits<int64_t>::max()});
        if (longer == by_count_.begin()) return {0, 0};
        return take({std::prev(longer)->second, std::prev(longer)->first});
    }

private:
    std::map<int64_t, int64_t> waiting_;               // first token, count
    std::set<std::pair<int64_t, int64_t>> by_count_;   // count, first token

    TokenRange take(TokenRange range) {
        waiting_.erase(range.first);
        by_count_.erase({range.count, range.first});
        return range;
    }
};

}  // namespace

std::vector<int64_t> document_starts(const Shard& shard) {
    constexpr int64_t kBlock = 1 << 16;
    std::vector<int64_t> starts;
    std::vector<int32_t> ids(kBlock);
    std::vector<uint8_t> begins(kBlock);
    for (int64_t done = 0; done < shard.info.tokens; done += kBlock) {
        const int64_t n = std::min(kBlock, shard.info.tokens - done);
        shard.copy(done, n, ids.data());
        shard.mark_starts(done, n, ids.data(), begins.data());
        for (int64_t i = 0; i < n; i++)
            if (begins[static_cast<size_t>(i)]) starts.push_back(done + i);
    }
    return starts;
}

DocumentPacking::DocumentPacking(std::vector<int64_t> starts, int64_t tokens, int64_t seq_length,
                                 PackingCounts& counts) {
    const auto end_sample = [&](int64_t used) {
        counts.padding += std::max<int64_t>(0, seq_length - used);
        ends_.push_back(ranges_.size());
    };
    const bool begun_before = starts.empty() || starts[0] > 0;
    if (begun_before) starts.insert(starts.begin(), 0);
    const size_t documents = starts.size();
    starts.push_back(tokens);
    Window window;
    for (size_t next = 0; next < documents || window.size() > 0;) {
        for (; next < documents && window.size() < kWindow; next++) {
            TokenRange rest{starts[next], starts[next + 1] - starts[next]};
            bool whole = next > 0 || !begun_before;
            counts.cut += !whole || rest.count > seq_length + 1;
            // The last token of one part is the first input of the next.
            for (; rest.count > seq_length + 1; rest.first += seq_length, rest.count -= seq_length, whole = false) {
                ranges_.push_back({rest.first, seq_length + 1});
                counts.cut_tokens += whole ? 0 : seq_length;
                end_sample(seq_length + 1);
            }
            counts.cut_tokens += whole ? 0 : rest.count - 1;
            window.add(rest, whole);
        }
        int64_t used = 0;
        for (TokenRange range = window.take_first(); range.count > 0;
             range = window.take_longest(seq_length + 1 - used)) {
            ranges_.push_back(range);
            used += range.count;
        }
        end_sample(used);
    }
    counts.shards++;
    counts.tokens += tokens;
    counts.samples += samples();
    counts.documents += static_cast<int64_t>(documents);
}

std::vector<TokenRange> DocumentPacking::sample(int64_t index) const {
    const size_t i = static_cast<size_t>(index), begin = i == 0 ? 0 : ends_[i - 1];
    return {ranges_.begin() + static_cast<int64_t>(begin), ranges_.begin() + static_cast<int64_t>(ends_[i])};
}
