#include "llmc/config/model_config.h"

#include <algorithm>

#include "llmc/base/check.h"

namespace {

ModelConfig gpt2(int64_t layers, int64_t hidden, int64_t heads) {
    return {.num_layers = layers, .hidden_size = hidden, .ffn_hidden_size = 4 * hidden, .num_attention_heads = heads,
            .num_query_groups = heads, .kv_channels = hidden / heads, .rope_scaling = {}};
}

ModelConfig llama(int64_t layers, int64_t hidden, int64_t ffn, int64_t heads, int64_t groups) {
    return {.num_layers = layers, .hidden_size = hidden, .ffn_hidden_size = ffn, .num_attention_heads = heads,
            .num_query_groups = groups, .kv_channels = hidden / heads, .vocab_size = 128256, .max_positions = 8192,
            .norm = Norm::kRmsNorm, .position = PositionEmbedding::kRope, .activation = Activation::kSwiglu,
            .rotary_base = 500000, .rope_scaling = {}, .linear_bias = LinearBias::kNone, .tied_head = false};
}

// A model with another vocabulary, length of the context and rope than the one it resembles.
ModelConfig pretrained(ModelConfig c, int64_t vocab, int64_t context, double rotary_base, bool tied) {
    c.vocab_size = vocab;
    c.max_positions = context;
    c.rotary_base = rotary_base;
    c.tied_head = tied;
    return c;
}

// Llama 3.1 to 3.3.
ModelConfig llama31(ModelConfig c, double rope_factor, bool tied) {
    c = pretrained(c, 128256, 131072, 500000, tied);
    c.rope_scaling = {.factor = rope_factor};
    return c;
}

ModelConfig qwen25(int64_t layers, int64_t hidden, int64_t ffn, int64_t heads, int64_t groups, int64_t vocab,
                   int64_t context, bool tied) {
    ModelConfig c = pretrained(llama(layers, hidden, ffn, heads, groups), vocab, context, 1e6, tied);
    c.linear_bias = LinearBias::kQkv;
    c.norm_eps = 1e-6;
    return c;
}

ModelConfig qwen3(int64_t layers, int64_t hidden, int64_t ffn, int64_t heads, bool tied) {
    ModelConfig c = pretrained(llama(layers, hidden, ffn, heads, 8), 151936, 40960, 1e6, tied);
    c.kv_channels = 128;
    c.qk_norm = true;
    c.norm_eps = 1e-6;
    return c;
}

ModelConfig mixture(ModelConfig c, int64_t experts, int64_t of_token) {
    c.num_experts = experts;
    c.experts_per_token = of_token;
    return c;
}

ModelConfig olmoe() {
    ModelConfig c = mixture(pretrained(llama(16, 2048, 1024, 16, 16), 50304, 4096, 10000, false), 64, 8);
    c.qk_norm = c.qk_norm_whole = true;
    c.normalize_experts = false;
    return c;
}

ModelConfig gpt_oss(int64_t layers, int64_t experts) {
    ModelConfig c = mixture(pretrained(llama(layers, 2880, 2880, 64, 8), 201088, 131072, 150000, false), experts, 4);
    c.kv_channels = 64;
    c.sliding_window = {128, 0};
    c.activation = Activation::kClampedSwiglu;
    c.linear_bias = LinearBias::kAll;
    c.attention_sinks = true;
    c.rope_scaling = {.factor = 32, .original_max_positions = 4096, .type = RopeScalingType::kYarn, .truncate = false};
    return c;
}

std::vector<ModelPreset> make_presets() {
    // A vocabulary of 257: 256 bytes and a document separator.
    const ModelConfig llama_small = pretrained(llama(12, 2048, 5504, 16, 4), 128256, 2048, 500000, false),
                      gpt2_tiny = pretrained(gpt2(4, 128, 4), 257, 256, 10000, true),
                      llama_tiny = pretrained(llama(4, 128, 352, 4, 2), 257, 256, 10000, false);
    const ModelConfig llama_8b = llama(32, 4096, 14336, 32, 8), llama_70b = llama(80, 8192, 28672, 64, 8);
    ModelConfig smollm_135m = pretrained(llama(30, 576, 1536, 9, 3), 49152, 8192, 100000, true);
    smollm_135m.init_std = 1.0 / 24;
    ModelConfig qwen3_30b = mixture(qwen3(48, 2048, 768, 32, false), 128, 8);
    qwen3_30b.num_query_groups = 4;
    ModelConfig moe_tiny = mixture(pretrained(llama(4, 128, 96, 4, 2), 257, 256, 10000, false), 8, 2);
    moe_tiny.qk_norm = true;

    return {
        {"gpt2-124M", "gpt2", 1024, gpt2(12, 768, 12)},
        {"gpt2-350M", "gpt2", 1024, gpt2(24, 1024, 16)},
        {"gpt2-774M", "gpt2", 1024, gpt2(36, 1280, 20)},
        {"gpt2-1558M", "gpt2", 1024, gpt2(48, 1600, 25)},
        {"gpt2-tiny", "gpt2", 128, gpt2_tiny},
        {"gpt-oss-20B", "llama", 4096, gpt_oss(24, 32)},
        {"llama3-8B", "llama", 8192, llama_8b},
        {"llama3.1-8B", "llama", 8192, llama31(llama_8b, 8, false)},
        {"llama3.1-70B", "llama", 8192, llama31(llama_70b, 8, false)},
        {"llama3.2-1B", "llama", 8192, llama31(llama(16, 2048, 8192, 32, 8), 32, true)},
        {"llama3.2-3B", "llama", 8192, llama31(llama(28, 3072, 8192, 24, 8), 32, true)},
        {"llama3.3-70B", "llama", 8192, llama31(llama_70b, 8, false)},
        {"llama3-small", "llama", 2048, llama_small},
        {"llama-tiny", "llama", 128, llama_tiny},
        {"mistral-7B-v0.3", "llama", 8192, pretrained(llama_8b, 32768, 32768, 1e6, false)},
        {"mixtral-8x7B", "llama", 8192, mixture(pretrained(llama_8b, 32000, 32768, 1e6, false), 8, 2)},
        {"moe-tiny", "llama", 128, moe_tiny},
        {"olmoe-1B-7B", "llama", 4096, olmoe()},
        {"qwen2.5-0.5B", "llama", 8192, qwen25(24, 896, 4864, 14, 2, 151936, 32768, true)},
        {"qwen2.5-1.5B", "llama", 8192, qwen25(28, 1536, 8960, 12, 2, 151936, 131072, true)},
        {"qwen2.5-7B", "llama", 8192, qwen25(28, 3584, 18944, 28, 4, 152064, 131072, false)},
        {"qwen3-0.6B", "llama", 8192, qwen3(28, 1024, 3072, 16, true)},
        {"qwen3-1.7B", "llama", 8192, qwen3(28, 2048, 6144, 16, true)},
        {"qwen3-4B", "llama", 8192, qwen3(36, 2560, 9728, 32, true)},
        {"qwen3-8B", "llama", 8192, qwen3(36, 4096, 12288, 32, false)},
        {"qwen3-30B-A3B", "llama", 8192, qwen3_30b},
        {"smollm2-135M", "llama", 2048, smollm_135m},
        {"smollm2-360M", "llama", 2048, pretrained(llama(32, 960, 2560, 15, 5), 49152, 8192, 100000, true)},
        {"smollm2-1.7B", "llama", 2048, pretrained(llama(24, 2048, 8192, 32, 32), 49152, 8192, 130000, true)},
    };
}

}  // namespace

