// The decoder against transformers: logits, loss and every gradient of stored tiny models, in FP32. The fixtures and
// the script that made them: tests/fixtures, tests/support/make_hf_fixtures.py.
#include "tests/support/doctest.h"

#include <cmath>
#include <cstdlib>
#include <string>

#include "llmc/checkpoint/huggingface/hf_config.h"
#include "llmc/checkpoint/huggingface/safetensors.h"
#include "llmc/checkpoint/load.h"
#include "tests/support/reference.h"
#include "tests/support/checkpoint_test.h"
#include "tests/support/model_test.h"

namespace {

std::vector<double> floats(const SafetensorsReader& file, const std::string& name) {
    const SafetensorsView& view = file.tensors().at(name);
    REQUIRE(view.dtype == "F32");
    std::vector<float> values(static_cast<size_t>(view.bytes / 4));
    view.read(0, view.bytes, values.data());
    return {values.begin(), values.end()};
}

std::vector<int32_t> ints(const SafetensorsReader& file, const std::string& name) {
    const SafetensorsView& view = file.tensors().at(name);
    REQUIRE(view.dtype == "I32");
    std::vector<int32_t> values(static_cast<size_t>(view.bytes / 4));
    view.read(0, view.bytes, values.data());
    return {values.begin(), values.end()};
}

// Rows of a parameter as the Hugging Face tensor holds them.
std::vector<double> hf_layout(const Param& p, const HfPart& part, const std::vector<double>& values) {
    std::vector<double> out;
    for (int64_t i = 0; i < part.rows * p.cols; i++)
        out.push_back(values[static_cast<size_t>(checkpoint_test::element_of(part, p.cols, i))]);
    return out;
}

// Logits (N, true vocabulary) of the model's last forward.
std::vector<double> logits_of(TestModel& model) {
    std::vector<double> values;
    for (int64_t n = 0; n < model.config.micro_batch_size * model.config.seq_length; n++) {
        const std::vector<double> row = model.logits(n);
        values.insert(values.end(), row.begin(), row.end());
    }
    return values;
}

void check_model(const std::string& name) {
    CAPTURE(name);
    const std::string directory = "tests/fixtures/" + name;
    const SafetensorsReader reference(directory + "/reference.safetensors");
    const int64_t B = 2, T = 16, N = B * T;
    Config config = tiny_config(model_config_from_hf(directory), Dtype::kFp32, B, T);
    config.moe_aux_loss_coeff = 1;   // has no gradient in the first step
    TestModel model(config);
    load_hf_weights(directory, model.config.shape, model.table, model.trainer->state_access(model.ctx), model.comm);
    model.trainer->weights_from_masters(model.ctx, true);
    model.set_batch(ints(reference, "input_ids"), ints(reference, "targets"));
    REQUIRE(model.counted < N);   // some targets are ignored

    // Gradients first: the logits are those of the last forward pass, which the gradients need anyway.
    model.gradients();
    const double loss = floats(reference, "loss")[0];
    CHECK(std::fabs(model.loss() - loss) < 1e-5 * loss);
    // transformers has K times our auxiliary loss. Of several layers it has the product of means over all of them.
    if (reference.tensors().count("aux_loss") == 1) {
        const double aux = floats(reference, "aux_loss")[0];
        CHECK(std::fabs(model.result.router_loss * static_cast<double>(config.shape.experts_per_token) - aux)
              < 1e-5 * aux);
    }
    for (size_t i = 0; i < model.table.params.size(); i++) {
        const Param& p = model.table.params[i];
        const std::vector<double> grad = model.grad(static_cast<int>(i));
        if (p.optimizer == OptimizerKind::kRouterBias) {   // a buffer of transformers
            CHECK(norm_of(grad) == 0);
            continue;
        }
        const HfPart stacked{.name = p.hf_stacked, .rows = p.rows};   // transformers 5 has experts so
        for (const HfPart& part : p.hf_stacked.empty() ? p.hf : std::vector<HfPart>{stacked}) {
            CAPTURE(part.name);
            const std::vector<double> expected = floats(reference, "grad." + part.name);
            std::vector<double> ours = hf_layout(p, part, grad);
            // A key bias shifts all scores of a row alike, so its gradient is 0 up to rounding: compare absolutely.
            double norm = 0;
            for (double g : expected) norm += g * g;
            if (std::sqrt(norm) < 1e-6) continue;
            CHECK(distance(ours, expected) < 1e-5);
            ours[ours.size() / 2] += 1e-4 * std::sqrt(norm);
            CHECK(distance(ours, expected) > 1e-5);   // the check can fail
        }
    }

    CHECK(distance(logits_of(model), floats(reference, "logits")) < 1e-5);
}

// Trains a model for three steps, and writes the checkpoint and its logits for tests/support/check_hf_load.py.
void save_trained(TestModel& model, const std::string& root) {
    const int64_t B = model.config.micro_batch_size, T = model.config.seq_length;
    model.set_random_batch(2, 17);
    for (int i = 0; i < 3; i++) model.step();
    checkpoint_test::CheckpointRequest request;
    request.root = root, request.seq_length = T, request.state_json = checkpoint_test::state_json(3), request.step = 3;
    save_checkpoint(request, model.config.shape, model.table, model.trainer->state_access(model.ctx));
    model.gradients();
    const std::vector<double> logits = logits_of(model);
    const std::vector<float> narrow(logits.begin(), logits.end());
    const std::string tokens(reinterpret_cast<const char*>(model.staged.tokens), static_cast<size_t>(B * T * 4));
    const std::string values(reinterpret_cast<const char*>(narrow.data()), narrow.size() * 4);
    checkpoint_test::spill_tensors(root + "/logits.safetensors",
                                   {{"input_ids", Dtype::kInt32, {B, T}},
                                    {"logits", Dtype::kFp32, {B, T, model.config.shape.vocab_size}}},
                                   tokens + values);
}

// Weights far from their neutral values, so that leaving one out or swapping two shows in the logits.
void randomise(TestModel& model) {
    const StateAccess access = model.trainer->state_access(model.ctx);
    for (size_t i = 0; i < model.table.params.size(); i++) {
        const Param& p = model.table.params[i];
        const double size = p.is_vector() ? 0.3 : 0.15, mean = p.init == Param::Init::kOnes ? 1 : 0;
        const reference::HostTensor noise = reference::random_tensor(Dtype::kFp32, p.elems(), i + 1, size, mean);
        access.write(StateKind::kMaster, static_cast<int>(i), 0, p.elems(), noise.data());
    }
    model.trainer->weights_from_masters(model.ctx, true);
}

// Models that no class of transformers supports, so that transformers runs our modeling_llmfp8.py: every norm,
// position embedding, activation, set of biases, qk-norm, window, grouping of heads, and tied or separate head.
std::vector<std::pair<std::string, ModelConfig>> own_models() {
    ModelConfig gpt2 = checkpoint_test::gpt2_config();
    gpt2.max_positions = 32;
    std::vector<std::pair<std::string, ModelConfig>> models;
    auto add = [&](const char* name, auto&& change) {
        ModelConfig c = gpt2;
        change(c);
        REQUIRE(hf_class(c) == HfClass::kOwn);
        models.emplace_back(name, c);
    };
    const auto rope = [](ModelConfig& c) {
        c.position = PositionEmbedding::kRope;
        c.rotary_base = 500;
    };
    add("own_modern", [&](ModelConfig& c) {
        rope(c);
        c.norm = Norm::kRmsNorm, c.activation = Activation::kRelu2, c.linear_bias = LinearBias::kNone;
        c.num_query_groups = 1, c.qk_norm = true, c.tied_head = false;
    });
    add("own_learned", [](ModelConfig& c) {
        c.activation = Activation::kRelu2, c.linear_bias = LinearBias::kQkv;
        c.num_attention_heads = 4, c.num_query_groups = 2, c.kv_channels = 16, c.attention_sinks = true;
    });
    add("own_scaled_rope", [&](ModelConfig& c) {
        rope(c);
        c.rope_scaling = {.factor = 4, .original_max_positions = 32};
        c.sliding_window = {5}, c.norm_eps = 1e-3;
    });
    add("own_gated", [](ModelConfig& c) {
        c.activation = Activation::kGeglu, c.linear_bias = LinearBias::kMlp, c.norm = Norm::kRmsNorm;
        c.qk_norm = true, c.sliding_window = {3}, c.tied_head = false, c.attention_sinks = true;
    });
    add("own_pattern", [&](ModelConfig& c) {
        rope(c);
        c.num_layers = 3, c.sliding_window = {3, 0, 6}, c.local_rotary_base = 30;
        c.activation = Activation::kClampedSwiglu;
        c.rope_scaling = {.factor = 8, .type = RopeScalingType::kLinear};
    });
    add("own_attention_bias", [&](ModelConfig& c) {
        rope(c);
        c.activation = Activation::kSwiglu, c.linear_bias = LinearBias::kAttention;
    });
    return models;
}

}  // namespace

