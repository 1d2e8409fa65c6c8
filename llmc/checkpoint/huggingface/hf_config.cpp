// Sources: the classes GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig, OlmoeConfig,
// Olmo2Config, Olmo3Config, GraniteConfig, Gemma2Config, Gemma3TextConfig, Phi3Config, MixtralConfig, Dots1Config and
// GptOssConfig of transformers 4 and 5, MinistralConfig and SolarOpenConfig of 5.
#include "llmc/checkpoint/huggingface/hf_config.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "llmc/base/system/files.h"
#include "llmc/checkpoint/huggingface/hf_family.h"
#include "llmc/checkpoint/huggingface/hf_rope.h"
#include "llmc/checkpoint/manifest.h"
#include "llmc/model/parameters/params.h"

namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr int64_t kMaxVocab = int64_t{1} << 24, kMaxLayers = 4096;
constexpr double kMostNormEps = 1, kMostMultiplier = 1e6, kMostCap = 1e6;
constexpr const char* kOwnModelType = "llmfp8";
constexpr const char *kAttentionCap = "attn_logit_softcapping", *kLogitsCap = "final_logit_softcapping";
constexpr const char *kSliding = "sliding_attention", *kFull = "full_attention";

// Fields of Granite, 1 where a file leaves them out.
struct Multiplier {
    const char* name;
    double ModelConfig::*field;
};
constexpr Multiplier kMultipliers[] = {{"embedding_multiplier", &ModelConfig::embedding_multiplier},
                                       {"residual_multiplier", &ModelConfig::residual_multiplier},
                                       {"logits_scaling", &ModelConfig::logits_scaling},
                                       {"attention_multiplier", &ModelConfig::attention_multiplier}};
// Fields of our own class.
struct OwnSize {
    const char* name;
    int64_t ModelConfig::*field;
    int64_t most = kMaxWidth;
};
constexpr OwnSize kOwnSizes[] = {
    {"num_layers", &ModelConfig::num_layers, kMaxLayers}, {"hidden_size", &ModelConfig::hidden_size},
    {"ffn_hidden_size", &ModelConfig::ffn_hidden_size}, {"num_attention_heads", &ModelConfig::num_attention_heads},
    {"num_query_groups", &ModelConfig::num_query_groups}, {"kv_channels", &ModelConfig::kv_channels},
    {"vocab_size", &ModelConfig::vocab_size, kMaxVocab}};
constexpr const char* kDropouts[] = {"resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"};
// ---- writing ----

// The special token ids of the origin, else of GPT-2 and Llama-3, known by the vocabulary size. Others get null,
// because a class's default may be outside the vocabulary or an ordinary token (Llama's is 2) that would end a text.
void put_special_tokens(OrderedJson& out, int64_t vocab_size, const HfOrigin& origin) {
    if (!origin.special_tokens.empty()) return out.update(OrderedJson::parse(origin.special_tokens));
    OrderedJson bos, eos;
    if (vocab_size == 50257) bos = eos = 50256;
    if (vocab_size == 128256) {
        bos = 128000;
        eos = 128001;
    }
    out["bos_token_id"] = bos;
    out["eos_token_id"] = eos;
}

void put_gpt2(OrderedJson& out, const ModelConfig& c) {
    out["architectures"] = {"GPT2LMHeadModel"};
    out["model_type"] = "gpt2";
    out["vocab_size"] = c.vocab_size;
    out["n_positions"] = c.max_positions;
    out["n_ctx"] = c.max_positions;
    out["n_embd"] = c.hidden_size;
    out["n_layer"] = c.num_layers;
    out["n_head"] = c.num_attention_heads;
    out["n_inner"] = nullptr;  // four times the width
    if (c.ffn_hidden_size != 4 * c.hidden_size) out["n_inner"] = c.ffn_hidden_size;
    out["activation_function"] = activation_function(c.activation).hf;
    out["layer_norm_epsilon"] = c.norm_eps;
    out["initializer_range"] = c.init_std;
    // The model was trained without dropout; the class's default is 0.1.
    for (const char* name : {"resid_pdrop", "embd_pdrop", "attn_pdrop"}) out[name] = 0.0;
    out["tie_word_embeddings"] = true;
}

