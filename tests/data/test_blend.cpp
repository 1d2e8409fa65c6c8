// Weighted blends: parsing of exact weights, the order of sources, and the samples that the loader reads.
#include <algorithm>
#include <cmath>
#include <set>

#include "tests/support/config_test.h"
#include "tests/support/data_test.h"

#include "llmc/base/rng.h"
#include "llmc/data/blend.h"

using data_test::check_contains;
using data_test::config_of;
using data_test::counting;
using data_test::llmc_v7;
using data_test::read_inputs;
using data_test::TempDir;
using data_test::spill;

namespace {

std::vector<int64_t> parts_of(const Words& words) {
    const DataWords parsed = parse_data_words(words);
    CHECK(parsed.error == "");
    std::vector<int64_t> parts;
    for (const DataSource& source : parsed.sources) parts.push_back(source.parts);
    return parts;
}

// The largest deviations from a share that a sequence of sources has, in samples: after the first n for some n, and
// in some window of it. parts x period samples are exact.
struct Deviation {
    double prefix = 0, window = 0;
};
Deviation deviation(const std::vector<int64_t>& sequence, const std::vector<int64_t>& parts) {
    const int64_t period = std::accumulate(parts.begin(), parts.end(), int64_t{0});
    Deviation result;
    for (size_t k = 0; k < parts.size(); k++) {
        int64_t ahead = 0, lowest = 0, highest = 0;   // period x count - part x n
        for (int64_t source : sequence) {
            ahead += (source == static_cast<int64_t>(k) ? period : 0) - parts[k];
            lowest = std::min(lowest, ahead);
            highest = std::max(highest, ahead);
        }
        const double unit = 1.0 / static_cast<double>(period);
        result.prefix = std::max(result.prefix, static_cast<double>(std::max(highest, -lowest)) * unit);
        result.window = std::max(result.window, static_cast<double>(highest - lowest) * unit);
    }
    return result;
}

std::vector<int64_t> sequence_of(const BlendOrder& order, int64_t n) {
    std::vector<int64_t> sequence;
    for (int64_t s = 0; s < n; s++) sequence.push_back(order.at(s).source);
    return sequence;
}

// Tijdeman's bound, up to rounding of the division above.
void check_shares(const std::vector<int64_t>& parts) {
    CAPTURE(parts.size(), parts[0]);
    const BlendOrder order(parts);
    const double K = static_cast<double>(parts.size()), round = 1e-12;
    const Deviation d = deviation(sequence_of(order, 2 * order.period()), parts);
    CHECK(d.prefix <= 1 - 1 / (2 * K - 2) + round);
    CHECK(d.window <= 2 - 1 / (K - 1) + round);
    if (parts.size() == 2) CHECK(d.window < 1 - round);
}

}  // namespace

TEST_CASE("blend: weights are converted exactly to integers") {
    CHECK(parts_of({"0.7", "a", "0.3", "b"}) == std::vector<int64_t>{7, 3});
    CHECK(parts_of({"1", "a", "1", "b", "1", "c"}) == std::vector<int64_t>{1, 1, 1});
    CHECK(parts_of({".5", "a", "1.50", "b"}) == std::vector<int64_t>{1, 3});
    CHECK(parts_of({"2e-1", "a", "+8E-1", "b"}) == std::vector<int64_t>{1, 4});
    CHECK(parts_of({"1e3", "a", "1e+0", "b"}) == std::vector<int64_t>{1000, 1});
    CHECK(parts_of({"627000000000", "a", "300000000000", "b"}) == std::vector<int64_t>{209, 100});
    CHECK(parts_of({"0.000001", "a", "0.999999", "b"}) == std::vector<int64_t>{1, 999999});
    CHECK(parts_of({"a", "b/*.bin"}) == std::vector<int64_t>{1});
    CHECK(parts_of({}).empty());
    // A pattern that the shell has expanded; words that only begin like numbers are files.
    const DataWords parsed =
        parse_data_words({"3", "a/1.bin", "7b/2.bin", "1", "-.bin", "./7", ".", "1e", "nan", "inf"});
    REQUIRE(parsed.sources.size() == 2);
    CHECK(parsed.error == "");
    CHECK(parsed.sources[0].globs == Words{"a/1.bin", "7b/2.bin"});
    CHECK(parsed.sources[1].globs == Words{"-.bin", "./7", ".", "1e", "nan", "inf"});
    CHECK(parsed.sources[0].weight == "3");
}

