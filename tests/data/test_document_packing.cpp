// Samples that are whole documents: which documents share one, what is padding, what is cut, and of which shards.
#include <algorithm>

#include "tests/support/data_test.h"

#include "llmc/base/rng.h"
#include "llmc/ops/ops.h"   // kIgnoreIndex

using namespace data_test;

namespace {

constexpr uint32_t kSeparator = 7, kFirst = 1000;

// A shard of documents with these lengths. Token i is kFirst + i, or the separator where a document begins.
struct PackedDocuments {
    std::vector<uint32_t> tokens;
    std::vector<uint8_t> flags;     // of the mask: separators do not count, and every fifth other token
    std::vector<size_t> start_of;   // (tokens): of their document

    explicit PackedDocuments(const std::vector<size_t>& lengths) {
        for (size_t length : lengths) {
            const size_t start = tokens.size();
            for (size_t i = 0; i < length; i++) {
                start_of.push_back(start);
                tokens.push_back(i == 0 ? kSeparator : kFirst + static_cast<uint32_t>(start + i));
                flags.push_back(i > 0 && tokens.size() % 5 != 0);
            }
        }
    }
    std::string write(const TempDir& dir, const std::string& name, bool masked = true) const {
        spill(dir / (name + ".bin"), llmc_v7(tokens));
        if (masked) spill(dir / (name + ".mask"), mask_bytes(flags));
        spill(dir / (name + ".meta.json"), "{\"tokenizer\": {\"separator\": 7}}");
        return dir / (name + ".bin");
    }
};

std::vector<size_t> random_lengths(size_t n, uint32_t longest, uint64_t seed) {
    std::vector<size_t> lengths;
    for (size_t i = 0; i < n; i++) lengths.push_back(1 + philox(seed, i).word[0] % longest);
    return lengths;
}

struct ReadSample {
    std::vector<int32_t> inputs, targets;
    int64_t counted;
};

ReadSample read(const DataLoader& loader, int64_t number) {
    const size_t T = static_cast<size_t>(loader.seq_length());
    ReadSample sample{std::vector<int32_t>(T), std::vector<int32_t>(T), 0};
    sample.counted = loader.read(number, sample.inputs.data(), sample.targets.data());
    return sample;
}

}  // namespace

TEST_CASE("document packing: every target that counts is read once, after its whole document up to there") {
    for (int64_t T : {1, 2, 16, 61})
        for (uint32_t longest : {2u, 12u, 17u, 150u}) {
            CAPTURE(T, longest);
            TempDir dir;
            const PackedDocuments data(random_lengths(1500, longest, 3));
            const DataLoader loader(config_of({data.write(dir, "a")}, T));
            std::vector<int> seen(data.tokens.size());
            int wrong = 0;
            int64_t padding = 0, without_beginning = 0;
            for (int64_t s = 0; s < loader.samples_per_epoch(); s++) {
                const ReadSample sample = read(loader, s);
                int64_t counted = 0, end = T;   // inputs from `end` on are padding
                while (end > 0 && sample.inputs[static_cast<size_t>(end - 1)] == static_cast<int32_t>(kSeparator)
                       && sample.targets[static_cast<size_t>(end - 1)] == kIgnoreIndex) end--;
                padding += T - end;
                for (int64_t t = 0; t < T; t++) {
                    if (sample.targets[static_cast<size_t>(t)] == kIgnoreIndex) continue;
                    counted++;
                    const size_t token = static_cast<size_t>(sample.targets[static_cast<size_t>(t)]) - kFirst;
                    seen[token]++;
                    const size_t start = data.start_of[token];
                    const int64_t from = t - static_cast<int64_t>(token - start - 1);   // where its document begins
                    if (from < 0) {
                        without_beginning++;
                        const size_t end_of = start + static_cast<size_t>(T) + 1;
                        wrong += end_of >= data.start_of.size() || data.start_of[end_of] != start;
                    }
                    for (int64_t i = std::max<int64_t>(0, from); i <= t; i++)
                        wrong += sample.inputs[static_cast<size_t>(i)]
                                 != static_cast<int32_t>(data.tokens[start + static_cast<size_t>(i - from)]);
                }
                wrong += counted != sample.counted;
            }
            CHECK(wrong == 0);
            CHECK(std::equal(seen.begin(), seen.end(), data.flags.begin(), data.flags.end()));
            const PackingCounts& counts = loader.packed();
            CHECK(counts.samples == loader.samples_per_epoch());
            CHECK(counts.documents == 1500);
            CHECK(padding >= counts.padding);   // a document of one token looks like padding
            if (T == 61 && longest == 17) CHECK(counts.padding < counts.samples * T / 200);
            CHECK((without_beginning > 0) == (longest > static_cast<uint32_t>(T) + 1));
            CHECK(counts.cut_tokens >= without_beginning);
        }
}