// Without layer_types, Qwen's window applies to the layers from max_window_layers on.
void put_window(OrderedJson& out, const ModelConfig& c, const Family& family) {
    const bool windows = c.has_windows();
    if (family.has(kQwenWindow)) out["use_sliding_window"] = windows;
    out["sliding_window"] = nullptr;
    // Classes with a window in every other layer or so need its length even if no layer has one.
    if (windows || family.full_every > 0) out["sliding_window"] = windows ? c.largest_window() : family.window;
    int64_t first = 0;
    while (first < c.num_layers && c.window(first) == 0) first++;
    if (family.has(kQwenWindow)) out["max_window_layers"] = first;
    if (c.same_windows() && family.full_every == 0) return;
    for (int64_t l = 0; l < c.num_layers; l++)
        out["layer_types"].push_back(c.window(l) > 0 ? kSliding : kFull);
}

void put_experts(OrderedJson& out, const ModelConfig& c, const Family& family) {
    out[experts_field(family)] = c.num_experts;
    out["num_experts_per_tok"] = c.experts_per_token;
    if (family.hf == HfClass::kGptOss) out["swiglu_limit"] = kSwigluLimit;
    else if (family.hf != HfClass::kMixtral) out["norm_topk_prob"] = c.normalize_experts;
    if (family.has(kMoeWidth)) out["moe_intermediate_size"] = c.ffn_hidden_size;
    if (family.has(kSharedExperts)) {
        out["n_shared_experts"] = c.shared_experts;
        out["routed_scaling_factor"] = c.routed_scale;
        out["n_group"] = out["topk_group"] = 1;
        out["first_k_dense_replace"] = c.dense_layers;
    }
    if (family.hf != HfClass::kQwen3Moe) return;
    out["decoder_sparse_step"] = 1;
    out["mlp_only_layers"] = OrderedJson::array();
    for (int64_t l = 0; l < c.dense_layers; l++) out["mlp_only_layers"].push_back(l);
}

void put_gemma(OrderedJson& out, const ModelConfig& c) {
    // A whole number in transformers.
    out["query_pre_attn_scalar"] = c.attention_multiplier > 0 ? std::llround(std::pow(c.attention_multiplier, -2))
                                                              : c.kv_channels;
    const auto put_cap = [&](const char* name, double cap) {
        out[name] = nullptr;   // none; the class's default is one
        if (cap > 0) out[name] = cap;
    };
    put_cap(kLogitsCap, c.logits_softcap);
    if (!c.qk_norm) put_cap(kAttentionCap, c.attention_softcap);
}

// The families differ in a handful of fields.
void put_llama(OrderedJson& out, const ModelConfig& c, const Family& family, int64_t positions) {
    out["architectures"] = {family.architecture};
    out["model_type"] = family.model_type;
    out["vocab_size"] = c.vocab_size;
    out["hidden_size"] = c.hidden_size;
    out["intermediate_size"] = c.dense_layers > 0 ? c.dense_ffn_size : c.ffn_hidden_size;
    out["num_hidden_layers"] = c.num_layers;
    out["num_attention_heads"] = c.num_attention_heads;
    out["num_key_value_heads"] = c.num_query_groups;
    out["head_dim"] = c.kv_channels;
    out[activation_field(family.hf)] = activation_function(c.activation).hf;
    out["max_position_embeddings"] = positions;
    out["initializer_range"] = c.init_std;
    out["rms_norm_eps"] = c.norm_eps;
    if (family.has(kAttentionBias)) out["attention_bias"] = c.proj_bias();
    if (family.has(kMlpBias)) out["mlp_bias"] = c.mlp_bias();
    if (!family.has(kNoWindow)) put_window(out, c, family);
    if (family.hf == HfClass::kGranite)
        for (const Multiplier& row : kMultipliers) out[row.name] = c.*row.field;
    if (family.hf == HfClass::kGranite && c.attention_multiplier == 0)
        out["attention_multiplier"] = 1 / std::sqrt(static_cast<double>(c.kv_channels));
    if (c.gemma) put_gemma(out, c);
    if (family.has(kExperts)) put_experts(out, c, family);
    out["tie_word_embeddings"] = c.tied_head;
    put_rope(out, c, family.local_base);
}

