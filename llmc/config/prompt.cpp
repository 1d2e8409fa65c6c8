#include "llmc/config/prompt.h"

#include <charconv>
#include <optional>
#include <sstream>

#include "llmc/base/check.h"
#include "llmc/base/text.h"

namespace {

// The ids that the text is, if all its words are whole numbers; else nothing.
std::optional<std::vector<int32_t>> ids_of(const std::string& text) {
    std::vector<int32_t> ids;
    std::istringstream words(text);
    for (std::string word; words >> word;) {
        int32_t id = -1;
        const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), id);
        if (error != std::errc() || end != word.data() + word.size() || id < 0) return {};
        ids.push_back(id);
    }
    return ids;
}

std::vector<int32_t> bytes_of(const std::string& text, bool bytes, int64_t vocab_size) {
    REQUIRE(bytes, "--prompt \"%s\": a vocabulary of %lld is not bytes: give token ids with "
            "spaces between them, or let scripts/generate encode the text", printable(text).c_str(), ll(vocab_size));
    std::vector<int32_t> ids;
    for (char c : text) ids.push_back(static_cast<unsigned char>(c));
    return ids;
}

}  // namespace

bool is_bytes(const std::string& vocabulary, int64_t vocab_size) {
    return vocabulary.empty() ? vocab_size <= 257 : vocabulary == "bytes";
}

std::vector<int32_t> read_prompt(const Config& config, bool bytes, int64_t max_tokens, const std::string& limit) {
    const int64_t vocab = config.shape.vocab_size;
    if (config.prompt.empty()) return {};
    const auto given = ids_of(config.prompt);
    const std::vector<int32_t> ids = given ? *given : bytes_of(config.prompt, bytes, vocab);
    REQUIRE(!ids.empty(), "--prompt: an empty prompt; give at least one token, or leave it out");
    for (int32_t id : ids)
        REQUIRE(id < vocab, "--prompt: token %d lies outside the vocabulary of %lld", id, ll(vocab));
    const int64_t tokens = static_cast<int64_t>(ids.size());
    REQUIRE(tokens + config.sample_tokens <= max_tokens,
            "--prompt: a prompt of %s and --sample-tokens %lld exceed %s %lld", count_text(tokens, "token").c_str(),
            ll(config.sample_tokens), limit.c_str(), ll(max_tokens));
    return ids;
}

bool prints_bytes(const Config& config, bool bytes) {
    return bytes && (config.prompt.empty() || !ids_of(config.prompt));
}

std::string tokens_text(const std::vector<int32_t>& tokens, bool bytes) {
    std::string text;
    for (int32_t token : tokens) {
        if (bytes) text += token < 256 ? static_cast<char>(token) : '\n';
        else text += (text.empty() ? "" : " ") + std::to_string(token);
    }
    return text;
}
