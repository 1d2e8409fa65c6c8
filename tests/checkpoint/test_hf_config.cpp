// config.json: every model that the options can describe is the same after writing and reading; all others are refused
// by name.
#include "tests/support/hf_config_test.h"

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "llmc/checkpoint/huggingface/hf_rope.h"

using namespace checkpoint_test;

namespace {

ModelConfig there_and_back(const ModelConfig& config) {
    return model_config_from_json(hf_config_json(config, Dtype::kBf16), "config.json");
}

Json llama_json() { return Json::parse(hf_config_json(llama_config(), Dtype::kFp32)); }
Json gpt2_json() { return Json::parse(hf_config_json(gpt2_config(), Dtype::kFp32)); }

ModelConfig qwen3_config() {
    ModelConfig c = llama_config();
    c.qk_norm = true;
    return c;
}

}  // namespace

TEST_CASE("config.json: every class and preset survives the way there and back") {
    for (const NamedConfig& c : all_configs()) {
        CAPTURE(c.name);
        CHECK(hf_class(c.config) == c.hf);
        CHECK(there_and_back(c.config) == c.config);
    }
    for (const ModelPreset& preset : model_presets()) {
        CAPTURE(preset.name);
        CHECK(there_and_back(preset.config) == preset.config);
    }
    // The one class that stores every field: a change of any of them arrives.
    ModelConfig own = all_configs()[4].config;
    REQUIRE(hf_class(own) == HfClass::kOwn);
    own.rope_scaling = {.factor = 3.5, .low_freq_factor = 1.25, .high_freq_factor = 5, .original_max_positions = 77};
    own.rotary_base = 12345.678, own.norm_eps = 3e-7, own.init_std = 0.0123;
    CHECK(there_and_back(own) == own);
}

TEST_CASE("config.json: the fields that transformers reads") {
    const Json gpt2 = Json::parse(hf_config_json(find_model_preset("gpt2-124M")->config, Dtype::kBf16));
    CHECK(gpt2["architectures"] == Json{"GPT2LMHeadModel"});
    CHECK(gpt2["model_type"] == "gpt2");
    for (const char* name : {"n_positions", "n_ctx"}) CHECK(gpt2[name] == 1024);
    CHECK(gpt2["n_inner"].is_null());
    CHECK(gpt2["activation_function"] == "gelu_new");
    CHECK(gpt2["layer_norm_epsilon"] == 1e-5);
    CHECK(gpt2["bos_token_id"] == 50256);
    CHECK(gpt2["eos_token_id"] == 50256);
    CHECK(gpt2["tie_word_embeddings"] == true);
    CHECK(gpt2["dtype"] == "bfloat16");
    CHECK(gpt2["torch_dtype"] == "bfloat16");
    CHECK(gpt2["resid_pdrop"] == 0.0);
    CHECK(gpt2_json()["n_inner"] == 56);
    CHECK(gpt2_json()["dtype"] == "float32");

    const Json llama = Json::parse(hf_config_json(find_model_preset("llama3.2-1B")->config, Dtype::kFp32));
    CHECK(llama["architectures"] == Json{"LlamaForCausalLM"});
    CHECK(llama["head_dim"] == 64);
    CHECK(llama["num_key_value_heads"] == 8);
    CHECK(llama["hidden_act"] == "silu");
    CHECK(llama["bos_token_id"] == 128000);
    CHECK(llama["eos_token_id"] == 128001);
    CHECK(llama["attention_bias"] == false);
    CHECK(llama["mlp_bias"] == false);
    CHECK(llama["tie_word_embeddings"] == true);
    CHECK(llama["rope_theta"] == 500000.0);
    const Json scaling = {{"rope_type", "llama3"}, {"factor", 32.0}, {"low_freq_factor", 1.0},
                          {"high_freq_factor", 4.0}, {"original_max_position_embeddings", 8192}};
    CHECK(llama["rope_scaling"] == scaling);
    Json parameters = scaling;
    parameters["rope_theta"] = 500000.0;
    CHECK(llama["rope_parameters"] == parameters);

    const Json unscaled = Json::parse(hf_config_json(find_model_preset("llama-tiny")->config, Dtype::kBf16));
    CHECK(unscaled["rope_scaling"].is_null());
    CHECK(unscaled["rope_parameters"] == Json{{"rope_type", "default"}, {"rope_theta", 10000.0}});
    // The default eos token of the class would be an ordinary byte here.
    CHECK(unscaled.contains("eos_token_id"));
    CHECK(unscaled["eos_token_id"].is_null());

    const Json qwen3 = Json::parse(hf_config_json(qwen3_config(), Dtype::kBf16));
    CHECK(qwen3["architectures"] == Json{"Qwen3ForCausalLM"});
    CHECK(qwen3["use_sliding_window"] == false);
    CHECK(Json::parse(hf_config_json(all_configs()[4].config, Dtype::kBf16))["model_type"] == "llmfp8");
}

