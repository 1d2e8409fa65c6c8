// Shape of a decoder, and the presets. GPT-2 and Llama are two configurations of one transformer.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "llmc/base/activation.h"

enum class Norm { kLayerNorm, kRmsNorm };
// Norms of a layer: before attention and the MLP; after each, before its result is added to the stream (OLMo-2); both
// (Gemma-2 and 3).
enum class NormPlace { kPre, kPost, kBoth };
enum class PositionEmbedding { kLearned, kRope };
// Which linears of a layer have biases. all: as in GPT-2; none: as in Llama; qkv: the projection to Q, K and V, as in
// Qwen2; attention: that and the output projection; mlp: those of the MLP.
enum class LinearBias { kAll, kNone, kQkv, kAttention, kMlp };
struct LinearBiasWord {
    const char* name;
    LinearBias kind;
};
inline constexpr LinearBiasWord kLinearBiasWords[] = {{"all", LinearBias::kAll},
                                                      {"none", LinearBias::kNone},
                                                      {"qkv", LinearBias::kQkv},
                                                      {"attention", LinearBias::kAttention},
                                                      {"mlp", LinearBias::kMlp}};

enum class RopeScalingType { kLlama3, kYarn, kLinear, kLongrope };

// Scaling of rope for longer contexts than the original one, by the rules that Hugging Face calls rope_type "llama3",
// "yarn", "linear" and "longrope"; factor 0 means no scaling. See rope_table.h.
struct RopeScaling {
    double factor = 0;
    double low_freq_factor = 1;    // llama3
    double high_freq_factor = 4;
    int64_t original_max_positions = 8192;
    RopeScalingType type = RopeScalingType::kLlama3;
    double beta_fast = 32;         // yarn
    double beta_slow = 1;
    double attention_factor = 0;   // multiplies cosines and sines; 0: by the factor
    bool truncate = true;          // rounds the range of interpolated frequencies outwards to whole pairs
    // longrope (Phi-3): divisors of the pairs' frequencies, for sequences up to the original length and longer ones.
    std::vector<double> short_factors = {}, long_factors = {};
    bool operator==(const RopeScaling&) const = default;
};

inline constexpr int64_t kMaxExperts = 1024, kMaxExpertsPerToken = 32;

struct ModelConfig {
    int64_t num_layers = 12;
    int64_t hidden_size = 768;
    int64_t ffn_hidden_size = 3072;
    int64_t num_attention_heads = 12;
    int64_t num_query_groups = 12;   // key/value heads
    int64_t kv_channels = 64;        // elements per head
    int64_t vocab_size = 50257;      // true size, without padding, as in data and exports
    int64_t max_positions = 1024;    // learned positions, or the context length of a rope model
    // By layer: the number of keys that a query attends to, its own included; 0: all up to its own. The layers after
    // those of the list repeat it; empty: no windows. See shorten_pattern.
    std::vector<int64_t> sliding_window = {};
    Norm norm = Norm::kLayerNorm;
    NormPlace norm_place = NormPlace::kPre;
    PositionEmbedding position = PositionEmbedding::kLearned;
    Activation activation = Activation::kGelu;
    double rotary_base = 10000;
    int64_t rotary_dim = 0;          // elements of a head that are rotated, the first ones; 0: all
    RopeScaling rope_scaling;
    double local_rotary_base = 0;    // rope's base in layers with a window, which have no scaling; 0: rope as in others
    LinearBias linear_bias = LinearBias::kAll;
    bool qk_norm = false;
    bool qk_norm_whole = false;      // over all heads of Q and of K (OLMoE, OLMo-2), not each
    bool attention_sinks = false;    // a learned logit of each query head joins its softmax
    // Mixture of experts: a token goes to experts_per_token of num_experts MLPs of width ffn_hidden_size; 0: one MLP.
    int64_t num_experts = 0;
    int64_t experts_per_token = 2;
    bool normalize_experts = true;   // the weights of a token's experts add up to 1
    // MLPs of the same width that every token uses, too, as in DeepSeek-V3. Such models have its router, see
    // sigmoid_router(): classes of transformers have both or neither.
    int64_t shared_experts = 0;
    double routed_scale = 1;         // of the weights of a token's other experts
    // The first layers, which have one MLP of a width of their own instead (DeepSeek-V3, dots.llm1).
    int64_t dense_layers = 0, dense_ffn_size = 0;
    bool tied_head = true;
    // Granite: embeddings times the first, results of attention and MLP times the second before they are added to the
    // stream, logits divided by the third.
    double embedding_multiplier = 1, residual_multiplier = 1, logits_scaling = 1;
    double attention_multiplier = 0;   // of attention scores (Granite, Gemma); 0: 1 / sqrt(kv_channels)
    // Soft caps c of attention scores (Gemma-2) and of logits (also Gemma-3), which become c tanh(x / c); 0: none.
    double attention_softcap = 0, logits_softcap = 0;
    bool fused_projections = false;    // Phi-3: files have Q, K and V in one tensor, and gate and up in another
    // Gemma-3, and without qk_norm Gemma-2: embeddings times sqrt(hidden size); files have norm weights minus 1.
    bool gemma = false;
    double norm_eps = 1e-5;
    double init_std = 0.02;
    bool operator==(const ModelConfig&) const = default;

