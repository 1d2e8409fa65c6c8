// Sources of the names: transformers' tokenizers (tokenization_utils_base.py and the slow tokenizers'
// VOCAB_FILES_NAMES) and GenerationConfig; llama.cpp's convert_hf_to_gguf.py and vLLM read the same ones.
#include "llmc/checkpoint/huggingface/model_extras.h"

#include <algorithm>
#include <filesystem>

#include "llmc/base/json_object.h"
#include "llmc/base/system/files.h"
#include "llmc/checkpoint/manifest.h"
#include "llmc/model/parameters/params.h"

// Written by the build, from the files of these names.
extern const char* const kConfigurationLlmfp8;
extern const char* const kModelingLlmfp8;

namespace {

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
        nlohmann::json config = parse_json_object(file.bytes, file.name);
        config["chat_template"] = chat_template;
        file.bytes = config.dump(2) + "\n";
    }
    files.push_back({"chat_template.jinja", chat_template});
}

}  // namespace

std::vector<ModelFile> hf_code(const ModelConfig& config) {
    if (hf_class(config) != HfClass::kOwn) return {};
    return {{"configuration_llmfp8.py", kConfigurationLlmfp8}, {"modeling_llmfp8.py", kModelingLlmfp8}};
}

std::vector<std::string> tokenizer_files(const std::string& tokenizer) {
    if (tokenizer.empty()) return {};
    if (is_regular_file(tokenizer)) {
        const std::string name = base_name(tokenizer);
        const bool ours = name == "config.json" || name == "state.json" || name == "manifest.json"
                          || name == "optimizer" || name == kGenerationConfig || name.rfind("model", 0) == 0
                          || name.ends_with(".py");
        REQUIRE(!ours, "--tokenizer %s: a checkpoint has its own %s; rename the file", tokenizer.c_str(), name.c_str());
        return {tokenizer};
    }
    const char* advice = tokenizer == "gpt2" ? ": name the tokenizer.json of openai-community/gpt2, which is copied"
                         : tokenizer == "bytes" ? ": bytes have no files to copy, leave it out" : "";
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

ModelExtras read_model_extras(const std::string& directory, const std::string& tokenizer,
                              const std::string& chat_template) {
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
    if (!chat_template.empty() && has_tokenizer) set_chat_template(extras.files, chat_template);
    return extras;
}