// Writes every field of ModelConfig by its own name, except two names that transformers interprets in every class:
// sliding_window ("window" here) sets the size of its key cache, and it converts rope_scaling ("rope").
void put_own(OrderedJson& out, const ModelConfig& c, int64_t positions) {
    out["architectures"] = {"LlmFp8ForCausalLM"};
    out["model_type"] = kOwnModelType;
    out["auto_map"] = {{"AutoConfig", "configuration_llmfp8.LlmFp8Config"},
                       {"AutoModelForCausalLM", "modeling_llmfp8.LlmFp8ForCausalLM"}};
    for (const OwnSize& row : kOwnSizes) out[row.name] = c.*row.field;
    out["max_positions"] = positions;
    out["norm"] = c.norm == Norm::kLayerNorm ? "layer" : "rms";
    out["position"] = c.position == PositionEmbedding::kLearned ? "learned" : "rope";
    out["activation"] = activation_function(c.activation).name;
    out["rotary_base"] = c.rotary_base;
    out["rope"] = scaling_json(c.rope_scaling);
    out["local_rotary_base"] = c.local_rotary_base;
    for (const LinearBiasWord& word : kLinearBiasWords)
        if (word.kind == c.linear_bias) out["linear_bias"] = word.name;
    out["window"] = c.sliding_window;   // the pattern
    if (c.same_windows()) out["window"] = c.largest_window();
    out["qk_norm"] = c.qk_norm;
    out["attention_sinks"] = c.attention_sinks;
    out["tie_word_embeddings"] = c.tied_head;
    out["norm_eps"] = c.norm_eps;
    out["init_std"] = c.init_std;
}

// ---- reading ----

// Returns the kind of the row whose name is the text of a field; name_of(row) may be null. more: ends the error.
template <typename Rows, typename Name>
auto read_word(const HfFields& f, const char* field, const Rows& rows, const Name& name_of, const char* more = "") {
    const std::string word = f.text(field);
    std::vector<std::string> known;
    for (const auto& row : rows) {
        const char* const name = name_of(row);
        if (name && word == name) return row.kind;
        if (name) known.push_back("\"" + std::string(name) + "\"");
    }
    f.refuse(field, "supported are " + list_text(known, ", ") + more);
}
constexpr const char* kTanh = "; gelu is the tanh approximation";

ModelConfig read_gpt2(const HfFields& f) {
    ModelConfig c;
    c.vocab_size = f.size("vocab_size", kMaxVocab);
    c.max_positions = f.size("n_positions", kMaxPositions);
    c.hidden_size = f.size("n_embd");
    c.num_layers = f.size("n_layer", kMaxLayers);
    c.num_attention_heads = c.num_query_groups = f.size("n_head");
    if (c.hidden_size % c.num_attention_heads != 0) f.refuse("n_head", "it must divide n_embd");
    c.kv_channels = c.hidden_size / c.num_attention_heads;
    c.ffn_hidden_size = f.size_or("n_inner", 4 * c.hidden_size);
    c.norm_eps = f.positive_or("layer_norm_epsilon", 1e-5, kMostNormEps);
    c.init_std = f.number_or("initializer_range", 0.02);
    if (f.has("activation_function") && f.text("activation_function") != "gelu_pytorch_tanh")   // as gelu_new
        c.activation = read_word(f, "activation_function", kActivations,
                                 [](const auto& row) { return row.gated ? nullptr : row.hf; }, kTanh);
    f.only("scale_attn_weights", true, "only scaled attention is supported");
    f.only("scale_attn_by_inverse_layer_idx", false, "this scaling is not supported");
    f.only("tie_word_embeddings", true, "a GPT-2 with an untied head is not supported");
    return c;
}

