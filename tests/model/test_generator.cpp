// Generation with a cache of keys and values, against the Sampler's forward passes over whole texts.
#include "tests/support/doctest.h"

#include <set>

#include "llmc/train/generator.h"
#include "tests/support/fp8_model_test.h"

namespace {

using Ids = std::vector<int32_t>;
using Texts = std::vector<Ids>;

constexpr int64_t kPositions = 48;   // a multiple of 16 that no length of a text divides

// A Generator for a model in training, with separate memory.
class Cached {
public:
    Cached(TestModel& model, const Generator::Limits& limits) : model_(model) {
        Ctx rehearsal;
        rehearsal.rehearsal = true;
        Arena measured;
        construct(limits, measured)->rehearse(rehearsal);
        planned = measured.peak_bytes();
        memory_ = device::device_alloc(planned);
        device::fill_bytes(model.ctx, memory_, 0xff, planned);
        pinned_ = device::pinned_alloc(Generator::pinned_bytes(limits));
        arena = Arena(memory_, planned);
        generator = construct(limits, arena);
    }
    ~Cached() {
        device::synchronize(model_.ctx);
        device::pinned_free(pinned_);
        device::device_free(memory_);
    }

    Texts run(const Texts& prompts, const Sampling& sampling, const Ids& eos = {}, size_t most = SIZE_MAX) {
        Texts texts;
        generator->run(model_.ctx, prompts, sampling, eos, pinned_, [&](const Ids& text) {
            texts.push_back(text);
            return texts.size() < most;
        });
        return texts;
    }

    Arena arena;
    std::unique_ptr<Generator> generator;
    int64_t planned = 0;

private:
    std::unique_ptr<Generator> construct(const Generator::Limits& limits, Arena& arena) {
        const Config& config = model_.config;
        return std::make_unique<Generator>(config.shape, config.dtype, limits, model_.trainer->decoder(),
                                           model_.trainer->fp8(), arena);
    }
    TestModel& model_;
    void *memory_ = nullptr, *pinned_ = nullptr;
};

Config text_config(ModelConfig shape, Dtype dtype) {
    Config config = tiny_config(shape, dtype, 1, kPositions);
    config.shape.max_positions = kPositions;
    config.shape.init_std = 0.3;
    return config;
}

// GPT-2; Llama with grouped queries; Qwen3 (qk-norm); head dims that are not whole vectors.
std::vector<ModelConfig> shapes() {
    ModelConfig qwen = tiny_llama(), odd = tiny_llama(), scaled = tiny_llama();
    qwen.qk_norm = true;
    odd.kv_channels = 10;
    odd.num_query_groups = 1;
    scaled.rope_scaling = {.factor = 8, .low_freq_factor = 1, .high_freq_factor = 4, .original_max_positions = 16};
    return {tiny_gpt2(), tiny_llama(), qwen, odd, scaled};
}

const Texts kPrompts = {{1, 2, 3}, {7}, {4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 9}, {3, 1},
                        {28, 0, 5, 6, 7, 8}};
const Generator::Limits kLimits{.texts = 3, .prompt = 17, .positions = 37};   // fewer slots than prompts

Texts sampled(TestModel& model, const Texts& prompts, const Sampling& sampling) {
    Texts texts;
    for (size_t i = 0; i < prompts.size(); i++)
        texts.push_back(model.trainer->generate(model.ctx, prompts[i], sampling, i, model.staged));
    return texts;
}

}  // namespace

TEST_CASE("generation with a cache gives the text of the Sampler, whatever else is decoded at the same time") {
    for (const ModelConfig& shape : shapes()) {
        for (Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
#ifdef LLMC_CUDA
            if (dtype == Dtype::kBf16) continue;   // rounds differently for other numbers of rows
#endif
            TestModel model(text_config(shape, dtype));
            model.set_random_batch(1, 1);
            for (double temperature : {0.0, 1.0}) {
                const Sampling sampling{.tokens = 20, .temperature = temperature, .seed = 4};
                const Texts expected = sampled(model, kPrompts, sampling);
                Cached cached(model, kLimits);
                CHECK(cached.run(kPrompts, sampling) == expected);
                CHECK(cached.arena.peak_bytes() == cached.planned);
                CHECK(cached.generator->times().prefill_tokens == 29);
                CHECK(cached.generator->times().decode_tokens == 5 * 19);
                Cached alone(model, {.texts = 1, .prompt = 17, .positions = 37});
                CHECK(alone.run(kPrompts, sampling) == expected);
                CHECK(alone.generator->times().decode_steps == 5 * 19);
            }
        }
    }
}

// With delayed scaling x is quantized with the scales of training, and with blockwise scaling each row has its own
// scales. With tensorwise scaling the amax spans all rows, so that a text from one forward pass per token has other
// roundings.
#ifndef LLMC_CUDA
TEST_CASE("generation with a cache in FP8: delayed and blockwise scaling give the text of the Sampler") {
    for (const ModelConfig& shape : fp8_shapes()) {
        for (Fp8Recipe recipe : kFp8Recipes) {
            Config config = fp8_config(shape, recipe);
            config.shape.init_std = 0.3;
            TestModel model(config);
            model.set_random_batch(2, 1);
            model.step();
            const Texts prompts = {{1, 2, 3}, {7}, {4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 9}};
            const Sampling sampling{.tokens = 20, .temperature = 0.7, .seed = 4};
            const Texts expected = sampled(model, prompts, sampling);
            Cached cached(model, {.texts = 2, .prompt = 17, .positions = 37});
            const Texts texts = cached.run(prompts, sampling);
            CHECK(texts.size() == 3);
            if (recipe != Fp8Recipe::kTensorwise) CHECK(texts == expected);
        }
    }
}
#endif