    // Stored vocabulary rows: vocab_size rounded up to a multiple of 128, which suits the tensor cores and is divisible
    // by every rank count up to 128 that is a power of two. Padded logits are masked, padded rows are never exported.
    int64_t padded_vocab() const { return (vocab_size + 127) / 128 * 128; }
    int64_t window(int64_t layer) const {
        const auto length = static_cast<int64_t>(sliding_window.size());
        return length == 0 ? 0 : sliding_window[static_cast<size_t>(layer % length)];
    }
    int64_t largest_window() const;
    bool has_windows() const { return largest_window() > 0; }
    std::string window_text() const;             // "128,128,0"; "0" without windows
    bool hides_keys(int64_t seq_length) const;   // whether a window does
    bool same_windows() const;   // all layers have the same, or none has one
    bool one_window() const;     // all layers that have one have the same
    bool local_rope(int64_t layer) const { return local_rotary_base > 0 && window(layer) > 0; }
    int64_t q_width() const { return num_attention_heads * kv_channels; }
    int64_t rotated() const { return rotary_dim > 0 ? rotary_dim : kv_channels; }
    int64_t kv_width() const { return num_query_groups * kv_channels; }
    int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
    bool qkv_bias() const {
        return linear_bias == LinearBias::kAll || linear_bias == LinearBias::kQkv
               || linear_bias == LinearBias::kAttention;
    }
    bool proj_bias() const { return linear_bias == LinearBias::kAll || linear_bias == LinearBias::kAttention; }
    bool mlp_bias() const { return linear_bias == LinearBias::kAll || linear_bias == LinearBias::kMlp; }
    int64_t up_width() const { return activation_inputs(activation, ffn_hidden_size); }   // of one expert
    bool pre_norms() const { return norm_place != NormPlace::kPost; }
    bool post_norms() const { return norm_place != NormPlace::kPre; }
    bool granite() const {
        return !gemma && (embedding_multiplier != 1 || residual_multiplier != 1 || logits_scaling != 1
                          || attention_multiplier > 0);
    }
    // The stream is kept divided by residual_multiplier: then a result is added as it is, and norms, to which the size
    // of the stream makes no difference but for epsilon, have that of stream_eps().
    double stream_eps() const { return norm_eps / (residual_multiplier * residual_multiplier); }
    bool has_experts() const { return num_experts > 0; }
    bool has_experts(int64_t layer) const { return has_experts() && layer >= dense_layers; }
    int64_t moe_layers() const { return has_experts() ? num_layers - dense_layers : 0; }
    int64_t ffn_size(int64_t layer) const {   // of one expert
        return has_experts() && !has_experts(layer) ? dense_ffn_size : ffn_hidden_size;
    }
    // The router's scores are sigmoids, and a bias that balances the experts is added for the choice, see router_bias.
    bool sigmoid_router() const { return shared_experts > 0; }
    // Experts and router have biases.
    bool gpt_oss() const { return has_experts() && activation == Activation::kClampedSwiglu; }
    // Heads of Q and of K, and elements of each, as qk-norm takes them.
    int64_t qk_norm_heads(int64_t heads) const { return qk_norm_whole ? 1 : heads; }
    int64_t qk_norm_width() const { return qk_norm_whole ? q_width() : kv_channels; }
    int64_t qk_norm_key_width() const { return qk_norm_whole ? kv_width() : kv_channels; }
};

struct ModelPreset {
    const char* name;
    const char* family;    // "gpt2" or "llama": the executable that offers it
    int64_t seq_length;    // default --seq-length
    ModelConfig config;
};
const std::vector<ModelPreset>& model_presets();
const ModelPreset* find_model_preset(const std::string& name);  // null if unknown

// Norms, position embedding and activation of Llama.
bool is_llama_like(const ModelConfig& config);
// Makes sliding_window the shortest list for the number of layers, empty without windows, and local_rotary_base 0 if it
// changes nothing, so that equal models have equal configurations.
void shorten_pattern(ModelConfig& config);

// One line per violated rule; empty if the configuration is valid.
std::vector<std::string> model_config_errors(const ModelConfig& config);