TEST_CASE("blend: invalid weights are refused") {
    const std::vector<std::pair<Words, std::string>> wrong = {
        {{"a", "0.3", "b"}, "'a' has no weight, but 0.3 is a weight"},
        {{"0.7", "0.3", "b"}, "weight 0.7 has no shards after it"},
        {{"0.7", "a", "0.3"}, "weight 0.3 has no shards after it"},
        {{"0", "a", "0.3", "b"}, "weight 0 must be above 0"},
        {{"0.3", "a", "0.000", "b"}, "weight 0.000 must be above 0"},
        {{"-0.3", "a", "1", "b"}, "weight -0.3 is negative"},
        {{"0.3", "a"}, "weight 0.3 has no effect on a single source"},
        {{"0.333333", "a", "0.766669", "b"}, "weights 0.333333 : 0.766669: exact shares repeat only after"},
        {{"0.3333333", "a", "0.6666667", "b"}, "weight 0.3333333: write it with at most six decimals"},
        {{"1e-300", "a", "1", "b"}, "weight 1e-300: write it with at most six decimals"},
        {{"1e999", "a", "1", "b"}, "weight 1e999: write it with at most six decimals, below 9e12"},
        {{"9000000000000", "a", "1", "b"}, "weight 9000000000000: write it"}};
    for (const auto& [words, text] : wrong) {
        CAPTURE(text);
        CHECK(contains(parse_data_words(words).error, text));
    }
    Words many;
    for (int i = 0; i < 257; i++) many.insert(many.end(), {"1", "a"});
    CHECK(contains(parse_data_words(many).error, "257 weights, at most 256"));
    many.resize(512);
    CHECK(parse_data_words(many).error == "");
}

TEST_CASE("blend: shares are exact after any number of samples") {
    for (int64_t a = 1; a <= 40; a++)
        for (int64_t b = 1; b <= 40; b++) check_shares({a, b});
    for (int64_t a = 1; a <= 9; a++)
        for (int64_t b = 1; b <= 9; b++)
            for (int64_t c = 1; c <= 9; c++) check_shares({a, b, c});
    Philox4 random{};
    for (uint64_t i = 0; i < 300; i++) {
        std::vector<int64_t> parts;
        for (uint64_t k = 0; k < 2 + i % 9; k++) {
            random = philox(17, k, i);
            parts.push_back(1 + random.word[0] % (random.word[1] % 2 ? 1000 : 7));   // even and uneven weights
        }
        check_shares(parts);
    }
    check_shares({999999, 1});
    check_shares({700001, 299999, 48576});
    check_shares(std::vector<int64_t>(256, 3));
}

TEST_CASE("blend: the position of a sample depends only on its number") {
    for (const std::vector<int64_t>& parts : {std::vector<int64_t>{1}, {7, 3}, {5, 3, 2}, {1, 1, 1}, {13, 1, 200, 7}}) {
        const BlendOrder order(parts);
        std::vector<int64_t> count(parts.size());
        for (int64_t s = 0; s < 3 * order.period() + 1; s++) {
            for (size_t k = 0; k < parts.size(); k++)
                REQUIRE(order.count(static_cast<int64_t>(k), s) == count[k]);
            const BlendOrder::Place place = order.at(s);
            REQUIRE(place.index == count[static_cast<size_t>(place.source)]++);
        }
        const int64_t far = (int64_t{1} << 60) / order.period() * order.period();
        for (int64_t s = 0; s < order.period(); s++) {
            CHECK(order.at(far + s).source == order.at(s).source);
            CHECK(order.at(far + s).index == order.count(order.at(s).source, far + s));
        }
    }
    // Pinned: a run resumed by another build must see the samples it would have seen.
    CHECK(sequence_of(BlendOrder({7, 3}), 10) == std::vector<int64_t>{0, 1, 0, 0, 0, 1, 0, 0, 1, 0});
    CHECK(sequence_of(BlendOrder({5, 3, 2}), 10) == std::vector<int64_t>{0, 1, 0, 2, 0, 1, 0, 2, 1, 0});
}

