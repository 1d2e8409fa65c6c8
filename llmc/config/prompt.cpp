#include "llmc/config/prompt.h"

#include <charconv>
#include <sstream>

#include "llmc/base/check.h"
#include "llmc/base/text.h"

namespace {

std::vector<int32_t> parse_ids(const std::string& text) {
    std::vector<int32_t> ids;
    std::istringstream words(text);
    for (std::string word; words >> word;) {
        int32_t id = -1;
        const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), id);
        REQUIRE(error == std::errc() && end == word.data() + word.size() && id >= 0, "--prompt-ids: \"%s\" is not a "
                "token id; ids are whole numbers with spaces between them", printable(word).c_str());
        ids.push_back(id);
    }
    return ids;
}

std::vector<int32_t> bytes_of(const std::string& text, int64_t vocab_size) {
    REQUIRE(vocabulary_is_bytes(vocab_size), "--prompt-bytes: a vocabulary of %lld is not bytes: give --prompt-ids, or "
            "let scripts/generate encode the text", ll(vocab_size));
    std::vector<int32_t> ids;
    for (char c : text) ids.push_back(static_cast<unsigned char>(c));
    return ids;
}

}  // namespace

bool vocabulary_is_bytes(int64_t vocab_size) { return vocab_size <= 257; }

std::vector<int32_t> read_prompt(const Config& config, int64_t max_tokens, const std::string& limit) {
    const int64_t vocab = config.shape.vocab_size;
    const bool by_ids = !config.prompt_ids.empty(), by_bytes = !config.prompt_bytes.empty();
    if (!by_ids && !by_bytes) return {};
    REQUIRE(!(by_ids && by_bytes), "--prompt-ids and --prompt-bytes are both given: a text continues one prompt");
    const std::vector<int32_t> ids = by_ids ? parse_ids(config.prompt_ids) : bytes_of(config.prompt_bytes, vocab);
    const char* option = by_ids ? "--prompt-ids" : "--prompt-bytes";
    REQUIRE(!ids.empty(), "%s: an empty prompt; give at least one token, or leave it out", option);
    for (int32_t id : ids)
        REQUIRE(id < vocab, "%s: token %d lies outside the vocabulary of %lld", option, id, ll(vocab));
    const int64_t tokens = static_cast<int64_t>(ids.size());
    REQUIRE(tokens + config.sample_tokens <= max_tokens, "%s: a prompt of %s and --sample-tokens %lld exceed %s %lld",
            option, count_text(tokens, "token").c_str(), ll(config.sample_tokens), limit.c_str(), ll(max_tokens));
    return ids;
}

bool prints_bytes(const Config& config) {
    return vocabulary_is_bytes(config.shape.vocab_size) && config.prompt_ids.empty();
}

std::string tokens_text(const std::vector<int32_t>& tokens, bool bytes) {
    std::string text;
    for (int32_t token : tokens) {
        if (bytes) text += token < 256 ? static_cast<char>(token) : '\n';
        else text += (text.empty() ? "" : " ") + std::to_string(token);
    }
    return text;
}