TEST_CASE("config.json: positions follow a longer training sequence, with rope only") {
    auto positions = [](const ModelConfig& c, int64_t seq_length) {
        return model_config_from_json(hf_config_json(c, Dtype::kBf16, seq_length), "x").max_positions;
    };
    CHECK(positions(llama_config(), 1000) == 1000);
    CHECK(positions(llama_config(), 3) == llama_config().max_positions);
    CHECK(positions(gpt2_config(), 1000) == gpt2_config().max_positions);
}

TEST_CASE("config.json: what transformers wrote") {
    ModelConfig gpt2{.num_layers = 2, .hidden_size = 64, .ffn_hidden_size = 128, .num_attention_heads = 4,
                     .num_query_groups = 4, .kv_channels = 16, .vocab_size = 97, .max_positions = 32,
                     .rope_scaling = {}};
    CHECK(model_config_from_hf(fixture("gpt2")) == gpt2);
    ModelConfig llama = gpt2;
    llama.ffn_hidden_size = 96, llama.num_query_groups = 2, llama.max_positions = 128, llama.norm = Norm::kRmsNorm;
    llama.position = PositionEmbedding::kRope, llama.activation = Activation::kSwiglu;
    llama.rope_scaling = {.factor = 4, .original_max_positions = 32}, llama.linear_bias = LinearBias::kNone;
    llama.tied_head = false;
    CHECK(model_config_from_hf(fixture("llama")) == llama);
    ModelConfig qwen3 = llama, tied = llama;
    qwen3.rope_scaling = tied.rope_scaling = {}, qwen3.norm_eps = tied.norm_eps = 1e-6, qwen3.qk_norm = true;
    CHECK(model_config_from_hf(fixture("qwen3")) == qwen3);
    tied.num_layers = 1, tied.tied_head = true, tied.rotary_base = 500;
    CHECK(model_config_from_hf(fixture("llama_tied")) == tied);
}

