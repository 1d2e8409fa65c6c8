// The classes of transformers with Llama's names of tensors and fields, a row each, and which fields a class has.
#pragma once
#include <cstdint>

#include "llmc/checkpoint/huggingface/hf_rope.h"
#include "llmc/model/parameters/params.h"

// A class, and its defaults of fields that a file leaves out: key/value heads (0: as many as heads), head dim (0:
// hidden size / heads), window (0: the class has none), epsilon of norms and base of rope; full_every: without
// layer_types, every layer of this number attends to all keys (Gemma-3: 6, OLMo-3: 4; 0: none, if there is a window).
// local_base: rope's base in layers with a window, which have no scaling then (Gemma-3: 10,000; OLMo-3: kBaseOfOthers;
// 0: rope as in the others).
struct Family {
    HfClass hf;
    const char *model_type, *architecture;
    int64_t groups, head_dim, window;
    double eps = 1e-6, base = 1e4;
    int64_t full_every = 0;
    double local_base = 0;
};
inline constexpr Family kFamilies[] = {
    {HfClass::kLlama, "llama", "LlamaForCausalLM", 0, 0, 0},
    {HfClass::kMistral, "mistral", "MistralForCausalLM", 8, 0, 4096},
    {HfClass::kMinistral, "ministral", "MinistralForCausalLM", 8, 0, 4096},
    {HfClass::kQwen2, "qwen2", "Qwen2ForCausalLM", 32, 0, 4096},
    {HfClass::kQwen3, "qwen3", "Qwen3ForCausalLM", 32, 128, 4096},
    {HfClass::kQwen3Moe, "qwen3_moe", "Qwen3MoeForCausalLM", 4, 0, 4096},
    {HfClass::kOlmoe, "olmoe", "OlmoeForCausalLM", 0, 0, 0, 1e-5},
    {HfClass::kOlmo2, "olmo2", "Olmo2ForCausalLM", 0, 0, 0, 1e-5},
    {HfClass::kOlmo3, "olmo3", "Olmo3ForCausalLM", 0, 0, 4096, 1e-5, 5e5, 4, kBaseOfOthers},
    {HfClass::kGranite, "granite", "GraniteForCausalLM", 0, 0, 0},
    {HfClass::kGemma3, "gemma3_text", "Gemma3ForCausalLM", 4, 256, 4096, 1e-6, 1e6, 6, 1e4},
    {HfClass::kPhi3, "phi3", "Phi3ForCausalLM", 0, 0, 0, 1e-5},
    {HfClass::kMixtral, "mixtral", "MixtralForCausalLM", 8, 0, 0, 1e-5},
    {HfClass::kDots1, "dots1", "Dots1ForCausalLM", 32, 0, 0},
    {HfClass::kSolarOpen, "solar_open", "SolarOpenForCausalLM", 8, 128, 0, 1e-5, 1e6},
};

inline bool is_qwen(HfClass hf) { return hf == HfClass::kQwen2 || hf == HfClass::kQwen3 || hf == HfClass::kQwen3Moe; }
inline bool has_layer_types(const Family& family) {
    return family.full_every > 0 || family.hf == HfClass::kMinistral || family.hf == HfClass::kQwen2
           || family.hf == HfClass::kQwen3;
}
inline bool has_shared_experts(HfClass hf) { return hf == HfClass::kDots1 || hf == HfClass::kSolarOpen; }
inline bool has_experts(HfClass hf) {
    return hf == HfClass::kQwen3Moe || hf == HfClass::kOlmoe || hf == HfClass::kMixtral || has_shared_experts(hf);
}
inline bool is_olmo2_or_3(HfClass hf) { return hf == HfClass::kOlmo2 || hf == HfClass::kOlmo3; }
inline bool may_bias_attention(HfClass hf) {
    return hf == HfClass::kLlama || hf == HfClass::kQwen3 || hf == HfClass::kQwen3Moe || hf == HfClass::kOlmoe
           || hf == HfClass::kDots1 || is_olmo2_or_3(hf) || hf == HfClass::kGranite || hf == HfClass::kGemma3;
}
inline bool may_bias_mlp(HfClass hf) { return hf == HfClass::kLlama || hf == HfClass::kGranite; }
// Without sliding_window.
inline bool has_no_window(HfClass hf) {
    return hf == HfClass::kLlama || hf == HfClass::kGranite || hf == HfClass::kOlmoe || hf == HfClass::kOlmo2;
}
inline const char* activation_field(HfClass hf) { return hf == HfClass::kGemma3 ? "hidden_activation" : "hidden_act"; }
// The fields of the number of experts, and that of their width where intermediate_size is another one's.
inline const char* experts_field(HfClass hf) {
    return hf == HfClass::kMixtral ? "num_local_experts" : has_shared_experts(hf) ? "n_routed_experts" : "num_experts";
}
inline bool has_moe_width(HfClass hf) { return hf == HfClass::kQwen3Moe || has_shared_experts(hf); }
