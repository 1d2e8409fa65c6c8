// Shared by the tests of checkpoints: a training state in host memory, small models of every class, folders.
#pragma once
#include "tests/support/doctest.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "llmc/base/rng.h"
#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/checkpoint/checkpoint_saver.h"
#include "llmc/checkpoint/huggingface/hf_config.h"
#include "llmc/checkpoint/huggingface/hf_tensors.h"
#include "llmc/checkpoint/huggingface/safetensors.h"
#include "llmc/checkpoint/load.h"
#include "tests/support/files_test.h"

namespace checkpoint_test {

using namespace files_test;

inline std::string fixture(const std::string& name) {
    const std::string path = "tests/fixtures/" + name;
    REQUIRE_MESSAGE(std::filesystem::exists(path), "run the tests from the repository's top folder");
    return path;
}

// A safetensors file of these tensors with this data, one after the other.
inline void spill_tensors(const std::string& path, const std::vector<SafetensorsEntry>& entries,
                          const std::string& data) {
    spill(path, safetensors_header(entries) + data);
}

// All bytes of a tensor.
inline std::string content_of(const SafetensorsView& view) {
    std::string all(static_cast<size_t>(view.bytes), '\0');
    view.read(0, view.bytes, all.data());
    return all;
}

inline std::vector<std::string> files_under(const std::string& directory) {
    std::vector<std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory))
        if (entry.is_regular_file())
            files.push_back(std::filesystem::relative(entry.path(), directory).string());
    std::sort(files.begin(), files.end());
    return files;
}

// ---- models: sizes are no multiples of each other or of a block, the vocabulary needs padding

inline ModelConfig gpt2_config() {
    ModelConfig c{.num_layers = 2, .hidden_size = 40, .ffn_hidden_size = 56, .num_attention_heads = 5,
                  .num_query_groups = 5, .kv_channels = 8, .vocab_size = 131, .max_positions = 19, .rope_scaling = {}};
    return c;
}

inline ModelConfig llama_config() {
    ModelConfig c = gpt2_config();
    c.num_attention_heads = 4;
    c.num_query_groups = 2;
    c.kv_channels = 16;  // larger than hidden_size / heads
    c.norm = Norm::kRmsNorm, c.position = PositionEmbedding::kRope, c.activation = Activation::kSwiglu;
    c.rotary_base = 500000, c.rope_scaling = {.factor = 8, .original_max_positions = 8};
    c.linear_bias = LinearBias::kNone, c.tied_head = false, c.norm_eps = 1e-6;
    return c;
}

struct NamedConfig {
    const char* name;
    HfClass hf;
    ModelConfig config;
};

