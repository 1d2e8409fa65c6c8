// Token shards: formats, errors at start, files beyond 32-bit sizes, fingerprints.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

#include "llmc/base/system/process_limits.h"
#include "tests/support/data_test.h"

using namespace data_test;

TEST_CASE("data: every format gives the same samples") {
    TempDir dir;
    // 23 tokens, T = 4: 5 samples from tokens 0, 4, .. 16; the last target read is token 20.
    std::vector<uint32_t> tokens = counting(40000, 23);
    tokens[7] = 65535;  // must not turn negative
    spill(dir / "a.bin", llmc_v1(tokens));
    spill(dir / "b.bin", llmc_v7(tokens));
    spill(dir / "c.bin", token_bytes<uint16_t>(tokens));
    spill(dir / "c.idx", megatron_index({10, 0, 13}, 8));
    spill(dir / "d.bin", token_bytes<uint32_t>(tokens));
    spill(dir / "d.idx", megatron_index({23}, 4));
    spill(dir / "e.bin", token_bytes<uint16_t>(tokens));
    spill(dir / "a.meta.json", "{}");
    DataConfig config = config_of({dir / "*"});
    config.shuffle = false;
    config.token_dtype = "uint16";
    DataLoader loader(config);
    REQUIRE(loader.shards().size() == 5);
    const ShardFormat formats[] = {ShardFormat::kLlmcV1, ShardFormat::kLlmcV7, ShardFormat::kMegatron,
                                   ShardFormat::kMegatron, ShardFormat::kRaw};
    const int widths[] = {2, 4, 2, 4, 2};
    for (size_t s = 0; s < 5; s++) {
        const ShardInfo& info = loader.shards()[s];
        CHECK(info.path == dir / (std::string(1, static_cast<char>('a' + s)) + ".bin"));
        CHECK(info.format == formats[s]);
        CHECK(info.token_bytes == widths[s]);
        CHECK(info.tokens == 23);
        CHECK(info.samples == 5);
    }
    CHECK(loader.samples_per_epoch() == 25);
    CHECK(loader.total_tokens() == 5 * 23);
    for (int64_t sample = 0; sample < 50; sample++) {
        std::vector<int32_t> inputs(4), targets(4);
        CHECK(loader.read(sample, inputs.data(), targets.data()) == 4);
        for (size_t t = 0; t < 4; t++) {
            size_t at = static_cast<size_t>(sample % 5) * 4 + t;
            CHECK(inputs[t] == static_cast<int32_t>(tokens[at]));
            CHECK(targets[t] == static_cast<int32_t>(tokens[at + 1]));
        }
    }
}

TEST_CASE("data: patterns") {
    TempDir dir;
    for (const char* name : {"b_2.bin", "b_10.bin", "B_1.bin", "a.bin", "odd[1].bin"})
        spill(dir / name, llmc_v1(counting(0, 9)));
    auto names = [&](std::vector<std::string> globs) {
        for (std::string& glob : globs)
            glob = dir / glob;
        std::string text;
        for (const std::string& path : expand_globs(globs))
            text += path.substr(dir.path.size() + 1) + " ";
        return text;
    };
    CHECK(names({"b_*.bin", "[aB]*.bin"})
          == "b_10.bin b_2.bin B_1.bin a.bin ");  // patterns in order, by byte
    CHECK(names({"odd[1].bin"}) == "odd[1].bin ");
    check_contains(refusal(config_of({dir / "a.bin", dir / "none_*.bin"})),
                   {"exit 2", "pattern '" + dir.path + "/none_*.bin' matches no file"});
    check_contains(refusal(config_of({dir / "a.bin", dir / "*.bin"})), {"exit 2", "a.bin' is matched by two"});
    check_contains(refusal(config_of({})), {"exit 2", "--train-data"});
    check_contains(refusal(config_of({dir.path})), {"exit 2", "a folder: name the files in it", "/train*.bin"});
}

