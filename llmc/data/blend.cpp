#include "llmc/data/blend.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <numeric>

#include "llmc/base/check.h"

namespace {

constexpr int64_t kMaxPeriod = 1 << 20;   // a table of 5 MiB; enough for six decimal places
constexpr size_t kMaxSources = 256;       // fits into a byte of the table
static_assert(kMaxPeriod <= std::numeric_limits<int32_t>::max());

bool is_number(const std::string& word) {
    if (word.empty() || std::string("+-.0123456789").find(word[0]) == std::string::npos || word.starts_with("+-"))
        return false;
    const char* begin = word.data() + (word[0] == '+' ? 1 : 0);
    double value;
    const auto [end, error] = std::from_chars(begin, word.data() + word.size(), value);
    return end == word.data() + word.size() && error != std::errc::invalid_argument;
}

// The weight in millionths, exactly; -1 if it has more than six decimals or is too large.
int64_t millionths_of(const std::string& word) {
    double value = 0;
    const char* begin = word.data() + (word[0] == '+' ? 1 : 0);
    const bool fits = std::from_chars(begin, word.data() + word.size(), value).ec == std::errc() && value < 9e12;
    const double scaled = fits ? 1e6 * value : 0.5;
    const bool whole = std::fabs(scaled - std::round(scaled)) < 0.01 && (scaled > 0.5 || value == 0);
    return whole ? std::llround(scaled) : -1;
}

// Computes the parts of all sources. Returns "" or what is wrong with the weights.
std::string weigh(std::vector<DataSource>& sources) {
    std::vector<int64_t> parts;
    std::string list;
    for (const DataSource& source : sources) {
        const char* weight = source.weight.c_str();
        if (source.globs.empty()) return strf("weight %s has no shards after it", weight);
        if (source.weight[0] == '-') return strf("weight %s is negative, it must be above 0", weight);
        parts.push_back(millionths_of(source.weight));
        if (parts.back() < 0) return strf("weight %s: write it with at most six decimals, below 9e12", weight);
        if (parts.back() == 0) return strf("weight %s must be above 0; leave out a source without a share", weight);
        list += (list.empty() ? "" : " : ") + source.weight;
    }
    if (sources.size() == 1)
        return strf("weight %s has no effect on a single source: leave it out", sources[0].weight.c_str());
    if (sources.size() > kMaxSources) return strf("%zu weights, at most %zu", sources.size(), kMaxSources);
    const int64_t divisor = std::accumulate(parts.begin(), parts.end(), int64_t{0}, std::gcd<int64_t, int64_t>);
    int64_t period = 0;
    for (int64_t& part : parts) period = std::min(kMaxPeriod + 1, period + (part /= divisor));
    if (period > kMaxPeriod)
        return strf("weights %s: exact shares repeat only after more than %lld samples; write the weights with fewer "
                    "digits", list.c_str(), ll(kMaxPeriod));
    for (size_t k = 0; k < parts.size(); k++) sources[k].parts = parts[k];
    return "";
}

}  // namespace

DataWords parse_data_words(const std::vector<std::string>& words) {
    DataWords result;
    for (const std::string& word : words) {
        if (is_number(word)) {
            if (!result.sources.empty() && result.sources[0].weight.empty()) {
                result.error = strf("'%s' has no weight, but %s is a weight: give one to every source, or to none (a "
                                    "file named %s is written ./%s)", result.sources[0].globs[0].c_str(), word.c_str(),
                                    word.c_str(), word.c_str());
                return result;
            }
            result.sources.push_back({.weight = word, .parts = 1, .globs = {}});
        } else {
            if (result.sources.empty()) result.sources.emplace_back();
            result.sources.back().globs.push_back(word);
        }
    }
    if (!result.sources.empty() && !result.sources[0].weight.empty()) result.error = weigh(result.sources);
    return result;
}

// Tijdeman's algorithm: among the sources that are owed at least 1 / (2 K - 2) of a sample, chooses the one that would
// first be owed 1 - 1 / (2 K - 2). owed[k] = parts[k] n - period count[k] is an integer, so everything is exact.
BlendOrder::BlendOrder(const std::vector<int64_t>& parts) : parts_(parts) {
    const int64_t period = std::accumulate(parts.begin(), parts.end(), int64_t{0});
    CHECK(!parts.empty() && parts.size() <= kMaxSources && *std::min_element(parts.begin(), parts.end()) >= 1
          && period <= kMaxPeriod, "%zu sources, period %lld", parts.size(), (long long)period);
    const int64_t d = std::max<int64_t>(1, 2 * static_cast<int64_t>(parts.size()) - 2);
    std::vector<int64_t> owed(parts.size());
    std::vector<int32_t> count(parts.size());
    for (int64_t n = 0; n < period; n++) {
        size_t chosen = parts.size();
        int64_t chosen_left = 0;
        for (size_t k = 0; k < parts.size(); k++) {
            owed[k] += parts[k];
            if (d * owed[k] < period) continue;
            // left / (d parts[k]) is the number of samples until source k is owed 1 - 1 / (2 K - 2).
            const int64_t left = (d - 1) * period - d * owed[k];
            if (chosen == parts.size() || left * parts[chosen] < chosen_left * parts[k]) {
                chosen = k;
                chosen_left = left;
            }
        }
        CHECK(chosen < parts.size(), "no source is owed sample %lld", (long long)n);
        owed[chosen] -= period;
        source_.push_back(static_cast<uint8_t>(chosen));
        index_.push_back(count[chosen]++);
    }
}

BlendOrder::Place BlendOrder::at(int64_t sample) const {
    CHECK(sample >= 0, "sample %lld", (long long)sample);
    const size_t place = static_cast<size_t>(sample % period());
    const int64_t source = source_[place];
    return {source, sample / period() * parts_[static_cast<size_t>(source)] + index_[place]};
}

int64_t BlendOrder::count(int64_t source, int64_t n) const {
    CHECK(n >= 0 && source >= 0 && source < static_cast<int64_t>(parts_.size()), "source %lld, %lld samples",
          (long long)source, (long long)n);
    const auto rest = source_.begin() + n % period();
    return n / period() * parts_[static_cast<size_t>(source)]
           + std::count(source_.begin(), rest, static_cast<uint8_t>(source));
}
