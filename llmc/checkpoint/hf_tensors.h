// Converts between parameters and tensors with the names and layouts of transformers, block by block: a tensor may be
// some rows of a parameter (q, k, v of qkv) or transposed (GPT-2's Conv1D), and has no vocabulary padding.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "llmc/checkpoint/safetensors.h"
#include "llmc/checkpoint/state_access.h"
#include "llmc/checkpoint/write_buffer.h"
#include "llmc/model/params.h"

struct HfTensor {
    SafetensorsEntry entry;  // name, dtype and shape in the file
    int param = -1;          // index in ParamTable::params
    HfPart part;             // its rows
};

// Every tensor of the model in table order, without a tied head.
std::vector<HfTensor> hf_tensors(const ParamTable& table, Dtype dtype);

std::vector<SafetensorsEntry> entries_of(const std::vector<HfTensor>& tensors);

// transformers splits models into files of this size by default, too.
inline constexpr int64_t kMaxPartBytes = 5'000'000'000;
// Splits consecutive tensors into files with at most max_part_bytes of data; a larger tensor is alone in its file.
std::vector<std::vector<HfTensor>> split_parts(const std::vector<HfTensor>& tensors, int64_t max_part_bytes);
// "model.safetensors", or "model-00001-of-00003.safetensors" (part counts from 0).
std::string part_file_name(size_t part, size_t parts);
// model.safetensors.index.json
std::string part_index_json(const std::vector<std::vector<HfTensor>>& parts);

// The number of a parameter's rows that are saved; the others are vocabulary padding.
int64_t hf_rows(const Param& param);

// Copies kWeight of one tensor to the buffer, front to back, in blocks of at most staging_bytes or one row. A
// transposed matrix needs a second block of that size, and is read once per block of the file's rows.
void export_tensor(const ParamTable& table, const HfTensor& tensor, const StateAccess& access,
                   int64_t staging_bytes, WriteBuffer& out);

// Writes a tensor of a file to its rows of a parameter. kWeight: the view has the same dtype and bits are kept.
// kMaster: F32, F16 or BF16 become fp32. The caller has checked shape and dtype. Blocks as above.
void import_tensor(const ParamTable& table, const HfTensor& tensor, const SafetensorsView& view,
                   StateKind kind, const StateAccess& access, int64_t staging_bytes);

// The tensors of model.safetensors, or of every part that model.safetensors.index.json names.
class HfModelFiles {
public:
    explicit HfModelFiles(const std::string& directory);  // exit 2: no such files, index and parts disagree
    struct Found {
        const SafetensorsView* view = nullptr;
        std::string file;
    };
    const std::map<std::string, Found>& tensors() const { return tensors_; }
    const std::string& directory() const { return directory_; }

private:
    void add_file(const std::string& path);
    std::string directory_;
    std::vector<std::unique_ptr<SafetensorsReader>> readers_;
    std::map<std::string, Found> tensors_;
};

// "[3, 4]"
std::string shape_text(const std::vector<int64_t>& shape);
