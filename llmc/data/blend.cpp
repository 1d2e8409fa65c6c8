#include "llmc/data/blend.h"

#include <algorithm>
#include <charconv>
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

// digits * 10^exponent; digits has no trailing zeros.
struct Decimal {
    int64_t digits = 0;
    int64_t exponent = 0;
};

// Returns false if an int64 cannot hold the digits.
bool parse_decimal(const std::string& word, Decimal* out) {
    constexpr int64_t kLimit = std::numeric_limits<int64_t>::max() / 10 - 1;
    int64_t exponent = 0;
    bool fraction = false;
    size_t i = word[0] == '+' ? 1 : 0;
    for (; i < word.size() && word[i] != 'e' && word[i] != 'E'; i++) {
        if (word[i] == '.') fraction = true;
        else if (out->digits > kLimit) return false;
        else out->digits = out->digits * 10 + (word[i] - '0');
        exponent -= fraction && word[i] != '.';
    }
    if (i < word.size()) {
        const char* begin = word.data() + i + 1 + (word[i + 1] == '+' ? 1 : 0);
        int64_t written = 0;
        if (std::from_chars(begin, word.data() + word.size(), written).ec != std::errc()) return false;
        if (written > 1000 || written < -1000) return false;
        exponent += written;
    }
    for (; out->digits > 0 && out->digits % 10 == 0; out->digits /= 10) exponent++;
    out->exponent = exponent;
    return true;
}

// Converts the weights to integers of the same ratio without a common divisor; returns false if they get too large.
bool make_parts(const std::vector<Decimal>& weights, std::vector<int64_t>* parts) {
    int64_t lowest = weights[0].exponent, divisor = 0;
    for (const Decimal& weight : weights) lowest = std::min(lowest, weight.exponent);
    for (const Decimal& weight : weights) {
        int64_t part = weight.digits;
        for (int64_t e = lowest; e < weight.exponent; e++)
            if (__builtin_mul_overflow(part, int64_t{10}, &part)) return false;
        parts->push_back(part);
        divisor = std::gcd(divisor, part);
    }
    int64_t sum = 0;
    for (int64_t& part : *parts)
        if (__builtin_add_overflow(sum, part /= divisor, &sum) || sum > kMaxPeriod) return false;
    return true;
}

// Computes the parts of all sources. Returns "" or what is wrong with the weights.
std::string weigh(std::vector<DataSource>& sources) {
    std::vector<Decimal> weights;
    std::string list;
    for (const DataSource& source : sources) {
        const char* weight = source.weight.c_str();
        Decimal decimal;
        if (source.globs.empty()) return strf("weight %s has no shards after it", weight);
        if (source.weight[0] == '-') return strf("weight %s is negative, it must be above 0", weight);
        if (!parse_decimal(source.weight, &decimal)) return strf("weight %s: write it with fewer digits", weight);
        if (decimal.digits == 0) return strf("weight %s must be above 0; leave out a source without a share", weight);
        weights.push_back(decimal);
        list += (list.empty() ? "" : " : ") + source.weight;
    }
    if (sources.size() == 1)
        return strf("weight %s has no effect on a single source: leave it out", sources[0].weight.c_str());
    if (sources.size() > kMaxSources) return strf("%zu weights, at most %zu", sources.size(), kMaxSources);
    std::vector<int64_t> parts;
    if (!make_parts(weights, &parts))
        return strf("weights %s: exact shares repeat only after more than %lld samples; write the weights with fewer "
                    "digits", list.c_str(), (long long)kMaxPeriod);
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
