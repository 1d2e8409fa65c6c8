// Options that describe the model.
#include <algorithm>

#include "llmc/base/check.h"
#include "llmc/config/config_table.h"

namespace {

// ---- defaults that follow from other options ----

bool is_rope(const Config& c) { return c.shape.position == PositionEmbedding::kRope; }

// Megatron's widths: 4C, or 8C/3 with a gate, which adds a third matrix.
void derive_ffn(Config& c, const Given& given) {
    if (!given.has("hidden-size") && !given.has("activation")) return;
    const bool gated = activation_function(c.shape.activation).gated;
    c.shape.ffn_hidden_size = gated ? std::max<int64_t>(c.shape.hidden_size * 8 / 3 / 64 * 64, 64)
                                    : c.shape.hidden_size * 4;
}

void derive_groups(Config& c, const Given& given) {
    const ModelConfig& preset = find_model_preset(c.model)->config;
    bool grouped = preset.num_query_groups != preset.num_attention_heads;
    if (given.has("num-attention-heads") && !grouped) c.shape.num_query_groups = c.shape.num_attention_heads;
}

void derive_kv_channels(Config& c, const Given& given) {
    if (!given.has("hidden-size") && !given.has("num-attention-heads")) return;
    REQUIRE(c.shape.hidden_size % c.shape.num_attention_heads == 0,
            "--hidden-size %lld is not a multiple of --num-attention-heads %lld: set --kv-channels",
            ll(c.shape.hidden_size), ll(c.shape.num_attention_heads));
    c.shape.kv_channels = c.shape.hidden_size / c.shape.num_attention_heads;
}

void derive_seq_length(Config& c, const Given& given) {
    c.seq_length = find_model_preset(c.model)->seq_length;
    // With --load and without --model the shape is not the preset's.
    const bool loaded = given.has("load") && !given.has("model");
    const bool limited = loaded || given.has("max-position-embeddings") || !is_rope(c);
    if (limited) c.seq_length = std::min(c.seq_length, c.shape.max_positions);
}

// ---- rows ----

// A number, or a list that the layers repeat: "128,128,0" or [128, 128, 0].
OptionValue windows() {
    constexpr int64_t kMost = 1 << 24;
    return {.metavar = "N[,N...]", .expects = strf("integers in [0, %lld], separated by commas", ll(kMost)),
            .parse = parse_integer,
            .set = [](Config& c, const Json& json) {
                int64_t one;
                std::vector<int64_t> list;
                if (json_integer(json, &one)) list = {one};
                else if (!json_tuple(json, ',', {}, &list)) return false;
                if (list.empty() || list.size() > 1024) return false;
                for (const int64_t window : list)
                    if (window < 0 || window > kMost) return false;
                c.shape.sliding_window = list;
                return true;
            },
            .get = [](const Config& c) {
                return c.shape.sliding_window.size() > 1 ? Json(c.shape.window_text()) : Json(c.shape.window(0));
            }};
}

const char* activation_help() {
    static const std::string text = [] {
        std::string functions;
        for (const ActivationFunction& row : kActivations)
            functions += strf("%s %s (%s)", functions.empty() ? ":" : ",", row.name, row.help);
        return "activation function of the feed-forward part" + functions;
    }();
    return text.c_str();
}

void add_model_sizes(std::vector<OptionRow>& rows) {
    add_rows(rows, OptionGroup::kModel, {
        {.name = "model", .value = text(AT(model), "NAME", "the name of a preset"),
         .help = "preset of the model; the other model options override single values of it", .fallback = "gpt2-124M",
         .fallback_llama = "llama3-small", .on_resume = OnResume::kReport},
        {.name = "num-layers", .value = integer(AT(shape.num_layers), 1, 1024), .help = "transformer layers"},
        {.name = "hidden-size", .value = integer(AT(shape.hidden_size), 8, 1 << 17),
         .help = "width of the residual stream, a multiple of 8"},
        {.name = "activation", .value = choice<Activation>(AT(shape.activation), words_of(kActivations)),
         .help = activation_help()},
        {.name = "ffn-hidden-size", .value = integer(AT(shape.ffn_hidden_size), 8, 1 << 19),
         .help = "width of the MLP, a multiple of 8", .derive = derive_ffn,
         .derived = "4x hidden size, 8/3x with a gate (swiglu), if --hidden-size or --activation is set"},
        {.name = "num-attention-heads", .value = integer(AT(shape.num_attention_heads), 1, 1024),
         .help = "query heads"},
        {.name = "num-query-groups", .value = integer(AT(shape.num_query_groups), 1, 1024),
         .help = "key and value heads, a divisor of the query heads", .derive = derive_groups},
        {.name = "kv-channels", .value = integer(AT(shape.kv_channels), 8, 256), .help = "head dim, a multiple of 8",
         .derive = derive_kv_channels, .derived = "hidden size / heads, if one of them is set"},
        {.name = "vocab-size", .value = integer(AT(shape.vocab_size), 2, 1 << 24),
         .help = "number of tokens in the vocabulary; stored rows are padded to a multiple of 128"},
    });
    add_rows(rows, OptionGroup::kBatch, {
        {.name = "seq-length", .value = integer(AT(seq_length), 1, 1 << 24),
         .help = "sequence length in tokens (context length)", .derive = derive_seq_length, .on_resume = kMust,
         .llmc = "-t"},
    });
    add_rows(rows, OptionGroup::kModel, {
        {.name = "max-position-embeddings", .value = integer(AT(shape.max_positions), 1, 1 << 24),
         .help = "number of learned positions, or the context length that a rope model declares",
         .derive = [](Config& c, const Given&) {
             if (is_rope(c)) c.shape.max_positions = std::max(c.shape.max_positions, c.seq_length);
         },
         .derived = "with rope at least --seq-length"},
    });
}

void add_model_layers(std::vector<OptionRow>& rows) {
    add_rows(rows, OptionGroup::kModel, {
        {.name = "normalization",
         .value = choice<Norm>(AT(shape.norm), {{"LayerNorm", Norm::kLayerNorm}, {"RMSNorm", Norm::kRmsNorm}}),
         .help = "kind of the normalization layers"},
        {.name = "norm-epsilon", .value = number(AT(shape.norm_eps), kInsideUnit),
         .help = "added to the variance in a norm layer"},
        {.name = "position-embedding-type",
         .value = choice<PositionEmbedding>(AT(shape.position), {{"learned_absolute", PositionEmbedding::kLearned},
                                            {"rope", PositionEmbedding::kRope}}), .help = "position embedding"},
        {.name = "rotary-base", .value = number(AT(shape.rotary_base), {.low = 1, .high = 1e12}),
         .help = "theta of rope"},
        {.name = "rope-scaling-factor", .value = number(AT(shape.rope_scaling.factor), {.low = 0, .high = 1e6}),
         .help = "scaling factor of --rope-scaling-type for longer contexts than the original one; 0: no scaling"},
        {.name = "rope-scaling-type",
         .value = choice<RopeScalingType>(AT(shape.rope_scaling.type), {{"llama3", RopeScalingType::kLlama3},
                                          {"yarn", RopeScalingType::kYarn}, {"linear", RopeScalingType::kLinear},
                                          {"longrope", RopeScalingType::kLongrope}}),
         .help = "rule of rope scaling: that of Llama 3.1, from 8192 positions, YaRN (arXiv 2309.00071), from the "
                 "preset's, or all positions divided by the factor; a config.json (--load) may have other parameters, "
                 "and alone has those of longrope"},
        {.name = "qk-layernorm", .value = flag(AT(shape.qk_norm)), .help = "RMSNorm over each head of Q and K"},
        {.name = "attention-sinks", .value = flag(AT(shape.attention_sinks)),
         .help = "a learned logit of each query head joins its softmax, so that a query may attend to nothing, as in "
                 "gpt-oss"},
        {.name = "num-experts", .value = integer(AT(shape.num_experts), 0, kMaxExperts),
         .help = "mixture of experts: number of MLPs of --ffn-hidden-size in each layer, of which a token uses "
                 "--moe-router-topk; 0: one MLP"},
        {.name = "moe-router-topk", .value = integer(AT(shape.experts_per_token), 1, kMaxExpertsPerToken),
         .help = "experts of a token"},
        {.name = "moe-shared-experts", .value = integer(AT(shape.shared_experts), 0, 64),
         .help = "with --num-experts: experts that every token uses, too, and DeepSeek-V3's router, which has sigmoids "
                 "and balances by a bias instead of an auxiliary loss"},
        {.name = "linear-bias", .value = choice<LinearBias>(AT(shape.linear_bias), words_of(kLinearBiasWords)),
         .help = "linear layers with biases; qkv: as in Qwen2; attention: qkv and the output projection"},
        {.name = "sliding-window", .value = windows(),
         .help = "keys that a query attends to, its own included, as in Mistral; 0: all earlier ones. A list is "
                 "repeated over the layers: 128,128,0"},
        {.name = "untie-embeddings-and-output-weights", .value = flag(AT(shape.tied_head), false),
         .help = "separate output matrix (LM head) instead of the transposed embedding"},
        {.name = "init-method-std", .value = number(AT(shape.init_std), kInsideUnit),
         .help = "standard deviation of the initial weights", .on_resume = kSilent, .changes = MayChange::kNumerics},
    });
}

}  // namespace

void add_model(std::vector<OptionRow>& rows) {
    add_model_sizes(rows);
    add_model_layers(rows);
}
