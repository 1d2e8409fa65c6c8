// The order of samples, what a resumed run compares, and sorting by token.
#include <algorithm>
#include <cmath>
#include <map>
#include <thread>

#include "tests/support/data_test.h"

#include "llmc/data/shard_meta.h"
#include "llmc/ops/ops.h"

using namespace data_test;

static_assert(kIgnoreIndex == -1, "the loader counts targets by this value");

TEST_CASE("data: sample counts at the edges") {
    TempDir dir;
    for (int64_t T : {1, 3, 4, 7})
        for (uint32_t n : {2u, 4u, 5u, 8u, 9u, 16u, 22u}) {
            CAPTURE(T, n);
            spill(dir / "a.bin", llmc_v1(counting(0, n)));
            if (n <= T) {
                check_contains(
                    refusal(config_of({dir / "a.bin"}, T)),
                    {"exit 2", "a.bin': " + std::to_string(n) + " tokens are fewer than one sample",
                     "length " + std::to_string(T) + " + 1"});
                continue;
            }
            DataLoader loader(config_of({dir / "a.bin"}, T));
            CHECK(loader.samples_per_epoch() == (n - 1) / T);
            read_inputs(loader, loader.samples_per_epoch() - 1);
        }
}

TEST_CASE("data: ignored targets are not counted") {
    TempDir dir;
    std::vector<uint32_t> tokens = counting(1, 9);
    tokens[0] = tokens[2] = tokens[8] = 0xffffffffu;
    spill(dir / "a.bin", llmc_v7(tokens));
    DataConfig config = config_of({dir / "a.bin"});
    config.check_ids = config.shuffle = false;
    DataLoader loader(config);
    int32_t inputs[4], targets[4];
    CHECK(loader.read(0, inputs, targets) == 3);  // tokens 1..4: one ignored; token 0 is no target
    CHECK(loader.read(1, inputs, targets) == 3);  // tokens 5..8
    CHECK(inputs[0] == 5);
    CHECK(targets[3] == kIgnoreIndex);
}

TEST_CASE("data: too few samples") {
    TempDir dir;
    spill(dir / "a.bin", llmc_v1(counting(0, 32)));
    spill(dir / "b.bin", llmc_v1(counting(0, 33)));
    DataLoader one(config_of({dir / "a.bin"})), two(config_of({dir / "*.bin"}));
    require_samples(one, 7, "one step of 7 sequences");
    require_samples(two, 15, "one evaluation");
    check_contains(refusal_of([&] { require_samples(two, 16, "one evaluation of 2 x 8 sequences"); }),
                   {"a.bin' and 1 more has 65 tokens = 15 samples of 4; needs 16 (one evaluation of 2 x 8 sequences)"});
    CHECK_THROWS_AS(require_samples(one, 8, "one step"), Error);
}

TEST_CASE("data: the order is a permutation for every size") {
    for (int64_t n = 1; n <= 300; n++)
        for (int64_t epoch : {0, 1, 1000000}) {
            std::vector<int> seen(static_cast<size_t>(n));
            for (int64_t i = 0; i < n; i++) {
                int64_t p = permuted_index(i, n, 42, epoch);
                REQUIRE(p >= 0);
                REQUIRE(p < n);
                seen[static_cast<size_t>(p)]++;
            }
            REQUIRE(std::count(seen.begin(), seen.end(), 1) == n);
        }
    for (int64_t n : {65535, 65536, 65537, 300007}) {
        std::vector<bool> seen(static_cast<size_t>(n));
        int64_t fixed = 0;
        for (int64_t i = 0; i < n; i++) {
            int64_t p = permuted_index(i, n, 7, 3);
            REQUIRE(!seen[static_cast<size_t>(p)]);
            seen[static_cast<size_t>(p)] = true;
            fixed += p == i;
        }
        CHECK(fixed < 12);  // about 1 is expected; the identity has n
    }
    // Too large to enumerate: distinct and in range where it is easiest to go wrong.
    for (int64_t n : {(int64_t{1} << 32) + 1, (int64_t{1} << 40) - 1, int64_t{1} << 62, INT64_MAX}) {
        std::map<int64_t, int64_t> seen;
        for (int64_t i = 0; i < 1000; i++)
            for (int64_t index : {i, n - 1 - i}) {
                int64_t p = permuted_index(index, n, 1, 0);
                REQUIRE(p >= 0);
                REQUIRE(p < n);
                REQUIRE(seen.emplace(p, index).second);
            }
    }
}

