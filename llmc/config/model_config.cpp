#include "llmc/config/model_config.h"

#include "llmc/base/check.h"

namespace {

ModelConfig gpt2(int64_t layers, int64_t hidden, int64_t heads) {
    ModelConfig c;
    c.num_layers = layers;
    c.hidden_size = hidden;
    c.ffn_hidden_size = 4 * hidden;
    c.num_attention_heads = c.num_query_groups = heads;
    c.kv_channels = hidden / heads;
    return c;
}

ModelConfig llama(int64_t layers, int64_t hidden, int64_t ffn, int64_t heads, int64_t groups) {
    ModelConfig c;
    c.num_layers = layers;
    c.hidden_size = hidden;
    c.ffn_hidden_size = ffn;
    c.num_attention_heads = heads;
    c.num_query_groups = groups;
    c.kv_channels = hidden / heads;
    c.vocab_size = 128256;
    c.max_positions = 8192;
    c.norm = Norm::kRmsNorm;
    c.position = PositionEmbedding::kRope;
    c.activation = Activation::kSwiglu;
    c.rotary_base = 500000;
    c.linear_bias = false;
    c.tied_head = false;
    return c;
}

std::vector<ModelPreset> make_presets() {
    ModelConfig llama32_1b = llama(16, 2048, 8192, 32, 8);
    llama32_1b.tied_head = true;
    llama32_1b.max_positions = 131072;
    llama32_1b.rope_scaling = {.factor = 32};

    ModelConfig llama_small = llama(12, 2048, 5504, 16, 4);
    llama_small.max_positions = 2048;

    ModelConfig gpt2_tiny = gpt2(4, 128, 4);
    gpt2_tiny.vocab_size = 257;  // 256 bytes and a document separator
    gpt2_tiny.max_positions = 256;

    ModelConfig llama_tiny = llama(4, 128, 352, 4, 2);
    llama_tiny.vocab_size = 257;
    llama_tiny.max_positions = 256;
    llama_tiny.rotary_base = 10000;

    return {
        {"gpt2-124M", "gpt2", 1024, gpt2(12, 768, 12)},
        {"gpt2-350M", "gpt2", 1024, gpt2(24, 1024, 16)},
        {"gpt2-774M", "gpt2", 1024, gpt2(36, 1280, 20)},
        {"gpt2-1558M", "gpt2", 1024, gpt2(48, 1600, 25)},
        {"gpt2-tiny", "gpt2", 128, gpt2_tiny},
        {"llama3-8B", "llama", 8192, llama(32, 4096, 14336, 32, 8)},
        {"llama3.2-1B", "llama", 8192, llama32_1b},
        {"llama3-small", "llama", 2048, llama_small},
        {"llama-tiny", "llama", 128, llama_tiny},
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

std::vector<std::string> model_config_errors(const ModelConfig& c) {
    std::vector<std::string> errors;
    auto rule = [&](bool holds, const std::string& text) {
        if (!holds) errors.push_back(text);
    };
    rule(c.num_query_groups > 0 && c.num_attention_heads % c.num_query_groups == 0,
         strf("--num-attention-heads %lld must be a multiple of --num-query-groups %lld",
              ll(c.num_attention_heads), ll(c.num_query_groups)));
    rule(c.hidden_size % 8 == 0,
         strf("--hidden-size %lld must be a multiple of 8 (16-byte rows in BF16)", ll(c.hidden_size)));
    rule(c.ffn_hidden_size % 8 == 0,
         strf("--ffn-hidden-size %lld must be a multiple of 8 (16-byte rows in BF16)", ll(c.ffn_hidden_size)));
    rule(c.kv_channels % 8 == 0,
         strf("--kv-channels %lld must be a multiple of 8 (16-byte rows in BF16)", ll(c.kv_channels)));
    rule(c.kv_channels <= 256, strf("--kv-channels %lld: attention takes at most 256", ll(c.kv_channels)));
    rule(c.vocab_size >= 2, strf("vocabulary of %lld tokens: at least 2 needed", ll(c.vocab_size)));
    return errors;
}