inline std::vector<NamedConfig> all_configs() {
    ModelConfig tied = llama_config(), qwen3 = llama_config(), mixed = gpt2_config(), biased = llama_config();
    ModelConfig attention_bias = llama_config(), mlp_bias = llama_config(), mistral = llama_config();
    ModelConfig qwen2 = llama_config(), qwen2_window = qwen2, narrow = llama_config(), window = gpt2_config();
    tied.tied_head = true;
    tied.rope_scaling = {};
    qwen3.qk_norm = true;
    qwen3.rope_scaling = {};
    // A model that no class of transformers supports: GPT-2 with rope and grouped queries.
    mixed.position = PositionEmbedding::kRope, mixed.num_query_groups = 1, mixed.qk_norm = true;
    mixed.tied_head = false;
    biased.linear_bias = LinearBias::kAll, biased.norm = Norm::kLayerNorm;
    biased.position = PositionEmbedding::kLearned;
    attention_bias.linear_bias = LinearBias::kAttention;
    mlp_bias.linear_bias = LinearBias::kMlp;
    mistral.sliding_window = {7};
    qwen2.linear_bias = qwen2_window.linear_bias = LinearBias::kQkv;
    qwen2_window.sliding_window = {5};
    ModelConfig qwen3_bias = qwen3;
    qwen3_bias.linear_bias = LinearBias::kAttention;
    qwen3_bias.sliding_window = {9};
    narrow.num_attention_heads = narrow.num_query_groups = 3;   // LlamaConfig requires a divisor of the hidden size
    window.sliding_window = {4}, window.attention_sinks = true;
    ModelConfig yarn = qwen2, own_yarn = mixed;
    yarn.rope_scaling = {.factor = 4, .original_max_positions = 16, .type = RopeScalingType::kYarn};
    own_yarn.rope_scaling = {.factor = 2.5, .original_max_positions = 16, .type = RopeScalingType::kYarn,
                             .beta_fast = 4, .beta_slow = 0.5, .attention_factor = 1.125, .truncate = false};
    ModelConfig mixtral = llama_config();
    mixtral.num_experts = 3, mixtral.sliding_window = {7};
    ModelConfig qwen3_moe = qwen3_bias, olmoe = mixtral;
    qwen3_moe.num_experts = 5, qwen3_moe.experts_per_token = 4, qwen3_moe.normalize_experts = false;
    olmoe.qk_norm = olmoe.qk_norm_whole = true, olmoe.sliding_window = {};
    olmoe.num_query_groups = olmoe.num_attention_heads, olmoe.hidden_size = olmoe.q_width();
    ModelConfig solar = qwen3_moe;
    solar.sliding_window = {}, solar.shared_experts = 2, solar.routed_scale = 1.25;
    const ModelConfig dots = solar;
    solar.qk_norm = false, solar.linear_bias = LinearBias::kNone;
    ModelConfig ministral = mistral, qwen2_pattern = qwen2, qwen3_pattern = qwen3_bias, pattern = window;
    ministral.sliding_window = {7, 0}, qwen2_pattern.sliding_window = {0, 5}, qwen3_pattern.sliding_window = {9, 0};
    pattern.sliding_window = {4, 1}, pattern.position = PositionEmbedding::kRope, pattern.local_rotary_base = 500;
    pattern.rope_scaling = {.factor = 8, .type = RopeScalingType::kLinear};
    ModelConfig olmo2 = olmoe, granite = attention_bias, gemma3 = qwen3;
    olmo2.num_experts = 0, olmo2.norm_place = NormPlace::kPost, olmo2.linear_bias = LinearBias::kAttention;
    granite.embedding_multiplier = 12, granite.residual_multiplier = 0.22, granite.logits_scaling = 8;
    granite.attention_multiplier = 0.0625, granite.rope_scaling = {};
    ModelConfig olmo3 = olmo2, gemma3_window = gemma3;
    olmo3.sliding_window = {7, 0}, olmo3.local_rotary_base = olmo3.rotary_base;
    gemma3.gemma = true, gemma3.norm_place = NormPlace::kBoth, gemma3.activation = Activation::kGeglu;
    gemma3.attention_multiplier = 1 / std::sqrt(168.0), gemma3.tied_head = true, gemma3_window = gemma3;
    gemma3_window.sliding_window = {7, 0}, gemma3_window.local_rotary_base = 500;
    gemma3_window.rope_scaling = {.factor = 8, .type = RopeScalingType::kLinear};
    ModelConfig gemma2 = gemma3;
    gemma3_window.logits_softcap = 20;
    gemma2.qk_norm = false, gemma2.sliding_window = {7, 0}, gemma2.attention_softcap = 50, gemma2.logits_softcap = 30;
    ModelConfig phi3 = mistral;
    ModelConfig gpt_oss = mixtral;
    gpt_oss.activation = Activation::kClampedSwiglu, gpt_oss.attention_sinks = true, gpt_oss.sliding_window = {7, 0};
    gpt_oss.linear_bias = LinearBias::kAll, gpt_oss.rope_scaling = own_yarn.rope_scaling;
    phi3.fused_projections = true, phi3.rotary_dim = 12, phi3.rope_scaling = {};
    ModelConfig longrope = phi3;
    longrope.rope_scaling = {.factor = static_cast<double>(phi3.max_positions) / 8, .original_max_positions = 8,
                             .type = RopeScalingType::kLongrope, .attention_factor = 1.25,
                             .short_factors = {1, 1, 1.5, 2, 2.5, 3}, .long_factors = {1, 2, 4, 8, 16, 32.5}};
    return {{"gpt2", HfClass::kGpt2, gpt2_config()}, {"llama", HfClass::kLlama, llama_config()},
            {"llama, tied", HfClass::kLlama, tied}, {"qwen3", HfClass::kQwen3, qwen3}, {"mixed", HfClass::kOwn, mixed},
            {"biased", HfClass::kOwn, biased}, {"llama, attention bias", HfClass::kLlama, attention_bias},
            {"llama, MLP bias", HfClass::kLlama, mlp_bias}, {"mistral", HfClass::kMistral, mistral},
            {"3 heads", HfClass::kMistral, narrow}, {"qwen2", HfClass::kQwen2, qwen2},
            {"qwen2, window", HfClass::kQwen2, qwen2_window}, {"qwen3, bias and window", HfClass::kQwen3, qwen3_bias},
            {"gpt2, window and sinks", HfClass::kOwn, window}, {"qwen2, yarn", HfClass::kQwen2, yarn},
            {"mixed, yarn", HfClass::kOwn, own_yarn}, {"mixtral", HfClass::kMixtral, mixtral},
            {"qwen3_moe", HfClass::kQwen3Moe, qwen3_moe}, {"olmoe", HfClass::kOlmoe, olmoe},
            {"dots1", HfClass::kDots1, dots}, {"solar_open", HfClass::kSolarOpen, solar},
            {"ministral", HfClass::kMinistral, ministral}, {"qwen2, pattern", HfClass::kQwen2, qwen2_pattern},
            {"qwen3, pattern", HfClass::kQwen3, qwen3_pattern}, {"pattern", HfClass::kOwn, pattern},
            {"olmo2", HfClass::kOlmo2, olmo2}, {"granite", HfClass::kGranite, granite},
            {"phi3", HfClass::kPhi3, phi3}, {"phi3, longrope", HfClass::kPhi3, longrope},
            {"gpt_oss", HfClass::kGptOss, gpt_oss},
            {"olmo3", HfClass::kOlmo3, olmo3}, {"gemma3", HfClass::kGemma3, gemma3},
            {"gemma2", HfClass::kGemma2, gemma2},
            {"gemma3, windows", HfClass::kGemma3, gemma3_window}};
}

