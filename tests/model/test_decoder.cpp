// The whole decoder: gradients against finite differences, and invariance under recomputation, batching and evaluation.
#include "tests/support/doctest.h"

#include <cmath>

#include "tests/support/fp8_model_test.h"
#include "tests/support/watched_store.h"

namespace {

struct Variant {
    const char* name;
    ModelConfig shape;
};

std::vector<Variant> variants() {
    ModelConfig gpt2_gqa = tiny_gpt2();
    gpt2_gqa.num_query_groups = 1;
    gpt2_gqa.tied_head = false;
    ModelConfig qwen = tiny_llama();
    qwen.qk_norm = true;
    qwen.tied_head = true;
    ModelConfig mixed = tiny_llama();   // combinations that no published model has
    mixed.norm = Norm::kLayerNorm, mixed.linear_bias = LinearBias::kAll, mixed.activation = Activation::kGelu;
    mixed.qk_norm = true;
    ModelConfig squared = tiny_gpt2();
    squared.activation = Activation::kRelu2;
    ModelConfig qwen2 = tiny_llama(), attention_bias = tiny_llama(), mlp_bias = tiny_gpt2();
    qwen2.linear_bias = LinearBias::kQkv;
    qwen2.sliding_window = {3};
    attention_bias.linear_bias = LinearBias::kAttention;
    mlp_bias.linear_bias = LinearBias::kMlp;
    mlp_bias.sliding_window = {1};
    ModelConfig pattern = tiny_llama();   // windows and rope by layer
    pattern.num_layers = 3, pattern.sliding_window = {3, 0, 5}, pattern.local_rotary_base = 30;
    pattern.rope_scaling = {.factor = 8, .type = RopeScalingType::kLinear};
    ModelConfig sinks = qwen2, gpt2_sinks = tiny_gpt2();
    sinks.attention_sinks = gpt2_sinks.attention_sinks = true;
    ModelConfig olmoe = tiny_moe();
    olmoe.num_query_groups = olmoe.num_attention_heads;
    olmoe.qk_norm_whole = true;
    olmoe.normalize_experts = false;
    olmoe.experts_per_token = 3;
    ModelConfig olmo2 = tiny_llama(), granite = attention_bias, gemma = tiny_llama();
    olmo2.num_query_groups = olmo2.num_attention_heads, olmo2.kv_channels = olmo2.hidden_size / olmo2.num_query_groups;
    olmo2.qk_norm = olmo2.qk_norm_whole = true, olmo2.norm_place = NormPlace::kPost;
    olmo2.linear_bias = LinearBias::kAttention;
    granite.embedding_multiplier = 5.5, granite.residual_multiplier = 0.375, granite.logits_scaling = 3;
    granite.attention_multiplier = 0.125, granite.tied_head = true;
    gemma.gemma = gemma.qk_norm = true, gemma.norm_place = NormPlace::kBoth, gemma.activation = Activation::kGeglu;
    gemma.attention_multiplier = 0.2;
    ModelConfig grouped = tiny_llama();
    grouped.qk_norm = grouped.qk_norm_whole = true, grouped.norm_place = NormPlace::kPost;
    grouped.kv_channels = grouped.hidden_size / grouped.num_attention_heads;
    ModelConfig gemma2 = gemma;
    gemma2.qk_norm = false, gemma2.attention_softcap = 0.25, gemma2.logits_softcap = 0.5;
    return {{"olmo2", olmo2}, {"olmo2, grouped", grouped}, {"granite", granite}, {"gemma2", gemma2}, {"gemma3", gemma},
            {"qwen3-moe", tiny_moe()}, {"olmoe", olmoe}, {"gpt-oss", tiny_gpt_oss()},
            {"gpt2", tiny_gpt2()}, {"gpt2-gqa-untied", gpt2_gqa}, {"llama", tiny_llama()}, {"qwen3", qwen},
            {"mixed", mixed}, {"relu2", squared}, {"windows by layer", pattern}, {"qwen2 with a window", qwen2},
            {"llama with attention bias", attention_bias}, {"gpt2 with MLP bias and a window", mlp_bias},
            {"qwen2 with sinks and a window", sinks}, {"gpt2 with sinks", gpt2_sinks}};
}

// Initial weights of 0.02 make tiny models almost linear; widen them so that every term matters.
Config test_config(const ModelConfig& shape, Dtype dtype, int64_t B, int64_t T) {
    Config config = tiny_config(shape, dtype, B, T);
    config.shape.init_std = 0.3;
    return config;
}

}  // namespace

