#include "llmc/model/parameters/params.h"

#include <cmath>

HfClass hf_class(const ModelConfig& c) {
    bool gpt2 = c.norm == Norm::kLayerNorm && c.position == PositionEmbedding::kLearned
                && !activation_function(c.activation).gated && c.linear_bias == LinearBias::kAll && !c.qk_norm
                && c.tied_head && c.num_query_groups == c.num_attention_heads && c.q_width() == c.hidden_size
                && !c.has_windows() && !c.attention_sinks;
    if (gpt2) return HfClass::kGpt2;
    if (c.gemma) return c.qk_norm ? HfClass::kGemma3 : HfClass::kGemma2;
    if (c.gpt_oss()) return HfClass::kGptOss;
    if (!c.pre_norms()) return c.has_windows() ? HfClass::kOlmo3 : HfClass::kOlmo2;
    if (!is_llama_like(c) || !c.one_window() || c.local_rotary_base > 0 || c.attention_sinks) return HfClass::kOwn;
    if (c.granite()) return HfClass::kGranite;
    if (c.fused_projections) return HfClass::kPhi3;
    if (c.sigmoid_router()) return c.qk_norm ? HfClass::kDots1 : HfClass::kSolarOpen;
    if (c.has_experts()) return c.qk_norm_whole ? HfClass::kOlmoe : c.qk_norm ? HfClass::kQwen3Moe : HfClass::kMixtral;
    const bool no_bias = c.linear_bias == LinearBias::kNone;
    if (c.qk_norm) return no_bias || c.linear_bias == LinearBias::kAttention ? HfClass::kQwen3 : HfClass::kOwn;
    if (c.linear_bias == LinearBias::kQkv) return HfClass::kQwen2;
    // LlamaConfig refuses a hidden size that the number of heads does not divide, even with a head_dim, and has no
    // sliding window.
    if (c.hidden_size % c.num_attention_heads == 0 && !c.has_windows()) return HfClass::kLlama;
    return !no_bias ? HfClass::kOwn : c.same_windows() ? HfClass::kMistral : HfClass::kMinistral;
}

int ParamTable::find(const std::string& name) const {
    for (size_t i = 0; i < params.size(); i++)
        if (params[i].name == name) return static_cast<int>(i);
    return -1;
}

int ParamTable::layer_of(int param) const {
    if (param == wte || param == wpe) return -1;
    const int layer = params[static_cast<size_t>(param)].layer;
    return layer >= 0 ? layer : static_cast<int>(layers.size());
}

namespace {

// Builds the table with the Hugging Face names of GPT-2, or those that Llama, Mistral and Qwen share.
struct Builder {
    const ModelConfig& c;
    ParamTable table;
    bool gpt2_names;
    OptimizerKind of_layers;

    int add(Param p) {
        for (const HfPart& part : p.hf) table.param_elems += part.rows * p.cols;
        table.params.push_back(std::move(p));
        return static_cast<int>(table.params.size()) - 1;
    }

    int vector(const std::string& name, std::vector<HfPart> hf, int layer, int64_t length,
               Param::Init init = Param::Init::kZeros) {
        return add({.name = name, .rows = length, .layer = layer, .init = init,
                    .minus_one = c.gemma && init == Param::Init::kOnes, .hf = std::move(hf)});
    }
    int vector(const std::string& name, const std::string& hf, int layer, int64_t length,
               Param::Init init = Param::Init::kZeros) {
        return vector(name, whole(hf, length, false), layer, length, init);
    }
    int matrix(const std::string& name, std::vector<HfPart> hf, int layer, int64_t rows, int64_t cols, double std,
               std::vector<int64_t> stacked = {}) {
        if (stacked.empty()) stacked = {rows};
        return add({.name = name, .rows = rows, .cols = cols, .layer = layer, .init = Param::Init::kNormal,
                    .init_std = std, .decay = true, .hf = std::move(hf),
                    .optimizer = layer >= 0 ? of_layers : OptimizerKind::kAdamW, .optimizer_by_option = layer >= 0,
                    .stacked = std::move(stacked)});
    }

    // A parameter that is one Hugging Face tensor; GPT-2 stores its matrices as [in, out].
    std::vector<HfPart> whole(const std::string& hf, int64_t rows, bool is_matrix) {
        return {{.name = hf, .rows = rows, .transposed = gpt2_names && is_matrix}};
    }