const std::vector<ModelPreset>& model_presets() {
    static const std::vector<ModelPreset> presets = make_presets();
    return presets;
}

const ModelPreset* find_model_preset(const std::string& name) {
    for (const ModelPreset& preset : model_presets())
        if (name == preset.name) return &preset;
    return nullptr;
}

int64_t ModelConfig::largest_window() const {
    return sliding_window.empty() ? 0 : *std::max_element(sliding_window.begin(), sliding_window.end());
}

bool ModelConfig::same_windows() const {
    return std::all_of(sliding_window.begin(), sliding_window.end(), [&](int64_t w) { return w == sliding_window[0]; });
}

bool ModelConfig::one_window() const {
    return std::all_of(sliding_window.begin(), sliding_window.end(),
                       [most = largest_window()](int64_t w) { return w == 0 || w == most; });
}

bool ModelConfig::hides_keys(int64_t seq_length) const {
    return std::any_of(sliding_window.begin(), sliding_window.end(),
                       [&](int64_t w) { return w > 0 && w < seq_length; });
}

std::string ModelConfig::window_text() const {
    std::string text;
    for (const int64_t window : sliding_window) text += (text.empty() ? "" : ",") + std::to_string(window);
    return text.empty() ? "0" : text;
}

void shorten_pattern(ModelConfig& c) {
    std::vector<int64_t> layers;
    for (int64_t l = 0; l < c.num_layers; l++) layers.push_back(c.window(l));
    ptrdiff_t period = 1;
    while (!std::equal(layers.begin() + period, layers.end(), layers.begin())) period++;
    c.sliding_window.assign(layers.begin(), layers.begin() + period);
    if (!c.has_windows()) c.sliding_window.clear();
    const bool same_rope = c.local_rotary_base == c.rotary_base && c.rope_scaling.factor == 0;
    if (same_rope || !c.has_windows()) c.local_rotary_base = 0;
}