// Reads the window of each layer; a list of one element is that of all.
std::vector<int64_t> read_windows(const HfFields& f, const Family& family, int64_t layers) {
    if (!family.has(kQwenWindow)) f.only("use_sliding_window", false, "this class has no such field");
    if (family.window == 0 && family.hf != HfClass::kMixtral && family.hf != HfClass::kPhi3)
        f.only("sliding_window", nullptr, "this class has no window");
    f.ignore({"sliding_window", "max_window_layers"});   // Qwen's are read only if it uses them
    if (family.hf == HfClass::kDots1 && !f.object.contains("sliding_window") && !f.has("layer_types")
        && f.integer_or("max_window_layers", 62, 0, kMaxLayers) < layers)
        f.refuse("max_window_layers", "layers from this one on have a window of 4096 if \"sliding_window\" is missing, "
                                      "which is not supported; say null there if they have none");
    if (family.full_every > 0) f.ignore({"sliding_window_pattern", "_sliding_window_pattern"});   // layer_types counts
    int64_t window = 0;
    if (!family.has(kQwenWindow) || f.boolean_or("use_sliding_window", false))   // null: none
        window = f.integer_or("sliding_window", f.object.contains("sliding_window") ? 0 : family.window, 1,
                              kMaxPositions);
    std::vector<int64_t> windows(static_cast<size_t>(layers), window);
    const auto set_full = [&](auto&& is_full) {
        for (int64_t l = 0; l < layers; l++)
            if (is_full(l)) windows[static_cast<size_t>(l)] = 0;
    };
    if (f.has("layer_types")) {
        const Json& types = f.object["layer_types"];
        const auto full = [&](int64_t l) { return types[static_cast<size_t>(l)] == kFull; };
        if (!types.is_array() || types.size() != static_cast<size_t>(layers)
            || !std::all_of(types.begin(), types.end(), [&](const Json& t) {
                   return t == kFull || (t == kSliding && window > 0);
               }))
            f.refuse("layer_types", strf("a list of \"%s\" and, if there is a window, \"%s\" for each of %lld layers "
                                         "is needed", kFull, kSliding, ll(layers)));
        set_full(full);
        if (!family.has(kLayerTypes) && std::count(windows.begin(), windows.end(), window) < layers)
            f.refuse("layer_types", strf("this class has the same window in all layers, %lld", ll(window)));
    } else if (family.full_every > 0) {
        const char *pattern = "sliding_window_pattern", *why = "transformers does not read it: layer_types is needed";
        if (family.hf != HfClass::kGemma3) f.only(pattern, family.full_every, why);
        const int64_t every = f.integer_or(pattern, family.full_every, 1, kMaxLayers);
        f.only("_sliding_window_pattern", every, why);
        set_full([&](int64_t l) { return (l + 1) % every == 0; });
    } else if (family.has(kQwenWindow) && family.hf != HfClass::kQwen3Moe) {
        const int64_t first = f.integer_or("max_window_layers", 28, 0, kMaxLayers);
        set_full([&](int64_t l) { return l < first; });
    }
    return windows;
}

LinearBias read_biases(const HfFields& f, const Family& family) {
    if (!family.has(kMlpBias)) f.only("mlp_bias", false, "this class has no such biases");
    if (family.hf == HfClass::kQwen2) f.ignore({"attention_bias"});
    if (family.hf == HfClass::kQwen2) return LinearBias::kQkv;
    if (!family.has(kAttentionBias)) f.only("attention_bias", false, "this class has no such biases");
    const bool gpt_oss = family.hf == HfClass::kGptOss;
    const bool attention = f.boolean_or("attention_bias", gpt_oss), mlp = gpt_oss || f.boolean_or("mlp_bias", false);
    if (attention) return mlp ? LinearBias::kAll : LinearBias::kAttention;
    return mlp ? LinearBias::kMlp : LinearBias::kNone;
}

