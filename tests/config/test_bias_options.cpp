// Biases of linears: the option, Megatron-LM's flag, and checkpoints that had the flag as an option.
#include "tests/support/config_test.h"

TEST_CASE("config: --disable-bias-linear is a value of --linear-bias") {
    const ParsedConfig parsed = parse("gpt2", {"--dry-run", "--disable-bias-linear"});
    CHECK(parsed.config.shape.linear_bias == LinearBias::kNone);
    CHECK(contains(parsed.notes.at(0), "--disable-bias-linear is --linear-bias none"));
    CHECK(parse("llama", {"--dry-run", "--disable-bias-linear=false"}).config.shape.linear_bias == LinearBias::kAll);
    CHECK(parse("llama", {"--dry-run", "--linear-bias", "qkv"}).config.shape.linear_bias == LinearBias::kQkv);
    CHECK(parse("llama", {"--dry-run", "--model", "qwen2.5-0.5B"}).config.shape.linear_bias == LinearBias::kQkv);
    CHECK(contains(refusal("gpt2", {"--dry-run", "--disable-bias-linear", "--linear-bias", "qkv"}),
                   "--disable-bias-linear is --linear-bias none, and --linear-bias says qkv"));
    CHECK(contains(refusal("gpt2", {"--dry-run", "--add-qkv-bias"}), "linear-bias qkv"));
    CHECK(contains(refusal("gpt2", {"--dry-run", "--window-size", "(127, 0)"}), "sliding-window"));
}

TEST_CASE("config: a checkpoint with the former option disable-bias-linear has the biases that it means") {
    for (const bool disabled : {true, false}) {
        const char* bias = disabled ? "--linear-bias=none" : "--linear-bias=all";
        const Config config = parse("llama", {"--dry-run", bias}).config;
        Json saved = Json::parse(config_to_json(config));
        saved.erase("linear-bias");
        saved["disable-bias-linear"] = disabled;
        const ConfigDiff diff = config_diff(saved.dump(), config);
        CHECK(diff.must_match.empty());
        CHECK(diff.changed.empty());
        Config read;
        CHECK(read_saved_options(saved.dump(), read) == "");
        CHECK(read.shape.linear_bias == config.shape.linear_bias);
        saved["disable-bias-linear"] = !disabled;
        CHECK(contains(config_diff(saved.dump(), config).must_match.at(0), "--linear-bias"));
    }
}
