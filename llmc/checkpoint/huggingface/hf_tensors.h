// Converts between masters and tensors with the names and layouts of transformers, block by block: a tensor may be some
// rows of a parameter (q, k, v of qkv) or transposed (GPT-2's Conv1D), and has no vocabulary padding.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "llmc/checkpoint/huggingface/safetensors.h"
#include "llmc/checkpoint/state_access.h"
#include "llmc/checkpoint/write_buffer.h"
#include "llmc/model/parameters/params.h"

struct HfTensor {
    SafetensorsEntry entry;  // name, dtype and shape in the file
    int param = -1;          // index in ParamTable::params
    HfPart part;             // its rows
};

// Every tensor of the model in table order, without a tied head. stacked: the matrices of all experts are one tensor.
std::vector<HfTensor> hf_tensors(const ParamTable& table, Dtype dtype, bool stacked = false);

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

// Reads elements [begin, begin + count) of a parameter's master.
using ReadMaster = std::function<void(int64_t begin, int64_t count, float* out)>;

// Writes a transposed tensor, rounded to its dtype, at `offset` of `file`: front to back, in blocks of whole file rows
// and at most staging_bytes or one row. The masters of a block are read strip by strip, whole rows where they fit.
void export_transposed(const HfTensor& tensor, const std::string& file, int64_t offset, const ReadMaster& read_master,
                       int64_t staging_bytes, WriteBuffer& out);
// The room that one block takes in the buffer.
int64_t transposed_room_bytes(const HfTensor& tensor, int64_t staging_bytes);

// Weights of experts in MXFP4, as gpt-oss has them: E2M1 codes, two in a byte, the first one in the lower bits, and
// E8M0 scales of 32 codes. The rows are not transposed.
struct Mxfp4 {
    const SafetensorsView &blocks, &scales;   // (experts, rows, cols / 32, 16), (experts, rows, cols / 32)
    // Shapes of both for a tensor.
    static std::vector<int64_t> shape(const HfTensor& tensor, bool of_blocks);
};
// Reads them as import_tensor does, exactly.
void import_mxfp4(const ParamTable& table, const HfTensor& tensor, const Mxfp4& view, const StateAccess& access);

// Reads a tensor in F32, F16 or BF16 into the masters that this rank holds of its rows, through `staging`. Reads no
// other elements, except the rest of a row of a transposed tensor. The caller has checked shape and dtype.
void import_tensor(const ParamTable& table, const HfTensor& tensor, const SafetensorsView& view,
                   const StateAccess& access, std::vector<float>& staging);
// The least staging memory for a transposed tensor of this parameter: a row, and the strip from which it is made.
int64_t least_import_bytes(const Param& param);

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