TEST_CASE("config.json: YaRN of Qwen2.5 and Qwen3, with the defaults of transformers") {
    // As the model cards tell users to write it; Qwen2.5's has `type` instead of `rope_type`.
    Json qwen = json_of("qwen2");
    for (const char* name : {"rope_parameters", "rope_theta"}) qwen.erase(name);
    qwen["max_position_embeddings"] = 64;
    qwen["rope_scaling"] = {{"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 32}};
    ModelConfig c = read_config(qwen);
    const RopeScaling expected{.factor = 4, .original_max_positions = 32, .type = RopeScalingType::kYarn};
    CHECK(c.rope_scaling == expected);
    CHECK(there_and_back(c) == c);
    // If the original length is left out, it is the model's length, and stays so in later checkpoints.
    qwen["rope_scaling"].erase("original_max_position_embeddings");
    c = read_config(qwen);
    CHECK(c.rope_scaling.original_max_positions == 64);
    const Json longer = Json::parse(hf_config_json(c, Dtype::kBf16, 256));
    CHECK(longer["max_position_embeddings"] == 256);
    CHECK(longer["rope_scaling"]["original_max_position_embeddings"] == 64);
    CHECK(longer["rope_scaling"]["rope_type"] == "yarn");
    CHECK(!longer["rope_scaling"].contains("attention_factor"));
    CHECK(!longer["rope_scaling"].contains("low_freq_factor"));
    // Every field; nulls are absent. mscale and mscale_all_dim give one factor.
    qwen["rope_scaling"].update({{"beta_fast", 16}, {"beta_slow", 2}, {"attention_factor", 1.5}, {"truncate", false}});
    c = read_config(qwen);
    CHECK(c.rope_scaling.beta_fast == 16);
    CHECK(c.rope_scaling.beta_slow == 2);
    CHECK(c.rope_scaling.attention_factor == 1.5);
    CHECK(!c.rope_scaling.truncate);
    CHECK(there_and_back(c) == c);
    qwen["rope_scaling"].update({{"attention_factor", nullptr}, {"mscale", 0.5}, {"mscale_all_dim", 2.0}});
    CHECK(read_config(qwen).rope_scaling.attention_factor
          == doctest::Approx((0.05 * std::log(4) + 1) / (0.2 * std::log(4) + 1)));
    qwen["rope_scaling"].erase("mscale_all_dim");
    CHECK(read_config(qwen).rope_scaling.attention_factor == 0);
}

TEST_CASE("config.json: the spellings of transformers 4 and 5, alone and together") {
    Json old = llama_json(), current = llama_json();
    old.erase("rope_parameters");
    current.erase("rope_theta");
    current.erase("rope_scaling");
    CHECK(model_config_from_json(old.dump(), "x") == llama_config());
    CHECK(model_config_from_json(current.dump(), "x") == llama_config());
    old["rope_scaling"]["type"] = old["rope_scaling"]["rope_type"];
    old["rope_scaling"].erase("rope_type");
    CHECK(model_config_from_json(old.dump(), "x") == llama_config());
    old["rope_scaling"] = nullptr;
    old.erase("rope_theta");
    ModelConfig plain = llama_config();
    plain.rope_scaling = {};
    plain.rotary_base = 10000;
    CHECK(model_config_from_json(old.dump(), "x") == plain);
    // A configuration of 2023 names only the sizes.
    for (const char* name :
         {"head_dim", "num_key_value_heads", "attention_bias", "mlp_bias", "tie_word_embeddings"})
        old.erase(name);
    plain.num_query_groups = plain.num_attention_heads;
    plain.kv_channels = 10;
    check_contains(error_of([&] { model_config_from_json(old.dump(), "x"); }), {"--kv-channels 10"});
    old["hidden_size"] = 32;
    CHECK(model_config_from_json(old.dump(), "x").kv_channels == 8);
    CHECK(model_config_from_json(old.dump(), "x").num_query_groups == 4);
}

TEST_CASE("config.json: unsupported models are refused by the field's name") {
    struct Case {
        Json json;
        const char* pointer;
        Json value;
    };
    const Json llama = llama_json(), gpt2 = gpt2_json(), yarn = json_of("qwen2, yarn");
    const Json qwen3 = Json::parse(hf_config_json(qwen3_config(), Dtype::kFp32));
    const Json own = Json::parse(hf_config_json(all_configs()[4].config, Dtype::kFp32));
    const Json longrope = Json::parse(slurp("tests/fixtures/phi3_longrope/config.json"));
    const Json mistral = json_of("mistral"), qwen2 = json_of("qwen2, window");
    Json dots = json_of("dots1");
    dots.erase("sliding_window");   // 4096
    dots.erase("layer_types");
    Json gemma2 = json_of("gemma2"), gemma3 = json_of("gemma3"), alone = longrope, olmo3 = json_of("olmo3");
    for (const char* name : {"rope_theta", "rope_parameters", "rope_scaling"}) olmo3.erase(name);
    for (Json* json : {&gemma2, &gemma3}) json->erase("layer_types");
    alone.erase("original_max_position_embeddings");
    const std::vector<Case> cases = {
        {gemma2, "/sliding_window_pattern", 3}, {gemma3, "/_sliding_window_pattern", 3},
        {gemma3, "/sliding_window_pattern", 0}, {gemma3, "/rope_parameters", {{"rope_type", "default"}}},
        {alone, "/rope_parameters/original_max_position_embeddings", 12}, {olmo3, "/rope_theta", 1e4},
        {olmo3, "/rope_parameters", {{"rope_type", "default"}}}, {olmo3, "/rope_scaling", {{"rope_theta", 1e4}}},
        {dots, "/max_window_layers", 1}, {llama, "/model_type", "gemma"}, {llama, "/model_type", "qwen2_moe"},
        {llama, "/model_type", kRemove}, {llama, "/hidden_act", "gelu"}, {llama, "/attention_bias", "yes"},
        {llama, "/use_sliding_window", true}, {mistral, "/use_sliding_window", true}, {mistral, "/sliding_window", 0},
        {mistral, "/layer_types", {"full_attention", "full_attention"}}, {qwen2, "/max_window_layers", -1},
        {mistral, "/layer_types", {"full_attention", "sliding_attention"}}, {qwen2, "/sliding_window", -1},
        {qwen2, "/layer_types", {"full_attention", "chunked_attention"}}, {qwen2, "/layer_types", {"full_attention"}},
        {llama, "/hidden_size", kRemove}, {llama, "/hidden_size", -64}, {llama, "/hidden_size", 64.0},
        {llama, "/hidden_size", "64"}, {llama, "/hidden_size", uint64_t{1} << 63}, {llama, "/num_hidden_layers", 0},
        {llama, "/vocab_size", nullptr}, {llama, "/rms_norm_eps", "small"}, {llama, "/rms_norm_eps", 0},
        {llama, "/rms_norm_eps", 1e308}, {gpt2, "/layer_norm_epsilon", 0}, {mistral, "/rope_theta", 1e308},
        {mistral, "/rope_theta", 0}, {llama, "/rope_scaling/high_freq_factor", 1e308},
        {llama, "/tie_word_embeddings", 1}, {llama, "/sliding_window", 4096},
        {llama, "/quantization_config", {{"quant_method", "fp8"}}},
        {llama, "/rope_theta", 10000.0},  // rope_parameters says otherwise
        {llama, "/rope_scaling/factor", 4.0}, {llama, "/rope_scaling", "llama3"},
        {llama, "/rope_scaling/rope_type", "dynamic"}, {yarn, "/rope_scaling/beta_slow", 32},
        {yarn, "/rope_scaling/attention_factor", 0}, {yarn, "/rope_scaling/attention_factor", 1e308},
        {yarn, "/rope_scaling/beta_fast", 1e308}, {yarn, "/rope_scaling/mscale_all_dim", 1e38},
        {yarn, "/rope_scaling/truncate", 1}, {yarn, "/rope_scaling/mscale", -1},
        {llama, "/rope_parameters/rope_type", "longrope"}, {llama, "/rope_parameters/low_freq_factor", 9.0},
        {llama, "/rope_parameters/partial_rotary_factor", 0.5}, {llama, "/partial_rotary_factor", 0.5},
        {json_of("phi3"), "/partial_rotary_factor", 1.5}, {json_of("phi3"), "/rope_scaling/rope_type", "dynamic"},
        {json_of("granite"), "/residual_multiplier", 0}, {json_of("granite"), "/logits_scaling", -1},
        {json_of("granite"), "/sliding_window", 8}, {json_of("olmo2"), "/sliding_window", 8},
        {json_of("gemma3"), "/final_logit_softcapping", 0}, {json_of("gemma3"), "/attn_logit_softcapping", 50.0},
        {json_of("gemma2"), "/final_logit_softcapping", -30.0}, {json_of("gemma2"), "/attn_logit_softcapping", "none"},
        {json_of("gemma2"), "/rope_local_base_freq", 500.0},
        {longrope, "/rope_parameters/short_factor", {1.0, 2.0}},
        {longrope, "/rope_parameters/long_factor", {1, -1, 1, 1}},
        {longrope, "/rope_parameters/factor", 2.0}, {longrope, "/rope_parameters/long_factor", nullptr},
        {json_of("gemma3"), "/use_bidirectional_attention", true}, {json_of("gemma3"), "/hidden_activation", "silu"},
        {json_of("gemma3"), "/query_pre_attn_scalar", 0}, {json_of("olmo3"), "/layer_types", {"full_attention"}},
        {json_of("olmo2"), "/mlp_bias", true}, {json_of("phi3"), "/attention_bias", true},
        {llama, "/rope_parameters", {{"full_attention", {{"rope_type", "default"}}}}},
        {qwen3, "/layer_types", {"full_attention", "sliding_attention"}}, {qwen3, "/layer_types", "full_attention"},
        {gpt2, "/activation_function", "gelu"}, {gpt2, "/scale_attn_by_inverse_layer_idx", true},
        {gpt2, "/scale_attn_weights", false}, {gpt2, "/add_cross_attention", true},
        {gpt2, "/tie_word_embeddings", false}, {gpt2, "/n_head", 3}, {gpt2, "/n_embd", kRemove},
        {own, "/norm", "batch"}, {own, "/linear_bias", "some"}, {own, "/linear_bias", kRemove}, {own, "/norm_eps", 0},
        {own, "/rotary_base", 1e300}, {own, "/window", -3}, {own, "/qk_norm", kRemove}, {own, "/rope", nullptr},
        {own, "/rope/rope_type", "dynamic"}, {own, "/window", {5, -1}}, {own, "/local_rotary_base", "1"},
        {json_of("mixtral"), "/router_jitter_noise", 0.1},
        {json_of("qwen3_moe"), "/decoder_sparse_step", 2}, {json_of("qwen3_moe"), "/mlp_only_layers", {1}},
        {json_of("qwen3_moe"), "/mlp_only_layers", {0, 1}}, {json_of("dots1"), "/first_k_dense_replace", 2},
        {json_of("qwen3_moe"), "/num_experts", 0}, {json_of("qwen3_moe"), "/moe_intermediate_size", kRemove},
        {json_of("olmoe"), "/clip_qkv", 8.0}, {json_of("olmoe"), "/num_experts_per_tok", 1000},
        {json_of("qwen3_moe"), "/shared_expert_intermediate_size", 64},
        {json_of("gpt_oss"), "/swiglu_limit", 5.0}, {json_of("gpt_oss"), "/experts_per_token", 3},
        {json_of("gpt_oss"), "/quantization_config", {{"quant_method", "fp8"}}},
        {json_of("mixtral"), "/quantization_config", {{"quant_method", "mxfp4"}}},
    };
    for (const Case& c : cases) {
        CAPTURE(c.pointer);
        const std::string field = std::string(c.pointer).substr(std::string(c.pointer).rfind('/') + 1);
        const std::string shown = field == "full_attention" ? "rope_parameters" : field;
        const std::string error = with(c.json, c.pointer, c.value);
        const bool other = field == "low_freq_factor" || field == "beta_slow" || field == "factor"
                           || field == "rope_parameters";
        check_contains(error, {"exit 2: DIR/config.json"});
        if (!other) check_contains(error, {"\"" + shown + "\""});
    }
    check_contains(with(llama, "/rope_scaling/rope_type", "dynamic"), {"rope_scaling", "yarn", "llama3"});
    check_contains(with(yarn, "/rope_scaling/beta_slow", 32), {"0 < beta_slow < beta_fast"});
    check_contains(with(llama, "/rope_scaling/factor", 4.0), {"rope_parameters", "contradicts rope_scaling"});
    check_contains(with(llama, "/rope_parameters", {{"full_attention", {{"rope_type", "default"}}}}),
                   {"full_attention", "per layer type"});
    check_contains(with(llama, "/rope_parameters/low_freq_factor", 9.0), {"high_freq_factor"});
    for (const char* text : {"", "[1]", "{", "nul"})
        check_contains(error_of([&] { model_config_from_json(text, "c"); }), {"exit 2: c: ", "not "});
    TempDir dir;
    check_contains(error_of([&] { model_config_from_hf(dir.path); }),
                   {"exit 2", dir.path, "no config.json: not a model"});
    check_contains(error_of([&] { model_config_from_hf(dir.path + "/none"); }),
                   {"exit 2", dir.path + "/none", "no config.json: no such directory"});
}

TEST_CASE("config.json: relu2 is GPT-2's where there is no gate, and our own elsewhere") {
    ModelConfig gpt2 = find_model_preset("gpt2-tiny")->config;
    gpt2.activation = Activation::kRelu2;
    CHECK(hf_class(gpt2) == HfClass::kGpt2);
    const Json json = Json::parse(hf_config_json(gpt2, Dtype::kBf16));
    CHECK(json["model_type"] == "gpt2");
    CHECK(json["activation_function"] == "relu2");
    CHECK(there_and_back(gpt2) == gpt2);
    // Llama's classes multiply the result of hidden_act by that of another linear layer, so relu2 there is another
    // function.
    ModelConfig llama = find_model_preset("llama-tiny")->config;
    llama.activation = Activation::kRelu2;
    CHECK(hf_class(llama) == HfClass::kOwn);
    CHECK(Json::parse(hf_config_json(llama, Dtype::kBf16))["activation"] == "relu2");
    CHECK(there_and_back(llama) == llama);
}

TEST_CASE("config.json: biases of the linears, as each class has them") {
    Json llama = llama_json();
    const auto bias = [&](bool attention, bool mlp) {
        llama["attention_bias"] = attention, llama["mlp_bias"] = mlp;
        return read_config(llama).linear_bias;
    };
    CHECK(bias(false, false) == LinearBias::kNone);
    CHECK(bias(true, true) == LinearBias::kAll);
    CHECK(bias(true, false) == LinearBias::kAttention);
    CHECK(bias(false, true) == LinearBias::kMlp);
    // Qwen2 has biases of Q, K and V, and Mistral has none. Their classes do not have this field, so its value has no
    // effect.
    Json qwen2 = json_of("qwen2"), mistral = json_of("mistral");
    CHECK_FALSE(qwen2.contains("attention_bias"));
    CHECK_FALSE(mistral.contains("attention_bias"));
    CHECK(read_config(qwen2).linear_bias == LinearBias::kQkv);
    CHECK(read_config(mistral).linear_bias == LinearBias::kNone);
    Json own = json_of("mixed");
    CHECK(own["linear_bias"] == "all");
    for (const LinearBiasWord& word : kLinearBiasWords) {
        own["linear_bias"] = word.name;
        CHECK(read_config(own).linear_bias == word.kind);
    }
}

TEST_CASE("config.json: the window of Mistral and Qwen") {
    Json mistral = json_of("mistral");
    CHECK(mistral["sliding_window"] == 7);
    CHECK(read_config(mistral).sliding_window == std::vector<int64_t>{7});
    mistral["layer_types"] = {"sliding_attention", "sliding_attention"};
    CHECK(read_config(mistral).sliding_window == std::vector<int64_t>{7});
    mistral["sliding_window"] = nullptr;
    mistral["layer_types"] = {"full_attention", "full_attention"};
    CHECK_FALSE(read_config(mistral).has_windows());
    mistral.erase("sliding_window");
    mistral.erase("layer_types");
    CHECK(read_config(mistral).sliding_window == std::vector<int64_t>{4096});   // the default of MistralConfig
    mistral.erase("num_key_value_heads");
    mistral["num_attention_heads"] = 16;
    CHECK(read_config(mistral).num_query_groups == 8);    // so is this
    mistral["num_key_value_heads"] = nullptr;
    CHECK(read_config(mistral).num_query_groups == 16);

    for (const char* name : {"qwen2, window", "qwen3, bias and window"}) {
        CAPTURE(name);
        Json qwen = json_of(name);
        const int64_t window = qwen["sliding_window"].get<int64_t>();
        CHECK(qwen["use_sliding_window"] == true);
        CHECK(qwen["max_window_layers"] == 0);
        CHECK(read_config(qwen).sliding_window == std::vector<int64_t>{window});
        qwen["max_window_layers"] = 2;   // the window begins at layer 2, so neither of the two layers has it
        CHECK_FALSE(read_config(qwen).has_windows());
        qwen["layer_types"] = {"sliding_attention", "sliding_attention"};   // counts more than max_window_layers
        CHECK(read_config(qwen).sliding_window == std::vector<int64_t>{window});
        qwen["layer_types"] = {"full_attention", "full_attention"};
        CHECK_FALSE(read_config(qwen).has_windows());
        qwen["layer_types"] = {"sliding_attention", "full_attention"};
        CHECK(read_config(qwen).sliding_window == std::vector<int64_t>{window, 0});
        qwen.erase("layer_types");
        qwen["max_window_layers"] = 1;
        CHECK(read_config(qwen).sliding_window == std::vector<int64_t>{0, window});
        qwen["use_sliding_window"] = false;   // as Qwen2.5 is published: the other fields have no effect
        CHECK_FALSE(read_config(qwen).has_windows());
    }
    const Json pattern = json_of("qwen3, pattern");
    CHECK(pattern["layer_types"] == Json{"sliding_attention", "full_attention"});
    CHECK(json_of("qwen2, pattern")["max_window_layers"] == 1);
    Json own = json_of("pattern");
    CHECK(own["window"] == Json{4, 1});
    own["window"] = {4, 4, 4};
    CHECK(read_config(own).sliding_window == std::vector<int64_t>{4});
    own.erase("local_rotary_base"), own["window"] = 0;   // as older versions wrote it
    CHECK(read_config(own).local_rotary_base == 0);
    CHECK_FALSE(read_config(own).has_windows());
}

TEST_CASE("config.json: rope's base that a file leaves out is the default of its class") {
    const std::map<HfClass, double> bases = {{HfClass::kLlama, 1e4}, {HfClass::kQwen3Moe, 1e4},
                                             {HfClass::kMixtral, 1e6}, {HfClass::kSolarOpen, 1e6},
                                             {HfClass::kOlmo3, 5e5}, {HfClass::kGemma3, 1e6},
                                             {HfClass::kGptOss, 1.5e5}};
    for (const NamedConfig& c : all_configs()) {
        if (!bases.contains(c.hf)) continue;
        Json json = Json::parse(hf_config_json(c.config, Dtype::kBf16));
        for (const char* name : {"rope_theta", "rope_parameters", "rope_scaling"}) json.erase(name);
        CAPTURE(c.name);
        CHECK(read_config(json).rotary_base == bases.at(c.hf));
    }
}

// transformers makes both masks of Gemma-3, also if no layer takes that of the window.
TEST_CASE("config.json: classes with windows in some layers have a length even if no layer has one") {
    for (NamedConfig c : all_configs()) {
        if (c.hf != HfClass::kGemma2 && c.hf != HfClass::kGemma3 && c.hf != HfClass::kGptOss) continue;
        c.config.sliding_window.clear(), c.config.local_rotary_base = 0;
        CHECK(Json::parse(hf_config_json(c.config, Dtype::kBf16))["sliding_window"] > 0);
        CHECK(there_and_back(c.config) == c.config);
    }
}

// As Gemma-3 (local_base 10,000) and OLMo-3 (kBaseOfOthers) have it, in the forms of transformers 4 and 5.
TEST_CASE("config.json: rope by type of layers, there and back") {
    ModelConfig c = llama_config();
    c.sliding_window = {7, 0}, c.local_rotary_base = 10000;
    for (const RopeScaling& scaling :
         {RopeScaling{.factor = 8, .type = RopeScalingType::kLinear},
          RopeScaling{.factor = 4, .original_max_positions = 16, .type = RopeScalingType::kYarn}, RopeScaling{}})
        for (double local_base : {10000.0, kBaseOfOthers})
            for (const char* left_out : {"", "rope_parameters", "rope_scaling"}) {
                c.rope_scaling = scaling;
                c.local_rotary_base = local_base > 0 ? 10000 : c.rotary_base;
                nlohmann::ordered_json json;
                put_rope(json, c, local_base);
                CHECK(json["rope_parameters"]["sliding_attention"]["rope_theta"] == c.local_rotary_base);
                CHECK(json.contains("rope_local_base_freq") == (local_base > 0));
                json.erase(left_out);
                const Json object = Json::parse(json.dump());
                const HfFields fields(object, "x");
                ModelConfig read = c;
                read.rope_scaling = {}, read.local_rotary_base = 0;
                if (local_base > 0) read.rotary_base = 1;   // of the class; OLMo-3 needs dictionaries for another one
                read_rope(fields, read, local_base);
                CHECK(read == c);
            }
    const Json scaled = {{"rope_parameters", {{"full_attention", {{"rope_type", "default"}}},
                                              {"sliding_attention", {{"rope_type", "linear"}, {"factor", 2.0}}}}}};
    check_contains(error_of([&] { read_rope(HfFields(scaled, "x"), c, 10000); }), {"sliding_attention", "no scaling"});
}

// The parameters of each published model, as the headers of its safetensors files have them.
TEST_CASE("presets of published models have their number of parameters") {
    const std::map<std::string, int64_t> published = {
        {"gpt2-124M", 124439808},       {"gpt2-350M", 354823168},        {"gpt2-774M", 774030080},
        {"gpt2-1558M", 1557611200},     {"llama3-8B", 8030261248},       {"llama3.1-8B", 8030261248},
        {"llama3.1-70B", 70553706496},  {"llama3.2-1B", 1235814400},     {"llama3.2-3B", 3212749824},
        {"llama3.3-70B", 70553706496},  {"mistral-7B-v0.3", 7248023552}, {"qwen2.5-0.5B", 494032768},
        {"qwen2.5-1.5B", 1543714304},   {"qwen2.5-7B", 7615616512},      {"qwen3-0.6B", 596049920},
        {"qwen3-1.7B", 1720574976},     {"qwen3-4B", 4022468096},        {"qwen3-8B", 8190735360},
        {"smollm2-135M", 134515008},    {"smollm2-360M", 361821120},     {"smollm2-1.7B", 1711376384},
        {"mixtral-8x7B", 46702792704},  {"olmoe-1B-7B", 6919161856},     {"qwen3-30B-A3B", 30532122624},
        {"gpt-oss-20B", 20914757184}};
    size_t own = 0;
    for (const ModelPreset& preset : model_presets()) {
        CAPTURE(preset.name);
        const auto found = published.find(preset.name);
        if (found == published.end()) own++;
        else CHECK(make_param_table(preset.config).param_elems == found->second);
    }
    CHECK(own == 4);   // gpt2-tiny, llama-tiny, llama3-small, moe-tiny
    CHECK(published.size() + own == model_presets().size());
}
