// Text generation: the prompt and its errors, drawing a token, and the Sampler against the decoder's forward pass.
#include "tests/support/config_test.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "llmc/commands/command.h"
#include "llmc/config/prompt.h"
#include "tests/support/model_test.h"

namespace {

using Ids = std::vector<int32_t>;
using Texts = std::vector<Ids>;

Config text_config(int64_t vocab) {
    Config config;
    config.shape.vocab_size = vocab;
    config.sample_tokens = 3;
    return config;
}

std::string prompt_error(const Config& config) {
    return refusal_of([&] { read_prompt(config, is_bytes("", config.shape.vocab_size), 8, "--seq-length"); });
}

ParsedConfig parse_generate(const Words& words) {
    std::vector<const char*> argv = {"train"};
    for (const std::string& word : words) argv.push_back(word.c_str());
    return parse_generate_config(static_cast<int>(argv.size()), argv.data(), "llama");
}

std::string generate_error(const Words& words) { return refusal_of([&] { parse_generate(words); }); }

}  // namespace

TEST_CASE("generate: a prompt as ids or as bytes, and the text in its form") {
    Config config = text_config(257);
    CHECK(read_prompt(config, true, 8, "T").empty());
    CHECK(prints_bytes(config, true));
    config.prompt = "a\xc3\xa9";
    CHECK(read_prompt(config, true, 8, "T") == Ids{97, 0xc3, 0xa9});
    CHECK(prints_bytes(config, true));
    config.prompt = " 1  256 0 ";
    CHECK(read_prompt(config, true, 8, "T") == Ids{1, 256, 0});
    CHECK_FALSE(prints_bytes(config, true));
    CHECK_FALSE(prints_bytes(text_config(257), false));
    // Byte shards train any vocabulary, and one of 61 ids may be another tokenizer's.
    for (int64_t vocab : {61, 257, 258, 50257}) {
        CHECK(is_bytes("", vocab) == (vocab <= 257));
        CHECK(is_bytes("bytes", vocab));
        CHECK_FALSE(is_bytes("a23176d6", vocab));
    }
    CHECK(tokens_text({72, 105, 256, 33}, true) == "Hi\n!");
    CHECK(tokens_text({72, 105, 256, 33}, false) == "72 105 256 33");
}

TEST_CASE("generate: an invalid prompt is named") {
    struct Case {
        int64_t vocab;
        std::string prompt, said;
    };
    const Case cases[] = {
        {61, "1 61", "--prompt: token 61 lies outside the vocabulary of 61"},
        {258, "1 -1", "--prompt \"1 -1\": a vocabulary of 258 is not bytes: give token ids"},
        {258, "99999999999", "a vocabulary of 258 is not bytes"}, {61, " ", "--prompt: an empty prompt"},
        {61, "a", "--prompt: token 97 lies outside the vocabulary of 61"},
        {61, "1 2 3 4 5 6", "--prompt: a prompt of 6 tokens and --sample-tokens 3 exceed --seq-length 8"},
        {61, "1 2 3 4 5", ""},
    };
    for (const Case& c : cases) {
        Config config = text_config(c.vocab);
        config.prompt = c.prompt;
        CHECK_MESSAGE(contains(prompt_error(config), c.said), prompt_error(config));
        CHECK(prompt_error(config).empty() == c.said.empty());
    }
}

TEST_CASE("generate: top-k draws from the largest logits, with ties resolved to the first") {
    const std::vector<float> logits = {1, 3, 2, 3, 0};
    auto drawn = [&](int64_t k) {
        std::set<int32_t> found;
        for (int i = 0; i < 1000; i++) found.insert(sample_token(logits, 1.0, i / 1000.0, k));
        return found;
    };
    CHECK(drawn(1) == std::set<int32_t>{1});
    CHECK(drawn(2) == std::set<int32_t>{1, 3});
    CHECK(drawn(3) == std::set<int32_t>{1, 2, 3});
    CHECK(drawn(5) == std::set<int32_t>{0, 1, 2, 3, 4});
    CHECK(drawn(0) == drawn(5));
    CHECK(drawn(9) == drawn(5));
    // Shares are those of the softmax over what is left.
    CHECK(sample_token(logits, 1.0, 0.499, 2) == 1);
    CHECK(sample_token(logits, 1.0, 0.501, 2) == 3);
    const double e = std::exp(-1.0), one = 1 / (2 + e);   // of token 1; then token 2
    CHECK(sample_token(logits, 1.0, one - 1e-6, 3) == 1);
    CHECK(sample_token(logits, 1.0, one + 1e-6, 3) == 2);
    CHECK(sample_token(logits, 1.0, one * (1 + e) + 1e-6, 3) == 3);
    CHECK(sample_token(logits, 0.0, 0.9, 3) == 1);
    const std::vector<float> three_to_one = {0.0f, std::log(3.0f), -1e30f};
    CHECK(sample_token(three_to_one, 1.0, 0.24) == 0);
    CHECK(sample_token(three_to_one, 1.0, 0.26) == 1);
    CHECK(sample_token(three_to_one, 1.0, 0.999999) == 1);
    CHECK(sample_token(three_to_one, 0.0, 0.1) == 1);
}

