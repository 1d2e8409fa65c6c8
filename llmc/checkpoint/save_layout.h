// The tensor files of a checkpoint, and the rank that writes each of their bytes: a pure function of the model and of
// the elements that each rank holds, so that every rank computes the same layout.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "llmc/checkpoint/huggingface/hf_tensors.h"
#include "llmc/model/parameters/params.h"

// The tensors of a state's file: the parameters that have the state, in table order, by their names in `table`, padded.
std::vector<SafetensorsEntry> state_entries(const ParamTable& table, const OptimizerState& state,
                                            const StateDtypes& dtypes);

struct SavedFile {
    std::string name;     // path within the checkpoint
    std::string header;   // rank 0 writes it
    int64_t bytes = 0;    // of the whole file
};

// A place in one of SaveLayout::files.
struct FilePlace {
    int file = -1;
    int64_t offset = 0;
};

// A transposed tensor of the model, and the rank that writes it. No rank has whole rows of it, hence it is read from
// the masters' file once that is complete.
struct TransposedTensor {
    HfTensor tensor;
    int rank = 0;
    FilePlace place;
    int state = 0;   // the number of the state file that has its weights
};

// A range of elements of a parameter's states, and the rank that writes it. It lies in one tensor of the model or in
// none (vocabulary padding).
struct SavedRange {
    int param = 0, rank = 0;
    int64_t begin = 0, count = 0;
    FilePlace weight = {};   // where it is in a model, `file` counted within that; -1: nowhere, or transposed
    float weight_add = 0;    // what its values there have more: see Param::minus_one
};

// The file of a state, and each parameter's place in it.
struct StateFile {
    const OptimizerState* state = nullptr;
    int64_t value_bytes = 0;
    std::vector<int64_t> offsets;   // by parameter; -1 if the parameter has no such state
    std::vector<int64_t> blocks;    // by parameter: Param::block_of
    int model = -1;   // the first file of the model with these weights, rounded; -1: there is none
    bool has(int param) const { return offsets[static_cast<size_t>(param)] >= 0; }
    // The values that the writer of elements writes: those of the blocks or rows that begin in them.
    ElementRange values(const SavedRange& range) const {
        const int64_t block = blocks[static_cast<size_t>(range.param)], begin = ceil_div(range.begin, block);
        return {begin, ceil_div(range.begin + range.count, block) - begin};
    }
};

struct SaveLayout {
    std::vector<SavedFile> files;        // of the model, of that with averaged weights, then of the states
    std::string index_json;              // of each model, "" if it is one file
    std::vector<SavedRange> ranges;      // ascending by parameter and begin
    std::vector<TransposedTensor> transposed;   // in table order
    std::vector<StateFile> state_files;    // for each state that a parameter has; the masters' is the first

    int64_t models() const;                 // the model, and that with averaged weights
    int64_t bytes() const;                  // of all files
    // The size of a WriteBuffer for the headers and states that `rank` writes. Weights are rounded from the masters in
    // the buffer.
    int64_t buffer_bytes(int rank) const;
};

// The elements that each rank holds of each parameter's states: held[rank][param], see StateAccess::held.
using HeldByRank = std::vector<std::vector<std::vector<ElementRange>>>;
// The same if every rank holds all elements.
HeldByRank held_whole(const ParamTable& table, int ranks);

SaveLayout make_save_layout(const ParamTable& table, const StateDtypes& dtypes, const HeldByRank& held,
                            int64_t max_part_bytes = kMaxPartBytes);