    LayerParams layer(int l) {
        const int64_t C = c.hidden_size, F = c.ffn_size(l), q = c.q_width(), kv = c.kv_width();
        const bool gated = activation_function(c.activation).gated, layer_norm = c.norm == Norm::kLayerNorm;
        const std::string own = "layers." + std::to_string(l) + ".";
        const std::string hf = (gpt2_names ? "transformer.h." : "model.layers.") + std::to_string(l) + ".";
        // Residual projections start smaller, so that the residual stream keeps its variance (GPT-2 paper).
        const double residual_std = c.init_std / std::sqrt(2.0 * static_cast<double>(c.num_layers));
        // A linear's bias has the same row ranges as its weight.
        auto qkv_parts = [&](const std::string& suffix) -> std::vector<HfPart> {
            if (gpt2_names) return whole(hf + "attn.c_attn" + suffix, q + 2 * kv, suffix == ".weight");
            if (c.fused_projections) return whole(hf + "self_attn.qkv_proj" + suffix, q + 2 * kv, false);
            return {{.name = hf + "self_attn.q_proj" + suffix, .rows = q},
                    {.name = hf + "self_attn.k_proj" + suffix, .row_begin = q, .rows = kv},
                    {.name = hf + "self_attn.v_proj" + suffix, .row_begin = q + kv, .rows = kv}};
        };
        auto up_parts = [&](const std::string& suffix) -> std::vector<HfPart> {
            if (!gated) return whole(hf + (gpt2_names ? "mlp.c_fc" : "mlp.up_proj") + suffix, F, suffix == ".weight");
            if (c.fused_projections) return whole(hf + "mlp.gate_up_proj" + suffix, 2 * F, false);
            return {{.name = hf + "mlp.gate_proj" + suffix, .rows = F},
                    {.name = hf + "mlp.up_proj" + suffix, .row_begin = F, .rows = F}};
        };
        const std::string norm1 = hf + (gpt2_names ? "ln_1" : "input_layernorm");
        const std::string norm2 = hf + (gpt2_names ? "ln_2" : c.post_norms() ? "pre_feedforward_layernorm"
                                                                                 : "post_attention_layernorm");
        const std::string proj = hf + (gpt2_names ? "attn.c_proj" : "self_attn.o_proj");
        const std::string down = hf + (gpt2_names ? "mlp.c_proj" : "mlp.down_proj");

        LayerParams p;
        auto norm = [&](const std::string& name, const std::string& hf_name, int& weight, int& bias) {
            weight = vector(own + name + ".weight", hf_name + ".weight", l, C, Param::Init::kOnes);
            if (layer_norm) bias = vector(own + name + ".bias", hf_name + ".bias", l, C);
        };
        auto post_norm = [&](const std::string& name, const char* hf_name, int& weight) {
            if (c.post_norms()) weight = vector(own + name, hf + hf_name, l, C, Param::Init::kOnes);
        };
        if (c.pre_norms()) norm("norm1", norm1, p.norm1_weight, p.norm1_bias);
        p.qkv_weight = matrix(own + "qkv.weight", qkv_parts(".weight"), l, q + 2 * kv, C, c.init_std, {q, kv, kv});
        if (c.qkv_bias()) p.qkv_bias = vector(own + "qkv.bias", qkv_parts(".bias"), l, q + 2 * kv);
        if (c.qk_norm) {
            p.q_norm = vector(own + "q_norm.weight", hf + "self_attn.q_norm.weight", l, c.qk_norm_width(),
                              Param::Init::kOnes);
            p.k_norm = vector(own + "k_norm.weight", hf + "self_attn.k_norm.weight", l, c.qk_norm_key_width(),
                              Param::Init::kOnes);
        }
        if (c.attention_sinks) {
            p.sinks = vector(own + "sinks", hf + "self_attn.sinks", l, c.num_attention_heads, Param::Init::kNormal);
            table.params.back().init_std = c.init_std;
        }
        p.proj_weight = matrix(own + "proj.weight", whole(proj + ".weight", C, true), l, C, q, residual_std);
        if (c.proj_bias()) p.proj_bias = vector(own + "proj.bias", proj + ".bias", l, C);
        post_norm("post_norm1.weight", "post_attention_layernorm.weight", p.post_norm1_weight);
        if (c.pre_norms()) norm("norm2", norm2, p.norm2_weight, p.norm2_bias);
        if (c.has_experts(l)) {
            add_experts(p, l, own, hf, residual_std);
            return p;
        }
        const int64_t up = activation_inputs(c.activation, F);
        p.up_weight = matrix(own + "up.weight", up_parts(".weight"), l, up, C, c.init_std,
                             std::vector<int64_t>(gated ? 2 : 1, F));
        if (c.mlp_bias()) p.up_bias = vector(own + "up.bias", up_parts(".bias"), l, up);
        p.down_weight = matrix(own + "down.weight", whole(down + ".weight", C, true), l, C, F, residual_std);
        if (c.mlp_bias()) p.down_bias = vector(own + "down.bias", down + ".bias", l, C);
        post_norm("post_norm2.weight", "post_feedforward_layernorm.weight", p.post_norm2_weight);
        return p;
    }