TEST_CASE("blend: every source is read in its own order, epoch after epoch") {
    TempDir dir;
    // Token = place in its source, plus 100000 for the second and 200000 for the third, so an input is an address.
    spill(dir / "a.bin", llmc_v7(counting(0, 401)));
    spill(dir / "b1.bin", llmc_v7(counting(100000, 201)));
    spill(dir / "b2.bin", llmc_v7(counting(100201, 101)));
    spill(dir / "c.bin", llmc_v7(counting(200000, 101)));
    DataConfig config = config_of({"0.5", dir / "a.bin", "0.3", dir / "b*.bin", "0.2", dir / "c.bin"}, 10);
    config.seed = 1337;
    const DataLoader loader(config), again(config);
    const std::vector<SourceInfo>& sources = loader.sources();
    REQUIRE(sources.size() == 3);
    CHECK(sources[1].shards == 2);
    CHECK(sources[1].share == doctest::Approx(0.3));
    const std::vector<int64_t> size = {40, 30, 10};
    CHECK(loader.samples_per_epoch() == 80);

    const BlendOrder order({5, 3, 2});
    std::vector<std::vector<int32_t>> stream(3);
    for (int64_t s = 0; s < 400; s++) {
        const int32_t first = read_inputs(loader, s)[0];
        REQUIRE(first / 100000 == order.at(s).source);
        stream[static_cast<size_t>(first / 100000)].push_back(first % 100000);
    }
    for (int64_t s = 399; s >= 0; s--) REQUIRE(read_inputs(again, s) == read_inputs(loader, s));

    std::set<std::vector<int32_t>> orders;
    for (size_t k = 0; k < 3; k++) {
        CHECK(static_cast<int64_t>(stream[k].size()) == 40 * std::vector<int64_t>{5, 3, 2}[k]);
        for (size_t at = 0; at + static_cast<size_t>(size[k]) <= stream[k].size(); at += static_cast<size_t>(size[k])) {
            std::vector<int32_t> epoch(stream[k].begin() + static_cast<long>(at),
                                       stream[k].begin() + static_cast<long>(at) + size[k]);
            CHECK(orders.insert(epoch).second);   // c has 10! orders and 8 epochs of the fixed seed
            std::sort(epoch.begin(), epoch.end());
            for (int64_t i = 0; i < size[k]; i++) {
                const int64_t shard_start = k == 1 && i >= 20 ? 201 - 200 : 0;
                REQUIRE(epoch[static_cast<size_t>(i)] == i * 10 + shard_start);
            }
        }
    }
    // The first source is read as it would be alone; another seed reads all in another order.
    DataConfig alone = config_of({dir / "a.bin"}, 10);
    alone.seed = 1337;
    const DataLoader only(alone);
    for (int64_t s = 0; s < 200; s++) REQUIRE(read_inputs(only, s)[0] == stream[0][static_cast<size_t>(s)]);
    config.seed = 1338;
    const DataLoader other(config);
    int same = 0;
    for (int64_t s = 0; s < 100; s++) same += read_inputs(other, s) == read_inputs(loader, s);
    CHECK(same < 20);
    loader.prefetch(0, 1000);
}

TEST_CASE("blend: sources of equal size are shuffled differently; without shuffling each is read in file order") {
    TempDir dir;
    spill(dir / "a.bin", llmc_v7(counting(0, 101)));
    spill(dir / "b.bin", llmc_v7(counting(1000, 101)));
    DataConfig config = config_of({"1", dir / "a.bin", "1", dir / "b.bin"}, 1);
    const DataLoader shuffled(config);
    int same = 0;
    for (int64_t s = 0; s < 200; s += 2)
        same += read_inputs(shuffled, s)[0] % 1000 == read_inputs(shuffled, s + 1)[0] % 1000;
    CHECK(same < 8);   // about 1 is expected
    config.shuffle = false;
    const DataLoader plain(config);
    for (int64_t s = 0; s < 500; s++) CHECK(read_inputs(plain, s)[0] == s % 2 * 1000 + s / 2 % 100);
}

