// Reads the tensors of a checkpoint, or of any model in the format of transformers, into the training state. With any
// number of ranks, each reads the part that it holds.
#pragma once
#include <string>

#include "llmc/checkpoint/state_access.h"
#include "llmc/model/params.h"
#include "llmc/parallel/comm.h"

// Restores weights and slots bit for bit. Shapes and dtypes must match (exit 2, naming the tensor). Rows of kWeight
// without a Hugging Face tensor (vocabulary padding) are set to the rounded masters. `path` comes from find_checkpoint,
// which has checked the hashes.
void load_checkpoint(const std::string& path, const ModelConfig& config, const ParamTable& table,
                     const StateAccess& access, int64_t staging_bytes = kStagingBytes);

// Loads weights only, from any directory in the format of transformers: single file or index, F32, F16 or BF16, with or
// without a copy of a tied head, GPT-2 names with or without "transformer."; mask and rope buffers are ignored. Writes
// this rank's part of kMaster (fp32), padded rows as 0. Exit 2, naming the first missing, surplus or misshapen tensor;
// exit 5 if files of a checkpoint do not match its manifest. Every rank calls it.
void load_hf_weights(const std::string& directory, const ModelConfig& config, const ParamTable& table,
                     const StateAccess& access, Comm& comm, int64_t staging_bytes = kStagingBytes);
