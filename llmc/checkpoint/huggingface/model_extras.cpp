// Sources of the names: transformers' tokenizers (tokenization_utils_base.py and the slow tokenizers'
// VOCAB_FILES_NAMES) and GenerationConfig; llama.cpp's convert_hf_to_gguf.py and vLLM read the same ones.
#include "llmc/checkpoint/huggingface/model_extras.h"

#include <algorithm>
#include <filesystem>

#include "llmc/base/json_object.h"
#include "llmc/base/system/files.h"
#include "llmc/checkpoint/manifest.h"
#include "llmc/data/token_text.h"
#include "llmc/model/parameters/params.h"

// Written by the build, from the files of these names.
extern const char* const kConfigurationLlmfp8;
extern const char* const kModelingLlmfp8;

namespace {

using Json = nlohmann::json;

// A directory with a tokenizer may be a model's, with config.json and weights.
constexpr const char* kTokenizerFiles[] = {
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
    "chat_template.jinja", "chat_template.json"};
constexpr const char* kGenerationConfig = "generation_config.json";

std::string base_name(const std::string& path) { return std::filesystem::path(path).filename().string(); }

// Whether something has this name, which must then be a file.
bool is_there(const std::string& path) {
    if (is_regular_file(path)) return true;
    REQUIRE(!path_exists(path), "%s is neither a file nor a link to one: replace or remove it", path.c_str());
    return false;
}

void append_known(const std::string& directory, std::vector<std::string>* files) {
    for (const char* name : kTokenizerFiles)
        if (is_there(directory + "/" + name)) files->push_back(directory + "/" + name);
}

// Programs read the template from one of two places, so both get it.
void set_chat_template(std::vector<ModelFile>& files, const std::string& chat_template) {
    std::erase_if(files, [](const ModelFile& file) { return file.name.rfind("chat_template.", 0) == 0; });
    for (ModelFile& file : files) {
        if (file.name != "tokenizer_config.json") continue;
        Json config = parse_json_object(file.bytes, file.name);
        config["chat_template"] = chat_template;
        file.bytes = config.dump(2) + "\n";
    }
    files.push_back({"chat_template.jinja", chat_template});
}

// Sets the special tokens in fields of config.json or generation_config.json as read_model_extras says. own: they are
// of the data's vocabulary.
void set_special_tokens(Json& fields, const TokenizerFacts& facts, bool own) {
    for (const char* name : kSpecialTokens)
        if (!own) fields.erase(name);
    for (const char* name : {"bos_token_id", "eos_token_id"})
        if (facts.separator >= 0 && (own ? fields.contains(name) && fields[name].is_null() : true))
            fields[name] = facts.separator;
    if (facts.end_of_turn < 0) return;
    const Json eos = fields.value("eos_token_id", Json());
    Json all = {facts.end_of_turn};
    for (const Json& id : eos.is_array() ? eos : eos.is_null() ? Json::array() : Json::array({eos}))
        if (id != facts.end_of_turn) all.push_back(id);
    fields["eos_token_id"] = all.size() == 1 ? all[0] : all;
}

// The same in the extras' files and origin.
void set_special_tokens(ModelExtras& extras, const TokenizerFacts& facts, bool own) {
    Json tokens = extras.origin.special_tokens.empty() ? Json::object() : Json::parse(extras.origin.special_tokens);
    set_special_tokens(tokens, facts, own);
    extras.origin.special_tokens = own || !tokens.empty() ? tokens.dump() : "";
    for (ModelFile& file : extras.files) {
        if (file.name != kGenerationConfig || (own && facts.separator < 0 && facts.end_of_turn < 0)) continue;
        const Json before = parse_json_object(file.bytes, file.name);
        Json after = before;
        set_special_tokens(after, facts, own);
        if (after != before) file.bytes = after.dump(2) + "\n";
    }
}

}  // namespace

std::vector<ModelFile> hf_code(const ModelConfig& config) {
    if (hf_class(config) != HfClass::kOwn) return {};
    return {{"configuration_llmfp8.py", kConfigurationLlmfp8}, {"modeling_llmfp8.py", kModelingLlmfp8}};
}

