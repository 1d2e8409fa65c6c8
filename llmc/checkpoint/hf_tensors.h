// Between the parameter table and tensors in the names and layouts of transformers, a block at a time: one
// tensor may be rows of a parameter (q, k, v inside qkv) or stand transposed (GPT-2's Conv1D), and vocabulary
// padding stays here.
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
    SafetensorsEntry entry;  // name, dtype and shape as in the file
    int param = -1;          // number in ParamTable::params
    HfPart part;             // which rows of it
};

// Every tensor of the model in table order; a tied head is not among them.
std::vector<HfTensor> hf_tensors(const ParamTable& table, Dtype dtype);

// The entries of a list of tensors, as the writer wants them.
std::vector<SafetensorsEntry> entries_of(const std::vector<HfTensor>& tensors);

// The size at which transformers splits a model by default, too.
inline constexpr int64_t kMaxPartBytes = 5'000'000'000;
// Consecutive files of at most max_part_bytes of data each; a larger tensor is alone in its file.
std::vector<std::vector<HfTensor>> split_parts(const std::vector<HfTensor>& tensors, int64_t max_part_bytes);
// "model.safetensors", or "model-00001-of-00003.safetensors" (part counts from 0).
std::string part_file_name(size_t part, size_t parts);
// model.safetensors.index.json
std::string part_index_json(const std::vector<std::vector<HfTensor>>& parts);

// Rows [hf_rows(param), param.rows) are in no file: vocabulary padding.
int64_t hf_rows(const Param& param);

// Streams kWeight of one tensor into the buffer, front to back. Blocks of staging_bytes at most, or one row where that
// is larger; as much again for a transposed matrix, which is read once per block of the file's rows.
void export_tensor(const ParamTable& table, const HfTensor& tensor, const StateAccess& access,
                   int64_t staging_bytes, WriteBuffer& out);

// Writes rows of one parameter from a tensor of a file. kWeight: the view has its dtype, bits are kept.
// kMaster: F32, F16 or BF16 become fp32. The caller has checked shape and dtype. Buffers as above.
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
