// Fuzzes the data loader: any bytes as a shard, as a shard with a Megatron index or a loss mask beside it, as edits of
// valid files, or as weights of a blend. Allowed outcomes are a loader whose every sample can be read, or an Error
// with exit code 2; for weights, integer parts with the same order, or one line with the error.
#include <fuzzer/FuzzedDataProvider.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "llmc/base/check.h"
#include "llmc/data/blend.h"
#include "llmc/data/dataloader.h"

namespace {

template <typename T>
void put(std::string& bytes, T value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

std::string valid_llmc(bool wide) {
    std::string bytes;
    put<uint32_t>(bytes, wide ? 20240801 : 20240520);
    put<uint32_t>(bytes, wide ? 7 : 1);
    put<uint32_t>(bytes, 40);
    bytes.resize(1024 + 40 * (wide ? 4 : 2), '\0');
    return bytes;
}

std::string valid_index(bool wide) {
    std::string bytes("MMIDIDX\0\0", 9);
    put<uint64_t>(bytes, 1);
    put<uint8_t>(bytes, wide ? 4 : 8);
    put<uint64_t>(bytes, 2);
    put<uint64_t>(bytes, 3);
    put<int32_t>(bytes, 15);
    put<int32_t>(bytes, 25);
    put<int64_t>(bytes, 0);
    put<int64_t>(bytes, wide ? 60 : 30);
    for (int64_t d : {0, 1, 2})
        put<int64_t>(bytes, d);
    return bytes;
}

std::string valid_mask() {
    std::string bytes("LOSSMASK");
    for (uint64_t value : {1, 40, 20}) put<uint64_t>(bytes, value);
    return bytes + "\x55\x55\x55\x55\x55";
}

// Up to 8 edits at any place of the file: overwrite 1 to 8 bytes, or cut or extend there.
void edit(std::string& bytes, FuzzedDataProvider& in) {
    for (int edits = in.ConsumeIntegralInRange(0, 8); edits > 0; edits--) {
        const auto at = in.ConsumeIntegralInRange<size_t>(0, bytes.size());
        const auto kind = in.ConsumeIntegralInRange<size_t>(0, 9);
        const std::string value = in.ConsumeBytesAsString(kind);
        if (kind == 9) {
            bytes.resize(at);
        } else if (kind == 8) {
            bytes.insert(at, value);
        } else {
            bytes.replace(at, std::min(value.size(), bytes.size() - at), value);
        }
    }
}

void write(const std::string& path, const std::string& bytes) {
    std::FILE* file = std::fopen(path.c_str(), "wb");
    if (!file || std::fwrite(bytes.data(), 1, bytes.size(), file) != bytes.size() || std::fclose(file)) {
        std::perror(path.c_str());
        std::abort();
    }
}

// A folder of this process, in memory where there is such a file system; removed at exit.
struct Folder {
    std::string path;
    Folder() {
        path = std::filesystem::is_directory("/dev/shm") ? "/dev/shm" : std::filesystem::temp_directory_path().string();
        path += "/llmc_fuzz_XXXXXX";
        if (!mkdtemp(path.data())) std::abort();
    }
    ~Folder() { std::filesystem::remove_all(path); }
};

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "fuzz_shards: %s\n", what);
    std::abort();
}

void open_and_read(const DataConfig& config, const std::string& json) {
    DataLoader loader(config);
    require(loader.samples_per_epoch() >= 1, "a loader without samples");
    size_t T = static_cast<size_t>(config.seq_length);
    std::vector<int32_t> inputs(T), targets(T);
    for (int64_t s = 0; s < std::min<int64_t>(2 * loader.samples_per_epoch(), 100); s++) {
        loader.prefetch(s, 1);
        loader.read(s, inputs.data(), targets.data());
        for (size_t t = 0; config.check_ids && t < T; t++)
            require(inputs[t] >= 0 && inputs[t] < config.vocab_size && targets[t] < config.vocab_size,
                    "an id beyond the vocabulary was let through");
    }
    require(loader.check_fingerprint(loader.fingerprint_json()).empty(), "a loader differs from itself");
    loader.check_fingerprint(json);
    std::string own = loader.fingerprint_json();
    loader.check_fingerprint(own.substr(0, json.size() % own.size()));
}

// Words of --train-data, one a line.
void parse_words(const std::string& text) {
    std::vector<std::string> words;
    for (size_t begin = 0; begin < text.size();) {
        const size_t end = std::min(text.find('\n', begin), text.size());
        words.push_back(text.substr(begin, end - begin));
        begin = end + 1;
    }
    const DataWords parsed = parse_data_words(words);
    if (!parsed.error.empty()) return;
    std::vector<int64_t> parts;
    int64_t period = 0;
    for (const DataSource& source : parsed.sources) {
        require(source.parts >= 1 && !source.globs.empty(), "a source without a share or without shards");
        parts.push_back(source.parts);
        period += source.parts;
    }
    require(period <= 1 << 20, "a period beyond its bound");
    if (period == 0 || period > 4096) return;
    const BlendOrder order(parts);
    for (size_t k = 0; k < parts.size(); k++)
        require(order.count(static_cast<int64_t>(k), period) == parts[k], "a source without its share");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Folder folder;
    FuzzedDataProvider in(data, size);
    const char* kTypes[] = {"", "uint16", "uint32", "int8"};
    DataConfig config;
    config.globs = {folder.path + "/a.bin"}, config.token_dtype = in.PickValueInArray(kTypes);
    config.seq_length = in.ConsumeIntegralInRange(1, 32), config.vocab_size = in.ConsumeIntegralInRange(1, 65536);
    const auto flags = in.ConsumeIntegral<uint8_t>();
    config.shuffle = flags & 1;
    config.check_ids = flags & 2;
    const bool with_index = flags & 4, from_valid = flags & 8, wide = flags & 16, with_mask = flags & 32;
    if (flags & 64) {
        parse_words(in.ConsumeRemainingBytesAsString());
        return 0;
    }
    std::string shard, index, mask = valid_mask();
    if (with_mask) edit(mask, in);
    if (from_valid) {
        shard = with_index ? std::string(wide ? 160 : 80, '\0') : valid_llmc(wide);
        index = valid_index(wide);
        edit(shard, in);
        edit(index, in);
    } else {
        index = in.ConsumeRandomLengthString(255);
        shard = in.ConsumeRemainingBytesAsString();
    }
    write(folder.path + "/a.bin", shard);
    if (with_index) {
        write(folder.path + "/a.idx", index);
    } else {
        unlink((folder.path + "/a.idx").c_str());
    }
    if (with_mask) {
        write(folder.path + "/a.mask", mask);
    } else {
        unlink((folder.path + "/a.mask").c_str());
    }
    try {
        open_and_read(config, shard);
    } catch (const Error& error) {
        require(error.exit_code == kExitBadInput && error.what()[0] != '\0', error.what());
    }
    return 0;
}