TEST_CASE("generate: a forward pass has the padded length of the text, at most max_seq") {
    CHECK(padded_length(1, 1024) == 128);
    CHECK(padded_length(128, 1024) == 128);
    CHECK(padded_length(129, 1024) == 256);
    CHECK(padded_length(1000, 1001) == 1001);
    CHECK(padded_length(5000, 1001) == 1001);
}

// GPT-2; Llama with grouped queries; Qwen3 (qk-norm).
TEST_CASE("generate: greedy text is what one forward pass over all of it says, in sequences of any length") {
    ModelConfig qwen = tiny_llama();
    qwen.qk_norm = true;
    for (ModelConfig shape : {tiny_gpt2(), tiny_llama(), qwen}) {
        shape.max_positions = 200;
        shape.init_std = 0.6;
        Texts texts;
        for (int64_t T : {13, 128, 200}) {   // passes of 13 tokens, 128, and 128 of 200
            TestModel model(tiny_config(shape, Dtype::kFp32, 1, T));
            model.set_random_batch(1, 1);
            texts.push_back(model.trainer->evaluator().generate(model.ctx, {1, 2, 3}, {.tokens = 10}, 5, model.staged));
            REQUIRE(texts.back().size() == 13);
            Ids tokens = texts.back();
            tokens.resize(static_cast<size_t>(T));
            model.set_batch(tokens, Ids(tokens.size(), 0));
            model.gradients();
            for (int64_t n = 2; n < 12; n++) {
                const std::vector<double> logits = model.logits(n);
                CHECK(std::max_element(logits.begin(), logits.end()) - logits.begin()
                      == tokens[static_cast<size_t>(n + 1)]);
            }
        }
        CHECK(texts[1] == texts[0]);
        CHECK(texts[2] == texts[0]);
        CHECK(std::set<int32_t>(texts[0].begin() + 3, texts[0].end()).size() > 1);   // not one token over and over
    }
}

TEST_CASE("generate: the model sees the last tokens of a text that is longer than its sequences") {
    ModelConfig shape = tiny_gpt2();
    shape.init_std = 0.3;
    TestModel model(tiny_config(shape, Dtype::kFp32, 1, 8));
    model.set_random_batch(1, 1);
    const Sampling sampling{.tokens = 1, .temperature = 1, .seed = 4};
    auto next = [&](const Ids& text) {
        return model.trainer->evaluator().generate(model.ctx, text, sampling, 5, model.staged).back();
    };
    std::set<int32_t> within;
    for (int32_t token = 0; token < 29; token++) {
        CHECK(next({token, 1, 2, 3, 4, 5, 6, 7, 8}) == next({1, 2, 3, 4, 5, 6, 7, 8}));
        within.insert(next({token, 1, 2, 3, 4, 5, 6, 7}));
    }
    CHECK(within.size() > 1);   // in a sequence the first token counts
}

TEST_CASE("generate: a text ends at the first eos, which is part of it") {
    ModelConfig shape = tiny_llama();
    shape.init_std = 0.3;
    TestModel model(tiny_config(shape, Dtype::kFp32, 1, 32));
    model.set_random_batch(1, 1);
    auto text = [&](const Ids& prompt, const Ids& eos) {
        return model.trainer->evaluator().generate(
            model.ctx, prompt, {.tokens = 20, .temperature = 1, .seed = 4, .eos = eos}, 5, model.staged);
    };
    const Ids whole = text({1, 2, 3}, {});
    REQUIRE(whole.size() == 23);
    for (const Ids& eos : {Ids{whole[7]}, Ids{whole[12], whole[7]}}) {
        const auto end = std::find_first_of(whole.begin() + 3, whole.end(), eos.begin(), eos.end());
        CHECK(text({1, 2, 3}, eos) == Ids(whole.begin(), end + 1));
        CHECK(end < whole.begin() + 8);
    }
    // An eos of the prompt ends nothing.
    Ids prompt = whole;
    prompt.resize(8);
    CHECK(text(prompt, {whole[7]}).size() > 8);
}

TEST_CASE("generate: accepts only the options about text") {
    const Words prompt = {"--load", "d", "--prompt", "1 2"};
    const Config config = parse_generate(joined(prompt, {"--top-k", "5", "--seed=9", "--sample_tokens", "7"})).config;
    CHECK(config.prompt == "1 2");
    CHECK(config.top_k == 5);
    CHECK(config.seed == 9);
    CHECK(config.sample_tokens == 7);
    CHECK(contains(generate_error({"--prompt", "1"}), "generate needs --load DIR"));
    CHECK(contains(generate_error(joined(prompt, {"--lr", "1"})), "generate has no option --lr, it is for training"));
    CHECK(contains(generate_error(joined(prompt, {"--temprature", "1"})), "did you mean --temperature?"));
    CHECK(contains(generate_error(joined(prompt, {"--temperature", "-1"})), "--temperature -1: must be a number in"));
    CHECK(contains(generate_error(joined(prompt, {"--temperature", "0", "--top-k", "3"})), "--top-k has no effect"));
    for (const std::string& name : generate_options()) {
        CHECK(find_option(name));
        CHECK(contains(parse_generate({"--help"}).text, "--" + name + " "));
    }
}