TEST_CASE("data: every value is equally likely at every position") {
    // 20,000 epochs of 10 samples: each of 100 cells has mean 2000, deviation sqrt(20000 * .1 * .9) = 42.4;
    // 5 deviations are missed by chance once in 17,000 runs of 100 cells, and the seed is fixed.
    const int64_t n = 10, epochs = 20000;
    std::vector<int64_t> counts(n * n);
    for (int64_t epoch = 0; epoch < epochs; epoch++)
        for (int64_t i = 0; i < n; i++)
            counts[static_cast<size_t>(i * n + permuted_index(i, n, 99, epoch))]++;
    for (int64_t count : counts)
        CHECK(std::fabs(static_cast<double>(count) - 2000.0) < 5 * 42.4);
    // Neighbours do not stay neighbours: i + 1 follows i in 1 of n - 1 places for a random order.
    int64_t follows = 0, big = 1000;
    for (int64_t i = 0; i + 1 < big; i++)
        follows += permuted_index(i + 1, big, 5, 0) == permuted_index(i, big, 5, 0) + 1;
    CHECK(follows < 10);
}

TEST_CASE("data: the order of samples never changes silently") {
    TempDir dir;
    // 3 shards of 1000, 501 and 1499 tokens; token value = place in the whole stream, so an input is its
    // address.
    spill(dir / "a.bin", llmc_v7(counting(0, 1000)));
    spill(dir / "b.bin", llmc_v1(counting(1000, 501)));
    spill(dir / "c.bin", llmc_v7(counting(1501, 1499)));
    DataConfig config = config_of({dir / "*.bin"}, 10);
    config.seed = 1337;
    DataLoader loader(config);
    REQUIRE(loader.samples_per_epoch() == 99 + 50 + 149);
    auto starts = [&](int64_t first) {
        std::string text;
        for (int64_t s = first; s < first + 8; s++)
            text += std::to_string(read_inputs(loader, s)[0]) + " ";
        return text;
    };
    // Pinned: a run resumed by another build must see the samples it would have seen.
    CHECK(starts(0) == "1260 1330 1781 2121 2941 2491 2841 850 ");
    CHECK(starts(298) == "2931 1541 890 250 2211 280 1190 490 ");

    for (int64_t epoch = 0; epoch < 3; epoch++) {
        std::vector<int64_t> all;
        for (int64_t s = 0; s < 298; s++)
            all.push_back(read_inputs(loader, epoch * 298 + s)[0]);
        std::sort(all.begin(), all.end());
        size_t at = 0;
        for (int64_t i = 0; i < 99; i++)
            REQUIRE(all[at++] == i * 10);
        for (int64_t i = 0; i < 50; i++)
            REQUIRE(all[at++] == 1000 + i * 10);
        for (int64_t i = 0; i < 149; i++)
            REQUIRE(all[at++] == 1501 + i * 10);
    }
    config.seed = 1338;
    DataLoader other(config);
    int same = 0;
    for (int64_t s = 0; s < 298; s++)
        same += read_inputs(other, s) == read_inputs(loader, s);
    CHECK(same < 12);
}

