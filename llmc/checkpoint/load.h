// Reads the tensors of a checkpoint, or of any model in the format of transformers, into the training state. Each rank
// reads the byte ranges of what it holds, block by block. An error of one rank is an Error on all. Every rank calls
// these functions. Afterwards WeightGatherer::from_masters must compute the weights from the masters.
#pragma once
#include <string>

#include "llmc/checkpoint/state_access.h"
#include "llmc/model/parameters/params.h"
#include "llmc/parallel/comm/comm.h"

// The shape of the model, or of a checkpoint's model, in a directory, from its config.json. Exit 2 if there is none or
// it is not supported; exit 5 if a checkpoint's file does not match its manifest.
ModelConfig model_config_from_hf(const std::string& directory);

// Restores the states bit for bit. Shapes and dtypes, also of the model's files, must match (exit 2, naming the
// tensor). `path` comes from find_checkpoint, which has checked the hashes. of_layers: the optimizer of the matrices of
// layers in the run that saved it. Returns the states that this run's optimizer needs and the checkpoint lacks, "" if
// it has all: "momentum of 8 matrices". They become 0.
std::string load_checkpoint(const std::string& path, const ModelConfig& config, const ParamTable& table,
                            const StateAccess& access, Comm& comm, int64_t staging_bytes = kStagingBytes,
                            OptimizerKind of_layers = OptimizerKind::kAdamW);

// Whether a checkpoint has an EMA. load_checkpoint loads none from one that has not.
bool has_ema(const std::string& path);

// Loads weights only, from any directory in the format of transformers: single file or index, F32, F16 or BF16, with or
// without a copy of a tied head, GPT-2 names with or without "transformer."; mask and rope buffers are ignored. Writes
// this rank's part of kMaster (fp32), padded rows as 0. Exit 2, naming the first missing, surplus or misshapen tensor;
// exit 5 if files of a checkpoint do not match its manifest. The ranks of each host share the work of this check.
void load_hf_weights(const std::string& directory, const ModelConfig& config, const ParamTable& table,
                     const StateAccess& access, Comm& comm, int64_t staging_bytes = kStagingBytes);

// A fingerprint of a model's weights, by which runs are compared: of the name, shape and first 4 KiB of each tensor.
std::string hf_weights_fingerprint(const std::string& directory);

// Host memory that each of the two takes, besides the files' headers: staging_bytes, or what one row of a transposed
// tensor needs.
int64_t load_staging_bytes(const ParamTable& table, int64_t staging_bytes = kStagingBytes);
