// The files of a checkpoint with tensors in them, and which rank writes which of their bytes: a pure function of the
// model and of what each rank holds, so that every rank comes to the same answer.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "llmc/checkpoint/checkpoint.h"
#include "llmc/checkpoint/hf_tensors.h"
#include "llmc/model/params.h"

struct OptimizerFile {
    const char* name;
    StateKind kind;
};
inline constexpr OptimizerFile kOptimizerFiles[] = {{"optimizer/master.safetensors", StateKind::kMaster},
                                                    {"optimizer/m.safetensors", StateKind::kMomentM},
                                                    {"optimizer/v.safetensors", StateKind::kMomentV}};

Dtype dtype_of_kind(StateKind kind, Dtype weight_dtype, Dtype moment_dtype);
// Whole parameters by our own names, padded rows included: the tensors of an optimizer file.
std::vector<SafetensorsEntry> own_entries(const ParamTable& table, Dtype dtype);

struct SavedFile {
    std::string name;     // within the checkpoint
    std::string header;   // its first bytes, which rank 0 writes
    int64_t bytes = 0;    // the whole file
};

// A tensor of the model's files and its writer.
struct SavedTensor {
    HfTensor tensor;
    int file = 0, rank = 0;
    int64_t offset = 0;   // in the file
};

// Elements of a parameter's master and moments and their writer.
struct SavedRange {
    int param = 0, rank = 0;
    int64_t begin = 0, count = 0;
};

struct SaveLayout {
    std::vector<SavedFile> files;                // parts of the model, then kOptimizerFiles
    std::string index_json;                      // "" where the model is one file
    std::vector<SavedTensor> tensors;            // in table order
    std::vector<SavedRange> ranges;              // ascending by parameter and begin
    std::vector<std::vector<int64_t>> offsets;   // of each parameter in each of kOptimizerFiles
    std::vector<int64_t> element_bytes;          // in each of kOptimizerFiles

    const SavedFile& optimizer_file(size_t number) const;
    int64_t bytes() const;                       // of all files
    int64_t buffer_bytes(int rank) const;        // of a WriteBuffer that takes all that this rank writes
};

// What each rank holds of each parameter's master and moments: held[rank][param], as StateAccess::held has it.
using HeldByRank = std::vector<std::vector<std::vector<ElementRange>>>;
// All of it on each of `ranks` ranks.
HeldByRank held_whole(const ParamTable& table, int ranks);

SaveLayout make_save_layout(const ParamTable& table, Dtype weight_dtype, Dtype moment_dtype, const HeldByRank& held,
                            int64_t max_part_bytes = kMaxPartBytes);