TEST_CASE("data: any thread reads any sample") {
    TempDir dir;
    spill(dir / "a.bin", llmc_v7(counting(0, 4097)));
    DataLoader loader(config_of({dir / "a.bin"}, 8));
    const int64_t n = loader.samples_per_epoch();
    std::vector<int32_t> serial(static_cast<size_t>(n) * 8), parallel(serial.size());
    auto read_range = [&](std::vector<int32_t>& out, int64_t first, int64_t step) {
        int32_t targets[8];
        for (int64_t s = first; s < n; s += step) {
            loader.prefetch(s, 2);
            loader.read(s, out.data() + s * 8, targets);
        }
    };
    read_range(serial, 0, 1);
    std::vector<std::thread> threads;
    for (int64_t t = 0; t < 4; t++)
        threads.emplace_back(read_range, std::ref(parallel), t, 4);
    for (std::thread& thread : threads)
        thread.join();
    CHECK(serial == parallel);
}

TEST_CASE("data: a changed shard is detected") {
    TempDir dir;
    const std::vector<uint32_t> a = counting(0, 50), b = counting(100, 60);
    spill(dir / "a.bin", llmc_v1(a));
    spill(dir / "b.bin", llmc_v1(b));
    spill(dir / "other.bin", llmc_v1(a));
    auto json = [&](std::vector<std::string> names) {
        for (std::string& name : names)
            name = dir / name;
        return DataLoader(config_of(names)).fingerprint_json();
    };
    DataLoader both(config_of({dir / "a.bin", dir / "b.bin"}));
    const std::string saved = both.fingerprint_json();
    CHECK(both.check_fingerprint(saved) == "");
    check_contains(saved, {"\"a.bin\"", "\"b.bin\"", "fingerprint"});
    CHECK(saved.find(dir.path) == std::string::npos);  // a moved folder is the same data

    check_contains(both.check_fingerprint(json({"b.bin", "a.bin"})), {"a.bin' (number 0) is reordered"});
    check_contains(both.check_fingerprint(json({"a.bin"})), {"b.bin' (number 1) is new"});
    check_contains(both.check_fingerprint(json({"b.bin"})), {"a.bin' (number 0) is new"});
    check_contains(both.check_fingerprint(json({"a.bin", "b.bin", "other.bin"})), {"'other.bin'", "is missing"});
    check_contains(both.check_fingerprint(json({"other.bin", "b.bin"})), {"'other.bin'", "is missing"});
    for (const char* bad : {"", "{", "[]", "{\"shards\": 3}", "{\"shards\": [{\"name\": 3}]}", "null"})
        check_contains(both.check_fingerprint(bad), {"not readable"});
    check_contains(both.check_fingerprint("{\"shards\": []}"), {"a.bin' (number 0) is new"});

    // For the log, the tokens in their order count, and no name.
    auto identity = [&](const std::vector<std::string>& globs) { return DataLoader(config_of(globs)).identity_json(); };
    check_contains(both.identity_json(), {"{\"fingerprint\":\"", "\",\"tokens\":110}"});
    CHECK(both.identity_json() == identity({dir / "other.bin", dir / "b.bin"}));
    CHECK(both.identity_json() != identity({dir / "b.bin", dir / "a.bin"}));
    CHECK(both.identity_json() != identity({"1", dir / "a.bin", "1", dir / "b.bin"}));

    auto check_now = [&] {
        return DataLoader(config_of({dir / "a.bin", dir / "b.bin"})).check_fingerprint(saved);
    };
    for (size_t at : {size_t{0}, size_t{30}, size_t{59}}) {
        std::vector<uint32_t> flipped = b;
        flipped[at] ^= 1;
        spill(dir / "b.bin", llmc_v1(flipped));
        check_contains(check_now(), {"b.bin' changed since the checkpoint: fingerprint"});
    }
    FileBytes header = llmc_v1(b);
    header[500] = 1;  // unused part of the header
    spill(dir / "b.bin", header);
    check_contains(check_now(), {"b.bin' changed since the checkpoint: fingerprint"});
    spill(dir / "b.bin", llmc_v1(counting(100, 61)));
    check_contains(check_now(), {"b.bin' changed", "61 tokens of 2 bytes, was 60 of 2"});
    spill(dir / "b.bin", llmc_v7(b));
    check_contains(check_now(), {"b.bin' changed", "60 tokens of 4 bytes, was 60 of 2"});
    spill(dir / "b.bin", llmc_v1(b));
    CHECK(check_now() == "");
}

