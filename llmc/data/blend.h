// Weighted blends of token shards: parses sources and their weights, and maps sample s of a run to a sample of a
// source. Opens no file.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

// Shards that are read as one stream: those of one weight, or all shards if there are no weights.
struct DataSource {
    std::string weight;   // as written by the user; empty without weights
    int64_t parts = 1;    // samples per period, the sum of all parts; the parts have no common divisor
    std::vector<std::string> globs;
};

// Parses globs, or weights that each precede the globs of a source: {"0.7", "a/*.bin", "0.3", "b/*.bin", "c.bin"}. A
// number is a weight, of at most six decimals; a file whose name is a number is written ./7. error: one line or empty.
struct DataWords {
    std::vector<DataSource> sources;
    std::string error;
};
DataWords parse_data_words(const std::vector<std::string>& words);

// The order of sources. It has a period of sum(parts) samples, so any sample is found without reading those before it.
// After n samples of K sources, the number of samples of a source with weight w differs from w n by at most
// 1 - 1 / (2 K - 2) (Tijdeman, The chairman assignment problem, Discrete Mathematics 32, 1980). In any window of N
// samples it differs from w N by less than 1 with two sources, and by less than 2 - 1 / (K - 1) with more.
class BlendOrder {
public:
    explicit BlendOrder(const std::vector<int64_t>& parts);

    struct Place {
        int64_t source;
        int64_t index;   // number of earlier samples of this source
    };
    Place at(int64_t sample) const;
    // Returns the number of samples of a source among the first n of the run.
    int64_t count(int64_t source, int64_t n) const;
    int64_t period() const { return static_cast<int64_t>(source_.size()); }

private:
    std::vector<int64_t> parts_;
    std::vector<uint8_t> source_;   // (period)
    std::vector<int32_t> index_;    // (period): number of earlier samples of that source in the period
};