bool is_llama_like(const ModelConfig& c) {
    return c.norm == Norm::kRmsNorm && c.position == PositionEmbedding::kRope && c.activation == Activation::kSwiglu;
}

static bool has_no_or_attention_biases(const ModelConfig& c) {
    return c.linear_bias == LinearBias::kNone || c.linear_bias == LinearBias::kAttention;
}

std::vector<std::string> model_config_errors(const ModelConfig& c) {
    std::vector<std::string> errors;
    auto rule = [&](bool holds, const std::string& text) {
        if (!holds) errors.push_back(text);
    };
    rule(c.num_query_groups > 0 && c.num_attention_heads % c.num_query_groups == 0,
         strf("--num-attention-heads %lld must be a multiple of --num-query-groups %lld",
              ll(c.num_attention_heads), ll(c.num_query_groups)));
    const std::pair<const char*, int64_t> sizes[] = {{"hidden-size", c.hidden_size},
                                                     {"ffn-hidden-size", c.ffn_hidden_size},
                                                     {"kv-channels", c.kv_channels}};
    for (const auto& [option, size] : sizes)
        rule(size % 8 == 0, strf("--%s %lld must be a multiple of 8 (16-byte rows in BF16)", option, ll(size)));
    rule(c.kv_channels <= 256, strf("--kv-channels %lld: attention takes at most 256", ll(c.kv_channels)));
    rule(c.vocab_size >= 2, strf("vocabulary of %lld tokens: at least 2 needed", ll(c.vocab_size)));
    rule(!c.qk_norm_whole || ((c.has_experts() ? !c.has_windows() : !c.pre_norms()) && c.qk_norm
                              && c.q_width() == c.hidden_size),
         "QK-norm over all heads (OLMoE, OLMo-2 and 3) needs --qk-layernorm, heads of --hidden-size elements in all "
         "and, with --num-experts, no --sliding-window");
    rule(c.pre_norms() || (is_llama_like(c) && !c.has_experts() && c.qk_norm_whole && has_no_or_attention_biases(c)),
         "norms after attention and the MLP (OLMo-2 and 3) need --normalization RMSNorm, --position-embedding-type "
         "rope, --activation swiglu, QK-norm over all heads, no --num-experts and --linear-bias none or attention: "
         "transformers has no other class");
    rule(c.one_window() || !c.post_norms(),
         strf("--sliding-window %s: this model's class has one length of windows", c.window_text().c_str()));
    const bool gemma2 = c.gemma && !c.qk_norm;
    rule(!c.post_norms() || gemma2 || !c.has_windows() || c.local_rotary_base > 0 || c.rope_scaling.factor == 0,
         "rope scaling in layers with a window: this model's class has it in the other layers alone");
    rule(c.shared_experts == 0 || (!c.qk_norm_whole && !c.has_windows()),
         "--moe-shared-experts needs a model without --sliding-window and without QK-norm over all heads, as dots.llm1 "
         "and Solar-Open: transformers has no other class");
    rule(c.gemma == (c.norm_place == NormPlace::kBoth)
             && (!c.gemma || (c.norm == Norm::kRmsNorm && c.position == PositionEmbedding::kRope
                              && c.activation == Activation::kGeglu && !c.has_experts() && has_no_or_attention_biases(c)
                              && c.hidden_size % c.num_attention_heads == 0)),
         "Gemma needs --normalization RMSNorm, --position-embedding-type rope, --activation geglu, no --num-experts, "
         "--linear-bias none or attention, and a --hidden-size that is a multiple of --num-attention-heads: "
         "transformers has no other class");
    rule(!gemma2 || c.local_rotary_base == 0,
         "Gemma without --qk-layernorm is Gemma-2, which has the same rope in all layers");
    rule((c.attention_softcap == 0 || gemma2) && (c.logits_softcap == 0 || c.gemma),
         "soft caps: transformers has them in Gemma-2, whose queries and keys have no norms, and that of the logits in "
         "Gemma-3: leave --qk-layernorm as in the model");
    rule(!c.fused_projections || (is_llama_like(c) && c.pre_norms() && !c.has_experts() && !c.qk_norm && !c.granite()
                                  && c.linear_bias == LinearBias::kNone && c.same_windows()
                                  && c.local_rotary_base == 0),
         "fused projections (Phi-3) need --normalization RMSNorm, --position-embedding-type rope, --activation swiglu, "
         "--linear-bias none, the same --sliding-window in all layers, and no --num-experts or --qk-layernorm: "
         "transformers has no other class");
    rule(c.rotary_dim == 0 || (c.fused_projections && c.rotary_dim % 2 == 0 && c.rotary_dim <= c.kv_channels),
         strf("%lld rotated elements of each head: an even number up to --kv-channels is needed, and fused projections "
              "(Phi-3)", ll(c.rotary_dim)));
    const RopeScaling& rope = c.rope_scaling;
    const auto pairs = static_cast<size_t>(c.rotated() / 2);
    rule((rope.factor > 0 && rope.type == RopeScalingType::kLongrope)
             == (c.fused_projections && rope.short_factors.size() == pairs && rope.long_factors.size() == pairs),
         "--rope-scaling-type longrope is that of a Phi-3 whose config.json has its factors (--load)");
    rule(!c.granite() || (is_llama_like(c) && !c.has_experts() && !c.qk_norm && c.linear_bias != LinearBias::kQkv
                          && !c.has_windows()),
         "Granite's multipliers need --normalization RMSNorm, --position-embedding-type rope, --activation swiglu, no "
         "--num-experts, --qk-layernorm, --sliding-window or --linear-bias qkv: transformers has no other class");
    rule(!c.attention_sinks || c.gpt_oss()
             || !(c.has_experts() || c.post_norms() || c.granite() || c.fused_projections),
         "--attention-sinks needs a model without --num-experts, or with --activation clamped_swiglu as gpt-oss, and "
         "not OLMo-2, OLMo-3, Gemma, Granite or Phi-3: leave it out");
    if (!c.has_experts()) return errors;
    rule(c.dense_layers == 0 || (c.dense_layers < c.num_layers && c.dense_ffn_size % 8 == 0 && c.qk_norm
                                 && !c.qk_norm_whole),
         strf("%lld layers without experts, of width %lld: fewer than --num-layers and a multiple of 8 are needed, and "
              "--qk-layernorm for each head, as Qwen3-MoE and dots.llm1: transformers has no other class",
              ll(c.dense_layers), ll(c.dense_ffn_size)));
    rule((c.gpt_oss() ? c.one_window() : c.same_windows()) && c.local_rotary_base == 0,
         "--num-experts needs the same --sliding-window and rope in all layers, as Qwen3-MoE and Mixtral; gpt-oss has "
         "a window of one length in some of them");
    rule(c.experts_per_token <= c.num_experts, strf("--moe-router-topk %lld exceeds --num-experts %lld",
                                                    ll(c.experts_per_token), ll(c.num_experts)));
    if (c.gpt_oss()) {
        rule(c.norm == Norm::kRmsNorm && c.position == PositionEmbedding::kRope && c.attention_sinks && c.mlp_bias()
                 && c.pre_norms() && !c.qk_norm && c.normalize_experts && c.shared_experts == 0,
             strf("--num-experts %lld with --activation clamped_swiglu is gpt-oss and needs --normalization RMSNorm, "
                  "--position-embedding-type rope, --attention-sinks, --linear-bias all (or mlp), and no "
                  "--qk-layernorm or --moe-shared-experts", ll(c.num_experts)));
        return errors;
    }
    rule(is_llama_like(c) && has_no_or_attention_biases(c) && (c.linear_bias == LinearBias::kNone || c.qk_norm)
             && (c.normalize_experts || c.qk_norm || c.sigmoid_router()),
         strf("--num-experts %lld needs --normalization RMSNorm, --position-embedding-type rope, --activation swiglu "
              "and --linear-bias none, as Mixtral, or also --qk-layernorm and biases of attention, as Qwen3-MoE and "
              "OLMoE: transformers has no other class", ll(c.num_experts)));
    return errors;
}