TEST_CASE("document packing: a sample is the first document of the window and the longest that fit") {
    TempDir dir;
    const PackedDocuments data({3, 6, 2, 7, 4, 12, 3});
    DataConfig config = config_of({data.write(dir, "a")}, 8);
    config.shuffle = false;
    const DataLoader loader(config);
    // Of the 12 tokens, 9 are a sample on their own, and a part of 4 begins with the last of these.
    const auto of = [&](std::vector<int> ranges) {   // start, length, ...
        std::vector<int32_t> inputs(8, static_cast<int32_t>(kSeparator));
        size_t t = 0;
        for (size_t r = 0; r < ranges.size(); r += 2)
            for (int i = 0; i < ranges[r + 1] && t < 8; i++)
                inputs[t++] = static_cast<int32_t>(data.tokens[static_cast<size_t>(ranges[r] + i)]);
        return inputs;
    };
    const std::vector<std::vector<int32_t>> expected = {
        of({22, 9}), of({0, 3, 3, 6}), of({9, 2, 11, 7}), of({18, 4, 34, 3}), of({30, 4})};
    REQUIRE(loader.samples_per_epoch() == 5);
    for (int64_t s = 0; s < 5; s++) CHECK(read(loader, s).inputs == expected[static_cast<size_t>(s)]);
    const PackingCounts& counts = loader.packed();
    CHECK(counts.cut == 1);
    CHECK(counts.cut_tokens == 3);
    CHECK(counts.padding == 1 + 4);
    const std::vector<std::string> lines = describe_data(loader, 5);
    REQUIRE(lines.size() == 2);
    CHECK(lines[1] == "samples begin at documents: 7 documents in 5 samples, 12 % padding; 1 "
                      "longer than a sample are cut, their later parts have 8.1 % of the tokens");
}

TEST_CASE("document packing: a document that goes on from the shard before is cut") {
    TempDir dir;
    PackedDocuments data({2, 2, 5, 2});
    data.tokens[0] = kFirst;
    const DataLoader loader(config_of({data.write(dir, "a")}, 6));
    CHECK(loader.packed().cut == 1);
    CHECK(loader.packed().cut_tokens == 1);
}

TEST_CASE("document packing: only of shards with a mask and a known separator, in blends too") {
    TempDir dir;
    const std::vector<size_t> lengths = random_lengths(400, 12, 5);
    const PackedDocuments data(lengths);
    const std::string masked = data.write(dir, "masked"), whole = data.write(dir, "whole", false),
                      copy = data.write(dir, "copy", false), nameless = dir / "nameless.bin";
    spill(nameless, llmc_v7(data.tokens));
    spill(dir / "nameless.mask", mask_bytes(data.flags));
    const DataLoader loader(config_of({"0.5", masked, "0.5", whole}, 16)), alone(config_of({masked}, 16));
    const DataLoader without(config_of({"0.5", copy, "0.5", whole}, 16));
    CHECK(loader.packed().shards == 1);
    CHECK(without.packed().shards == 0);
    CHECK(loader.sources()[1].samples == without.sources()[1].samples);
    for (int64_t s = 0; s < 200; s++) {
        const ReadSample sample = read(loader, s), expected = s % 2 ? read(without, s) : read(alone, s / 2);
        CHECK(sample.inputs == expected.inputs);
        CHECK(sample.targets == expected.targets);
    }
    // PackedDocuments of a Megatron shard are those of its index.
    spill(dir / "megatron.bin", token_bytes<uint32_t>(data.tokens));
    spill(dir / "megatron.idx", megatron_index({lengths.begin(), lengths.end()}, 4));
    spill(dir / "megatron.mask", mask_bytes(data.flags));
    const DataLoader megatron(config_of({dir / "megatron.bin"}, 16));
    CHECK(megatron.packed().shards == 1);
    CHECK(megatron.packed().padding == alone.packed().padding);
    const DataLoader unknown(config_of({nameless}, 16));
    CHECK(unknown.packed().shards == 0);
    check_contains(describe_data(unknown, 1).back(), {"1 shard with loss masks begin anywhere", "no tokenizer.sep"});
}

TEST_CASE("document packing: --align-documents on is for shards without masks too, off for none") {
    TempDir dir;
    const PackedDocuments data({3, 6, 2, 7, 4, 12, 3});
    const auto open = [&](const std::string& path, std::optional<bool> align) {
        DataConfig config = config_of({path}, 8);
        config.shuffle = false;
        config.align = align;
        return DataLoader(config);
    };
    const std::string masked = data.write(dir, "masked"), whole = data.write(dir, "whole", false);
    const DataLoader on = open(whole, true), with_mask = open(masked, {}), off = open(masked, false);
    REQUIRE(on.samples_per_epoch() == 5);
    for (int64_t s = 0; s < 5; s++) CHECK(read(on, s).inputs == read(with_mask, s).inputs);
    // The separator after the last document is its end, except after the last one of the shard.
    const int32_t end = static_cast<int32_t>(kSeparator), none = kIgnoreIndex, at = static_cast<int32_t>(kFirst);
    CHECK(read(on, 3).targets == std::vector{at + 19, at + 20, at + 21, end, at + 35, at + 36, none, none});
    CHECK(read(on, 4).targets == std::vector{at + 31, at + 32, at + 33, end, none, none, none, none});
    CHECK(open(masked, true).fingerprint_json() == with_mask.fingerprint_json());

    REQUIRE(off.samples_per_epoch() == 4);
    const DataLoader plain = open(whole, {});
    for (int64_t s = 0; s < 4; s++) CHECK(read(off, s).inputs == read(plain, s).inputs);
    CHECK(read(off, 1).targets[0] == none);
    check_contains(off.check_fingerprint(with_mask.fingerprint_json()), {"changed since the checkpoint"});
    CHECK(describe_data(off, 1).back() == "samples of 1 shard with loss masks begin anywhere in a document "
                                          "(--align-documents off)");
    std::remove((dir / "whole.meta.json").c_str());
    check_contains(error_of([&] { open(whole, true); }), {"exit 2", "--align-documents on", "whole.meta.json' is"});
}

TEST_CASE("document packing: a shard may be shorter than a sample") {
    TempDir dir;
    const PackedDocuments data({4, 3});
    const DataLoader loader(config_of({data.write(dir, "a")}, 16));
    CHECK(loader.samples_per_epoch() == 1);
    spill(dir / "unmasked.bin", llmc_v7(data.tokens));
    check_contains(refusal(config_of({dir / "unmasked.bin"}, 16)), {"7 tokens are fewer than one sample"});
}