TEST_CASE("data: refused headers name file and byte") {
    TempDir dir;
    std::string path = dir / "a.bin";
    DataConfig config = config_of({path});
    FileBytes good = llmc_v1(counting(0, 20)), wide = llmc_v7(counting(0, 20));
    auto with = [&](const FileBytes& bytes) {
        spill(path, bytes);
        return refusal(config);
    };
    CHECK(with(good) == "nothing");
    CHECK(with(wide) == "nothing");

    check_contains(with(""), {"exit 2", "a.bin': the file is empty"});
    check_contains(with(good.substr(0, 1000)), {"exit 2", "a.bin': truncated in the header", "byte 1000 of 1024"});
    check_contains(with(good.substr(0, 4)), {"exit 2", "truncated in the header", "byte 4 of 1024"});
    check_contains(with(good.substr(0, good.size() - 1)),
                   {"exit 2", "a.bin': truncated", "20 tokens", "1064 bytes", "ends at byte 1063"});
    check_contains(with(wide.substr(0, wide.size() - 4)), {"exit 2", "truncated", "1104 bytes", "byte 1100"});
    check_contains(with(good + "xx"), {"exit 2", "20 tokens, which end at byte 1064", "has 1066 bytes"});
    check_contains(with(llmc_header(20240520, 1, 0xffffffffu)), {"exit 2", "truncated", "4294967295 tokens"});
    check_contains(with(llmc_header(20240520, 7, 20) + good.substr(1024)),
                   {"exit 2", "a.bin': byte 4: version 7, expected 1 after magic 20240520"});
    check_contains(with(llmc_header(20240801, 1, 20) + wide.substr(1024)),
                   {"exit 2", "byte 4: version 1, expected 7 after magic 20240801"});
    check_contains(with(llmc_header(20240520, 1, 0)), {"exit 2", "0 tokens are fewer than one sample"});
    check_contains(with(llmc_header(0x12345678, 1, 20)),
                   {"exit 2", "a.bin': byte 0: wrong magic 0x12345678", "--token-dtype uint16 or uint32"});

    config.token_dtype = "int16";
    check_contains(with(good), {"exit 2", "--token-dtype 'int16'", "uint16 or uint32"});
    config.token_dtype = "uint32";
    check_contains(with(FileBytes(41, '\0')), {"exit 2", "odd size: 41 bytes", "4 bytes of a uint32"});
    CHECK(with(FileBytes(44, '\0')) == "nothing");
    check_contains(with(good.substr(0, 1050)), {"exit 2", "truncated"});  // magic wins over --token-dtype
    config.token_dtype = "uint16";
    check_contains(with(FileBytes(41, '\0')), {"exit 2", "odd size: 41 bytes", "2 bytes of a uint16"});
    check_contains(with(FileBytes(300, 'a')), {"exit 2", "this is text"});   // not ids of 24929
    check_contains(with(llmc_header(20240522, 1, 20)), {"exit 2", "byte 0: wrong magic", "evaluation file"});
    check_contains(with("BIN.TOK\n" + FileBytes(100, '\0')), {"exit 2", "byte 0: wrong magic", "llmq"});
    check_contains(with("\x93NUMPY" + FileBytes(100, '\0')), {"exit 2", "NumPy"});

    std::filesystem::remove(path);
    check_contains(refusal(config), {"exit 2", "matches no file"});
}

