// Positions: scaled rope, and positions that restart with each document (--reset-position-ids).
#include "tests/support/doctest.h"

#include <cmath>

#include "llmc/model/rope_table.h"
#include "tests/support/fp8_model_test.h"

namespace {

// Frequencies of the pairs, from the angles of position 1. |angle| < pi.
std::vector<double> frequencies(const ModelConfig& c) {
    const std::vector<double> table = rope_table(c, 2);
    std::vector<double> found;
    for (size_t i = 0; i < static_cast<size_t>(c.kv_channels / 2); i++) {
        const size_t at = static_cast<size_t>(c.kv_channels) + 2 * i;
        found.push_back(std::atan2(table[at + 1], table[at]));
    }
    return found;
}

// Sequences of documents; the first token of each is a separator, other tokens are none.
struct Packed {
    std::vector<std::vector<int32_t>> documents;
    std::vector<int32_t> tokens, targets;

    explicit Packed(const std::vector<int64_t>& lengths, int64_t V) {
        for (size_t d = 0; d < lengths.size(); d++) {
            documents.emplace_back();
            for (int64_t i = 0; i < lengths[d]; i++) {
                const Philox4 p = philox(91, d, static_cast<uint64_t>(i));
                const auto other = static_cast<int32_t>(2 + p.word[0] % static_cast<uint32_t>(V - 2));
                documents.back().push_back(i == 0 ? TestModel::kSeparator : other);
                tokens.push_back(documents.back().back());
                targets.push_back(target_of(d, i, V));
            }
        }
    }
    static int32_t target_of(size_t d, int64_t i, int64_t V) {
        return static_cast<int32_t>(philox(92, d, static_cast<uint64_t>(i)).word[0] % static_cast<uint32_t>(V));
    }
};

Config packed_config(const ModelConfig& shape, Dtype dtype, int64_t B, int64_t T) {
    Config config = tiny_config(shape, dtype, B, T);
    config.shape.init_std = 0.3, config.shape.max_positions = T;
    config.reset_attention_mask = config.reset_position_ids = true;
    return config;
}

}  // namespace

TEST_CASE("llama3 rope scaling keeps short wavelengths and stretches long ones") {
    ModelConfig c = tiny_llama();
    c.kv_channels = 8;
    c.rotary_base = 500000;
    const std::vector<double> plain = rope_table(c, 3);
    c.rope_scaling = {.factor = 8, .low_freq_factor = 1, .high_freq_factor = 4, .original_max_positions = 8192};
    const std::vector<double> scaled = rope_table(c, 3);
    // Pair 0 turns by 1 radian a position: wavelength 6.3, kept. Pair 3: wavelength 1.2e5 > 8192, divided by 8.
    CHECK(scaled[(1 * 4 + 0) * 2] == plain[(1 * 4 + 0) * 2]);
    CHECK(std::acos(scaled[(2 * 4 + 3) * 2]) == doctest::Approx(std::acos(plain[(2 * 4 + 3) * 2]) / 8).epsilon(1e-6));
}

TEST_CASE("yarn rope scaling keeps what turns often, stretches what does not, and scales both") {
    ModelConfig c = tiny_llama();
    c.kv_channels = 16;
    c.rotary_base = 10000;
    const std::vector<double> plain = frequencies(c);
    c.rope_scaling = {.factor = 4, .original_max_positions = 64, .type = RopeScalingType::kYarn, .beta_fast = 4,
                      .beta_slow = 1};
    // Pairs that turn 4 and 1 times within 64 tokens: 16 ln(64 / (2 pi turns)) / (2 ln 10000) = 0.811 and 2.016. The
    // range of whole pairs is 0 to 3, so that pairs 1 and 2 keep 2/3 and 1/3 of their frequency.
    const double keep[] = {1, 2.0 / 3, 1.0 / 3, 0, 0, 0, 0, 0};
    const std::vector<double> found = frequencies(c);
    for (size_t i = 0; i < 8; i++) {
        CAPTURE(i);
        CHECK(found[i] == doctest::Approx(plain[i] * (keep[i] + (1 - keep[i]) / 4)).epsilon(1e-9));
    }
    c.rope_scaling.truncate = false;
    const double share = (1 - 0.8105) / (2.0156 - 0.8105);
    CHECK(frequencies(c)[0] == doctest::Approx(plain[0]));
    CHECK(frequencies(c)[1] == doctest::Approx(plain[1] * ((1 - share) + share / 4)).epsilon(1e-3));
    CHECK(frequencies(c)[2] == doctest::Approx(plain[2] * (0.0130 + 0.9870 / 4)).epsilon(1e-3));
    // The cosine of position 0, which is the attention factor: 1 with llama3 and without a factor.
    CHECK(rope_table(c, 1)[0] == doctest::Approx(0.1 * std::log(4) + 1));
    c.rope_scaling.attention_factor = 0.75;
    CHECK(rope_table(c, 1)[0] == 0.75);
    c.rope_scaling.type = RopeScalingType::kLlama3;
    CHECK(rope_table(c, 1)[0] == 1);

    // longrope: the short factors up to the original length, the long ones beyond it.
    const auto pairs = static_cast<size_t>(c.rotated() / 2);
    c.rope_scaling = {.factor = 4, .original_max_positions = 5, .type = RopeScalingType::kLongrope};
    for (size_t i = 0; i < pairs; i++) {
        c.rope_scaling.short_factors.push_back(1 + 0.25 * static_cast<double>(i));
        c.rope_scaling.long_factors.push_back(2 + static_cast<double>(i));
    }
    for (int64_t T : {5, 6}) {
        const std::vector<double> scaled = rope_table(c, T);
        const double m = std::sqrt(1 + std::log(4.0) / std::log(5.0));
        for (size_t i = 0; i < pairs; i++) {
            const double by = T == 5 ? 1 + 0.25 * static_cast<double>(i) : 2 + static_cast<double>(i);
            const double angle = std::pow(c.rotary_base, -static_cast<double>(i) / static_cast<double>(pairs)) * 3 / by;
            CHECK(scaled[(3 * pairs + i) * 2] == doctest::Approx(m * std::cos(angle)));
            CHECK(scaled[(3 * pairs + i) * 2 + 1] == doctest::Approx(m * std::sin(angle)));
        }
    }
}

