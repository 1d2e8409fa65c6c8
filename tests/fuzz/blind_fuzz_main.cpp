// main for a fuzzer's entry point where libFuzzer is not installed: mutates seeds without feedback from the code.
// Takes libFuzzer's -max_total_time=SECONDS, -artifact_prefix=PREFIX and folders with seeds, and ignores other options.
// A file argument is run once, to reproduce a crash. Writes each input to PREFIX + "last" before it is run.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

Bytes read_file(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return Bytes(std::istreambuf_iterator<char>(file), {});
}

// One to eight edits: flipped bit, interesting byte, changed 8-byte number, cut, repeated piece.
void mutate(Bytes& bytes, std::mt19937_64& random) {
    auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
    for (size_t edits = 1 + below(8); edits > 0; edits--) {
        if (bytes.empty()) bytes.resize(1 + below(64));
        size_t at = below(bytes.size());
        switch (below(5)) {
            case 0: bytes[at] ^= static_cast<uint8_t>(1u << below(8)); break;
            case 1: {
                constexpr uint8_t kInteresting[] = {0, 1, 0x7f, 0x80, 0xff, '"', '{', '}', '[', ',', ':', '9'};
                bytes[at] = kInteresting[below(sizeof kInteresting)];
                break;
            }
            case 2: {
                uint64_t number = random() >> below(64);
                if (below(2)) number = ~number;
                for (size_t i = 0; i < 8 && at + i < bytes.size(); i++)
                    bytes[at + i] = static_cast<uint8_t>(number >> 8 * i);
                break;
            }
            case 3: bytes.resize(at); break;
            default: {
                Bytes piece(bytes.begin() + static_cast<ptrdiff_t>(at), bytes.end());
                if (piece.size() > 64) piece.resize(64);
                bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(below(bytes.size())), piece.begin(), piece.end());
            }
        }
    }
    if (bytes.size() > 65536) bytes.resize(65536);
}

}  // namespace

int main(int argc, char** argv) {
    double seconds = 60;
    std::string artifact_prefix;
    std::vector<Bytes> seeds(1);
    for (int i = 1; i < argc; i++) {
        std::string argument = argv[i];
        if (argument.starts_with("-max_total_time=")) seconds = std::atof(argv[i] + 16);
        else if (argument.starts_with("-artifact_prefix=")) artifact_prefix = argument.substr(17);
        else if (std::filesystem::is_directory(argument)) {
            for (auto& entry : std::filesystem::directory_iterator(argument)) seeds.push_back(read_file(entry.path()));
        } else if (!argument.starts_with("-")) {
            Bytes input = read_file(argument);
            LLVMFuzzerTestOneInput(input.data(), input.size());
            return 0;
        }
    }
    std::mt19937_64 random(1);
    auto begin = std::chrono::steady_clock::now();
    long runs = 0;
    for (; std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < seconds; runs++) {
        Bytes input = seeds[random() % seeds.size()];
        mutate(input, random);
        std::ofstream(artifact_prefix + "last", std::ios::binary)
            .write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
        LLVMFuzzerTestOneInput(input.data(), input.size());
    }
    std::printf("%ld inputs from %zu seeds\n", runs, seeds.size());
}