    // transformers 4 and files of transformers 5 have tensors of each expert.
    void add_experts(LayerParams& p, int l, const std::string& own, const std::string& hf, double residual_std) {
        const int64_t C = c.hidden_size, F = c.ffn_hidden_size, E = c.num_experts;
        const bool mixtral = hf_class(c) == HfClass::kMixtral;
        const auto param = [&](int number) -> Param& { return table.params[static_cast<size_t>(number)]; };
        const std::string mlp = hf + (mixtral ? "block_sparse_moe." : "mlp.");
        const char *gate = mixtral ? "w1" : "gate_proj", *up = mixtral ? "w3" : "up_proj",
                   *down = mixtral ? "w2" : "down_proj";
        std::vector<HfPart> up_parts, down_parts;
        for (int64_t e = 0; e < E && !c.gpt_oss(); e++) {
            const std::string expert = mlp + "experts." + std::to_string(e) + ".";
            up_parts.push_back({.name = expert + gate + ".weight", .row_begin = 2 * e * F, .rows = F});
            up_parts.push_back({.name = expert + up + ".weight", .row_begin = (2 * e + 1) * F, .rows = F});
            down_parts.push_back({.name = expert + down + ".weight", .row_begin = e * C, .rows = C});
        }
        const char* const router = c.gpt_oss() ? "router" : "gate";
        p.router_weight = matrix(own + "router.weight", whole(mlp + router + ".weight", E, true), l, E, C, c.init_std);
        if (c.gpt_oss()) {
            const auto stack = [&](const char* name, int64_t rows, bool transposed, bool interleaved = false) {
                return std::vector<HfPart>{{.name = mlp + "experts." + name, .rows = E * rows,
                                            .transposed = transposed, .stacked = E, .interleaved = interleaved}};
            };
            up_parts = stack("gate_up_proj", 2 * F, true, true), down_parts = stack("down_proj", C, true);
            p.router_logit_bias = vector(own + "router.logit_bias", mlp + "router.bias", l, E);
            p.experts_up_bias = vector(own + "experts.up.bias", stack("gate_up_proj_bias", 2 * F, true, true), l,
                                       E * 2 * F);
            param(p.experts_up_bias).experts = E;
            p.experts_down_bias = vector(own + "experts.down.bias", stack("down_proj_bias", C, false), l, E * C);
        }
        p.up_weight = matrix(own + "experts.up.weight", up_parts, l, E * 2 * F, C, c.init_std,
                             std::vector<int64_t>(static_cast<size_t>(2 * E), F));
        p.down_weight = matrix(own + "experts.down.weight", down_parts, l, E * C, F, residual_std,
                               std::vector<int64_t>(static_cast<size_t>(E), C));
        param(p.router_weight).optimizer = OptimizerKind::kAdamW;
        param(p.router_weight).optimizer_by_option = false;
        if (!c.gpt_oss()) param(p.up_weight).hf_stacked = hf + "mlp.experts.gate_up_proj";
        if (!c.gpt_oss()) param(p.down_weight).hf_stacked = hf + "mlp.experts.down_proj";
        param(p.up_weight).experts = param(p.down_weight).experts = E;
        if (c.shared_experts == 0) return;
        const std::string shared = mlp + "shared_experts.";
        const int64_t S = c.shared_experts * F;
        p.router_bias = vector(own + "router.bias", mlp + "gate.e_score_correction_bias", l, E);
        param(p.router_bias).optimizer = OptimizerKind::kRouterBias;
        p.shared_up_weight = matrix(own + "shared.up.weight", {{.name = shared + "gate_proj.weight", .rows = S},
                                    {.name = shared + "up_proj.weight", .row_begin = S, .rows = S}}, l, 2 * S, C,
                                    c.init_std, {S, S});
        p.shared_down_weight = matrix(own + "shared.down.weight", whole(shared + "down_proj.weight", C, true), l, C, S,
                                      residual_std);
    }

