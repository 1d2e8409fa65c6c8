// Fuzzes the reader of HellaSwag files with edits of a valid file of either version. Either every row can be read and
// scored, or there is an Error with exit code 2.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "llmc/base/check.h"
#include "llmc/data/hellaswag.h"

namespace {

constexpr int64_t kVocab = 50, kLength = 16;

template <typename Word> std::string valid_file() {
    std::string body;
    size_t longest = 0;
    for (size_t i = 0; i < 3; i++) {
        std::vector<size_t> words = {std::numeric_limits<Word>::max(), 0, i, i % 2, 2 + i, 3, 7, 8, 9};
        for (size_t c = 0; c < 2 + i; c++) {
            words.push_back(1 + c);
            words.insert(words.end(), 1 + c, 10 + c);
        }
        longest = words[1] = words.size() * sizeof(Word);
        for (size_t word : words) {
            const Word value = static_cast<Word>(word);
            body.append(reinterpret_cast<const char*>(&value), sizeof value);
        }
    }
    const int32_t header[256] = {20240522, sizeof(Word) / 2, 3, static_cast<int32_t>(longest)};
    return std::string(reinterpret_cast<const char*>(header), sizeof header) + body;
}

void read_all(const std::string& path, int64_t examples) {
    const Hellaswag file(path, kVocab, kLength, examples);
    const auto T = static_cast<size_t>(file.longest());
    if (file.longest() > kLength) std::abort();
    std::vector<int32_t> inputs(T), targets(T);
    for (int64_t row = 0; row < file.rows(); row++) {
        if (file.read(row, file.longest(), inputs.data(), targets.data()) < 1) std::abort();
        for (int32_t token : inputs)
            if (token < 0 || token >= kVocab) std::abort();
    }
    const int64_t correct = file.correct(std::vector<double>(static_cast<size_t>(file.rows()), 1.0));
    if (correct < 0 || correct > file.examples()) std::abort();
}

}  // namespace

// A byte of flags, then edits of six bytes: an offset from the header's start (even) or end (odd), and the new bytes.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const std::string path =
        (std::filesystem::temp_directory_path() / strf("llmc_fuzz_hellaswag_%d.bin", getpid())).string();
    if (size < 1) return 0;
    std::string bytes = data[0] & 1 ? valid_file<uint32_t>() : valid_file<uint16_t>();
    for (size_t at = 1; at + 6 <= size; at += 6) {
        uint16_t place;
        std::memcpy(&place, data + at, 2);
        const size_t begin = place % 2 ? 1024 + place / 2 % (bytes.size() - 1024) : place / 2 % 20;
        std::memcpy(bytes.data() + begin, data + at + 2, std::min<size_t>(data[0] & 2 ? 4 : 2, bytes.size() - begin));
    }
    if (data[0] & 4) bytes.resize(data[size - 1] * bytes.size() / 255);
    std::ofstream(path, std::ios::binary) << bytes;
    try {
        read_all(path, data[0] >> 3 & 3);
    } catch (const Error& error) {
        if (error.exit_code != kExitBadInput) std::abort();
    }
    std::remove(path.c_str());
    return 0;
}
