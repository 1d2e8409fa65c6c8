// The parameter table: one row per stored parameter, in the order of the model. Initialisation, optimizer, shards,
// checkpoints and exports iterate over it; it is constant.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/model/parameters/optimizer_state.h"

// A tensor of the Hugging Face model that is stored as rows [row_begin, row_begin + rows) of a parameter.
struct HfPart {
    std::string name;            // "model.layers.3.self_attn.k_proj.weight"
    int64_t row_begin = 0;
    int64_t rows = 0;            // true vocabulary rows for embeddings and head
    bool transposed = false;     // its Hugging Face shape is [cols, rows] (GPT-2's Conv1D)
    // gpt-oss: the tensor stacks these equal parts of the rows, and its shape begins with their number; 0: with none.
    int64_t stacked = 0;
    bool interleaved = false;    // of the rows of each, the halves (gates, ups) alternate in the file; transposed only
    int64_t matrix_rows() const { return rows / std::max<int64_t>(1, stacked); }
};

struct Param {
    std::string name;            // "layers.3.qkv.weight"
    int64_t rows = 0;            // out-features, or the length of a vector
    int64_t cols = 1;            // in-features; 1 for vectors (one-dimensional in Hugging Face files)
    int layer = -1;              // -1: of no layer
    enum class Init { kNormal, kOnes, kZeros } init = Init::kZeros;
    double init_std = 0;
    bool decay = false;          // weight decay applies (matrices)
    // Files of transformers have the values minus 1 (norms of Gemma-3). The optimizer makes the same updates of either,
    // because there is no decay; BF16 weights are rounded as those of other models' norms.
    bool minus_one = false;
    std::vector<HfPart> hf;
    std::string hf_stacked = {};   // experts: the tensor (experts, rows of one, cols) of transformers 5 instead of `hf`
    int64_t experts = 1;           // matrices of as many rows, of which a token uses experts_per_token
    int64_t parts = 1, part = 0;   // --expert-parallel: this is one of `parts` equal parts of the parameter
    OptimizerKind optimizer = OptimizerKind::kAdamW;
    bool optimizer_by_option = false;   // --optimizer decides: a matrix of a layer, but no router's
    std::vector<int64_t> stacked = {};   // rows of each matrix that Muon updates alone: Q, K, V; gate, up
    bool ema = false;            // --ema
    LrGroup lr_group = LrGroup::kVector;
    double mup_lr_scale = 1;     // of the learning rate by width, but not of weight decay (--mup-base-width)
    bool scales = false;         // of moments in blocks, --moment-dtype fp8
    bool row_norm = false;       // --muon-beta2

    // Whether it has this state: its optimizer keeps it, or it is the EMA.
    bool has(StateKind state) const {
        if (state == StateKind::kEma) return ema;
        return keeps(optimizer, state) && (scales || state_row(state).block == 1)
               && (row_norm || !state_row(state).by_row);
    }
    int64_t block_of(const OptimizerState& state) const { return state.by_row ? cols : state.block; }
    // OptimizerState::values, also of a state by row.
    int64_t values(const OptimizerState& state, int64_t elems) const { return ceil_div(elems, block_of(state)); }
    bool is_vector() const { return cols == 1; }
    int64_t elems() const { return rows * cols; }
    int64_t first_elem() const { return part * elems(); }   // number of the first element in the whole parameter
};

// Numbers of the parameters of a layer within ParamTable::params; -1 where the model has none.
struct LayerParams {
    int norm1_weight = -1, norm1_bias = -1;
    int qkv_weight = -1, qkv_bias = -1;     // rows: [q heads | k heads | v heads]
    int q_norm = -1, k_norm = -1;
    int sinks = -1;                         // (query heads)
    int proj_weight = -1, proj_bias = -1;   // attention output
    int post_norm1_weight = -1, post_norm2_weight = -1;   // of the results of attention and the MLP
    int norm2_weight = -1, norm2_bias = -1;
    int router_weight = -1, router_bias = -1;   // (experts, hidden size), (experts)
    int router_logit_bias = -1;             // (experts)
    int experts_up_bias = -1, experts_down_bias = -1;   // (experts, 2 width), (experts, hidden size)
    int shared_up_weight = -1, shared_down_weight = -1;   // of the shared experts
    int up_weight = -1, up_bias = -1;       // rows of a gated activation: [gate | up]; of every expert in turn
    int down_weight = -1, down_bias = -1;
};

struct ParamTable {
    std::vector<Param> params;
    std::vector<LayerParams> layers;
    int wte = -1, wpe = -1;
    int final_norm_weight = -1, final_norm_bias = -1;
    int head = -1;               // equals wte when tied
    int64_t param_elems = 0;     // as Hugging Face counts them: true vocabulary, tied weights once

    int find(const std::string& name) const;  // -1 if absent
    // The layer that completes the parameter's gradient and reads the parameter first, numbered as in ParamStore.
    int layer_of(int param) const;
};

// The Hugging Face class that represents a configuration exactly; kOwn if none does.
enum class HfClass {
    kGpt2, kLlama, kMistral, kMinistral, kQwen2, kQwen3, kQwen3Moe, kOlmoe, kMixtral, kDots1, kSolarOpen, kOlmo2,
    kOlmo3, kGranite, kGemma2, kGemma3, kPhi3, kGptOss, kOwn
};
HfClass hf_class(const ModelConfig& config);

// of_layers: the optimizer of the matrices of layers. ema: with an EMA of the master weights. scales: with those of
// moments in fp8. row_norm: Muon has second moments of rows.
ParamTable make_param_table(const ModelConfig& config, OptimizerKind of_layers = OptimizerKind::kAdamW,
                            bool ema = false, bool scales = false, bool row_norm = false);
// The table of a rank that holds one of `parts` equal parts of the experts.
ParamTable expert_part(const ParamTable& whole, int64_t parts, int64_t part);
// That of a run: init_std and mup_lr_scale follow --mup-base-width.
ParamTable make_param_table(const Config& config);
