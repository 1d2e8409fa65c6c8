// Small models in FP8, for the tests of its recipes.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "llmc/checkpoint/fp8_state_json.h"
#include "tests/support/model_test.h"

inline constexpr Fp8Recipe kRecipes[] = {Fp8Recipe::kNone, Fp8Recipe::kDelayed, Fp8Recipe::kTensorwise,
                                        Fp8Recipe::kBlockwise, Fp8Recipe::kBlockwiseBf16Wgrad,
                                        Fp8Recipe::kInt8Forward};
inline constexpr std::span<const Fp8Recipe> kFp8Recipes = std::span(kRecipes).subspan(1);

// Sizes are multiples of 16, not of 128, and differ from each other.
inline std::vector<ModelConfig> fp8_shapes() {
    ModelConfig gpt2 = tiny_gpt2();
    gpt2.hidden_size = 48, gpt2.ffn_hidden_size = 80, gpt2.num_attention_heads = gpt2.num_query_groups = 3;
    gpt2.kv_channels = 16, gpt2.max_positions = 48;
    ModelConfig llama = tiny_llama();
    llama.hidden_size = 64, llama.ffn_hidden_size = 144, llama.num_attention_heads = 4, llama.num_query_groups = 2;
    llama.kv_channels = 16, llama.max_positions = 48;
    ModelConfig mixed = llama;   // biases behind rope and qk-norm
    mixed.norm = Norm::kLayerNorm, mixed.linear_bias = LinearBias::kAll, mixed.activation = Activation::kGelu;
    mixed.qk_norm = true;
    ModelConfig squared = gpt2;
    squared.activation = Activation::kRelu2;
    ModelConfig qwen2 = llama;
    qwen2.linear_bias = LinearBias::kQkv;
    qwen2.sliding_window = {17, 0}, qwen2.local_rotary_base = 300;
    ModelConfig olmo2 = llama, gemma = llama;
    olmo2.num_query_groups = 4, olmo2.qk_norm = olmo2.qk_norm_whole = true, olmo2.norm_place = NormPlace::kPost;
    olmo2.linear_bias = LinearBias::kAttention;
    gemma.gemma = gemma.qk_norm = true, gemma.norm_place = NormPlace::kBoth, gemma.activation = Activation::kGeglu;
    ModelConfig gemma2 = gemma;
    gemma2.qk_norm = false, gemma2.attention_softcap = 0.25, gemma2.logits_softcap = 0.5;
    return {gpt2, llama, mixed, squared, qwen2, olmo2, gemma, gemma2};
}

inline Config fp8_config(const ModelConfig& shape, Fp8Recipe recipe) {
    Config config = tiny_config(shape, Dtype::kBf16, 2, 40);
    if (recipe == Fp8Recipe::kInt8Forward) {   // which turns groups of 64 columns
        config.shape.hidden_size = 64, config.shape.ffn_hidden_size = 192;
        if (shape.hidden_size != 64) config.shape.num_attention_heads = config.shape.num_query_groups = 4;
    }
    config.shape.init_std = 0.1, config.fp8_recipe = recipe;
    config.fp8_format = is_blockwise(recipe) ? Fp8Format::kE4m3 : Fp8Format::kHybrid;
    config.fp8_amax_history_len = 3;
    return config;
}

// Rows of gate and up, and those of experts, share the blocks of 128.
inline ModelConfig fp8_moe() {
    ModelConfig shape = fp8_shapes()[1];
    shape.ffn_hidden_size = 80, shape.num_experts = 5;
    return shape;
}

inline std::vector<char> raw(TestModel& model, const Tensor& tensor) {
    std::vector<char> bytes(static_cast<size_t>(tensor.bytes()));
    device::copy_to_host(model.ctx, bytes.data(), tensor.data, tensor.bytes());
    device::synchronize(model.ctx);
    return bytes;
}

// Scales and histories of a delayed run.
inline std::string state_text(TestModel& model) { return fp8_state_json(model.ctx, model.trainer->fp8()); }

// Checks that a run has the bits of one without recomputation, at every level and with poisoned scratch.
template <typename SetBatch> void check_recompute(Config config, SetBatch&& set_batch, int steps = 1) {
    TestModel reference(config, false);
    set_batch(reference);
    for (int i = 0; i < steps; i++) reference.step();
    CHECK(std::isfinite(reference.loss()));
    const auto expected = all_grads(reference);
    for (Recompute level : {Recompute::kNone, Recompute::kNormAct, Recompute::kBlock, Recompute::kBlockKeepAttention}) {
        CAPTURE(static_cast<int>(level));
        config.recompute = level;
        TestModel model(config, true);
        set_batch(model);
        int64_t matmuls = 0;   // of the last step: the first one may calibrate
        for (int i = 0; i < steps; i++) {
            matmuls = device::fp8_matmuls(model.ctx);
            model.step();
        }
        if (config.fp8_recipe != Fp8Recipe::kDelayed || steps > 1)
            CHECK(device::fp8_matmuls(model.ctx) - matmuls
                  == planned_fp8_matmuls(model.fp8_plan, level, model.staged.micro_batches));
        CHECK(model.result.loss_sum == reference.result.loss_sum);
        CHECK(all_grads(model) == expected);
        CHECK(state_text(model) == state_text(reference));
        CHECK(model.arena.peak_bytes() == model.plan.arena_bytes);
    }
}
