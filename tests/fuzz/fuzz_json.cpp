// Fuzzes every reader of JSON from outside. The first byte selects the kind of file: a model's config.json, a file of
// --config, a shard's .meta.json, state.json or manifest.json of a checkpoint, a line of a log. The input is accepted,
// or there is an Error with exit code 2 or 5, or a description of the damage, in one short line without words of the
// JSON library.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "llmc/base/check.h"
#include "llmc/base/json_object.h"
#include "llmc/checkpoint/huggingface/hf_config.h"
#include "llmc/checkpoint/manifest.h"
#include "llmc/checkpoint/saved_state.h"
#include "llmc/config/config.h"
#include "llmc/data/shard_meta.h"

namespace {

// Parts of libraries' own messages.
constexpr std::array kLibraryWords = {"json.exception", "basic_", "std::", "what()"};
bool has_library_words(const std::string& text) {
    return std::any_of(kLibraryWords.begin(), kLibraryWords.end(),
                       [&](const char* word) { return text.find(word) != std::string::npos; });
}

void require_fit_to_print(const std::string& text) {
    if (has_library_words(text)) std::abort();
    for (const char c : text)
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) std::abort();
    if (text.size() > 4096) std::abort();
}

std::string written(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
    return path;
}

void read(char kind, const std::string& folder, const std::string& text) {
    const std::string checkpoint = folder + "/step-00000010";
    switch (kind) {
        case 'c': model_config_from_json(text, "config.json"); break;
        case 'o': {
            const std::string path = written(folder + "/run.json", text);
            const char* words[] = {"train_gpt2", "--config", path.c_str()};
            parse_config(3, words, "gpt2", {.gpu = false});
            break;
        }
        case 't': {
            const std::string shard = folder + "/shard.bin";
            written(folder + "/shard.meta.json", text);
            read_tokenizer(shard);
            read_separator(shard, 61);
            break;
        }
        case 's':
            written(checkpoint + "/state.json", text);
            require_fit_to_print(state_damage(checkpoint));
            break;
        case 'm':
            written(checkpoint + "/state.json", "{}");
            written(checkpoint + "/manifest.json", text);
            require_fit_to_print(checkpoint_damage(checkpoint, true));
            require_fit_to_print(model_damage(checkpoint, "model"));
            break;
        default: parse_json_line(text);
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const std::string folder = [] {
        const auto path = std::filesystem::temp_directory_path() / strf("llmc_fuzz_json_%d", getpid());
        std::filesystem::create_directories(path / "step-00000010");
        return path.string();
    }();
    if (size < 1) return 0;
    const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
    if (has_library_words(text)) return 0;   // a message may quote its input
    try {
        read(static_cast<char>(data[0]), folder, text);
    } catch (const Error& error) {
        require_fit_to_print(error.what());
        if (error.exit_code != kExitBadInput && error.exit_code != kExitNoCheckpoint) std::abort();
    }
    return 0;
}
