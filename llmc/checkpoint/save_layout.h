// The files of a checkpoint with tensors in them, and which rank writes which of their bytes: a pure function of the
// model and of what each rank holds, so that every rank comes to the same answer.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "llmc/checkpoint/hf_tensors.h"
#include "llmc/model/params.h"

// The parameters that have this slot by our own names, padded rows included: the tensors of its file. In table order.
std::vector<SafetensorsEntry> slot_entries(const ParamTable& table, const StateSlot& slot, const StateDtypes& dtypes);

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

// Elements of a parameter's slots and their writer.
struct SavedRange {
    int param = 0, rank = 0;
    int64_t begin = 0, count = 0;
};

// Where a slot of each parameter is in its file.
struct SlotFile {
    const StateSlot* slot = nullptr;
    int64_t element_bytes = 0;
    std::vector<int64_t> offsets;   // by parameter; -1 where the parameter has no such slot
    bool has(int param) const { return offsets[static_cast<size_t>(param)] >= 0; }
};

struct SaveLayout {
    std::vector<SavedFile> files;        // parts of the model, then those of the slots
    std::string index_json;              // "" where the model is one file
    std::vector<SavedTensor> tensors;    // in table order
    std::vector<SavedRange> ranges;      // ascending by parameter and begin
    std::vector<SlotFile> slot_files;    // of the slots that parameters have

    int64_t bytes() const;                // of all files
    int64_t buffer_bytes(int rank) const;   // of a WriteBuffer that takes all that this rank writes
};

// What each rank holds of each parameter's slots: held[rank][param], as StateAccess::held has it.
using HeldByRank = std::vector<std::vector<std::vector<ElementRange>>>;
// All of it on each of `ranks` ranks.
HeldByRank held_whole(const ParamTable& table, int ranks);

SaveLayout make_save_layout(const ParamTable& table, const StateDtypes& dtypes, const HeldByRank& held,
                            int64_t max_part_bytes = kMaxPartBytes);