TEST_CASE("data: rows sorted by token") {
    std::vector<int64_t> scratch;
    auto sorted = [&](const std::vector<int32_t>& tokens, int64_t vocab) {
        std::vector<int32_t> order(tokens.size());
        sort_rows_by_token(tokens.data(), static_cast<int64_t>(tokens.size()), vocab, order.data(), scratch);
        return order;
    };
    CHECK(sorted({}, 5).empty());
    CHECK(sorted({3}, 5) == std::vector<int32_t>{0});
    CHECK(sorted({2, 0, 2, 1, 0, 2}, 3) == std::vector<int32_t>{1, 4, 3, 0, 2, 5});
    // Outside [0, vocab): after all others, in row order among themselves.
    CHECK(sorted({-1, 2, 7, 0, INT32_MIN, 3, INT32_MAX}, 3) == std::vector<int32_t>{3, 1, 0, 2, 4, 5, 6});
    for (int64_t n : {1, 17, 1000, 4097})
        for (int64_t vocab : {1, 7, 50257}) {
            std::vector<int32_t> tokens(static_cast<size_t>(n)), expected(tokens.size());
            for (int64_t i = 0; i < n; i++)
                tokens[static_cast<size_t>(i)] = static_cast<int32_t>(permuted_index(i, n, 3, vocab) % vocab);
            std::iota(expected.begin(), expected.end(), 0);
            std::stable_sort(expected.begin(), expected.end(), [&](int32_t x, int32_t y) {
                return tokens[static_cast<size_t>(x)] < tokens[static_cast<size_t>(y)];
            });
            CHECK(sorted(tokens, vocab) == expected);
        }
}

TEST_CASE("data: documents within sequences, from the tokens that begin them") {
    // Two sequences: separators side by side, at the end, at the beginning; none at all.
    const std::vector<uint8_t> starts = {0, 1, 1, 0, 0, 0, 1,   1, 0, 1, 0, 0, 0, 0,   0, 0, 0, 0, 0, 0, 0};
    std::vector<int32_t> marked(2 * starts.size(), -7);
    mark_documents(starts.data(), 3, 7, marked.data());
    CHECK(marked == std::vector<int32_t>{0, 1, 2, 2, 2, 2, 6,   0, 0, 2, 2, 2, 2, 2,   0, 0, 0, 0, 0, 0, 0,
                                         1, 2, 6, 6, 6, 6, 7,   2, 2, 7, 7, 7, 7, 7,   7, 7, 7, 7, 7, 7, 7});
    int32_t one[2] = {-7, -7};
    for (uint8_t start : {1, 0}) {
        mark_documents(&start, 1, 1, one);
        CHECK(one[0] == 0);
        CHECK(one[1] == 1);
    }
}