    void build() {
        const int64_t C = c.hidden_size, V = c.vocab_size, Vp = c.padded_vocab();
        auto rows_of = [&](const char* gpt2, const char* llama, int64_t rows) {
            return std::vector<HfPart>{{.name = gpt2_names ? gpt2 : llama, .rows = rows}};
        };
        table.wte = matrix("wte.weight", rows_of("transformer.wte.weight", "model.embed_tokens.weight", V), -1, Vp, C,
                           c.init_std);
        if (c.position == PositionEmbedding::kLearned)
            table.wpe = matrix("wpe.weight",
                               rows_of("transformer.wpe.weight", "model.embed_positions.weight", c.max_positions), -1,
                               c.max_positions, C, c.init_std);
        for (int l = 0; l < c.num_layers; l++) table.layers.push_back(layer(l));
        const std::string final_norm = gpt2_names ? "transformer.ln_f" : "model.norm";
        table.final_norm_weight = vector("final_norm.weight", final_norm + ".weight", -1, C, Param::Init::kOnes);
        if (c.norm == Norm::kLayerNorm) table.final_norm_bias = vector("final_norm.bias", final_norm + ".bias", -1, C);
        table.head = table.wte;
        if (!c.tied_head)
            table.head = matrix("lm_head.weight", rows_of("lm_head.weight", "lm_head.weight", V), -1, Vp, C,
                                c.init_std);
    }
};

}  // namespace

ParamTable make_param_table(const ModelConfig& config, OptimizerKind of_layers, bool ema, bool scales,
                            bool row_norm) {
    Builder builder{config, {}, hf_class(config) == HfClass::kGpt2, of_layers};
    builder.build();
    ParamTable& table = builder.table;
    for (Param& param : table.params) {
        param.ema = ema, param.scales = scales, param.row_norm = row_norm;
        param.lr_group = param.is_vector() ? LrGroup::kVector : param.layer >= 0 ? LrGroup::kMatrix
                                                                                 : LrGroup::kEmbedding;
    }
    if (table.head != table.wte) table.params[static_cast<size_t>(table.head)].lr_group = LrGroup::kHead;
    return std::move(builder.table);
}

ParamTable expert_part(const ParamTable& whole, int64_t parts, int64_t part) {
    ParamTable table = whole;
    for (Param& p : table.params) {
        if (p.experts == 1 || parts == 1) continue;
        p.rows /= parts, p.experts /= parts, p.parts = parts, p.part = part;
        if (p.hf[0].stacked > 0) {
            p.hf[0].rows = p.rows, p.hf[0].stacked = p.experts;
        } else {
            const auto tensors = static_cast<int64_t>(p.hf.size()) / parts;
            p.hf = {p.hf.begin() + part * tensors, p.hf.begin() + (part + 1) * tensors};
            for (HfPart& tensor : p.hf) tensor.row_begin -= part * p.rows;
        }
        p.stacked.resize(p.stacked.size() / static_cast<size_t>(parts));
        REQUIRE(!p.scales || p.elems() % kScaleBlock == 0, "--moment-dtype fp8 with --expert-parallel %lld: %lld "
                "elements of %s on a rank are no multiple of %lld, the elements of a scale; use --moment-dtype bf16",
                ll(parts), ll(p.elems()), p.name.c_str(), ll(kScaleBlock));
    }
    return table;
}

// Rates and deviations by width as in table 3 of Tensor Programs V (Yang et al., arXiv 2203.03466), which needs no
// multiplier within the model. Muon: the spectral norm of an update must not depend on the width (Yang et al., arXiv
// 2310.17813), as it does not with --muon-scale spectral; that of match-rms grows with sqrt(ratio).
ParamTable make_param_table(const Config& config) {
    ParamTable table = make_param_table(config.shape, config.optimizer, config.ema > 0,
                                        config.moment_dtype == Dtype::kE4m3, config.muon_beta2 > 0);
    if (config.mup_base_width == 0) return table;
    const double ratio = static_cast<double>(config.shape.hidden_size) / static_cast<double>(config.mup_base_width);
    const double root = std::sqrt(ratio);
    const struct { double init, adamw, match_rms, spectral; } divisors[] = {   // by LrGroup
        {1, 1, 1, 1},           // embedding
        {ratio, ratio, 1, 1},   // head, which AdamW updates
        {root, ratio, root, 1}, // matrix
        {1, 1, 1, 1},           // vector
    };
    for (Param& param : table.params) {
        const auto& by = divisors[static_cast<size_t>(param.lr_group)];
        param.init_std /= by.init;
        param.mup_lr_scale = 1 / (param.optimizer == OptimizerKind::kAdamW ? by.adamw
                                  : config.muon_scale == MuonScale::kSpectral ? by.spectral : by.match_rms);
    }
    return table;
}
