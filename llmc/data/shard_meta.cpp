#include "llmc/data/shard_meta.h"

#include <algorithm>

#include "llmc/base/json_object.h"

namespace {

using Json = nlohmann::json;

std::string sidecar_of(const std::string& shard) { return shard_stem(shard) + ".meta.json"; }

// A field of a sidecar, null if it has none. The offsets of a million documents follow, and are not read.
Json field_of(const std::string& sidecar, const char* name) {
    return read_json_object(sidecar, kMaxSidecarBytes, name);
}

// An id in object[name], -1 if there is none.
int32_t id_of(const Json& object, const char* name) {
    const Json id = object.is_object() ? object.value(name, Json()) : Json();
    return id.is_number_integer() && id >= 0 && id <= INT32_MAX ? id.get<int32_t>() : -1;
}

// Whether the first of these texts that both know differs.
bool differs(const TokenizerFacts& a, const TokenizerFacts& b) {
    for (const auto text : {&TokenizerFacts::vocabulary, &TokenizerFacts::sha256, &TokenizerFacts::name})
        if (!(a.*text).empty() && !(b.*text).empty()) return a.*text != b.*text;
    return false;
}

// The name of the tokenizer `facts` in an error that must tell it apart from `other`.
std::string tokenizer_name(const TokenizerFacts& facts, const TokenizerFacts& other) {
    if (!facts.name.empty() && facts.name != other.name) return "the tokenizer " + printable(facts.name);
    return "the tokenizer of SHA-256 " + facts.sha256.substr(0, 12);
}

}  // namespace

int32_t read_separator(const std::string& shard, int64_t vocab_size) {
    const std::string sidecar = sidecar_of(shard);
    auto refuse = [&](const std::string& why) {
        FAIL(kExitBadInput, "--reset-attention-mask, --reset-position-ids, --align-documents on: data shard '%s' does "
             "not name the token that separates documents: '%s' %s (data/prepare_text.py writes it as "
             "tokenizer.separator)", shard.c_str(), sidecar.c_str(), why.c_str());
    };
    if (!path_exists(sidecar)) refuse("is missing");
    const Json tokenizer = field_of(sidecar, "tokenizer");
    const Json id = tokenizer.is_object() ? tokenizer.value("separator", Json()) : Json();
    if (!id.is_number_integer()) refuse("has no integer tokenizer.separator");
    if (id < 0 || id >= vocab_size)
        refuse(strf("says %s, outside the vocabulary of %lld", id.dump().c_str(), ll(vocab_size)));
    return id.get<int32_t>();
}

TokenizerFacts read_tokenizer(const std::string& shard) {
    const std::string sidecar = sidecar_of(shard);
    if (!is_regular_file(sidecar)) return {};
    const Json tokenizer = field_of(sidecar, "tokenizer"), size = field_of(sidecar, "vocab_size");
    const std::string name = text_of(tokenizer, "name");
    return {.name = name, .sha256 = text_of(tokenizer, "sha256"),
            .vocabulary = name == "bytes" ? name : text_of(tokenizer, "vocabulary"),
            .chat_template = text_of(tokenizer, "chat_template"),
            .vocab_size = size.is_number_unsigned() ? size.get<int64_t>() : -1,
            .separator = id_of(tokenizer, "separator"), .end_of_turn = id_of(tokenizer, "end_of_turn")};
}

TokenizerFacts facts_of(const std::vector<ShardInfo>& shards) {
    TokenizerFacts facts;
    for (const ShardInfo& shard : shards) {
        for (const auto text : {&TokenizerFacts::name, &TokenizerFacts::sha256, &TokenizerFacts::vocabulary,
                                &TokenizerFacts::chat_template})
            if ((facts.*text).empty()) facts.*text = shard.tokenizer.*text;
        facts.vocab_size = std::max(facts.vocab_size, shard.tokenizer.vocab_size);
        for (const auto id : {&TokenizerFacts::separator, &TokenizerFacts::end_of_turn})
            if (facts.*id < 0) facts.*id = shard.tokenizer.*id;
    }
    return facts;
}

void require_same_tokenizer(const std::string& what, const std::vector<ShardInfo>& shards,
                            const std::vector<ShardInfo>& more) {
    // The first shard that knows a fact stands for all of `shards`, which were compared with each other.
    const auto compare = [&](auto known, auto same, auto refuse) {
        const auto first = std::find_if(shards.begin(), shards.end(), [&](auto& s) { return known(s.tokenizer); });
        for (const ShardInfo& shard : more)
            if (first != shards.end() && known(shard.tokenizer) && !same(shard.tokenizer, first->tokenizer))
                refuse(shard, *first);
    };
    compare([](const TokenizerFacts& facts) { return !facts.chat_template.empty(); },
            [](const TokenizerFacts& a, const TokenizerFacts& b) { return a.chat_template == b.chat_template; },
            [&](const ShardInfo& shard, const ShardInfo& first) {
                FAIL(kExitBadInput, "%s: '%s' has another chat template than '%s' (their .meta.json): name shards of "
                     "one data/prepare_chat.py --template", what.c_str(), shard.path.c_str(), first.path.c_str());
            });
    compare([](const TokenizerFacts& facts) { return !(facts.name + facts.sha256 + facts.vocabulary).empty(); },
            [](const TokenizerFacts& a, const TokenizerFacts& b) { return !differs(a, b); },
            [&](const ShardInfo& shard, const ShardInfo& first) {
                FAIL(kExitBadInput, "%s: '%s' was made with %s, '%s' with %s (their .meta.json): name files of one "
                     "tokenizer", what.c_str(), shard.path.c_str(),
                     tokenizer_name(shard.tokenizer, first.tokenizer).c_str(), first.path.c_str(),
                     tokenizer_name(first.tokenizer, shard.tokenizer).c_str());
            });
    compare([](const TokenizerFacts& facts) { return facts.separator >= 0; },
            [](const TokenizerFacts& a, const TokenizerFacts& b) { return a.separator == b.separator; },
            [&](const ShardInfo& shard, const ShardInfo& first) {
                FAIL(kExitBadInput, "%s: '%s' separates documents with token %d, '%s' with %d (their .meta.json): name "
                     "shards with one --separator", what.c_str(), shard.path.c_str(), shard.tokenizer.separator,
                     first.path.c_str(), first.tokenizer.separator);
            });
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