#ifndef LLMC_CUDA
TEST_CASE("decoder gradients agree with central differences in double") {
    for (const Variant& variant : variants()) {
        CAPTURE(variant.name);
        Config config = test_config(variant.shape, Dtype::kFp64, 2, 5);
        config.z_loss = variant.shape.tied_head ? 0 : 0.0625;   // a float has it exactly
        config.moe_aux_loss_coeff = 0.25, config.moe_z_loss_coeff = 0.125;
        TestModel model(config);
        model.set_random_batch(2, 11);
        double worst = 0;
        for (size_t p = 0; p < model.table.params.size(); p++)
            worst = std::fmax(worst, model.check_differences(static_cast<int>(p), 6));
        CHECK(worst > 0);
    }
}
#endif

TEST_CASE("a window of the whole sequence in some layers has the bits of none, and equal windows those of one") {
    const auto results = [](std::vector<int64_t> windows) {
        ModelConfig shape = tiny_llama();
        shape.num_layers = 3, shape.sliding_window = std::move(windows);
        TestModel model(test_config(shape, Dtype::kBf16, 2, 16));
        model.set_random_batch(2, 5);
        model.gradients();
        std::vector<double> all{model.loss()};
        for (size_t p = 0; p < model.table.params.size(); p++) {
            const std::vector<double> grad = model.grad(static_cast<int>(p));
            all.insert(all.end(), grad.begin(), grad.end());
        }
        return all;
    };
    CHECK(results({16, 0, 17}) == results({}));
    CHECK(results({5, 5}) == results({5}));
    CHECK(results({5, 0}) != results({5}));
    CHECK(results({15, 0}) != results({}));
}

TEST_CASE("recomputation and poisoned scratch do not change any gradient bit") {
    for (Dtype dtype : {Dtype::kFp32, Dtype::kBf16})
        for (const Variant& variant : variants()) {
            CAPTURE(variant.name);
            check_recompute(test_config(variant.shape, dtype, 3, 7), [](TestModel& m) { m.set_random_batch(6, 3); });
        }
}

TEST_CASE("block-keep-attention saves attention's output and log-sum-exp, and runs attention once per layer") {
    for (const Variant& variant : variants())
        for (Fp8Recipe recipe : {Fp8Recipe::kNone, Fp8Recipe::kDelayed}) {
            CAPTURE(variant.name);
            Config config = test_config(variant.shape, Dtype::kBf16, 2, 16);
            ModelConfig& shape = config.shape;   // sizes that FP8 supports
            shape.hidden_size = 64, shape.ffn_hidden_size = 96, shape.kv_channels = 16;
            shape.num_layers = 3;
            config.fp8_recipe = recipe;
            auto planned = [&](Recompute level) {
                config.recompute = level;
                return memory_of(config, 1);
            };
            const MemoryPlan none = planned(Recompute::kNone), block = planned(Recompute::kBlock),
                             kept = planned(Recompute::kBlockKeepAttention);
            const auto bytes = [](const MemoryPlan& plan) {
                return plan.purpose_bytes[static_cast<size_t>(Purpose::kActivations)];
            };
            // The bf16 output and fp32 log-sum-exp of every layer but one; with `block` all layers share one set of
            // buffers.
            const int64_t N = 2 * 16, q = shape.q_width(), heads = shape.num_attention_heads;
            const auto aligned = [](int64_t n) {
                return (n + Arena::kAlignBytes - 1) / Arena::kAlignBytes * Arena::kAlignBytes;
            };
            CHECK(bytes(kept) - bytes(block) == (shape.num_layers - 1) * (aligned(N * q * 2) + aligned(N * heads * 4)));
            CHECK(bytes(kept) < bytes(none));
            const auto calls = [](const MemoryPlan& plan, OpKind kind) {
                int64_t count = 0;
                for (const PlannedOp& op : plan.step_ops) count += op.kind == kind ? op.count : 0;
                return count;
            };
            CHECK(calls(none, OpKind::attention_forward) == shape.num_layers);
            CHECK(calls(kept, OpKind::attention_forward) == shape.num_layers);
            CHECK(calls(block, OpKind::attention_forward) == 2 * shape.num_layers);
            const OpKind act = shape.has_experts() ? OpKind::expert_activation_forward : OpKind::activation_forward;
            CHECK(calls(kept, act) == 2 * shape.num_layers);
            CHECK(calls(kept, OpKind::rope_forward) == calls(block, OpKind::rope_forward));
        }
}

// In bf16 the producers of dy sum the bias gradients, in FP32 a separate pass does.
TEST_CASE("gradients in bf16 are those of FP32 except for rounding, with either sum of bias gradients") {
    std::vector<Variant> all = variants();
    ModelConfig biased = tiny_llama();
    biased.linear_bias = LinearBias::kAll;
    all.push_back({"llama with biases", biased});
    biased.qk_norm = true;
    biased.position = PositionEmbedding::kLearned;
    all.push_back({"qk-norm and biases", biased});
    for (const Variant& variant : all) {
        CAPTURE(variant.name);
        std::vector<std::vector<double>> grads[2];
        for (Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
            TestModel model(tiny_config(variant.shape, dtype, 3, 7));
            model.set_random_batch(6, 3);   // two micro-batches, so that gradients are accumulated
            model.gradients();
            grads[dtype == Dtype::kBf16] = all_grads(model);
        }
        for (size_t p = 0; p < grads[0].size(); p++) {
            // A gradient has a few dozen roundings of 2^-9; a term that is added twice or left out causes a far larger
            // difference.
            const double off = distance(grads[1][p], grads[0][p]);
            CHECK_MESSAGE(off < 0.15, variant.name, " ", p, ": off by ", off);
        }
    }
}