void read_experts(const HfFields& f, const Family& family, ModelConfig& c) {
    const HfClass hf = family.hf;
    c.num_experts = f.integer(f.has("num_local_experts") ? "num_local_experts" : experts_field(family), 1, kMaxExperts);
    const bool gpt_oss = hf == HfClass::kGptOss;
    c.experts_per_token = f.integer_or("num_experts_per_tok", hf == HfClass::kMixtral ? 2 : gpt_oss ? 4 : 8, 1,
                                       kMaxExpertsPerToken);
    if (gpt_oss) {
        f.only("swiglu_limit", kSwigluLimit, "only 7 is supported");
        f.only("experts_per_token", c.experts_per_token, "num_experts_per_tok says otherwise");
        f.ignore({"initial_context_length"});   // that of yarn counts
    }
    c.normalize_experts =
        hf == HfClass::kMixtral || gpt_oss || f.boolean_or("norm_topk_prob", hf == HfClass::kSolarOpen);
    c.dense_ffn_size = std::exchange(c.ffn_hidden_size, family.has(kMoeWidth) ? f.size("moe_intermediate_size")
                                                                          : c.ffn_hidden_size);
    if (family.has(kSharedExperts)) {
        c.shared_experts = f.integer_or("n_shared_experts", 1, 1, 64);
        c.routed_scale = f.positive_or("routed_scaling_factor", 1, 1e3);
        for (const char* field : {"n_group", "topk_group"}) f.only(field, 1, "groups of experts are not supported");
        if (hf == HfClass::kDots1) c.dense_layers = f.integer_or("first_k_dense_replace", 0, 0, c.num_layers - 1);
        else f.only("first_k_dense_replace", 0, "only models with experts in all layers are supported");
    }
    f.only("decoder_sparse_step", 1, "experts in every layer but the first ones are supported");
    Json dense = Json::array();
    if (hf == HfClass::kQwen3Moe && f.has("mlp_only_layers"))
        c.dense_layers = std::min(static_cast<int64_t>(f.object["mlp_only_layers"].size()), c.num_layers - 1);
    for (int64_t l = 0; hf == HfClass::kQwen3Moe && l < c.dense_layers; l++) dense.push_back(l);
    f.only("mlp_only_layers", dense, "experts in every layer but the first ones are supported");
    if (c.dense_layers == 0) c.dense_ffn_size = 0;
    f.only("router_jitter_noise", 0, "noise in the router is not supported");
    f.only("clip_qkv", nullptr, "clipped queries, keys and values are not supported");
    f.ignore({"output_router_logits", "router_aux_loss_coef"});   // --moe-aux-loss-coeff is an option of the run
}

void read_gemma(const HfFields& f, HfClass hf, ModelConfig& c) {
    c.attention_multiplier = 1 / std::sqrt(static_cast<double>(f.integer_or("query_pre_attn_scalar", 256, 1, 1 << 20)));
    const auto cap = [&](const char* name, double otherwise) {   // null: none
        return f.object.contains(name) && !f.has(name) ? 0 : f.positive_or(name, otherwise, kMostCap);
    };
    const bool gemma2 = hf == HfClass::kGemma2;
    c.logits_softcap = cap(kLogitsCap, gemma2 ? 30 : 0);
    if (gemma2) c.attention_softcap = cap(kAttentionCap, 50);
    else f.only(kAttentionCap, nullptr, "transformers has no soft cap of Gemma-3's attention scores");
    // Of files of the time when transformers got these classes, without effect now.
    f.ignore({"cache_implementation", "sliding_window_size", "hidden_act"});
    f.only("use_bidirectional_attention", false, "only causal attention is supported");
}

ModelConfig read_llama(const HfFields& f, const Family& family) {
    ModelConfig c;
    c.norm = Norm::kRmsNorm;
    c.position = PositionEmbedding::kRope;
    const bool gemma = c.gemma = is_gemma(family.hf);
    c.attention_sinks = family.hf == HfClass::kGptOss;
    c.activation = gemma ? Activation::kGeglu : c.attention_sinks ? Activation::kClampedSwiglu : Activation::kSwiglu;
    if (c.attention_sinks)   // where a file has no scaling of rope
        c.rope_scaling = {.factor = 32, .original_max_positions = 4096, .type = RopeScalingType::kYarn,
                          .truncate = false};
    if (gemma) c.norm_place = NormPlace::kBoth;
    if (family.has(kPostNorm)) c.norm_place = NormPlace::kPost;
    c.qk_norm_whole = family.has(kQkNormWhole);
    c.qk_norm = family.has(kQkNorm);
    c.vocab_size = f.size("vocab_size", kMaxVocab);
    c.hidden_size = f.size("hidden_size");
    c.rotary_base = family.base;
    if (family.hf == HfClass::kSolarOpen) f.ignore({"intermediate_size"});
    else c.ffn_hidden_size = f.size("intermediate_size");
    c.num_layers = f.size("num_hidden_layers", kMaxLayers);
    c.num_attention_heads = f.size("num_attention_heads");
    const bool groups_left_out = family.groups > 0 && !f.object.contains("num_key_value_heads");
    c.num_query_groups = f.size_or("num_key_value_heads", groups_left_out ? family.groups : c.num_attention_heads);
    // Old files leave head_dim out if it is hidden_size / heads.
    const int64_t quotient = std::max<int64_t>(1, c.hidden_size / c.num_attention_heads);
    c.kv_channels = f.size_or("head_dim", family.head_dim > 0 ? family.head_dim : quotient);
    c.max_positions = f.size("max_position_embeddings", kMaxPositions);
    c.norm_eps = f.positive_or("rms_norm_eps", family.eps, kMostNormEps);
    c.init_std = f.number_or("initializer_range", 0.02);
    c.tied_head = f.boolean_or("tie_word_embeddings", gemma);
    const ActivationFunction& activation = activation_function(c.activation);
    f.only(activation_field(family.hf), activation.hf,
           strf("only \"%s\" (%s) is supported", activation.hf, activation.name).c_str());
    if (family.hf == HfClass::kGranite)
        for (const Multiplier& row : kMultipliers) c.*row.field = f.positive_or(row.name, 1, kMostMultiplier);
    if (gemma) read_gemma(f, family.hf, c);
    c.fused_projections = family.hf == HfClass::kPhi3;
    c.linear_bias = read_biases(f, family);
    c.sliding_window = read_windows(f, family, c.num_layers);
    read_rope(f, c, family.local_base);
    if (family.has(kExperts)) read_experts(f, family, c);
    return c;
}

