#include "llmc/data/hellaswag.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "llmc/base/check.h"
#include "llmc/base/dtype.h"
#include "llmc/base/system/files.h"

namespace {

constexpr int32_t kMagic = 20240522, kShardMagic = 20240520, kShardMagic32 = 20240801;
constexpr int64_t kHeaderBytes = 256 * 4, kMaxFileBytes = int64_t{1} << 30, kMaxCompletions = 64;

int32_t header_word(const std::string& bytes, int64_t index) {
    int32_t value;
    std::memcpy(&value, bytes.data() + index * 4, 4);
    return value;
}

// Reads the words of a file in order. Errors name the byte offset of the value.
template <typename Word>
class Words {
public:
    Words(const std::string& path, const std::string& bytes) : path_(path), bytes_(bytes) {}

    int64_t offset() const { return at_; }
    bool at_end() const { return at_ == static_cast<int64_t>(bytes_.size()); }
    int64_t next(const char* what) {
        constexpr int64_t size = sizeof(Word);
        const int64_t end = static_cast<int64_t>(bytes_.size());
        REQUIRE(at_ + size <= end, "HellaSwag file '%s': byte %lld: the file ends where %s should be", path_.c_str(),
                ll(at_), what);
        Word value;
        std::memcpy(&value, bytes_.data() + at_, sizeof value);
        at_ += size;
        return static_cast<int64_t>(value);
    }
    // Reads a word that must be in [low, high].
    int64_t next(const char* what, int64_t low, int64_t high) {
        const int64_t begin = at_, value = next(what);
        REQUIRE(value >= low && value <= high, "HellaSwag file '%s': byte %lld: %s is %lld, must be %s%lld",
                path_.c_str(), ll(begin), what, ll(value),
                low == high ? "" : strf("in %lld..", ll(low)).c_str(), ll(high));
        return value;
    }

private:
    const std::string& path_;
    const std::string& bytes_;
    int64_t at_ = kHeaderBytes;
};

}  // namespace

Hellaswag::Hellaswag(const std::string& path, int64_t vocab_size, int64_t seq_length)
    : vocab_size_(vocab_size), seq_length_(seq_length) {
    const char* name = path.c_str();
    REQUIRE(path_exists(path), "HellaSwag file '%s': no such file; data/prepare_hellaswag.py makes it", name);
    const std::string bytes = read_text_file(path, kMaxFileBytes);
    const int32_t magic = bytes.size() >= 4 ? header_word(bytes, 0) : 0;
    REQUIRE(magic != kShardMagic && magic != kShardMagic32,
            "HellaSwag file '%s': byte 0: a token shard, not HellaSwag (--train-data, --valid-data)", name);
    REQUIRE(static_cast<int64_t>(bytes.size()) >= kHeaderBytes && magic == kMagic,
            "HellaSwag file '%s': byte 0: wrong magic %d or truncated (%zu bytes), expected %d and a header of %lld "
            "bytes; data/prepare_hellaswag.py makes such a file", name, magic, bytes.size(), kMagic, ll(kHeaderBytes));
    const int32_t version = header_word(bytes, 1);
    REQUIRE(version == 1 || version == 2, "HellaSwag file '%s': byte 4: version %d, expected 1 or 2", name, version);
    fingerprint_ = xxh3_of_text(bytes);
    if (version == 1) parse<uint16_t>(path, bytes);
    else parse<uint32_t>(path, bytes);
}

template <typename Word>
void Hellaswag::parse(const std::string& path, const std::string& bytes) {
    const char* name = path.c_str();
    constexpr int64_t kLargest = std::numeric_limits<Word>::max();
    const int64_t count = header_word(bytes, 2), longest_bytes = header_word(bytes, 3);
    REQUIRE(count > 0, "HellaSwag file '%s': byte 8: %lld examples", name, ll(count));
    Words<Word> words(path, bytes);
    auto take_tokens = [&](int64_t n) {
        const int64_t begin = static_cast<int64_t>(tokens_.size());
        for (int64_t i = 0; i < n; i++)
            tokens_.push_back(static_cast<int32_t>(words.next("a token", 0, vocab_size_ - 1)));
        return begin;
    };
    for (int64_t i = 0; i < count; i++) {
        const int64_t begin = words.offset();
        words.next("the start of an example", kLargest, kLargest);
        const int64_t size = words.next("the example's bytes", 1, longest_bytes), end = begin + size;
        words.next("the example's number", i, i);
        const int64_t label_at = words.offset(), label = words.next("the label");
        const int64_t completions = words.next("the number of completions", 2, kMaxCompletions);
        REQUIRE(label < completions, "HellaSwag file '%s': byte %lld: label %lld of %lld completions", name,
                ll(label_at), ll(label), ll(completions));
        const int64_t n = words.next("the context's length", 1, size), context = take_tokens(n);
        const int64_t first_row = rows();
        for (int64_t c = 0; c < completions; c++) {
            const int64_t m = words.next("the completion's length", 1, size), completion = take_tokens(m);
            rows_.push_back({context, n, completion, m});
            REQUIRE(n + m - 1 <= seq_length_,
                    "HellaSwag file '%s': example %lld has a context of %lld tokens and a completion of %lld, which do "
                    "not fit into --seq-length %lld", name, ll(i), ll(n), ll(m), ll(seq_length_));
        }
        REQUIRE(words.offset() == end, "HellaSwag file '%s': byte %lld: example %lld ends here, by its size of %lld "
                "bytes at %lld", name, ll(words.offset()), ll(i), ll(size), ll(end));
        examples_.push_back({first_row, completions, label});
    }
    REQUIRE(words.at_end(), "HellaSwag file '%s': byte %lld: the header says %lld examples, and more follows", name,
            ll(words.offset()), ll(count));
    for (const Row& row : rows_) longest_ = std::max(longest_, row.context_tokens + row.completion_tokens - 1);
}

int64_t Hellaswag::read(int64_t row, int64_t T, int32_t* inputs, int32_t* targets) const {
    const Row& r = rows_[static_cast<size_t>(row)];
    const int64_t count = r.context_tokens + r.completion_tokens - 1;
    CHECK(count <= T, "a row longer than %lld", ll(T));
    std::fill(targets, targets + T, kIgnoreIndex);
    std::copy_n(tokens_.begin() + r.context, r.context_tokens, inputs);
    // The last token is only a target.
    std::copy_n(tokens_.begin() + r.completion, r.completion_tokens - 1, inputs + r.context_tokens);
    std::copy_n(tokens_.begin() + r.completion, r.completion_tokens, targets + r.context_tokens - 1);
    for (int64_t i = count; i < T; i++) inputs[i] = inputs[i - count];
    return r.completion_tokens;
}

int64_t Hellaswag::correct(const std::vector<double>& losses) const {
    CHECK(losses.size() == rows_.size(), "%zu losses of %zu rows", losses.size(), rows_.size());
    int64_t count = 0;
    for (const Example& example : examples_) {
        int64_t best = -1;
        double lowest = std::numeric_limits<double>::infinity();
        for (int64_t c = 0; c < example.completions; c++) {
            const double loss = losses[static_cast<size_t>(example.first_row + c)];
            if (std::isfinite(loss) && loss < lowest) best = c, lowest = loss;
        }
        count += best == example.label;
    }
    return count;
}
