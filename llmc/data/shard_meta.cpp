#include "llmc/data/shard_meta.h"

#include <algorithm>
#include <filesystem>

#include "llmc/base/json_object.h"

namespace {

using Json = nlohmann::json;

std::string sidecar_of(const std::string& shard) { return shard_stem(shard) + ".meta.json"; }

// The field "tokenizer" of a sidecar, null if it has none. The offsets of a million documents follow, and are not read.
Json tokenizer_of(const std::string& sidecar) { return read_json_object(sidecar, kMaxSidecarBytes, "tokenizer"); }

bool differs(const ShardInfo& a, const ShardInfo& b) {
    if (!a.tokenizer_sha256.empty() && !b.tokenizer_sha256.empty()) return a.tokenizer_sha256 != b.tokenizer_sha256;
    return !a.tokenizer.empty() && !b.tokenizer.empty() && a.tokenizer != b.tokenizer;
}

bool has_chat_template(const ShardInfo& shard) { return !shard.chat_template.empty(); }

// The name of the tokenizer of `shard` in an error that must tell it apart from the tokenizer of `other`.
std::string tokenizer_name(const ShardInfo& shard, const ShardInfo& other) {
    if (!shard.tokenizer.empty() && shard.tokenizer != other.tokenizer)
        return "the tokenizer " + printable(shard.tokenizer);
    return "the tokenizer of SHA-256 " + shard.tokenizer_sha256.substr(0, 12);
}

}  // namespace

int32_t read_separator(const std::string& shard, int64_t vocab_size) {
    const std::string sidecar = sidecar_of(shard);
    auto refuse = [&](const std::string& why) {
        FAIL(kExitBadInput, "--reset-attention-mask, --reset-position-ids: data shard '%s' does not name the token "
             "that separates documents: '%s' %s (data/prepare_text.py writes it as tokenizer.separator)", shard.c_str(),
             sidecar.c_str(), why.c_str());
    };
    if (!std::filesystem::exists(sidecar)) refuse("is missing");
    const Json tokenizer = tokenizer_of(sidecar);
    const Json id = tokenizer.is_object() ? tokenizer.value("separator", Json()) : Json();
    if (!id.is_number_integer()) refuse("has no integer tokenizer.separator");
    if (id < 0 || id >= vocab_size)
        refuse(strf("says %s, outside the vocabulary of %lld", id.dump().c_str(), ll(vocab_size)));
    return id.get<int32_t>();
}

void read_tokenizer(ShardInfo& shard) {
    const std::string sidecar = sidecar_of(shard.path);
    if (!is_regular_file(sidecar)) return;
    const Json tokenizer = tokenizer_of(sidecar);
    shard.tokenizer = text_of(tokenizer, "name");
    shard.tokenizer_sha256 = text_of(tokenizer, "sha256");
    shard.chat_template = text_of(tokenizer, "chat_template");
}

std::string chat_template_of(const std::vector<ShardInfo>& shards) {
    const auto found = std::find_if(shards.begin(), shards.end(), has_chat_template);
    return found == shards.end() ? "" : found->chat_template;
}

void require_same_tokenizer(const std::string& what, const std::vector<ShardInfo>& shards,
                            const std::vector<ShardInfo>& more) {
    const auto chat = std::find_if(shards.begin(), shards.end(), has_chat_template);
    for (const ShardInfo& shard : more)
        REQUIRE(chat == shards.end() || !has_chat_template(shard) || shard.chat_template == chat->chat_template, "%s: "
                "data shard '%s' has another chat template than '%s' (their .meta.json): name shards of one "
                "data/prepare_chat.py --template", what.c_str(), shard.path.c_str(), chat->path.c_str());
    // The first known tokenizer stands for all of `shards`, which were compared with each other.
    const auto known = [](const ShardInfo& shard) { return !(shard.tokenizer + shard.tokenizer_sha256).empty(); };
    const auto first = std::find_if(shards.begin(), shards.end(), known);
    if (first == shards.end()) return;
    for (const ShardInfo& shard : more)
        REQUIRE(!differs(*first, shard), "%s: data shard '%s' was made with %s, '%s' with %s (their .meta.json): name "
                "shards of one tokenizer", what.c_str(), shard.path.c_str(), tokenizer_name(shard, *first).c_str(),
                first->path.c_str(), tokenizer_name(*first, shard).c_str());
}

std::string check_validation_shards(const std::vector<ShardInfo>& train, const std::vector<ShardInfo>& valid,
                                    bool same) {
    require_same_tokenizer("--valid-data and --train-data", train, valid);
    std::vector<const ShardInfo*> both;
    for (const ShardInfo& shard : valid)
        if (std::any_of(train.begin(), train.end(), [&](const ShardInfo& other) {
                return other.fingerprint == shard.fingerprint && other.tokens == shard.tokens;
            }))
            both.push_back(&shard);
    if (both.empty()) return "";
    const char* first = both[0]->path.c_str();
    REQUIRE(same || both.size() < valid.size() || valid.size() < train.size(), "--valid-data and --train-data name the "
            "same tokens ('%s'%s): name shards that are not trained on (data/prepare_text.py --valid-fraction makes "
            "both), or leave --valid-data out", first, both.size() == 1 ? "" : ", ...");
    return strf("VALIDATION ON TRAINING DATA: %s of --valid-data %s also in --train-data, the first is '%s'",
                count_text(static_cast<int64_t>(both.size()), "shard").c_str(), both.size() == 1 ? "is" : "are", first);
}