ModelConfig read_own(const HfFields& f) {
    ModelConfig c;
    for (const OwnSize& row : kOwnSizes) c.*row.field = f.size(row.name, row.most);
    c.max_positions = f.size("max_positions", kMaxPositions);
    c.norm = f.one_of("norm", "layer", Norm::kLayerNorm, "rms", Norm::kRmsNorm);
    c.position = f.one_of("position", "learned", PositionEmbedding::kLearned, "rope", PositionEmbedding::kRope);
    const auto name_of = [](const auto& row) { return row.name; };
    c.activation = read_word(f, "activation", kActivations, name_of, kTanh);
    c.rotary_base = f.positive("rotary_base", kMostBase);
    read_rope_dictionary(f, "rope", c);
    if (f.has("local_rotary_base") && f.number("local_rotary_base") != 0)
        c.local_rotary_base = f.positive("local_rotary_base", kMostBase);
    c.linear_bias = read_word(f, "linear_bias", kLinearBiasWords, name_of);
    if (f.has("window") && f.object["window"].is_array()) c.sliding_window = f.integers("window", 0, kMaxPositions);
    else c.sliding_window = {f.integer_or("window", 0, 0, kMaxPositions)};
    c.qk_norm = f.boolean("qk_norm");
    c.attention_sinks = f.boolean_or("attention_sinks", false);
    c.tied_head = f.boolean("tie_word_embeddings");
    c.norm_eps = f.positive("norm_eps", kMostNormEps);
    c.init_std = f.number("init_std");
    return c;
}

// The fields of every class that change nothing of what is computed in training. Dropout is not applied; dropout_note
// says so.
void ignore_inert(const HfFields& f) {
    f.ignore({"architectures", "auto_map", "model_type", "torch_dtype", "dtype", "transformers_version",
              "_name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_autoset",
              "_flash_attn_2_enabled", "attn_implementation", "use_cache", "use_bfloat16", "torchscript",
              "return_dict", "output_attentions", "output_hidden_states", "gradient_checkpointing",
              "low_cpu_mem_usage", "chunk_size_feed_forward", "transformers.js_config", "transformers_js_config",
              "is_llama_config", "unsloth_fixed", "unsloth_version"});
    // Initial values; how a step of the same function is computed.
    f.ignore({"initializer_range", "pretraining_tp", "reorder_and_upcast_attn", "n_ctx"});
    // The text that goes in and comes out, and the limits of its length.
    f.ignore({"bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "prefix",
              "tokenizer_class", "max_sequence_length", "model_max_length", "max_length", "min_length", "do_sample",
              "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p",
              "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
              "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
              "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
              "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"});
    // Heads of other tasks.
    f.ignore({"finetuning_task", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params",
              "classifier_dropout", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
              "summary_type", "summary_use_proj", "predict_special_tokens", "n_special"});
    for (const char* name : kDropouts) f.ignore({name});
    for (const char* name : {"is_decoder", "is_encoder_decoder", "tie_encoder_decoder", "add_cross_attention",
                             "cross_attention_hidden_size", "use_mrope", "rope_interleaved", "tf_legacy_loss"})
        f.only(name, false, "this is not supported");
    f.only("pruned_heads", Json::object(), "this is not supported");
}

}  // namespace

