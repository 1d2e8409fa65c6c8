// The classes of transformers with Llama's names of tensors and fields, a row each, and which fields a class has.
#pragma once
#include <cstdint>

#include "llmc/checkpoint/huggingface/hf_rope.h"
#include "llmc/model/parameters/params.h"

// What a class has: fields for biases; no sliding_window, or layer_types or Qwen's other fields beside it; QK-norm,
// over each head or all at once; norms after attention and the MLP alone; experts, whose width moe_intermediate_size
// is if intermediate_size is another one, and shared ones.
enum HfTrait : unsigned {
    kAttentionBias = 1, kMlpBias = 2, kNoWindow = 4, kLayerTypes = 8, kQwenWindow = 16, kQkNorm = 32, kQkNormWhole = 64,
    kPostNorm = 128, kExperts = 256, kMoeWidth = 512, kSharedExperts = 1024
};

// A class, and its defaults of fields that a file leaves out: key/value heads (0: as many as heads), head dim (0:
// hidden size / heads), window (0: the class has none), epsilon of norms and base of rope; full_every: without
// layer_types, every layer of this number attends to all keys (Gemma-2, gpt-oss: 2, Gemma-3: 6, OLMo-3: 4; 0: none, if
// there is a window).
// local_base: rope's base in layers with a window, which have no scaling then (Gemma-3: 10,000; OLMo-3: kBaseOfOthers;
// 0: rope as in the others).
struct Family {
    HfClass hf;
    unsigned traits;
    const char *model_type, *architecture;
    int64_t groups, head_dim, window;
    double eps = 1e-6, base = 1e4;
    int64_t full_every = 0;
    double local_base = 0;
    bool has(HfTrait trait) const { return traits & trait; }
};
inline constexpr Family kFamilies[] = {
    {HfClass::kLlama, kAttentionBias | kMlpBias | kNoWindow, "llama", "LlamaForCausalLM", 0, 0, 0},
    {HfClass::kMistral, 0, "mistral", "MistralForCausalLM", 8, 0, 4096},
    {HfClass::kMinistral, kLayerTypes, "ministral", "MinistralForCausalLM", 8, 0, 4096},
    {HfClass::kQwen2, kLayerTypes | kQwenWindow, "qwen2", "Qwen2ForCausalLM", 32, 0, 4096},
    {HfClass::kQwen3, kAttentionBias | kLayerTypes | kQwenWindow | kQkNorm, "qwen3", "Qwen3ForCausalLM", 32, 128, 4096},
    {HfClass::kQwen3Moe, kAttentionBias | kQwenWindow | kQkNorm | kExperts | kMoeWidth, "qwen3_moe",
     "Qwen3MoeForCausalLM", 4, 0, 4096},
    {HfClass::kOlmoe, kAttentionBias | kNoWindow | kQkNorm | kQkNormWhole | kExperts, "olmoe", "OlmoeForCausalLM", 0, 0,
     0, 1e-5},
    {HfClass::kOlmo2, kAttentionBias | kNoWindow | kQkNorm | kQkNormWhole | kPostNorm, "olmo2", "Olmo2ForCausalLM", 0,
     0, 0, 1e-5},
    {HfClass::kOlmo3, kAttentionBias | kLayerTypes | kQkNorm | kQkNormWhole | kPostNorm, "olmo3", "Olmo3ForCausalLM", 0,
     0, 4096, 1e-5, 5e5, 4, kBaseOfOthers},
    {HfClass::kGranite, kAttentionBias | kMlpBias | kNoWindow, "granite", "GraniteForCausalLM", 0, 0, 0},
    {HfClass::kGemma2, kAttentionBias | kLayerTypes, "gemma2", "Gemma2ForCausalLM", 4, 256, 4096, 1e-6, 1e4, 2},
    {HfClass::kGemma3, kAttentionBias | kLayerTypes | kQkNorm, "gemma3_text", "Gemma3ForCausalLM", 4, 256, 4096, 1e-6,
     1e6, 6, 1e4},
    {HfClass::kPhi3, 0, "phi3", "Phi3ForCausalLM", 0, 0, 0, 1e-5},
    {HfClass::kMixtral, kExperts, "mixtral", "MixtralForCausalLM", 8, 0, 0, 1e-5, 1e6},
    {HfClass::kDots1, kAttentionBias | kQkNorm | kExperts | kMoeWidth | kSharedExperts, "dots1", "Dots1ForCausalLM", 32,
     0, 0},
    {HfClass::kSolarOpen, kExperts | kMoeWidth | kSharedExperts, "solar_open", "SolarOpenForCausalLM", 8, 128, 0, 1e-5,
     1e6},
    {HfClass::kGptOss, kAttentionBias | kLayerTypes | kExperts, "gpt_oss", "GptOssForCausalLM", 8, 64, 128, 1e-5, 1.5e5,
     2},
};

inline bool is_gemma(HfClass hf) { return hf == HfClass::kGemma2 || hf == HfClass::kGemma3; }
inline const char* activation_field(HfClass hf) { return is_gemma(hf) ? "hidden_activation" : "hidden_act"; }
// The field of the number of experts.
inline const char* experts_field(const Family& family) {
    return family.hf == HfClass::kMixtral || family.hf == HfClass::kGptOss ? "num_local_experts"
           : family.has(kSharedExperts) ? "n_routed_experts" : "num_experts";
}
