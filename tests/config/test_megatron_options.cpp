// Options of Megatron-LM that are a value of an option here.
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
    CHECK(contains(refusal("gpt2", {"--dry-run", "--softmax-type", "learnable"}), "attention-sinks"));
    CHECK(contains(refusal("gpt2", {"--dry-run", "--window-attn-skip-freq", "4"}), "sliding-window to a list"));
}
