// Loss masks of shards: which targets the loader ignores, and which files it refuses.
#include <algorithm>

#include "tests/support/data_test.h"

#include "llmc/data/loss_mask.h"
#include "llmc/data/shard_meta.h"
#include "llmc/ops/ops.h"

using namespace data_test;

namespace {

std::vector<uint8_t> pattern(size_t n, uint32_t seed) {
    std::vector<uint8_t> flags(n);
    for (size_t i = 0; i < n; i++) flags[i] = (i * 2654435761u + seed) >> 13 & 1;
    return flags;
}

std::string fingerprint(const std::string& path) { return DataLoader(config_of({path})).fingerprint_json(); }

}  // namespace

TEST_CASE("data: a shard whose name leaves no room for the suffix of a mask has none") {
    TempDir dir;
    const std::string path = dir / std::string(252, 'a');
    spill(path, llmc_v1(counting(5, 9)));
    CHECK(!LossMask::of_shard(path, 9));
    CHECK(error_of([&] { read_separator(path, 9); }).find("is missing") != std::string::npos);
}

TEST_CASE("data: a loss mask ignores exactly the right targets, in every format") {
    for (uint32_t n : {9u, 16u, 17u, 64u, 101u})
        for (int64_t T : {1, 3, 4, 7}) {
            CAPTURE(n, T);
            TempDir dir;
            const std::vector<uint32_t> tokens = counting(5, n);
            spill(dir / "v1.bin", llmc_v1(tokens));
            spill(dir / "v7.bin", llmc_v7(tokens));
            spill(dir / "raw.bin", token_bytes<uint16_t>(tokens));
            spill(dir / "megatron.bin", token_bytes<uint16_t>(tokens));
            spill(dir / "megatron.idx", megatron_index({static_cast<int32_t>(n)}, 8));
            spill(dir / "named.dat", llmc_v1(tokens));
            uint32_t seed = 0;
            for (const char* name : {"v1.bin", "v7.bin", "raw.bin", "megatron.bin", "named.dat"}) {
                const std::string path = dir / name, stem = path.substr(0, path.size() - 4);
                const std::vector<uint8_t> flags = pattern(n, ++seed);
                spill((path.ends_with(".bin") ? stem : path) + ".mask", mask_bytes(flags));
                DataConfig config = config_of({path}, T);
                config.token_dtype = "uint16";
                config.shuffle = false;
                const DataLoader loader(config);
                CHECK(loader.shards()[0].masked);
                CHECK(loader.shards()[0].counted == std::accumulate(flags.begin(), flags.end(), 0));
                std::vector<int32_t> inputs(static_cast<size_t>(T)), targets(inputs.size());
                for (int64_t s = 0; s < loader.samples_per_epoch(); s++) {
                    int64_t counted = 0;
                    const int64_t read = loader.read(s, inputs.data(), targets.data());
                    for (int64_t t = 0; t < T; t++) {
                        const size_t at = static_cast<size_t>(s * T + t);
                        // The one document of the Megatron shard ends in padding.
                        CHECK(inputs[static_cast<size_t>(t)]
                              == (at < tokens.size() ? static_cast<int32_t>(tokens[at]) : 0));
                        const bool counts = at + 1 < tokens.size() && flags[at + 1];
                        const int32_t target = counts ? static_cast<int32_t>(tokens[at + 1]) : kIgnoreIndex;
                        CHECK(targets[static_cast<size_t>(t)] == target);
                        counted += counts;
                    }
                    CHECK(read == counted);
                }
            }
        }
}

TEST_CASE("data: shards with and without masks go together, in shuffled order too") {
    TempDir dir;
    spill(dir / "a.bin", llmc_v1(counting(0, 41)));
    spill(dir / "b.bin", llmc_v1(counting(1000, 41)));
    std::vector<uint8_t> flags(41);
    for (size_t i = 0; i < 41; i++) flags[i] = i % 3 == 0;
    spill(dir / "b.mask", mask_bytes(flags));
    spill(dir / "a.meta.json", "{\"tokens\": 41}");
    const DataLoader loader(config_of({dir / "*"}));   // masks and sidecars are ignored
    REQUIRE(loader.shards().size() == 2);
    for (int64_t s = 0; s < 40; s++) {
        int32_t inputs[4], targets[4];
        loader.read(s, inputs, targets);
        for (int t = 0; t < 4; t++) {
            const int32_t next = inputs[t] + 1;
            CHECK(targets[t] == (next < 1000 || (next - 1000) % 3 == 0 ? next : kIgnoreIndex));
        }
    }
    const std::vector<std::string> lines = describe_data(loader, 10);
    REQUIRE(lines.size() == 2);
    check_contains(lines[0], {"loss masks of 1 of 2 shards: 55 of 82 tokens count as targets, 67.1 %"});
}

