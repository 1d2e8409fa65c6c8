// Checkpoints: a directory that is a Hugging Face model (config.json, model*.safetensors) plus optimizer/ and
// state.json, complete or absent, never half.
//
//   ROOT/step-00000120/config.json                       Hugging Face configuration
//                      model.safetensors                 or model-00001-of-0000N.safetensors + index (5 GB parts)
//                      optimizer/{master,m,v}.safetensors  by our parameter name, whole stored shape
//                      state.json                        step, cursor, resolved options, data fingerprint, plans
//                      manifest.json                     XXH3-128 and size of every other file; written last
//
// Written under ROOT/.tmp-step-..., every file and the directory fsynced, then renamed. Readers trust a directory only
// when its manifest matches.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "llmc/dtype.h"
#include "llmc/params.h"

enum class StateKind { kWeight, kMaster, kMomentM, kMomentV };

// How the checkpoint reaches the training state, wherever it lives. Ranges are elements within one parameter.
struct StateAccess {
    Dtype weight_dtype = Dtype::kBf16, moment_dtype = Dtype::kFp32;   // of kWeight, and of kMomentM/V; kMaster is fp32
    // Copy elements [begin, begin + count) of parameter `index` to or from host memory, in that kind's dtype.
    std::function<void(StateKind kind, int index, int64_t begin, int64_t count, void* host)> read;
    std::function<void(StateKind kind, int index, int64_t begin, int64_t count, const void* host)> write;
};

struct CheckpointRequest {
    std::string root;                  // --save
    int64_t step = 0;
    int64_t seq_length = 0;            // for config.json where a field needs it
    std::string state_json;            // the loop's state, an object; stored as state.json
    std::string tokenizer;             // file or directory copied beside the model, "" for none
    int64_t keep = 0;                  // 0: all
};

// Writes one checkpoint and drops the oldest beyond `keep` (never the one it was resumed from before the new one is
// complete). Returns its path. Disk errors: Error with exit 7; what was there before stays as it was.
std::string save_checkpoint(const CheckpointRequest& request, const ModelConfig& config, const ParamTable& table,
                            const StateAccess& access);
int64_t checkpoint_bytes(const ModelConfig& config, const ParamTable& table, Dtype weight_dtype, Dtype moment_dtype);

struct FoundCheckpoint {
    std::string path;
    std::string state_json;
    std::vector<std::string> skipped;   // newer ones that were damaged, with the reason, one line each
};
// `where` is a checkpoint directory, or "auto": the newest complete one under root. A damaged directory named
// explicitly, or no usable one at all, is an Error with exit 5. "auto" with no checkpoint at all returns path "".
FoundCheckpoint find_checkpoint(const std::string& where, const std::string& root);

// Everything: weights, masters, moments. Shapes and dtypes must match (exit 2, naming the tensor).
void load_checkpoint(const std::string& path, const ModelConfig& config, const ParamTable& table,
                     const StateAccess& access);

// Weights only, from any directory in the format of transformers: sharded index or single file, tied head, GPT-2 names
// with or without "transformer.", attn.bias buffers ignored, F32/F16/BF16. Writes kMaster (fp32) of every parameter, padded
// rows as 0. Missing, surplus or misshapen tensors: exit 2, naming the first.
void load_hf_weights(const std::string& directory, const ModelConfig& config, const ParamTable& table,
                     const StateAccess& access);

// config.json <-> ModelConfig. Reading names the first field that is missing or not supported (exit 2).
std::string hf_config_json(const ModelConfig& config, Dtype weight_dtype);
ModelConfig model_config_from_hf(const std::string& directory);
