// Shared by tests that write files: a folder for them, and what is in them.
#pragma once
#include "tests/support/doctest.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "llmc/base/check.h"

namespace files_test {

inline bool full_run() { return std::getenv("LLMC_FULL") != nullptr; }

// The folder is in memory if possible, because hundreds of fsyncs are slow, but not with `on_disk` or in full runs.
struct TempDir {
    std::string path;
    explicit TempDir(bool on_disk = full_run()) {
        const bool in_memory = !on_disk && access("/dev/shm", W_OK) == 0;
        std::string name = in_memory ? "/dev/shm" : std::filesystem::temp_directory_path().string();
        name += "/llmc_test_XXXXXX";
        REQUIRE(mkdtemp(name.data()) != nullptr);
        path = name;
    }
    ~TempDir() { std::filesystem::remove_all(path); }
    std::string operator/(const std::string& name) const { return path + "/" + name; }
};

inline std::string slurp(const std::string& path) {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    std::string bytes(file ? static_cast<size_t>(file.tellg()) : 0, '\0');
    file.seekg(0).read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return bytes;
}

inline void spill(const std::string& path, const std::string& bytes) {
    std::ofstream file(path, std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    REQUIRE(file.good());
}

// Returns "exit 2: message" of the error, which must be one line, or "nothing".
template <typename Body> std::string error_of(Body&& body) {
    try {
        body();
    } catch (const Error& error) {
        CHECK(std::string(error.what()).find('\n') == std::string::npos);
        return "exit " + std::to_string(error.exit_code) + ": " + error.what();
    }
    return "nothing";
}

inline void check_contains(const std::string& text, const std::vector<std::string>& parts) {
    for (const std::string& part : parts) {
        CAPTURE(part, text);
        CHECK(text.find(part) != std::string::npos);
    }
}

}  // namespace files_test