TEST_CASE("loss and gradient norm do not depend on how the batch is split into micro-batches") {
    for (const ModelConfig& shape : {tiny_gpt2(), tiny_llama()}) {
        double loss = 0, norm = 0;
        for (int64_t B : {1, 2, 3, 6}) {
            TestModel model(test_config(shape, Dtype::kFp32, B, 9));
            model.set_random_batch(6, 21);
            model.gradients();
            if (B == 1) {
                loss = model.loss();
                norm = static_cast<double>(model.result.grad_norm);
            }
            CHECK(std::fabs(model.loss() - loss) <= 1e-6 * std::fabs(loss));
            CHECK(std::fabs(static_cast<double>(model.result.grad_norm) - norm) <= 1e-6 * norm);
        }
        // A mean of means would differ: the micro-batches have different numbers of counted targets.
        TestModel ignoring(test_config(shape, Dtype::kFp32, 1, 9));
        ignoring.set_random_batch(6, 21, false);
        ignoring.gradients();
        CHECK(std::fabs(ignoring.loss() - loss) > 1e-4);
    }
}

TEST_CASE("the decoder calls before_layer before reading a layer, and after_layer when its gradients are complete") {
    for (const ModelConfig& shape : {tiny_gpt2(), tiny_llama()}) {
        TestModel model(test_config(shape, Dtype::kFp32, 1, 4));
        WatchedStore store(model);
        model.set_random_batch(1, 1);
        model.gradients();
        WatchedStore::Calls calls;
        for (int layer : {-1, 0, 1, 2}) calls.push_back({layer, Pass::kForward});
        for (int layer : {2, 1, 0, -1}) calls.push_back({layer, Pass::kBackward});
        CHECK(store.before == calls);
        CHECK(store.after == calls);
        CHECK(store.closed_reads == 0);
    }
}

namespace {

// Two sequences of 16 tokens. Some documents have one token, and one began before its sequence. The other tokens are
// random, without separators.
std::vector<int32_t> text_with_documents(uint64_t key) {
    std::vector<int32_t> tokens;
    for (uint64_t i = 0; i < 32; i++)
        tokens.push_back(2 + static_cast<int32_t>(philox(key, i).word[0] % static_cast<uint32_t>(27)));
    for (size_t at : {4u, 5u, 11u, 16u, 25u}) tokens[at] = TestModel::kSeparator;
    return tokens;
}

}  // namespace

TEST_CASE("documents: a token affects only the losses and gradients of its document, in every layer") {
    // Learned positions, rope and qk-norm; recomputed blocks must apply the mask again.
    for (const Variant& variant : variants())
        for (Recompute level : {Recompute::kNone, Recompute::kBlock, Recompute::kBlockKeepAttention})
            for (bool masked : {true, false}) {
                CAPTURE(variant.name, masked);
                Config config = test_config(variant.shape, Dtype::kFp32, 2, 16);
                config.recompute = level;
                config.reset_attention_mask = masked;
                // Only positions 5..10 of the first sequence, one document, count.
                std::vector<int32_t> targets(32, kIgnoreIndex);
                for (size_t i = 5; i < 11; i++) targets[i] = static_cast<int32_t>(i);
                TestModel model(config);
                auto loss_of = [&](const std::vector<int32_t>& tokens) {
                    model.set_batch(tokens, targets);
                    model.gradients();
                    return model.result.loss_sum;
                };
                const std::vector<int32_t> tokens = text_with_documents(3);
                const double loss = loss_of(tokens);
                const float norm = model.result.grad_norm;
                for (size_t at = 0; at < 32; at++) {
                    if (tokens[at] == TestModel::kSeparator) continue;
                    std::vector<int32_t> changed = tokens;
                    changed[at] = changed[at] == 28 ? 2 : changed[at] + 1;
                    // A window reaches back window - 1 tokens in each layer.
                    int64_t reach = 0;
                    for (int64_t l = 0; l < config.shape.num_layers; l++)
                        reach += config.shape.window(l) > 0 ? config.shape.window(l) - 1 : 16;
                    const bool own = at >= 5 && at < 11, before = at < 5 && static_cast<int64_t>(at) + reach >= 5;
                    const bool same = loss_of(changed) == loss;
                    CAPTURE(at);
                    CHECK(same == !(own || (before && !masked)));
                    if (same) CHECK(model.result.grad_norm == norm);
                }
            }
}
