// Weighted blends of token shards: which words name sources and their weights, and which sample of which source is
// sample number s of a run. Opens no file.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

// Shards that are read as one stream: everything without weights, else what one weight is for.
struct DataSource {
    std::string weight;   // as it was written; empty without weights
    int64_t parts = 1;    // of every sum of all parts samples; the parts have no common divisor
    std::vector<std::string> globs;
};

// Globs, or weights each before the globs of its source: {"0.7", "a/*.bin", "0.3", "b/*.bin", "c.bin"}. A word that
// is a number is a weight; a file of such a name is written ./7. Weights are decimals and taken as exactly what they
// say. error: one line, empty if there is none.
struct DataWords {
    std::vector<DataSource> sources;
    std::string error;
};
DataWords parse_data_words(const std::vector<std::string>& words);

// The order of sources. It repeats after `period` = sum of parts samples, so that any sample is found without reading
// those before it, and after n samples each source has had its share w n of them up to less than one sample
// (Tijdeman, The chairman assignment problem, Discrete Mathematics 32, 1980: at most 1 - 1 / (2 K - 2) with K sources).
// In any window of N samples it has w N up to less than 1 with two sources and up to less than 2 - 1 / (K - 1) with
// more, for which no order does better than 1 with all weights (Fraenkel's conjecture).
class BlendOrder {
public:
    explicit BlendOrder(const std::vector<int64_t>& parts);

    struct Place {
        int64_t source;
        int64_t index;   // how many samples of the source come before it
    };
    Place at(int64_t sample) const;
    // Samples of a source among the first n of the run.
    int64_t count(int64_t source, int64_t n) const;
    int64_t period() const { return static_cast<int64_t>(source_.size()); }

private:
    std::vector<int64_t> parts_;
    std::vector<uint8_t> source_;   // (period)
    std::vector<int32_t> index_;    // (period): samples of that source before it in the period
};
