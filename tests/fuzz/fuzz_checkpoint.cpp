// Fuzzes the JSON of a checkpoint. The first byte selects the file: s is state.json, anything else manifest.json. The
// input is accepted, or there is an Error with exit code 2 or 5, or a description of the damage, in one short line
// without words of the JSON library. The drill's hostile input has other files of JSON, fuzz_safetensors config.json.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "llmc/base/check.h"
#include "llmc/checkpoint/manifest.h"
#include "llmc/checkpoint/saved_state.h"

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

void write(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

void read(char kind, const std::string& checkpoint, const std::string& text) {
    if (kind == 's') {
        write(checkpoint + "/state.json", text);
        require_fit_to_print(state_damage(checkpoint));
        return;
    }
    write(checkpoint + "/state.json", "{}");
    write(checkpoint + "/manifest.json", text);
    require_fit_to_print(checkpoint_damage(checkpoint, true));
    require_fit_to_print(model_damage(checkpoint, "model"));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const std::string checkpoint = [] {
        const auto path = std::filesystem::temp_directory_path() / strf("llmc_fuzz_%d/step-00000010", getpid());
        std::filesystem::create_directories(path);
        return path.string();
    }();
    if (size < 1) return 0;
    const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
    if (has_library_words(text)) return 0;   // a message may quote its input
    try {
        read(static_cast<char>(data[0]), checkpoint, text);
    } catch (const Error& error) {
        require_fit_to_print(error.what());
        if (error.exit_code != kExitBadInput && error.exit_code != kExitNoCheckpoint) std::abort();
    }
    return 0;
}
