// Checkpoints: a directory that is a Hugging Face model (config.json, model*.safetensors) plus optimizer/ and
// state.json, complete or absent, never half.
//
//   ROOT/step-00000120/config.json         Hugging Face configuration
//                      model.safetensors   or model-00001-of-0000N.safetensors + index (parts of 5 GB)
//                      optimizer/{master,m,v}.safetensors   by our parameter name, whole stored shape
//                      state.json          step, cursor, resolved options, data fingerprint, plans
//                      tokenizer.json ...  copied where the request names a tokenizer
//                      manifest.json       XXH3-128 and size of every other file, or of its parts; written last
//
// Written under ROOT/.tmp-step-..., every file and the directory fsynced, then renamed. Readers trust a directory only
// when its manifest matches what they read of it. checkpoint_save.h writes them; any number of ranks reads them, each
// what it holds.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "llmc/base/dtype.h"
#include "llmc/base/files.h"
#include "llmc/model/params.h"

class Comm;

enum class StateKind { kWeight, kMaster, kMomentM, kMomentV };

struct ElementRange {
    int64_t begin, count;
};

// How the checkpoint reaches the training state, wherever it lives. Ranges are elements within one parameter.
struct StateAccess {
    Dtype weight_dtype = Dtype::kBf16;  // of kWeight: bf16 or fp32
    Dtype moment_dtype = Dtype::kFp32;  // of kMomentM and kMomentV: bf16 or fp32; kMaster is always fp32
    // Copy elements [begin, begin + count) of parameter `index` to or from host memory, in that kind's dtype.
    std::function<void(StateKind kind, int index, int64_t begin, int64_t count, void* host)> read;
    std::function<void(StateKind kind, int index, int64_t begin, int64_t count, const void* host)> write;
    // With several ranks. The elements that this rank holds of a master or moment, ascending; read and write stay
    // within them. Together the ranks hold every element, some perhaps twice (--zero 0). Empty function: all of them.
    std::function<std::vector<ElementRange>(int index)> held = {};
    // Every rank calls it for every parameter, in table order, before any rank reads kWeight of that parameter, which
    // then works on all of them until the next call. Empty function: kWeight can be read at any time.
    std::function<void(int index)> collect_weight = {};
};

// Of these elements of a parameter those that this rank holds.
std::vector<ElementRange> held_within(const StateAccess& access, StateKind kind, int index, const ElementRange& all);

// Host memory for one block on its way between state and file; a transposing copy uses two.
inline constexpr int64_t kStagingBytes = int64_t{32} << 20;
// The size at which transformers splits a model by default, too.
inline constexpr int64_t kMaxPartBytes = 5'000'000'000;

struct SaveOptions {
    std::string root;                        // --save
    int64_t seq_length = 0;                  // rope models: config.json promises at least this many positions
    std::string tokenizer;                   // file or directory copied beside the model, "" for none
    int64_t keep = 0;                        // complete checkpoints to keep, 0: all
    bool async = false;                      // written while training continues
    int64_t max_part_bytes = kMaxPartBytes;  // a larger tensor gets a part of its own
    int64_t staging_bytes = kStagingBytes;
    IoHook io_hook;  // for tests and fault injection; with async another thread calls it
};

// The files that `tokenizer` (--tokenizer) stands for: itself, or the known names in that directory. Exit 2
// where there are none or a name is one of ours, so that a run can ask before it starts. "" gives none.
std::vector<std::string> tokenizer_files(const std::string& tokenizer);

struct FoundCheckpoint {
    std::string path;
    std::string state_json;
    std::vector<std::string> skipped;  // newer ones that were damaged, with the reason, one line each
};
// `where` is a checkpoint directory, or "auto": the newest complete one under root. A named directory that is
// damaged, or no usable one at all: Error with exit 5. "auto" with no checkpoint at all returns path "". The ranks
// share the work, and all find the same.
FoundCheckpoint find_checkpoint(const std::string& where, const std::string& root, Comm& comm);

// Everything that this rank holds: weights, masters, moments, bit for bit. Shapes and dtypes must match (exit 2, naming
// the tensor). Rows of kWeight that no Hugging Face tensor has (vocabulary padding) are the rounded master.
// `path` is one that find_checkpoint gave: hashes are not checked a second time.
void load_checkpoint(const std::string& path, const ModelConfig& config, const ParamTable& table,
                     const StateAccess& access, int64_t staging_bytes = kStagingBytes);

// Weights only, from any directory in the format of transformers: sharded index or single file, tied head
// absent or present, GPT-2 names with or without "transformer.", attn.bias buffers ignored, F32/F16/BF16.
// Writes what this rank holds of kMaster (fp32), padded rows as 0. Missing, surplus or misshapen tensors: exit 2,
// naming the first. Files of a checkpoint are held against its manifest before (exit 5); every rank calls it.
void load_hf_weights(const std::string& directory, const ModelConfig& config, const ParamTable& table,
                     const StateAccess& access, Comm& comm, int64_t staging_bytes = kStagingBytes);

// config.json <-> ModelConfig. Reading names the first field that is missing or not supported (exit 2); that of a
// checkpoint must be the one its manifest knows (exit 5). What no class of transformers computes (hf_class kOwn) is
// written with model_type "llmfp8" and every field of ModelConfig.
std::string hf_config_json(const ModelConfig& config, Dtype weight_dtype, int64_t seq_length = 0);
ModelConfig model_config_from_hf(const std::string& directory);
// The same from the file's text; `where` is its path, for messages.
ModelConfig model_config_from_json(const std::string& text, const std::string& where);