inline ModelConfig one_layer() {
    ModelConfig c = llama_config();
    c.num_layers = 1, c.hidden_size = c.ffn_hidden_size = 16, c.num_attention_heads = c.num_query_groups = 2;
    c.kv_channels = 8, c.vocab_size = 30;
    return c;
}

// ---- state

// A training state in host memory whose every byte is a function of (seed, kind, parameter).
struct FakeState {
    ModelConfig config;
    ParamTable table;
    StateDtypes dtypes;
    std::vector<std::vector<char>> bytes[kStateKinds];  // by kind, then by parameter
    int64_t largest_request_bytes = 0;

    explicit FakeState(const ModelConfig& c, const StateDtypes& types = {})
        : config(c), table(make_param_table(c, OptimizerKind::kAdamW, false, types.moment == Dtype::kE4m3)),
          dtypes(types) {
        for (const OptimizerState& row : kOptimizerStates)
            for (const Param& param : table.params)
                of(row.kind).emplace_back(static_cast<size_t>(param.has(row.kind) * row.values(param.elems())
                                                              * dtype_bytes(dtypes.of(row.kind))), '\x5a');
    }

    std::vector<std::vector<char>>& of(StateKind kind) { return bytes[static_cast<int>(kind)]; }
    // Random bits, including NaN.
    void randomise(uint64_t seed) {
        for (const OptimizerState& row : kOptimizerStates)
            for (size_t p = 0; p < table.params.size(); p++) {
                std::vector<char>& data = of(row.kind)[p];
                const uint64_t key = rng_key(seed + static_cast<uint64_t>(row.kind), table.params[p].name);
                for (size_t i = 0; i < data.size(); i += 2) {
                    const uint32_t word = philox(key, i).word[0];
                    std::memcpy(&data[i], &word, std::min<size_t>(2, data.size() - i));
                }
            }
    }
    float master(int param, int64_t row, int64_t col) {
        float value;
        const int64_t i = row * table.params[static_cast<size_t>(param)].cols + col;
        std::memcpy(&value, of(StateKind::kMaster)[static_cast<size_t>(param)].data() + i * 4, 4);
        return value;
    }
    bool same_as(FakeState& other) {
        return std::equal(std::begin(bytes), std::end(bytes), std::begin(other.bytes));
    }

    StateAccess access() {
        auto place = [this](StateKind kind, int index, int64_t begin, int64_t count) {
            std::vector<char>& data = of(kind).at(static_cast<size_t>(index));
            const int64_t element = dtype_bytes(dtypes.of(kind));
            REQUIRE(begin >= 0);
            REQUIRE(count > 0);
            REQUIRE((begin + count) * element <= static_cast<int64_t>(data.size()));
            largest_request_bytes = std::max(largest_request_bytes, count * element);
            return std::pair(data.data() + begin * element, static_cast<size_t>(count * element));
        };
        StateAccess access;
        access.dtypes = dtypes;
        access.read = [place](StateKind kind, int index, int64_t begin, int64_t count, void* host) {
            auto [data, n] = place(kind, index, begin, count);
            std::memcpy(host, data, n);
        };
        access.write = [place](StateKind kind, int index, int64_t begin, int64_t count, const void* host) {
            auto [data, n] = place(kind, index, begin, count);
            std::memcpy(data, host, n);
        };
        return access;
    }
};

