// Text generation: prompts and their errors, drawing a token, and `generate` without training state compared with the
// model in training.
#include "tests/support/config_test.h"

#include <cmath>

#include "llmc/commands/generate.h"
#include "llmc/config/prompts.h"
#include "tests/support/model_test.h"

namespace {

using Ids = std::vector<int32_t>;
using Prompts = std::vector<Ids>;

Config text_config(int64_t vocab) {
    Config config;
    config.shape.vocab_size = vocab;
    config.sample_tokens = 3;
    return config;
}

std::string prompt_error(const Config& config) {
    try {
        read_prompts(config, 8, "--seq-length", false);
        return "";
    } catch (const Error& error) {
        CHECK(error.exit_code == kExitBadInput);
        return error.what();
    }
}

ParsedConfig parse_generate(const Words& words) {
    std::vector<const char*> argv = {"train"};
    for (const std::string& word : words) argv.push_back(word.c_str());
    return parse_generate_config(static_cast<int>(argv.size()), argv.data(), "llama");
}

std::string generate_error(const Words& words) {
    try {
        parse_generate(words);
        return "";
    } catch (const Error& error) {
        CHECK(error.exit_code == kExitBadInput);
        return error.what();
    }
}

}  // namespace

TEST_CASE("generate: prompts as ids, as bytes, and as the lines of a file") {
    Config config = text_config(257);
    CHECK(read_prompts(config, 8, "T", false).empty());
    config.prompt_ids = " 1  256 0 ";
    config.prompt_bytes = "a\xc3\xa9";
    const TempFile lines("xy\r\n  \nz\n\n");
    config.prompts = lines.path;
    CHECK(read_prompts(config, 8, "T", false) == Prompts{{1, 256, 0}, {97, 0xc3, 0xa9}, {120, 121}, {32, 32}, {122}});
    config = text_config(50257);
    const TempFile ids("50256 7\n8\n");
    config.prompts = ids.path;
    CHECK(read_prompts(config, 8, "T", false) == Prompts{{50256, 7}, {8}});
    CHECK(token_form(config) == TokenForm::kIds);
    CHECK(token_form(text_config(257)) == TokenForm::kBytes);
    CHECK(tokens_text({72, 105, 256, 33}, TokenForm::kBytes) == "Hi\n!");
    CHECK(tokens_text({72, 105, 256, 33}, TokenForm::kIds) == "72 105 256 33");
}

TEST_CASE("generate: ids at which a text ends") {
    Config config = text_config(61);
    CHECK(read_stop_ids(config).empty());
    config.stop_ids = " 60 7";
    CHECK(read_stop_ids(config) == Ids{60, 7});
    for (const auto& [ids, said] : {std::pair{"61", "--stop-ids: token 61 lies outside the vocabulary of 61"},
                                    std::pair{"x", "--stop-ids: \"x\" is not a token id"}}) {
        config.stop_ids = ids;
        try {
            read_stop_ids(config);
            FAIL_CHECK(ids);
        } catch (const Error& error) {
            CHECK(error.exit_code == kExitBadInput);
            CHECK(contains(error.what(), said));
        }
    }
}

TEST_CASE("generate: an invalid prompt is named") {
    struct Case {
        int64_t vocab;
        std::string ids, bytes, file, said;
    };
    const Case cases[] = {
        {61, "1 61", "", "", "--prompt-ids: token 61 lies outside the vocabulary of 61"},
        {61, "1 -1", "", "", "--prompt-ids: \"-1\" is not a token id"},
        {61, "1 2x", "", "", "--prompt-ids: \"2x\" is not a token id"},
        {61, "99999999999", "", "", "--prompt-ids: \"99999999999\" is not a token id"},
        {61, " ", "", "", "--prompt-ids: an empty prompt"},
        {61, "", "a", "", "--prompt-bytes: token 97 lies outside the vocabulary of 61"},
        {50257, "", "a", "", "--prompt-bytes: a vocabulary of 50257 is not bytes"},
        {61, "1 2 3 4 5 6", "", "", "--prompt-ids: a prompt of 6 tokens and --sample-tokens 3 exceed --seq-length 8"},
        {258, "", "", "1\n3\n2 x\n", ": line 3: \"x\" is not a token id"},
        {258, "", "", "1\n\n2\n", ": line 2: an empty prompt"},
        {258, "", "", "\n", ": has no line"},
    };
    for (const Case& c : cases) {
        Config config = text_config(c.vocab);
        config.prompt_ids = c.ids;
        config.prompt_bytes = c.bytes;
        const TempFile file(c.file);
        if (!c.file.empty()) config.prompts = file.path;
        CHECK_MESSAGE(contains(prompt_error(config), c.said), prompt_error(config));
    }
    Config config = text_config(61);
    config.prompt_ids = "1 2 3 4 5";
    CHECK(prompt_error(config) == "");
    config.prompts = "-";
    CHECK(contains(prompt_error(config), "--prompts -: only generate"));
    config = text_config(258);
    config.print = TokenForm::kBytes;
    CHECK(contains(prompt_error(config), "--print bytes: a vocabulary of 258 is not bytes"));
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
}