std::string dropout_note(const std::string& directory) {
    const Json object = read_json_object(directory + "/config.json", kMaxConfigBytes);
    std::vector<std::string> found;
    for (const char* name : kDropouts)
        if (object.contains(name) && object[name] != 0) found.push_back(name + (" " + object[name].dump()));
    if (found.empty()) return "";
    return directory + "/config.json has " + list_text(found, ", ") + ": training here has no dropout";
}

HfOrigin hf_origin(const std::string& directory) {
    const std::string path = directory + "/config.json";
    require_undamaged(directory, "config.json");
    const Json object = read_json_object(path, kMaxConfigBytes);
    const JsonFields f{object, path};
    OrderedJson tokens = OrderedJson::object();
    for (const char* name : kSpecialTokens) {
        if (!object.contains(name)) continue;
        if (object[name].is_array()) f.integers(name, 0, INT32_MAX);
        // Llama-1's files say -1 where there is no padding.
        else if (f.has(name)) f.integer(name, std::string_view(name) == "pad_token_id" ? -1 : 0, INT32_MAX);
        tokens[name] = object[name];
    }
    return {.model_type = f.text("model_type"), .special_tokens = tokens.dump()};
}

std::string hf_config_json(const ModelConfig& config, Dtype weight_dtype, int64_t seq_length, const HfOrigin& origin) {
    // A rope model that was trained on longer sequences than its preset declares supports them.
    const bool rope = config.position == PositionEmbedding::kRope;
    const int64_t positions = rope ? std::max(config.max_positions, seq_length) : config.max_positions;
    OrderedJson out;
    HfClass hf = hf_class(config);
    // Without biases and window, Llama and Mistral are the same.
    if (hf == HfClass::kLlama && config.linear_bias == LinearBias::kNone && origin.model_type == "mistral")
        hf = HfClass::kMistral;
    if (hf == HfClass::kGpt2) put_gpt2(out, config);
    if (hf == HfClass::kOwn) put_own(out, config, positions);
    for (const Family& family : kFamilies)
        if (family.hf == hf) put_llama(out, config, family, positions);
    put_special_tokens(out, config.vocab_size, origin);
    // In the order of kSpecialTokens, which a resumed run has.
    if (hf != HfClass::kOwn && origin.special_tokens.empty()) out["pad_token_id"] = nullptr;
    CHECK(weight_dtype == Dtype::kBf16 || weight_dtype == Dtype::kFp32, "weights in %s", dtype_name(weight_dtype));
    // transformers 4 reads torch_dtype, transformers 5 dtype.
    for (const char* name : {"torch_dtype", "dtype"})
        out[name] = weight_dtype == Dtype::kBf16 ? "bfloat16" : "float32";
    return out.dump(2) + "\n";
}

ModelConfig model_config_from_json(const std::string& text, const std::string& where) {
    const Json object = parse_json_object(text, where);
    const HfFields f{object, where};
    const std::string type = f.text("model_type");
    if (f.has("quantization_config")) {
        const HfFields quantization = f.child("quantization_config");
        const bool mxfp4 = quantization.has("quant_method") && quantization.text("quant_method") == "mxfp4";
        if (type != "gpt_oss" || !mxfp4)
            f.refuse("quantization_config", "quantised weights are not supported, except gpt_oss in mxfp4");
    }
    const Family* family = std::find_if(std::begin(kFamilies), std::end(kFamilies),
                                        [&](const Family& row) { return type == row.model_type; });
    ModelConfig config;
    if (family != std::end(kFamilies))
        config = read_llama(f, *family);
    else if (type == "gpt2")
        config = read_gpt2(f);
    else if (type == kOwnModelType)
        config = read_own(f);
    else
        f.refuse("model_type", "only gpt2, llama, mistral, ministral, qwen2, qwen3, qwen3_moe, olmoe, olmo2, olmo3, "
                 "granite, gemma2, gemma3_text, phi3, mixtral, dots1, solar_open, gpt_oss and llmfp8 are supported");
    ignore_inert(f);
    f.require_all_read();
    shorten_pattern(config);
    const int64_t width = std::max(config.q_width(), config.kv_width());
    REQUIRE(width <= kMaxWidth, "%s: heads of %lld elements in all are too wide", where.c_str(), ll(width));
    const std::vector<std::string> errors = model_config_errors(config);
    if (!errors.empty()) FAIL(kExitBadInput, "%s: %s", where.c_str(), errors[0].c_str());
    return config;
}
