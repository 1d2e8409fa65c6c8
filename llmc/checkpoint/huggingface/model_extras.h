// What a model has besides its weights and shape: tokenizer, chat template, defaults of generation, special tokens. A
// run copies these from the model or checkpoint that it starts from into every checkpoint.
#pragma once
#include <string>
#include <vector>

#include "llmc/checkpoint/huggingface/hf_config.h"
#include "llmc/data/shards.h"

struct ModelFile {
    std::string name, bytes;
};
// The Python files with which transformers computes this model, which the build takes from hf_code/; none if a class of
// transformers has its shape.
std::vector<ModelFile> hf_code(const ModelConfig& config);

struct ModelExtras {
    HfOrigin origin;                // for config.json
    std::vector<ModelFile> files;   // for the checkpoint's folder
};

// The files of --tokenizer: the file itself, or the files with known names in the directory; none for "" and "bytes".
// Exit 2 if
// there is no such file or a checkpoint has a file of that name.
std::vector<std::string> tokenizer_files(const std::string& tokenizer);

// The files with known names in `directory`, of the tokenizer and generation_config.json; none for "". Exit 2, naming
// it, if one is anything but a regular file or a link to one.
std::vector<std::string> model_files(const std::string& directory);

// The vocabulary of --tokenizer or of a model's folder: that of its tokenizer.json, or of the data on which a
// checkpoint was trained ("bytes" has no files); "" if it is not known.
std::string tokenizer_vocabulary(const std::string& tokenizer);

// Reads the extras of the model in `directory` ("": there are none). `tokenizer`: --tokenizer, whose files take the
// place of all of the model's tokenizer files. `facts`: of the training data. Their chat template takes the place of
// the tokenizer's, and the end of a turn becomes a further eos. The separator becomes bos and eos where the model has
// null, and where there is no model or it has another vocabulary than --tokenizer. Exit 2 if the files have more than
// kMaxTokenizerBytes together or config.json has special tokens that are not ids; exit 5 if a file of a checkpoint does
// not match its manifest.
ModelExtras read_model_extras(const std::string& directory, const std::string& tokenizer,
                              const TokenizerFacts& facts = {});

// The ids at which a text ends: eos_token_id (an id or a list) of generation_config.json, which transformers' generate
// reads, else of config.json. In the order of the file, each once; empty if neither names one. Exit 2, naming the file,
// if the field is anything else; exit 5 if a checkpoint's file does not match its manifest.
std::vector<int32_t> eos_token_ids(const std::string& directory);