TEST_CASE("blend: the fingerprint that a resumed run compares") {
    TempDir dir;
    for (const char* name : {"a.bin", "b.bin", "c.bin"}) spill(dir / name, llmc_v7(counting(0, 41)));
    auto loader = [&](Words words) {
        for (std::string& word : words) word = word.ends_with(".bin") ? dir / word : word;
        return std::make_unique<DataLoader>(config_of(words));
    };
    const auto saved = loader({"0.7", "a.bin", "0.3", "b.bin", "c.bin"});
    const std::string json = saved->fingerprint_json();
    CHECK(saved->check_fingerprint(json) == "");
    CHECK(loader({"7", "a.bin", "3", "b.bin", "c.bin"})->check_fingerprint(json) == "");   // the same shares
    check_contains(loader({"6", "a.bin", "4", "b.bin", "c.bin"})->check_fingerprint(json),
                   {"the weights of the data were 7 : 3 of 1, 2 shards in the checkpoint, 3 : 2 of 1, 2 shards now"});
    check_contains(loader({"7", "a.bin", "b.bin", "3", "c.bin"})->check_fingerprint(json),
                   {"in the checkpoint, 7 : 3 of 2, 1 shards now"});
    check_contains(loader({"a.bin", "b.bin", "c.bin"})->check_fingerprint(json), {"in the checkpoint, no weights now"});
    check_contains(saved->check_fingerprint(loader({"a.bin", "b.bin", "c.bin"})->fingerprint_json()),
                   {"were no weights in the checkpoint, 7 : 3"});
    check_contains(loader({"0.3", "b.bin", "c.bin", "0.7", "a.bin"})->check_fingerprint(json), {"reordered"});
    CHECK(loader({"a.bin"})->fingerprint_json().find("blend") == std::string::npos);   // as in versions without weights
    const std::string head = json.substr(0, json.find("\"blend\""));
    CHECK(contains(saved->check_fingerprint(head + "\"blend\": [3]}"), "not readable"));
}

TEST_CASE("blend: a step or an evaluation never reads a sample twice, and the banner says how often a run does") {
    TempDir dir;
    spill(dir / "a.bin", llmc_v7(counting(0, 401)));   // 100 samples of 4
    spill(dir / "b.bin", llmc_v7(counting(0, 17)));    // 4
    const DataLoader loader(config_of({"0.9", dir / "a.bin", "0.1", dir / "b.bin"})), one(config_of({dir / "a.bin"}));
    require_samples(loader, 40, "one step");
    check_contains(refusal_of([&] { require_samples(loader, 50, "one step"); }),
                   {"b.bin' has 4 samples of 4; needs 5, its share of 50 (one step): lower its weight 0.1"});
    CHECK_THROWS_AS(require_samples(loader, 112, "one step"), Error);
    const std::vector<std::string> lines = describe_data(loader, 400);
    REQUIRE(lines.size() == 2);
    check_contains(lines[0], {"90 % of the samples from ", "a.bin: 1 shard, 100 samples, each read 3.6 times"});
    check_contains(lines[1], {"10 % of the samples from ", "b.bin: 1 shard, 4 samples, each read 10 times"});
    CHECK(describe_data(one, 400).empty());
}

TEST_CASE("blend: invalid blends are refused, some when options are parsed and some when the data is opened") {
    TempDir dir;
    spill(dir / "a.bin", llmc_v7(counting(0, 41)));
    spill(dir / "b.bin", llmc_v7(counting(0, 41)));
    check_contains(data_test::refusal(config_of({"1", dir / "*.bin", "2", dir / "b.bin"})),
                   {"exit 2", "b.bin' is matched by two patterns"});
    check_contains(data_test::refusal(config_of({"1", dir / "a.bin", "2", dir / "none*.bin"})),
                   {"exit 2", "none*.bin' matches no file"});
    check_contains(data_test::refusal(config_of({dir / "a.bin", "2", dir / "b.bin"})), {"exit 2: data: ", "no weight"});
    for (const std::string option : {"--train-data", "--valid-data"}) {
        const Words run = option == "--train-data" ? Words{"--train-iters", "5"} : base("");
        CHECK(contains(refusal("gpt2", joined(run, {option, "0", "x", "1", "y"})), option + ": weight 0 must be"));
        const Words words = {option, "0.7", "a/*.bin", "0.3", "b/1.bin", "b/2.bin"};
        const Config c = parse("gpt2", joined(run, words)).config;
        const Words& got = option == "--train-data" ? c.train_data : c.valid_data;
        CHECK(got == Words(words.begin() + 1, words.end()));
    }
    TempFile file("{\"train-data\": [0.7, \"x\", 3e-1, \"y\"], \"train-iters\": 5}");
    CHECK(parse("gpt2", {"--config", file.path}).config.train_data == Words{"0.7", "x", "0.3", "y"});
}
