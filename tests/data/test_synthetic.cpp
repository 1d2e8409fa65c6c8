// Synthetic data: tokens as a function of (vocabulary, seed, sample number), and its options.
#include <limits>

#include "tests/support/config_test.h"
#include "tests/support/data_test.h"

namespace {

DataConfig synthetic(int64_t seq_length, int64_t vocab_size, uint64_t seed = 1) {
    DataConfig config = data_test::config_of({}, seq_length, vocab_size);
    config.synthetic = true;
    config.seed = seed;
    return config;
}

std::vector<int32_t> tokens_of(const DataConfig& config, int64_t sample) {
    return data_test::read_inputs(DataLoader(config), sample);
}

const Words kRun = {"--synthetic-data", "--train-iters", "100"};

}  // namespace

// A change of these tokens requires another kSyntheticVersion.
TEST_CASE("synthetic: the tokens are frozen") {
    CHECK(tokens_of(synthetic(6, 50257), 0) == std::vector<int32_t>{2, 8139, 29, 2, 14, 5259});
    const int64_t far = (int64_t{1} << 40) + 3;
    CHECK(tokens_of(synthetic(6, 50257, 7), far) == std::vector<int32_t>{11446, 651, 13054, 0, 13, 0});
}

TEST_CASE("synthetic: a sample depends only on its number, the seed and the vocabulary") {
    const DataLoader loader(synthetic(33, 1000)), other(synthetic(33, 1000));
    std::vector<std::vector<int32_t>> samples;
    for (int64_t s = 0; s < 50; s++) samples.push_back(data_test::read_inputs(loader, s));
    for (int64_t s = 49; s >= 0; s--) CHECK(data_test::read_inputs(other, s) == samples[static_cast<size_t>(s)]);
    for (size_t a = 0; a < samples.size(); a++)
        for (size_t b = 0; b < a; b++) CHECK(samples[a] != samples[b]);
    CHECK(tokens_of(synthetic(33, 1000, 2), 0) != samples[0]);
    // Longer sequences begin as shorter ones, odd lengths included; read_inputs compares targets with inputs.
    for (int64_t T : {1, 2, 3, 4, 5, 31, 32}) {
        const std::vector<int32_t> begin(samples[3].begin(), samples[3].begin() + T);
        CHECK(tokens_of(synthetic(T, 1000), 3) == begin);
        std::vector<int32_t> inputs(begin.size()), targets(begin.size());
        CHECK(DataLoader(synthetic(T, 1000)).read(3, inputs.data(), targets.data()) == T);
        CHECK(targets.back() == samples[3][begin.size()]);
    }
}

TEST_CASE("synthetic: ids lie in the vocabulary") {
    constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
    for (int64_t vocab : {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{61}, int64_t{50257}, int64_t{128256}, kLargest}) {
        CAPTURE(vocab);
        for (int32_t token : tokens_of(synthetic(5000, vocab), 0)) {
            REQUIRE(token >= 0);
            REQUIRE(token < vocab);
        }
    }
}

TEST_CASE("synthetic: no end, no shards, and a fingerprint that differs from that of shards") {
    data_test::TempDir dir;
    data_test::spill(dir / "a.bin", data_test::llmc_v1(data_test::counting(0, 40)));
    const DataLoader loader(synthetic(4, 1000)), shards(data_test::config_of({dir / "a.bin"}));
    require_samples(loader, std::numeric_limits<int64_t>::max(), "one step");
    loader.prefetch(0, 1 << 20);
    CHECK(loader.shards().empty());
    CHECK(loader.check_fingerprint(loader.fingerprint_json()) == "");
    CHECK(shards.check_fingerprint(shards.fingerprint_json()) == "");
    CHECK(contains(loader.check_fingerprint(shards.fingerprint_json()), "shards, this run has synthetic"));
    CHECK(contains(shards.check_fingerprint(loader.fingerprint_json()),
                   "synthetic (--synthetic-data), this run has shards"));
    CHECK(contains(loader.check_fingerprint("{\"synthetic\": 2}"), "of version 2, this executable draws version 1"));
    CHECK(contains(loader.check_fingerprint("{\"synthetic\": []}"), "not readable"));
}

TEST_CASE("synthetic: options about shards are refused with it") {
    const ParsedConfig run = parse("gpt2", kRun);
    CHECK(run.config.synthetic_data);
    REQUIRE(run.notes.size() == 1);
    CHECK(contains(run.notes[0], "SYNTHETIC DATA"));
    CHECK(contains(config_to_json(run.config), "\"synthetic-data\": true"));
    CHECK(!contains(config_to_json(run.config), "train-data"));
    for (const OptionRow& row : option_table()) {
        const std::string name = row.name;
        if (row.group != OptionGroup::kData || name == "synthetic-data") continue;
        CAPTURE(name);
        const std::string value = row.value.flag ? "true" : row.value.words.empty() ? "3" : row.value.words[0];
        CHECK(contains(refusal("gpt2", joined(kRun, {"--" + name + "=" + value})), "--" + name + " has no effect: "));
    }
    CHECK(contains(refusal("gpt2", joined(kRun, {"--train-data", "t"})), "--synthetic-data draws tokens"));
    CHECK(contains(refusal("gpt2", {"--synthetic-data", "--epochs", "2"}), "--synthetic-data has no end"));
    CHECK(contains(refusal("gpt2", {"--train-iters", "5"}), "--train-data is missing"));
    CHECK(refusal("gpt2", joined(base(""), {"--synthetic-data=false"})) == "");
}

TEST_CASE("ranks: the number of ranks that plan is for, and that a run must have") {
    const Words plan = {"--dry-run", "--ranks", "8", "--micro-batch-size", "2"};
    CHECK(parse("gpt2", plan).config.global_batch_size == 16);
    CHECK(parse("gpt2", joined(plan, {"--overlap", "off"})).no_effect.empty());
    CHECK(parse("gpt2", {"--dry-run", "--overlap", "off"}).no_effect.size() == 1);
    CHECK(contains(refusal("gpt2", joined(plan, {"--global-batch-size", "24"})), "--micro-batch-size 2 x 8 ranks"));
    CHECK(contains(refusal("gpt2", joined(kRun, {"--ranks", "8"})), "--ranks 8, and 1 was started"));
    CHECK(contains(refusal("gpt2", joined(kRun, {"--ranks", "8"}), {.ranks = 2}), "and 2 were started"));
    CHECK(refusal("gpt2", joined(kRun, {"--ranks", "2"}), {.ranks = 2}) == "");
    CHECK(refusal("gpt2", kRun, {.ranks = 2}) == "");
}