TEST_CASE("data: a shard that is cut while it is read is an error of its byte, not a signal") {
    TempDir dir;
    std::string path = dir / "a.bin";
    for (const FileBytes& bytes : {llmc_v1(counting(0, 40000)), llmc_v7(counting(0, 40000))}) {
        spill(path, bytes);
        DataConfig config = config_of({path}, 1000);
        config.shuffle = false;
        const DataLoader loader(config);
        std::vector<int32_t> inputs(1000), targets(1000);
        const auto reading = [&](int64_t sample) -> std::string {
            try {
                loader.read(sample, inputs.data(), targets.data());
            } catch (const Error& error) {
                return "exit " + std::to_string(error.exit_code) + ": " + error.what();
            }
            return "read";
        };
        CHECK(reading(20) == "read");
        const int64_t width = loader.shards()[0].token_bytes, cut = 1024 + 20'000 * width;
        REQUIRE(truncate(path.c_str(), cut) == 0);
        CHECK(reading(18) == "read");
        // the last target of sample 19 is the first token that is gone
        check_contains(reading(19), {"exit 2", "data shard '" + path + "': byte " + std::to_string(cut) + " is missing",
                                     std::to_string(bytes.size()) + " bytes", "has " + std::to_string(cut) + " now"});
        check_contains(reading(30), {"exit 2", "byte " + std::to_string(cut + 10'000 * width) + " is missing"});
        REQUIRE(truncate(path.c_str(), 0) == 0);
        check_contains(reading(0), {"exit 2", "byte 1024 is missing", "has 0 now"});
    }
}

TEST_CASE("data: more shards than the soft limit of open files allows") {
    TempDir dir;
    for (int i = 0; i < 40; i++) spill(dir / ("a_" + std::to_string(10 + i) + ".bin"), llmc_v1(counting(0, 9)));
    rlimit before{};
    REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
    const rlimit few{24, before.rlim_max};
    REQUIRE(setrlimit(RLIMIT_NOFILE, &few) == 0);
    CHECK(refusal(config_of({dir / "a_*.bin"})).find("raise the limit of open files") != std::string::npos);
    check_process_limits();   // as every executable at its start
    const std::string result = refusal(config_of({dir / "a_*.bin"}));
    setrlimit(RLIMIT_NOFILE, &before);
    CHECK(result == "nothing");
}

TEST_CASE("data: headerless tokens of another width than --token-dtype are refused") {
    TempDir dir;
    const auto said = [&](const FileBytes& bytes, const char* dtype) {
        spill(dir / "a.bin", bytes);
        DataConfig config = config_of({dir / "a.bin"}, 4, 200000);
        config.token_dtype = dtype;
        return refusal(config);
    };
    const auto ids = [](uint32_t low, uint32_t vocab) {
        std::vector<uint32_t> tokens;
        for (uint32_t i = 0; i < 400; i++) tokens.push_back(low + i * 7919 % (vocab - low));
        return tokens;
    };
    for (const auto& tokens : {ids(0, 5), ids(0, 257), ids(0, 50257), ids(100, 65000)}) {
        CHECK(said(token_bytes<uint16_t>(tokens), "uint16") == "nothing");
        CHECK(said(token_bytes<uint32_t>(tokens), "uint32") == "nothing");
        check_contains(said(token_bytes<uint32_t>(tokens), "uint16"),
                       {"exit 2", "a.bin': --token-dtype uint16 would read", "32-bit ids, --token-dtype uint32"});
        for (const char* dtype : {"uint16", "uint32"})
            check_contains(said(token_bytes<uint64_t>(tokens), dtype), {"exit 2", dtype, "64-bit ids"});
    }
    CHECK(said(token_bytes<uint32_t>(ids(0, 128256)), "uint32") == "nothing");   // upper halves of 0 and 1
    check_contains(said(token_bytes<uint32_t>(ids(0, 128256)), "uint16"), {"exit 2", "32-bit ids"});
    check_contains(said(token_bytes<uint16_t>(ids(100, 65000)), "uint32"),
                   {"exit 2", "is not below the vocabulary size", "or has another --token-dtype"});
    CHECK(said(token_bytes<uint16_t>(std::vector<uint32_t>(400, 0)), "uint16") == "nothing");
}

TEST_CASE("data: refused Megatron indices name file and byte") {
    TempDir dir;
    DataConfig config = config_of({dir / "m.bin"});
    const std::vector<int32_t> lengths = {7, 13};
    spill(dir / "m.bin", token_bytes<uint16_t>(counting(0, 20)));
    const FileBytes good = megatron_index(lengths, 8);
    auto with = [&](const FileBytes& index) {
        spill(dir / "m.idx", index);
        return refusal(config);
    };
    auto patched = [&](size_t at, auto value) {
        FileBytes bytes = good;
        std::memcpy(bytes.data() + at, &value, sizeof(value));
        return with(bytes);
    };
    REQUIRE(good.size() == 34 + 2 * 4 + 2 * 8 + 3 * 8);
    CHECK(with(good) == "nothing");
    check_contains(with(good.substr(0, 33)), {"exit 2", "m.idx': truncated in the header", "byte 33 of 34"});
    check_contains(with(""), {"exit 2", "m.idx': truncated in the header", "byte 0 of 34"});
    check_contains(patched(3, 'x'), {"exit 2", "m.idx': byte 0: wrong magic"});
    check_contains(patched(8, 'x'), {"exit 2", "m.idx': byte 0: wrong magic"});
    check_contains(patched(9, uint64_t{2}), {"exit 2", "m.idx': byte 9: version 2, expected 1"});
    check_contains(patched(17, uint8_t{1}), {"exit 2", "m.idx': byte 17: token type 1 (uint8)"});
    check_contains(patched(17, uint8_t{200}), {"exit 2", "byte 17: token type 200 (unknown)"});
    // The product of this count with 12 or 8 overflows to a small number, which must be detected.
    check_contains(patched(18, uint64_t{1} << 62), {"exit 2", "m.idx': truncated: byte 18 says 4611686018427387904"});
    check_contains(patched(26, uint64_t{1} << 61), {"exit 2", "truncated", "byte 26 2305843009213693952"});
    check_contains(with(good.substr(0, good.size() - 1)), {"exit 2", "truncated", "ends at byte 81"});
    check_contains(with(good + "xx"), {"exit 2", "2 bytes too many at byte 82"});
    check_contains(patched(34 + 4, int32_t{-1}), {"exit 2", "m.idx': byte 38: sequence 1 has length -1"});
    check_contains(patched(34 + 4, int32_t{12}), {"exit 2", "m.bin': the sequences", "byte 38", "has 40 bytes"});
    check_contains(patched(34 + 4, int32_t{14}), {"exit 2", "m.bin': truncated: sequence 1", "byte 42", "byte 40"});
    check_contains(patched(34 + 8 + 8, int64_t{16}),
                   {"exit 2", "m.idx': byte 50: sequence 1 starts at 16, expected 14"});
    check_contains(with(megatron_index(lengths, 4)), {"exit 2", "truncated: sequence 1"});
}

TEST_CASE("data: token ids at or above the vocabulary") {
    TempDir dir;
    const uint32_t vocab = 50257;
    auto tokens = [&](uint32_t n, int64_t bad_at, uint32_t bad) {
        std::vector<uint32_t> list(n, vocab - 1);
        if (bad_at >= 0) list[static_cast<size_t>(bad_at)] = bad;
        return list;
    };
    for (uint32_t n : {5u, 1023u, 1024u, 1025u, 3000u})
        for (int64_t bad_at : {int64_t{0}, int64_t{n} / 2, int64_t{n} - 1}) {
            CAPTURE(n, bad_at);
            std::vector<std::string> parts = {"exit 2", "(token " + std::to_string(bad_at) + ")", "size 50257"};
            DataConfig config = config_of({dir / "a.bin"}, 4, vocab);
            spill(dir / "a.bin", llmc_v1(tokens(n, -1, 0)));
            CHECK(refusal(config) == "nothing");
            spill(dir / "a.bin", llmc_v1(tokens(n, bad_at, vocab)));
            parts.push_back("a.bin': byte " + std::to_string(1024 + 2 * bad_at));
            check_contains(refusal(config), parts);
            spill(dir / "a.bin", llmc_v7(tokens(n, bad_at, 0xffffffffu)));
            parts.back() = "a.bin': byte " + std::to_string(1024 + 4 * bad_at);
            parts.push_back("id 4294967295");
            check_contains(refusal(config), parts);
            config.check_ids = false;
            CHECK(refusal(config) == "nothing");
        }
    // The error names the first one of the first shard; every uint16 is below a large vocabulary.
    spill(dir / "a.bin", llmc_v1(tokens(100, -1, 0)));
    std::vector<uint32_t> two = tokens(3000, 2000, 65535);
    two[2500] = 65535;
    spill(dir / "b.bin", llmc_v1(two));
    spill(dir / "c.bin", llmc_v1(tokens(100, 0, 65535)));
    check_contains(refusal(config_of({dir / "*.bin"}, 4, vocab)), {"b.bin': byte 5024 (token 2000): id 65535"});
    check_contains(refusal(config_of({dir / "*.bin"}, 4, 65535)), {"b.bin': byte 5024 (token 2000): id 65535"});
    CHECK(refusal(config_of({dir / "*.bin"}, 4, 65536)) == "nothing");
}

TEST_CASE("data: files beyond 2^31 and 2^32 tokens") {
    TempDir dir;
    // 5 GiB of holes with marks around byte 2^31 and 2^32 and token 2^31; nothing in between is stored or
    // read.
    const std::string path = dir / "big.bin";
    const int64_t bytes = int64_t{5} << 30, tokens = bytes / 2, T = 1 << 20;
    const std::vector<int64_t> marks = {0, (int64_t{1} << 30), (int64_t{1} << 31) - 1, int64_t{1} << 31, tokens - 1};
    {
        std::ofstream file(path, std::ios::binary);
        for (size_t m = 0; m < marks.size(); m++) {
            uint16_t value = static_cast<uint16_t>(100 + m);
            file.seekp(marks[m] * 2);
            file.write(reinterpret_cast<const char*>(&value), 2);
        }
        REQUIRE(file.good());
    }
    REQUIRE(std::filesystem::file_size(path) == static_cast<uint64_t>(bytes));
    DataConfig config = config_of({path}, T, 104);  // the last mark, 104, is no valid id
    config.token_dtype = "uint16";
    config.check_ids = config.shuffle = false;
    DataLoader loader(config);
    CHECK(loader.total_tokens() == tokens);
    REQUIRE(loader.samples_per_epoch() == tokens / T - 1);
    std::vector<int32_t> inputs(T), targets(T);
    for (size_t m = 0; m < marks.size() - 1; m++) {
        loader.prefetch(marks[m] / T, 1);
        loader.read(marks[m] / T, inputs.data(), targets.data());
        CHECK(inputs[static_cast<size_t>(marks[m] % T)] == static_cast<int32_t>(100 + m));
        // nothing else is set, except for an adjacent mark
        CHECK(std::count(inputs.begin(), inputs.end(), 0) == T - 1);
    }
    Shard shard(path, "uint16");
    CHECK(shard.find_bad_id((int64_t{1} << 31) - 100, 200, 103) == (int64_t{1} << 31));
    CHECK(shard.find_bad_id(tokens - 5000, 5000, 104) == tokens - 1);
    CHECK(shard.find_bad_id(tokens - 5000, 5000, 105) == -1);
    CHECK(shard.byte_offset(tokens - 1) == bytes - 2);

    // A uint32 shard with more than 2^32 tokens: 16 GiB + 64 bytes of holes.
    const std::string wide = dir / "wide.bin";
    spill(wide, "");
    const int64_t many = (int64_t{1} << 32) + 16;
    REQUIRE(truncate(wide.c_str(), many * 4) == 0);
    {
        std::fstream file(wide, std::ios::binary | std::ios::in | std::ios::out);
        uint32_t value = 77;
        file.seekp((many - 8) * 4);
        file.write(reinterpret_cast<const char*>(&value), 4);
    }
    Shard large(wide, "uint32");
    CHECK(large.info.tokens == many);
    CHECK(large.token(many - 8) == 77);
    CHECK(large.find_bad_id(many - 1000, 1000, 77) == many - 8);
    config = config_of({wide}, 4);
    config.token_dtype = "uint32";
    config.check_ids = config.shuffle = false;
    DataLoader wide_loader(config);
    CHECK(read_inputs(wide_loader, (many - 8) / 4)[0] == 77);
}

TEST_CASE("data: the fingerprint of a large shard samples the whole file") {
    TempDir dir;
    // 8 MiB: larger than both ends and the blocks together, so only samples are hashed.
    const std::string path = dir / "a.bin";
    FileBytes bytes = llmc_v1(std::vector<uint32_t>(4 << 20, 5));
    auto fingerprint = [&] {
        spill(path, bytes);
        return Shard(path, "").info.fingerprint;
    };
    const uint64_t before = fingerprint();
    CHECK(fingerprint() == before);
    const size_t mib = 1 << 20, size = bytes.size();
    for (size_t at : {size_t{1024}, mib - 1, size - 1, size - mib}) {
        bytes[at] ^= 1;
        CHECK(fingerprint() != before);
        bytes[at] ^= 1;
    }
    // Any changed 200 KiB in the middle contain a block: blocks are at most 6 MiB / 63 apart.
    for (size_t at = mib; at + 200 * 1024 < size - mib; at += mib) {
        for (size_t i = 0; i < 200 * 1024; i++)
            bytes[at + i] ^= 1;
        CHECK(fingerprint() != before);
        for (size_t i = 0; i < 200 * 1024; i++)
            bytes[at + i] ^= 1;
    }
    CHECK(fingerprint() == before);
}
