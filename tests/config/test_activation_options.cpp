// --activation and --recompute, and the options of older versions and other trainers that mean the same.
#include "tests/support/config_test.h"
#include "tests/support/doctest.h"

TEST_CASE("config: --activation and Megatron's flags for it agree, or are refused") {
    const ParsedConfig parsed = parse("gpt2", {"--dry-run", "--swiglu"});
    CHECK(parsed.config.shape.activation == Activation::kSwiglu);
    CHECK(contains(parsed.notes.at(0), "--swiglu is --activation swiglu"));
    CHECK(parse("gpt2", {"--dry-run", "--swiglu", "--activation=SwiGLU"}).config.shape.activation
          == Activation::kSwiglu);
    for (const Words& words : {Words{"--swiglu", "--activation", "gelu"}, Words{"--activation=gelu", "--swiglu"}})
        CHECK(contains(refusal("gpt2", joined({"--dry-run"}, words)),
                       "--swiglu is --activation swiglu, and --activation says gelu: leave one of the two out"));
    CHECK(contains(refusal("gpt2", {"--dry-run", "--activation", "relu"}), "--activation relu: must be one of gelu"));
    TempFile both("{\"swiglu\": true, \"activation\": \"gelu\"}");
    CHECK(contains(refusal("gpt2", {"--dry-run", "--config", both.path}), "leave one of the two out"));
    TempFile file("{\"swiglu\": true}");
    CHECK(parse("gpt2", {"--dry-run", "--config", file.path}).config.shape.activation == Activation::kSwiglu);
    CHECK(parse("llama", {"--dry-run", "--squared-relu"}).config.shape.activation == Activation::kRelu2);
    CHECK(contains(refusal("llama", {"--dry-run", "--squared-relu", "--swiglu"}), "leave one of the two out"));
    // The command line wins over the file.
    CHECK(parse("gpt2", {"--dry-run", "--config", file.path, "--activation", "gelu"}).config.shape.activation
          == Activation::kGelu);
}

TEST_CASE("config: a checkpoint with the former option swiglu has that activation function") {
    const Config config = parse("llama", {"--dry-run"}).config;
    Json saved = Json::parse(config_to_json(config));
    saved.erase("activation");
    saved["swiglu"] = true;
    ConfigDiff diff = config_diff(saved.dump(), config);
    CHECK(diff.must_match.empty());
    CHECK(diff.changed.empty());
    saved["swiglu"] = false;
    diff = config_diff(saved.dump(), config);
    REQUIRE(diff.must_match.size() == 1);
    CHECK(contains(diff.must_match[0], "--activation: gelu in the checkpoint, swiglu now"));
}

TEST_CASE("config: Megatron's selective recomputation is not mistaken for block-keep-attention") {
    CHECK(parse("llama", {"--dry-run", "--recompute", "block-keep-attention"}).config.recompute
          == Recompute::kBlockKeepAttention);
    const std::string value = refusal("llama", {"--dry-run", "--recompute", "selective"});
    CHECK(contains(value, "--recompute selective: Megatron's selective recomputes attention alone"));
    CHECK(contains(value, "block-keep-attention is the opposite"));
    const std::string option = refusal("llama", {"--dry-run", "--recompute-granularity", "selective"});
    CHECK(contains(option, "unknown option --recompute-granularity (Megatron-LM): leave it out"));
    CHECK(contains(option, "block-keep-attention is the opposite"));
    CHECK(contains(refusal("llama", {"--dry-run", "--recompute", "blocks"}), "must be one of none"));
}