std::vector<std::string> tokenizer_files(const std::string& tokenizer) {
    if (tokenizer.empty() || tokenizer == "bytes") return {};
    if (is_regular_file(tokenizer)) {
        const std::string name = base_name(tokenizer);
        const bool ours = name == "config.json" || name == "state.json" || name == "manifest.json"
                          || name == "optimizer" || name == kGenerationConfig || name.rfind("model", 0) == 0
                          || name.ends_with(".py");
        REQUIRE(!ours, "--tokenizer %s: a checkpoint has its own %s; rename the file", tokenizer.c_str(), name.c_str());
        return {tokenizer};
    }
    const char* advice =
        tokenizer == "gpt2" ? ": name the tokenizer.json of openai-community/gpt2, which is copied" : "";
    REQUIRE(path_exists(tokenizer), "--tokenizer %s: no such file or directory%s", tokenizer.c_str(), advice);
    REQUIRE(is_directory(tokenizer), "--tokenizer %s: neither a file nor a folder", tokenizer.c_str());
    std::vector<std::string> files;
    append_known(tokenizer, &files);
    REQUIRE(!files.empty(), "--tokenizer %s: no tokenizer.json, tokenizer.model or vocab.json in it",
            tokenizer.c_str());
    return files;
}

std::vector<std::string> model_files(const std::string& directory) {
    std::vector<std::string> files;
    if (directory.empty()) return files;
    append_known(directory, &files);
    const std::string generation = directory + "/" + kGenerationConfig;
    if (is_there(generation)) files.push_back(generation);
    return files;
}

std::string tokenizer_vocabulary(const std::string& tokenizer) {
    if (tokenizer == "bytes") return tokenizer;
    if (const std::string file = tokenizer_json(tokenizer); !file.empty()) return vocabulary_of(file);
    const std::string state = tokenizer + "/state.json";
    if (tokenizer.empty() || !is_regular_file(state)) return "";
    try {
        return text_of(read_json_object(state, kMaxStateBytes, "train_data"), "vocabulary");
    } catch (const Error&) {
        return "";   // a damaged checkpoint is refused where it is loaded
    }
}

ModelExtras read_model_extras(const std::string& directory, const std::string& tokenizer,
                              const TokenizerFacts& facts) {
    ModelExtras extras;
    int64_t left = kMaxTokenizerBytes;
    const auto read = [&](const std::string& path) {
        extras.files.push_back({base_name(path), read_text_file(path, left)});
        left -= static_cast<int64_t>(extras.files.back().bytes.size());
    };
    if (!directory.empty()) extras.origin = hf_origin(directory);
    for (const std::string& path : model_files(directory)) {
        if (!tokenizer.empty() && base_name(path) != kGenerationConfig) continue;
        require_undamaged(directory, base_name(path));
        read(path);
    }
    for (const std::string& path : tokenizer_files(tokenizer)) read(path);
    const bool has_tokenizer = std::any_of(extras.files.begin(), extras.files.end(),
                                           [](const ModelFile& file) { return file.name != kGenerationConfig; });
    if (!facts.chat_template.empty() && has_tokenizer) set_chat_template(extras.files, facts.chat_template);
    const std::string was = tokenizer.empty() || directory.empty() ? "" : tokenizer_vocabulary(directory);
    const std::string is = was.empty() ? "" : tokenizer_vocabulary(tokenizer);
    set_special_tokens(extras, facts, !directory.empty() && (is.empty() || is == was));
    return extras;
}

std::vector<int32_t> eos_token_ids(const std::string& directory) {
    std::vector<int32_t> ids;
    for (const char* file : {"generation_config.json", "config.json"}) {
        const std::string path = directory + "/" + file;
        if (!is_regular_file(path)) continue;
        require_undamaged(directory, file);
        const Json object = read_json_object(path, kMaxConfigBytes);
        const JsonFields fields{object, path};
        if (!fields.has("eos_token_id")) continue;
        const bool list = object["eos_token_id"].is_array();
        for (int64_t id : list ? fields.integers("eos_token_id", 0, INT32_MAX)
                               : std::vector<int64_t>{fields.integer("eos_token_id", 0, INT32_MAX)})
            if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(static_cast<int32_t>(id));
        if (!ids.empty()) break;
    }
    return ids;
}
