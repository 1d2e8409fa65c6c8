// Shared by the tests of token shards and of the loader: shard files of every format, written by hand.
#pragma once
#include "tests/support/doctest.h"

#include <numeric>
#include <string>
#include <vector>

#include "llmc/data/dataloader.h"
#include "tests/support/files_test.h"

namespace data_test {

using namespace files_test;

using FileBytes = std::string;

template <typename T>
void append(FileBytes& bytes, T value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

template <typename T>
FileBytes token_bytes(const std::vector<uint32_t>& tokens) {
    FileBytes bytes;
    for (uint32_t token : tokens)
        append(bytes, static_cast<T>(token));
    return bytes;
}

inline FileBytes llmc_header(uint32_t magic, uint32_t version, uint32_t count) {
    FileBytes bytes;
    append(bytes, magic);
    append(bytes, version);
    append(bytes, count);
    bytes.resize(1024);
    return bytes;
}

inline FileBytes llmc_v1(const std::vector<uint32_t>& tokens) {
    return llmc_header(20240520, 1, static_cast<uint32_t>(tokens.size())) + token_bytes<uint16_t>(tokens);
}

inline FileBytes llmc_v7(const std::vector<uint32_t>& tokens) {
    return llmc_header(20240801, 7, static_cast<uint32_t>(tokens.size())) + token_bytes<uint32_t>(tokens);
}

// A Megatron index of documents with these lengths, one sequence each.
inline FileBytes megatron_index(const std::vector<int32_t>& lengths, int code) {
    FileBytes bytes("MMIDIDX\0\0", 9);
    append(bytes, uint64_t{1});
    append(bytes, static_cast<uint8_t>(code));
    append(bytes, static_cast<uint64_t>(lengths.size()));
    append(bytes, static_cast<uint64_t>(lengths.size() + 1));
    int64_t position = 0;
    for (int32_t length : lengths)
        append(bytes, length);
    for (int32_t length : lengths) {
        append(bytes, position);
        position += int64_t{length} * (code == 8 ? 2 : 4);
    }
    for (size_t d = 0; d <= lengths.size(); d++)
        append(bytes, static_cast<int64_t>(d));
    return bytes;
}

// A file of loss masks, built without using the loader.
inline FileBytes mask_bytes(const std::vector<uint8_t>& flags) {
    FileBytes bytes("LOSSMASK"), bits((flags.size() + 7) / 8, '\0');
    uint64_t counted = 0;
    for (size_t i = 0; i < flags.size(); i++) {
        counted += flags[i];
        if (flags[i]) bits[i / 8] = static_cast<char>(static_cast<uint8_t>(bits[i / 8]) | 1u << (i % 8));
    }
    append(bytes, uint64_t{1});
    append(bytes, static_cast<uint64_t>(flags.size()));
    append(bytes, counted);
    return bytes + bits;
}

inline std::vector<uint32_t> counting(uint32_t first, uint32_t n) {
    std::vector<uint32_t> tokens(n);
    std::iota(tokens.begin(), tokens.end(), first);
    return tokens;
}

inline DataConfig config_of(std::vector<std::string> globs, int64_t seq_length = 4, int64_t vocab_size = 1 << 20) {
    DataConfig config;
    config.globs = std::move(globs), config.seq_length = seq_length, config.vocab_size = vocab_size;
    return config;
}

// The error of opening these data, or "nothing".
inline std::string refusal(const DataConfig& config) {
    return error_of([&] { DataLoader loader(config); });
}

inline std::vector<int32_t> read_inputs(const DataLoader& loader, int64_t sample) {
    std::vector<int32_t> inputs(static_cast<size_t>(loader.seq_length())), targets(inputs.size());
    CHECK(loader.read(sample, inputs.data(), targets.data()) == loader.seq_length());
    for (size_t t = 1; t < inputs.size(); t++)
        CHECK(inputs[t] == targets[t - 1]);
    return inputs;
}

inline std::vector<uint8_t> starts_of(const DataLoader& loader, int64_t sample) {
    const auto T = static_cast<size_t>(loader.seq_length());
    std::vector<int32_t> inputs(T), targets(T);
    std::vector<uint8_t> starts(T, 7);
    loader.read(sample, inputs.data(), targets.data(), starts.data());
    return starts;
}

}  // namespace data_test