TEST_CASE("data: the separator comes from the sidecar of every shard") {
    TempDir dir;
    spill(dir / "a.bin", llmc_v1(counting(0, 32)));
    spill(dir / "b.bin", llmc_v1(counting(0, 32)));
    DataConfig config = config_of({dir / "*.bin"}, 4, 1000);
    CHECK(refusal(config) == "nothing");   // not requested, so no sidecar is needed
    config.documents = true;
    check_contains(refusal(config), {"exit 2", "--reset-attention-mask", "a.bin'", "a.meta.json' is missing"});
    auto sidecar = [&](const char* name, const std::string& text) { spill(dir / name, text); };
    auto names = [](int64_t id) { return "{\"tokenizer\": {\"separator\": " + std::to_string(id) + "}}"; };
    sidecar("a.meta.json", names(7));
    check_contains(refusal(config), {"exit 2", "b.bin'", "b.meta.json' is missing"});
    sidecar("b.meta.json", names(8));
    check_contains(refusal(config), {"exit 2", "b.bin' separates documents with token 8", "a.bin' with 7"});
    for (const char* text : {"", "{", "[]", "7"}) {
        sidecar("b.meta.json", text);
        check_contains(refusal(config), {"exit 2", "b.meta.json: ", "not "});
    }
    for (const char* text : {"{}", "{\"tokenizer\": 7}", "{\"tokenizer\": {}}", "{\"tokenizer\": {\"separator\": 7.0}}",
                             "{\"tokenizer\": {\"separator\": \"7\"}}"}) {
        sidecar("b.meta.json", text);
        check_contains(refusal(config), {"exit 2", "b.meta.json' has no integer tokenizer.separator"});
    }
    for (const char* id : {"-1", "1000", "18446744073709551615"}) {
        sidecar("b.meta.json", std::string("{\"tokenizer\": {\"separator\": ") + id + "}}");
        check_contains(refusal(config), {"exit 2", "b.meta.json' says ", id, "outside the vocabulary of 1000"});
    }
    sidecar("b.meta.json", names(7));
    config.shuffle = false;
    CHECK(starts_of(DataLoader(config), 0) == std::vector<uint8_t>{0, 0, 0, 0});
    CHECK(starts_of(DataLoader(config), 1) == std::vector<uint8_t>{0, 0, 0, 1});   // tokens 4 to 7
}

TEST_CASE("data: the documents of a Megatron shard are those of its index") {
    TempDir dir;
    // Megatron's end-of-document token, here 9, is the last one of its document, and may stand within one.
    spill(dir / "m.bin", token_bytes<uint16_t>({5, 6, 9, 1, 9, 2, 9, 3, 3, 3, 3, 9, 4}));
    const FileBytes good = megatron_index({3, 4, 0, 2, 3, 1}, 8);   // one document has no tokens
    spill(dir / "m.idx", good);
    DataConfig config = config_of({dir / "m.bin"}, 6, 10);
    config.shuffle = false;
    CHECK(starts_of(DataLoader(config), 0) == std::vector<uint8_t>(6));   // not requested
    config.documents = true;
    const DataLoader loader(config);
    CHECK(starts_of(loader, 0) == std::vector<uint8_t>{1, 0, 0, 1, 0, 0});
    CHECK(starts_of(loader, 1) == std::vector<uint8_t>{0, 1, 0, 1, 0, 0});
    // A document of two sequences, 0 and 1.
    const auto with = [&](const std::vector<int64_t>& documents) {
        FileBytes index = good.substr(0, good.size() - 7 * 8);
        const auto count = static_cast<uint64_t>(documents.size());
        index.replace(26, 8, reinterpret_cast<const char*>(&count), 8);
        for (int64_t first : documents) append(index, first);
        spill(dir / "m.idx", index);
        return refusal(config);
    };
    CHECK(with({0, 2, 3, 6}) == "nothing");
    CHECK(starts_of(DataLoader(config), 0) == std::vector<uint8_t>{1, 0, 0, 0, 0, 0});
    CHECK(starts_of(DataLoader(config), 1) == std::vector<uint8_t>{0, 1, 0, 0, 0, 0});
    check_contains(with({1, 6}), {"exit 2", "m.idx': byte 106: document 0 begins with sequence 1 of 6"});
    check_contains(with({0, 3, 2, 6}), {"byte 122: document 2 begins with sequence 2 of 6, the one before with 3"});
    check_contains(with({0, 7}), {"document 1 begins with sequence 7 of 6"});
    for (const auto& documents : {std::vector<int64_t>{}, {0}, {0, 3}})
        check_contains(with(documents), {"--align-documents off", "m.idx': its ", "do not cover its 6 sequences"});
}

