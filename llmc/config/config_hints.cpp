// What an error about a value adds: what was probably meant.
#include <strings.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <sstream>

#include "llmc/base/check.h"
#include "llmc/base/nearest.h"
#include "llmc/config/config_table.h"

namespace {

constexpr const char* kDtypes = "dtype grad-dtype moment-dtype grad-comm-dtype grad-shard-dtype";
// Words of other trainers for a value, and what to write here.
constexpr struct {
    const char *options, *words, *hint;
} kHints[] = {
    {kDtypes, "bfloat16 torch.bfloat16 bfloat bf16-mixed", "did you mean bf16?"},
    {kDtypes, "float32 torch.float32 float single 32 tf32", "did you mean fp32?"},
    {kDtypes, "fp16 float16 torch.float16 half 16 16-mixed",
     "there is no FP16; bf16 has FP32's range and needs no loss scaling"},
    {"dtype", "fp8 float8 e4m3 e5m2 hybrid",
     "FP8 is --fp8-recipe int8-forward, delayed, tensorwise or blockwise, beside --dtype bf16"},
    {"recompute", "full uniform all on true 1", "did you mean block?"},
    {"recompute", "off false 0", "did you mean none?"},
    {"fp8-recipe", "on true yes 1 fp8 hybrid e4m3",
     "int8-forward is the usual choice; --fp8-format has hybrid and e4m3"},
    {"fp8-recipe", "int8 w8a8", "did you mean int8-forward?"},
    {"fp8-recipe", "off false no 0", "did you mean none?"},
    {"fp8-recipe", "mxfp8 rowwise rowwise-with-gw-hp", "blockwise has the finest scaling factors that Hopper supports"},
    {"fp8-recipe", "current float8-current-scaling dynamic", "did you mean tensorwise?"},
    {"position-embedding-type", "learned absolute", "did you mean learned_absolute?"},
    {"position-embedding-type", "rotary", "did you mean rope?"},
    {"activation", "silu swish", "did you mean swiglu?"},
    {"activation", "gelu-new gelu-pytorch-tanh", "did you mean gelu?"},
    {"normalization", "rms", "did you mean RMSNorm?"},
    {"normalization", "layer ln", "did you mean LayerNorm?"},
};

std::string choice_hint(const OptionRow& row, const std::string& word) {
    for (const auto& hint : kHints)
        if (has_word(hint.options, row.name) && has_word(hint.words, dashes(word))) return hint.hint;
    if (word.empty()) return "";
    const std::string near = nearest(word, row.value.words);
    return edit_distance(word, near) <= std::max<size_t>(1, near.size() / 3) ? "did you mean " + near + "?" : "";
}

// For a text that begins with a number.
std::string number_hint(const OptionRow& row, const std::string& word) {
    double x = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), x);
    if (error != std::errc() || end == word.data()) return "";
    const std::string rest(end, word.data() + word.size());
    if (rest.empty() && word.find_first_not_of("0123456789") == std::string::npos && x > 9e18)
        return strf("the largest integer is %lld", ll(INT64_MAX));
    const std::string unit = rest.size() == 1 ? "kmgbt" : "";
    const size_t place = unit.find(static_cast<char>(std::tolower(static_cast<unsigned char>(rest[0]))));
    if (place < unit.size()) {
        constexpr double kFactors[] = {1e3, 1e6, 1e9, 1e9, 1e12};
        const double whole = x * kFactors[place];
        const bool binary = place == 0 && std::string(row.value.type) == "integer";
        return "units are not read: write " + strf("%.0f", whole)
               + (binary ? strf(", or %.0f for %g x 1024", x * 1024, x) : "");
    }
    if (rest[0] == ',') return "write it without commas, with a point before decimals";
    if (rest[0] == '%') return strf("write it as a share, %g", x / 100);
    return "";
}

}  // namespace

bool has_word(const std::string& words, const std::string& word) {
    std::istringstream all(words);
    for (std::string one; all >> one;)
        if (strcasecmp(one.c_str(), word.c_str()) == 0) return true;
    return false;
}

std::string value_error(const OptionRow& row, const std::string& where, const Json& value) {
    const std::string word = shortened(json_text(value));
    const std::string hint = !row.value.words.empty() ? choice_hint(row, word)
                             : row.value.any_text || word.empty() ? "" : number_hint(row, word);
    return strf("%s %s: must be %s%s", where.c_str(), word.empty() ? "''" : word.c_str(), row.value.expects.c_str(),
                hint.empty() ? "" : ("; " + hint).c_str());
}

void fail_unexpected_word(const std::string& given, const OptionRow* before) {
    const std::string word = shortened(given);
    if (before && std::string(before->value.type) == "tuple")
        FAIL(kExitBadInput, "unexpected word \"%s\": the values of --%s are one word, in quotes: %s", word.c_str(),
             before->name, before->value.metavar.c_str());
    const std::string name = dashes(word.substr(0, word.find('=')));
    if (name.size() < word.size() && find_option(name))
        FAIL(kExitBadInput, "unexpected word \"%s\": write --%s%s", word.c_str(), name.c_str(),
             word.substr(name.size()).c_str());
    // U+2010 to U+2015 and U+2212, which word processors put in the place of hyphens.
    const bool dash = word.starts_with("\xe2\x80") && word.size() > 3 && word[2] >= '\x90' && word[2] <= '\x95';
    if (dash || word.starts_with("\xe2\x88\x92"))
        FAIL(kExitBadInput, "unexpected word \"%s\": it begins with a typographic dash, not with two hyphens: --%s",
             word.c_str(), word.substr(word.find_first_not_of("\xe2\x80\x88\x90\x91\x92\x93\x94\x95-")).c_str());
    FAIL(kExitBadInput, "unexpected word \"%s\": a value follows its option; true-or-false options take --option=false",
         word.c_str());
}

std::string batch_hint(int64_t sequences, int64_t micro_batch_size, int ranks) {
    const int64_t unit = micro_batch_size * ranks, below = sequences / unit * unit;
    std::string text = below > 0 ? strf("%lld or %lld would be one", ll(below), ll(below + unit))
                                 : strf("%lld would be one", ll(unit));
    if (sequences % ranks != 0) return text;
    int64_t divisor = std::min(micro_batch_size, sequences / ranks);
    while (sequences / ranks % divisor != 0) divisor--;
    return text + strf(", or take --micro-batch-size %lld", ll(divisor));
}