TEST_CASE("generation ends a text at any eos, which is part of it, and no other text changes") {
    TestModel model(text_config(tiny_llama(), Dtype::kFp32));
    model.set_random_batch(1, 1);
    const Sampling sampling{.tokens = 20, .temperature = 1, .seed = 4};
    Cached cached(model, kLimits);
    const Texts whole = cached.run(kPrompts, sampling);
    const Ids eos = {whole[0][5], whole[2][17]};   // the third token of the first text, the first of the third
    Texts expected;
    for (size_t i = 0; i < whole.size(); i++) {
        size_t length = kPrompts[i].size();
        while (length < whole[i].size())
            if (const int32_t token = whole[i][length++]; token == eos[0] || token == eos[1]) break;
        expected.emplace_back(whole[i].begin(), whole[i].begin() + static_cast<int64_t>(length));
    }
    CHECK(expected[0].size() <= 6);
    CHECK(expected[2].size() == 18);
    CHECK(cached.run(kPrompts, sampling, eos) == expected);
    CHECK(cached.run({{eos[0], eos[1]}}, sampling)[0].size() == 22);   // an eos of the prompt ends nothing
    CHECK(cached.run(kPrompts, sampling, {}, 2) == Texts(whole.begin(), whole.begin() + 2));
}

TEST_CASE("top-p draws from the fewest most likely tokens, after top-k") {
    // Probabilities 0.4, 0.3, 0.2, 0.05, 0.05 at temperature 1.
    std::vector<float> logits;
    for (double p : {0.05, 0.4, 0.05, 0.2, 0.3}) logits.push_back(static_cast<float>(std::log(p)));
    auto drawn = [&](double p, int64_t k = 0, double temperature = 1) {
        std::set<int32_t> found;
        for (int i = 0; i < 2000; i++) found.insert(sample_token(logits, temperature, i / 2000.0, k, p));
        return found;
    };
    using Set = std::set<int32_t>;
    CHECK(drawn(1e-9) == Set{1});
    CHECK(drawn(0.399) == Set{1});
    CHECK(drawn(0.401) == Set{1, 4});
    CHECK(drawn(0.699) == Set{1, 4});
    CHECK(drawn(0.701) == Set{1, 3, 4});
    CHECK(drawn(0.92) == Set{0, 1, 3, 4});   // of equally likely tokens the first one
    CHECK(drawn(0.96) == Set{0, 1, 2, 3, 4});
    CHECK(drawn(1) == Set{0, 1, 2, 3, 4});
    CHECK(drawn(0.55, 2) == Set{1});      // 0.4 of 0.7
    CHECK(drawn(0.58, 2) == Set{1, 4});
    CHECK(drawn(0.5, 0, 0.5) == Set{1});  // 0.16 of 0.295
    CHECK(drawn(0.58, 0, 0.5) == Set{1, 4});
    // The probabilities of the remaining tokens keep their ratios; u selects tokens in the order of their ids.
    CHECK(sample_token(logits, 1, 4.0 / 7 - 1e-6, 0, 0.6) == 1);
    CHECK(sample_token(logits, 1, 4.0 / 7 + 1e-6, 0, 0.6) == 4);
    CHECK(sample_token(logits, 0, 0.9, 0, 0.6) == 1);
}

// The share of n draws of a token with probability p has a standard deviation of sqrt(p (1 - p) / n); 5 of them are
// exceeded by chance in less than one of a million cases. The seed is fixed.
TEST_CASE("top-p: tokens are drawn as often as their probabilities say") {
    std::vector<float> logits;
    for (int i = 0; i < 50; i++) logits.push_back(static_cast<float>(std::sin(i * 1.7) * 2));
    const double kept = 0.8;
    std::vector<int> order(50);
    for (int i = 0; i < 50; i++) order[static_cast<size_t>(i)] = i;
    std::sort(order.begin(), order.end(), [&](int a, int b) {
        return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
    });
    double total = 0, nucleus = 0;
    for (float x : logits) total += std::exp(x);
    std::vector<double> share(50, 0);
    for (int i : order) {
        if (nucleus >= kept * total) break;
        nucleus += share[static_cast<size_t>(i)] = std::exp(logits[static_cast<size_t>(i)]);
    }
    constexpr int kDraws = 20000;
    std::vector<int> count(50, 0);
    for (int i = 0; i < kDraws; i++)
        count[static_cast<size_t>(draw_token(logits, {.temperature = 1, .top_p = kept, .seed = 11}, 3, i))]++;
    auto fits = [&](size_t token, double p) {
        return std::fabs(count[token] - p * kDraws) <= 5 * std::sqrt(p * (1 - p) * kDraws);
    };
    for (size_t i = 0; i < 50; i++) CHECK_MESSAGE(fits(i, share[i] / nucleus), "token ", i);
    const auto top = static_cast<size_t>(order[0]);
    CHECK_FALSE(fits(top, share[top] / total));   // the bound detects drawing from all tokens
}