TEST_CASE("restarted positions: packed documents have the losses of documents in sequences of their own") {
    // Every layer has attention within documents and positions from 0. The 24 tokens are in two sequences.
    ModelConfig qwen = tiny_llama(), wide_gpt2 = tiny_gpt2();
    qwen.qk_norm = true;
    qwen.rope_scaling = {.factor = 2, .original_max_positions = 8, .type = RopeScalingType::kYarn};
    wide_gpt2.norm = Norm::kRmsNorm;
    const std::vector<int64_t> lengths = {5, 1, 6, 9, 3};
    for (const ModelConfig& shape : {tiny_gpt2(), tiny_llama(), qwen, wide_gpt2})
        for (Recompute level : {Recompute::kNone, Recompute::kBlock}) {
            Config config = packed_config(shape, Dtype::kFp32, 2, 12);
            config.recompute = level;
            const Packed packed(lengths, shape.vocab_size);
            TestModel model(config);
            model.set_batch(packed.tokens, packed.targets);
            model.gradients();
            double sum = 0;
            for (size_t d = 0; d < lengths.size(); d++) {
                Config alone = packed_config(shape, Dtype::kFp32, 1, lengths[d]);
                alone.shape.max_positions = 12;
                alone.reset_attention_mask = alone.reset_position_ids = false;
                TestModel one(alone);
                std::vector<int32_t> targets;
                for (int64_t i = 0; i < lengths[d]; i++) targets.push_back(Packed::target_of(d, i, shape.vocab_size));
                one.set_batch(packed.documents[d], targets);
                one.gradients();
                sum += one.result.loss_sum;
            }
            CHECK(model.result.loss_sum == doctest::Approx(sum).epsilon(1e-6));
            // Rope turns keys and queries by the difference of positions, so that only learned ones must restart.
            config.reset_position_ids = false;
            TestModel continued(config);
            continued.set_batch(packed.tokens, packed.targets);
            continued.gradients();
            const bool learned = shape.position == PositionEmbedding::kLearned;
            CHECK((continued.result.loss_sum != doctest::Approx(sum).epsilon(1e-4)) == learned);
            CHECK(model.arena.peak_bytes() == model.plan.arena_bytes);
        }
}

TEST_CASE("restarted positions: without the attention mask a copy of a document sees other keys, not other positions") {
    Config config = packed_config(tiny_gpt2(), Dtype::kFp32, 1, 12);
    config.reset_attention_mask = false;
    const Packed packed({6, 6}, 29);
    TestModel model(config);
    model.set_batch(packed.tokens, packed.targets);
    model.gradients();
    const std::vector<double> grad = model.grad(model.table.wpe);
    for (size_t i = 0; i < grad.size(); i++) CHECK((grad[i] != 0) == (i < 6 * 24));   // C = 24
    config.reset_attention_mask = true;
    TestModel masked(config);
    masked.set_batch(packed.tokens, packed.targets);
    masked.gradients();
    CHECK(masked.result.loss_sum != model.result.loss_sum);
}

#ifndef LLMC_CUDA
TEST_CASE("restarted positions: gradients agree with central differences in double") {
    for (const ModelConfig& shape : {tiny_gpt2(), tiny_llama()}) {
        Config config = packed_config(shape, Dtype::kFp64, 2, 12);
        config.shape.rope_scaling = {.factor = 2, .original_max_positions = 8, .type = RopeScalingType::kYarn};
        const Packed packed({5, 1, 6, 9, 3}, shape.vocab_size);
        TestModel model(config);
        model.set_batch(packed.tokens, packed.targets);
        const LayerParams& block = model.table.layers[0];
        for (int p : {block.qkv_weight, model.table.wte, model.table.wpe})
            if (p >= 0) model.check_differences(p, 8);
    }
}
#endif

TEST_CASE("restarted positions: in FP8, also of attention, and with any recomputation") {
    ModelConfig shape = fp8_shapes()[1];
    for (bool fp8_attention : {false, true}) {
        if (fp8_attention) shape.kv_channels = 64;
        Config config = fp8_config(shape, Fp8Recipe::kDelayed);
        config.shape.max_positions = 40, config.fp8_attention = fp8_attention, config.reset_attention_mask = true;
        const Packed packed({33, 17, 5, 25}, shape.vocab_size);
        double losses[2];
        for (bool restart : {false, true}) {
            config.reset_position_ids = restart;
            const auto set_batch = [&](TestModel& model) { model.set_batch(packed.tokens, packed.targets); };
            check_recompute(config, set_batch, 2);
            TestModel model(config);
            set_batch(model), model.gradients();
            losses[restart] = model.loss();
        }
        // Rope is relative, so restarting positions changes only roundings, but in every number.
        CHECK(losses[0] != losses[1]);
        CHECK(losses[0] == doctest::Approx(losses[1]).epsilon(0.01));
    }
}