TEST_CASE("positions restart where documents begin, in every sequence") {
    // The first token of a sequence is at position 0 whatever it is.
    const std::vector<uint8_t> starts = {0, 0, 1, 0, 0, 1, 1, 0, /**/ 1, 0, 0, 0, 0, 0, 0, 1};
    std::vector<int32_t> positions(16, -7), documents(32), again(16);
    restart_positions(starts.data(), 2, 8, positions.data());
    CHECK(positions == std::vector<int32_t>{0, 1, 0, 1, 2, 0, 0, 1, /**/ 0, 1, 2, 3, 4, 5, 6, 0});
    // The distance to the start of the document.
    mark_documents(starts.data(), 2, 8, documents.data());
    for (size_t i = 0; i < 16; i++) again[i] = static_cast<int32_t>(i % 8) - documents[i];
    CHECK(positions == again);
}

TEST_CASE("data: shards of different tokenizers are refused, and validation on the training shards") {
    TempDir dir;
    for (const char* name : {"a", "b", "c", "d"}) spill(dir / (std::string(name) + ".bin"), llmc_v1(counting(0, 32)));
    spill(dir / "d.bin", llmc_v1(counting(7, 32)));
    auto sidecar = [&](const char* name, const char* tokenizer, const char* hash) {
        spill(dir / (std::string(name) + ".meta.json"), strf("{\"tokenizer\": {\"name\": \"%s\", \"sha256\": \"%s\"}, "
                                                             "\"document_offsets\": [0, 1]}", tokenizer, hash));
    };
    sidecar("b", "mine", "abcd");
    sidecar("c", "gpt2", "0123");
    const auto both = [&](const char* one, const char* other) { return config_of({dir / one, dir / other}, 4, 1000); };
    CHECK(refusal(both("a.bin", "b.bin")) == "nothing");   // nothing is known about a
    check_contains(refusal(config_of({dir / "a.bin", dir / "b.bin", dir / "c.bin"}, 4, 1000)),
                   {"exit 2", "c.bin' was made with the tokenizer gpt2", "b.bin' with the tokenizer mine"});
    sidecar("c", "mine", "0123");   // of the same name
    check_contains(refusal(both("b.bin", "c.bin")), {"the tokenizer of SHA-256 0123", "the tokenizer of SHA-256 abcd"});
    sidecar("c", "renamed", "abcd");
    CHECK(refusal(both("b.bin", "c.bin")) == "nothing");
    spill(dir / "c.meta.json", "{\"tokenizer\": {\"name\": ");
    check_contains(refusal(both("b.bin", "c.bin")),
                   {"exit 2", "c.meta.json: not JSON: parse error at line 1, column "});

    const auto shards = [&](const char* name) { return DataLoader(config_of({dir / name}, 4, 1000)).shards(); };
    const auto said = [&](const std::vector<ShardInfo>& train, const std::vector<ShardInfo>& valid, bool same) {
        try {
            return check_validation_shards(train, valid, same);
        } catch (const Error& error) {
            return std::string(error.what());
        }
    };
    const std::vector<ShardInfo> a = shards("a.bin"), d = shards("d.bin");
    CHECK(said(a, d, false) == "");
    check_contains(said(a, shards("b.bin"), false), {"name the same tokens", "b.bin'"});   // a copy
    check_contains(said(a, a, true), {"VALIDATION ON TRAINING DATA: 1 shard of --valid-data is also"});
    check_contains(said(shards("[ad].bin"), d, false), {"VALIDATION ON TRAINING DATA: 1 shard"});
    sidecar("d", "gpt2", "0123");
    check_contains(said(shards("b.bin"), shards("d.bin"), true),
                   {"--valid-data and --train-data", "the tokenizer gpt2"});
}