// ---- one rank

struct CheckpointRequest : SaveOptions {
    int64_t step = 0;
    std::string state_json;
    std::string model, tokenizer;   // of CheckpointSaver::carry
    TokenizerFacts facts;           // the same
};

// Saves at once and returns the path.
inline std::string save_checkpoint(const CheckpointRequest& request, const ModelConfig& config,
                                   const ParamTable& table, const StateAccess& access) {
    const auto comm = open_single();
    CheckpointSaver saver(request, config, table, access, *comm);
    saver.carry(request.model, request.tokenizer, request.facts);
    std::string path;
    saver.on_saved([&](const SavedCheckpoint& saved) { path = saved.path; });
    saver.save(request.step, request.state_json);
    return path;
}

inline FoundCheckpoint find_checkpoint(const std::string& where, const std::string& root) {
    return ::find_checkpoint(where, root, *open_single());
}

// A minimal state.json.
inline std::string state_json(int64_t step) {
    const auto none = nlohmann::json::array();
    return nlohmann::json{{"format", 1}, {"step", step}, {"samples", step}, {"adam_step", step}, {"skips", 0},
                          {"norm_skips", 0}, {"consecutive_skips", 0}, {"norms", none}, {"missed", none},
                          {"config", nlohmann::json::object()},
                          {"train_data", {{"synthetic", 1}}}, {"fp8", {{"recipe", "none"}}},
                          {"loss_watch", {{"first", none}, {"last", none}, {"above", false}}},
                          {"gemm_plans", {{"library", "cpu"}, {"plans", none}}}}
        .dump();
}

inline CheckpointRequest request_of(const std::string& root, int64_t step) {
    CheckpointRequest request;
    request.root = root, request.step = step, request.state_json = state_json(step);
    return request;
}

inline std::string save(FakeState& state, const CheckpointRequest& request) {
    return save_checkpoint(request, state.config, state.table, state.access());
}

// The element of a parameter that is element i of its tensor.
inline int64_t element_of(const HfPart& part, int64_t cols, int64_t i) {
    const int64_t rows = part.matrix_rows(), in_matrix = i % (rows * cols);
    int64_t row = part.transposed ? in_matrix % rows : in_matrix / cols;
    const int64_t col = part.transposed ? in_matrix / rows : in_matrix % cols;
    if (part.interleaved) row = row % 2 * (rows / 2) + row / 2;
    return (part.row_begin + i / (rows * cols) * rows + row) * cols + col;
}

// Whether the weights in a checkpoint's files are the rounded masters, or those minus 1, where transformers expects
// them.
inline void check_weights(const std::string& path, FakeState& state) {
    const HfModelFiles files(path);
    const bool wide = state.dtypes.weight == Dtype::kFp32;
    for (size_t p = 0; p < state.table.params.size(); p++) {
        const Param& param = state.table.params[p];
        for (const HfPart& part : param.hf) {
            const std::string found = content_of(*files.tensors().at(part.name).view);
            std::string expected;
            for (int64_t i = 0; i < part.rows * param.cols; i++) {
                float value;
                std::memcpy(&value, state.of(StateKind::kMaster)[p].data() + element_of(part, param.cols, i) * 4, 4);
                if (param.minus_one) value += -1.0f;
                const uint16_t rounded = bf16(value).bits;
                expected.append(reinterpret_cast<const char*>(wide ? static_cast<const void*>(&value) : &rounded),
                                wide ? 4 : 2);
            }
            CAPTURE(part.name);
            CHECK(found == expected);
        }
    }
}

// Reads the state from a checkpoint directory, and checks that its weights are the rounded masters.
inline FakeState load(const std::string& path, const FakeState& like) {
    FakeState state(like.config, like.dtypes);
    load_checkpoint(path, state.config, state.table, state.access(), *open_single());
    check_weights(path, state);
    return state;
}

inline FakeState random_state(uint64_t seed, const ModelConfig& config = one_layer()) {
    FakeState state(config);
    state.randomise(seed);
    return state;
}

// The files of a checkpoint by name, without the manifest, which has the time of the save.
inline std::map<std::string, std::string> contents(const std::string& path) {
    std::map<std::string, std::string> files;
    for (const std::string& file : files_under(path))
        if (file != "manifest.json") files[file] = slurp(path + "/" + file);
    return files;
}

}  // namespace checkpoint_test
