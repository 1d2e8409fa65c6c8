#include "llmc/checkpoint/checkpoint.h"

#include <algorithm>
#include <filesystem>

#include "llmc/base/check.h"

namespace {

// What of a tokenizer directory goes along; a model has config.json and weights of its own there.
constexpr const char* kTokenizerFiles[] = {
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json",
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"};

std::string base_name(const std::string& path) { return std::filesystem::path(path).filename().string(); }

}  // namespace

std::vector<std::string> tokenizer_files(const std::string& tokenizer) {
    if (tokenizer.empty()) return {};
    if (is_regular_file(tokenizer)) {
        const std::string name = base_name(tokenizer);
        const bool ours = name == "config.json" || name == "state.json" || name == "manifest.json"
                          || name == "optimizer" || name.rfind("model", 0) == 0;
        REQUIRE(!ours, "--tokenizer %s: a checkpoint has its own %s; rename the file", tokenizer.c_str(),
                name.c_str());
        return {tokenizer};
    }
    REQUIRE(is_directory(tokenizer), "--tokenizer %s: no such file or directory", tokenizer.c_str());
    std::vector<std::string> files;
    for (const char* name : kTokenizerFiles)
        if (is_regular_file(tokenizer + "/" + name)) files.push_back(tokenizer + "/" + name);
    REQUIRE(!files.empty(), "--tokenizer %s: no tokenizer.json, tokenizer.model or vocab.json in it",
            tokenizer.c_str());
    return files;
}

std::vector<ElementRange> held_within(const StateAccess& access, StateKind kind, int index, const ElementRange& all) {
    if (all.count == 0) return {};
    if (kind == StateKind::kWeight || !access.held) return {all};
    std::vector<ElementRange> parts;
    for (const ElementRange& held : access.held(index)) {
        const int64_t begin = std::max(held.begin, all.begin);
        const int64_t end = std::min(held.begin + held.count, all.begin + all.count);
        if (begin < end) parts.push_back({begin, end - begin});
    }
    return parts;
}