TEST_CASE("logits, loss and every gradient as in transformers") {
    for (const char* name : {"gpt2", "llama", "llama_tied", "llama_attention_bias", "llama_mlp_bias", "mistral",
                             "mistral_window", "qwen2", "qwen2_window", "qwen3", "qwen3_bias_window", "qwen3_yarn",
                             "qwen3_moe", "olmoe", "mixtral", "dots1", "solar_open", "olmo2", "olmo3", "granite",
                             "olmo2_grouped", "phi3_longrope", "gemma2", "gemma3", "phi3", "ministral", "qwen3_layers",
                             "dots1_dense", "qwen3_moe_dense", "gpt_oss", "gpt_oss_mxfp4"})
        check_model(name);
}
TEST_CASE("a window one token longer or shorter has other logits than transformers") {
    for (int64_t change : {-1, 1}) {
        const std::string directory = "tests/fixtures/mistral_window";
        const SafetensorsReader reference(directory + "/reference.safetensors");
        ModelConfig shape = model_config_from_hf(directory);
        shape.sliding_window[0] += change;
        TestModel model(tiny_config(shape, Dtype::kFp32, 2, 16));
        load_hf_weights(directory, shape, model.table, model.trainer->state_access(model.ctx), model.comm);
        model.trainer->weights_from_masters(model.ctx, true);
        model.set_batch(ints(reference, "input_ids"), ints(reference, "targets"));
        model.gradients();
        CHECK(distance(logits_of(model), floats(reference, "logits")) > 1e-2);
    }
}
// The logits are compared if a Python with transformers and torch is there ($PYTHON, else python3).
TEST_CASE("transformers computes saved models through our modeling code") {
    checkpoint_test::TempDir dir;
    const char* python = std::getenv("PYTHON");
    std::string command = std::string(python ? python : "python3") + " tests/support/check_hf_load.py";
    for (const auto& [name, shape] : own_models()) {
        CAPTURE(name);
        const std::string root = dir / name;
        TestModel model(tiny_config(shape, Dtype::kFp32, 2, 16));
        randomise(model);
        save_trained(model, root);
        const std::string saved = root + "/step-00000003";
        CHECK(checkpoint_damage(saved, true).empty());
        for (const char* file : {"configuration_llmfp8.py", "modeling_llmfp8.py"})
            CHECK(checkpoint_test::slurp(saved + "/" + file)
                  == checkpoint_test::slurp(std::string("llmc/checkpoint/huggingface/hf_code/") + file));
        command += " " + saved + " " + root + "/logits.safetensors";
    }
    const int status = std::system((command + " > " + (dir / "log") + " 2>&1").c_str());
    const std::string log = checkpoint_test::slurp(dir / "log");
    CAPTURE(log);
    if (WEXITSTATUS(status) == 77) MESSAGE("skipped: " << log);
    else CHECK(status == 0);
}
