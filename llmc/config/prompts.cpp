#include "llmc/config/prompts.h"

#include <charconv>
#include <iostream>
#include <sstream>

#include "llmc/base/check.h"
#include "llmc/base/system/files.h"
#include "llmc/base/text.h"

namespace {

constexpr int64_t kMaxPromptBytes = int64_t{64} << 20;

std::vector<int32_t> parse_ids(const std::string& text, const std::string& where) {
    std::vector<int32_t> ids;
    std::istringstream words(text);
    for (std::string word; words >> word;) {
        int32_t id = -1;
        const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), id);
        REQUIRE(error == std::errc() && end == word.data() + word.size() && id >= 0, "%s: \"%s\" is not a token id; "
                "ids are whole numbers with spaces between them", where.c_str(), printable(word).c_str());
        ids.push_back(id);
    }
    return ids;
}

void require_in_vocabulary(const std::vector<int32_t>& ids, int64_t vocab_size, const std::string& where) {
    for (int32_t id : ids)
        REQUIRE(id < vocab_size, "%s: token %d lies outside the vocabulary of %lld", where.c_str(), id, ll(vocab_size));
}

std::vector<int32_t> bytes_of(const std::string& text, int64_t vocab_size, const std::string& where) {
    REQUIRE(vocabulary_is_bytes(vocab_size), "%s: a vocabulary of %lld is not bytes: give token ids, or let "
            "scripts/generate encode the text", where.c_str(), ll(vocab_size));
    std::vector<int32_t> ids;
    for (char c : text) ids.push_back(static_cast<unsigned char>(c));
    return ids;
}

// The lines of --prompts, without empty ones at the end.
std::vector<std::string> prompt_lines(const std::string& file, bool standard_input) {
    std::string all;
    if (file == "-") {
        REQUIRE(standard_input, "--prompts -: only generate reads standard input");
        all.assign(std::istreambuf_iterator<char>(std::cin), {});
    } else {
        REQUIRE(!is_directory(file), "--prompts %s: a folder, not a file", file.c_str());
        all = read_text_file(file, kMaxPromptBytes);
    }
    std::vector<std::string> lines;
    std::istringstream stream(all);
    for (std::string line; std::getline(stream, line);) {
        if (line.ends_with('\r')) line.pop_back();   // lines as Windows ends them
        lines.push_back(line);
    }
    while (!lines.empty() && lines.back().empty()) lines.pop_back();
    REQUIRE(!lines.empty(), "--prompts %s: has no line with a prompt", file.c_str());
    return lines;
}

}  // namespace

bool vocabulary_is_bytes(int64_t vocab_size) { return vocab_size <= 257; }

TokenForm token_form(const Config& config) {
    if (config.print == TokenForm::kAuto)
        return vocabulary_is_bytes(config.shape.vocab_size) ? TokenForm::kBytes : TokenForm::kIds;
    REQUIRE(config.print == TokenForm::kIds || vocabulary_is_bytes(config.shape.vocab_size),
            "--print bytes: a vocabulary of %lld is not bytes: print ids, or let scripts/generate decode them",
            ll(config.shape.vocab_size));
    return config.print;
}

std::vector<std::vector<int32_t>> read_prompts(const Config& config, int64_t max_tokens, const std::string& limit,
                                               bool standard_input) {
    const int64_t vocab = config.shape.vocab_size;
    std::vector<std::vector<int32_t>> prompts;
    auto add = [&](std::vector<int32_t> ids, const std::string& where) {
        REQUIRE(!ids.empty(), "%s: an empty prompt; give at least one token, or leave it out", where.c_str());
        require_in_vocabulary(ids, vocab, where);
        const int64_t tokens = static_cast<int64_t>(ids.size());
        REQUIRE(tokens + config.sample_tokens <= max_tokens,
                "%s: a prompt of %s and --sample-tokens %lld exceed %s %lld", where.c_str(),
                count_text(tokens, "token").c_str(), ll(config.sample_tokens), limit.c_str(), ll(max_tokens));
        prompts.push_back(std::move(ids));
    };
    const TokenForm form = token_form(config);
    if (!config.prompt_ids.empty()) add(parse_ids(config.prompt_ids, "--prompt-ids"), "--prompt-ids");
    if (!config.prompt_bytes.empty()) add(bytes_of(config.prompt_bytes, vocab, "--prompt-bytes"), "--prompt-bytes");
    if (config.prompts.empty()) return prompts;
    int64_t number = 0;
    for (const std::string& line : prompt_lines(config.prompts, standard_input)) {
        const std::string where = strf("--prompts %s: line %lld", config.prompts.c_str(), ll(++number));
        add(form == TokenForm::kIds ? parse_ids(line, where) : bytes_of(line, vocab, where), where);
    }
    return prompts;
}

std::vector<int32_t> read_stop_ids(const Config& config) {
    const std::vector<int32_t> ids = parse_ids(config.stop_ids, "--stop-ids");
    require_in_vocabulary(ids, config.shape.vocab_size, "--stop-ids");
    return ids;
}

std::string tokens_text(const std::vector<int32_t>& tokens, TokenForm form) {
    std::string text;
    for (int32_t token : tokens) {
        if (form == TokenForm::kIds) text += (text.empty() ? "" : " ") + std::to_string(token);
        else text += token < 256 ? static_cast<char>(token) : '\n';
    }
    return text;
}
