// Reading the tensors of a checkpoint, or of any model in the format of transformers, into the training state. Any
// number of ranks reads, each what it holds.
#pragma once
#include <string>

#include "llmc/checkpoint/state_access.h"
#include "llmc/model/params.h"
#include "llmc/parallel/comm.h"

// Everything that this rank holds: weights and slots, bit for bit. Shapes and dtypes must match (exit 2, naming the
// tensor). Rows of kWeight that no Hugging Face tensor has (vocabulary padding) are the rounded master.
// `path` is one that find_checkpoint gave: hashes are not checked a second time.
void load_checkpoint(const std::string& path, const ModelConfig& config, const ParamTable& table,
                     const StateAccess& access, int64_t staging_bytes = kStagingBytes);

// Weights only, from any directory in the format of transformers: sharded index or single file, tied head
// absent or present, GPT-2 names with or without "transformer.", attn.bias buffers ignored, F32/F16/BF16.
// Writes what this rank holds of kMaster (fp32), padded rows as 0. Missing, surplus or misshapen tensors: exit 2,
// naming the first. Files of a checkpoint are held against its manifest before (exit 5); every rank calls it.
void load_hf_weights(const std::string& directory, const ModelConfig& config, const ParamTable& table,
                     const StateAccess& access, Comm& comm, int64_t staging_bytes = kStagingBytes);