TEST_CASE("data: loss masks that are damaged or do not fit are refused") {
    TempDir dir;
    spill(dir / "a.bin", llmc_v1(counting(0, 41)));
    const FileBytes good = mask_bytes(pattern(41, 1));
    auto refused = [&](const FileBytes& mask, std::vector<std::string> parts) {
        spill(dir / "a.mask", mask);
        parts.push_back("exit 2: loss mask '" + (dir / "a.mask") + "'");
        check_contains(refusal(config_of({dir / "a.bin"})), parts);
    };
    auto changed = [&](size_t at, int bit) {
        FileBytes bytes = good;
        bytes[at] = static_cast<char>(bytes[at] ^ 1 << bit);
        return bytes;
    };
    refused("", {"truncated in the header: it ends at byte 0 of 32"});
    refused(good.substr(0, 31), {"it ends at byte 31 of 32"});
    refused(changed(3, 0), {"byte 0: wrong magic"});
    refused(changed(8, 1), {"byte 8: version 3, expected 1"});
    refused(mask_bytes(pattern(40, 1)), {"byte 16: it is for 40 tokens, the shard has 41"});
    refused(good.substr(0, good.size() - 1), {"41 tokens are 38 bytes, the file has 37"});
    refused(good + '\0', {"41 tokens are 38 bytes, the file has 39"});
    refused(changed(37, 1), {"byte 37: bits after the last token are set"});
    for (size_t at = 32; at < 38; at++) refused(changed(at, 0), {"byte 24: the header says that"});
    refused(changed(31, 7), {"byte 24: the header says that"});
    spill(dir / "a.mask", good);
    CHECK(refusal(config_of({dir / "a.bin"})) == "nothing");

    // A sidecar that names a mask.
    std::filesystem::remove(dir / "a.mask");
    const std::string list = ", \"document_offsets\": [0" + std::string(100000, ' ') + "]}";
    spill(dir / "a.meta.json", "{\"tokens\": 41, \"loss_mask\": {\"file\": \"a.mask\"}" + list);
    check_contains(refusal(config_of({dir / "a.bin"})),
                   {"exit 2: data shard '", "a.bin': its loss mask '", "a.mask' is missing, although '",
                    "a.meta.json' names it"});
    spill(dir / "a.meta.json", "{\"tokens\": 41" + list);
    CHECK(refusal(config_of({dir / "a.bin"})) == "nothing");
    spill(dir / "c.mask", good);
    DataConfig raw = config_of({dir / "c.mask"});
    raw.token_dtype = "uint16";
    check_contains(refusal(raw), {"this is a loss mask; name its .bin instead"});
}

TEST_CASE("data: a changed loss mask is another data set") {
    TempDir dir;
    const std::string path = dir / "a.bin";
    spill(path, llmc_v1(counting(0, 41)));
    const std::string without = fingerprint(path);
    spill(dir / "a.mask", mask_bytes(pattern(41, 1)));
    const std::string with = fingerprint(path);
    DataLoader loader(config_of({path}));
    CHECK(loader.check_fingerprint(with) == "");
    check_contains(loader.check_fingerprint(without), {"a.bin' changed since the checkpoint: fingerprint"});
    std::vector<uint8_t> flags = pattern(41, 1);
    std::swap(*std::find(flags.begin(), flags.end(), 0), *std::find(flags.begin(), flags.end(), 1));
    spill(dir / "a.mask", mask_bytes(flags));
    CHECK(fingerprint(path) != with);
    std::filesystem::remove(dir / "a.mask");
    CHECK(fingerprint(path) == without);
}