TEST_CASE("generate: a forward pass has the padded length of the text, at most max_seq") {
    CHECK(padded_length(1, 1024) == 128);
    CHECK(padded_length(128, 1024) == 128);
    CHECK(padded_length(129, 1024) == 256);
    CHECK(padded_length(1000, 1001) == 1001);
    CHECK(padded_length(5000, 1001) == 1001);
}

TEST_CASE("generate: the length of the forward pass does not change the text") {
    // With 200 positions the text fits into one pass of 128 or of 200; 130 tokens are computed in a pass of 256 or,
    // sliding, of 130.
    for (const ModelConfig& shape : {tiny_gpt2(), tiny_llama()}) {
        Prompts texts;
        for (int64_t T : {13, 128, 200}) {
            Config config = tiny_config(shape, Dtype::kFp32, 1, T);
            config.shape.max_positions = 200;
            config.shape.init_std = 0.3;
            TestModel model(config);
            model.set_random_batch(1, 1);
            texts.push_back(model.trainer->generate(model.ctx, {1, 2, 3}, {.tokens = 10, .temperature = 1, .seed = 4},
                                                    5, model.staged));
        }
        CHECK(texts[0].size() == 13);
        CHECK(texts[1] == texts[0]);
        CHECK(texts[2] == texts[0]);
    }
}

TEST_CASE("generate: accepts only the options about text") {
    const Words prompt = {"--load", "d", "--prompt-ids", "1 2"};
    const Config config = parse_generate(joined(prompt, {"--top-k", "5", "--seed=9", "--sample_tokens", "7"})).config;
    CHECK(config.prompt_ids == "1 2");
    CHECK(config.top_k == 5);
    CHECK(config.seed == 9);
    CHECK(config.sample_tokens == 7);
    CHECK(config.inference_max_requests == 16);
    CHECK_FALSE(config.ignore_eos);
    const Config more = parse_generate(joined(prompt, {"--top-p=0.9", "--ignore-eos", "--inference-max-requests",
                                                       "3"})).config;
    CHECK(more.top_p == 0.9);
    CHECK(more.ignore_eos);
    CHECK(more.inference_max_requests == 3);
    CHECK(contains(generate_error(joined(prompt, {"--top-p", "0"})), "--top-p 0: must be a number in (0, 1]"));
    CHECK(contains(generate_error(joined(prompt, {"--temperature", "0", "--top-p", "0.5"})), "--top-p has no effect"));
    CHECK(contains(generate_error({"--prompt-ids", "1"}), "generate needs --load DIR"));
    CHECK(contains(generate_error(joined(prompt, {"--lr", "1"})), "generate has no option --lr, it is for training"));
    CHECK(contains(generate_error(joined(prompt, {"--temprature", "1"})), "did you mean --temperature?"));
    CHECK(contains(generate_error(joined(prompt, {"--temperature", "-1"})), "--temperature -1: must be a number in"));
    CHECK(contains(generate_error(joined(prompt, {"--temperature", "0", "--top-k", "3"})), "--top-k has no effect"));
    for (const std::string& name : generate_options()) {
        CHECK(find_option(name));
        CHECK(contains(parse_generate({"--help"}).text, "--" + name + " "));
    }
}
