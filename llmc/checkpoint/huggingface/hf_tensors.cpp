#include "llmc/checkpoint/huggingface/hf_tensors.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "llmc/base/json_object.h"

namespace {

constexpr int64_t kTile = 32;  // elements: source and result of a tile stay in the L1 cache

// out[j * out_stride + i] = in[i * in_stride + j] for i < rows, j < cols.
template <typename In, typename Out>
void transpose_block(const In* in, int64_t in_stride, int64_t rows, int64_t cols, Out* out, int64_t out_stride) {
    for (int64_t i0 = 0; i0 < rows; i0 += kTile)
        for (int64_t j0 = 0; j0 < cols; j0 += kTile)
            for (int64_t i = i0; i < std::min(rows, i0 + kTile); i++)
                for (int64_t j = j0; j < std::min(cols, j0 + kTile); j++)
                    out[j * out_stride + i] = Out(in[i * in_stride + j]);
}

// Number of rows of `row_bytes` bytes that fit into `bytes`; at least one.
int64_t rows_that_fit(int64_t bytes, int64_t row_bytes, int64_t rows) {
    return std::clamp<int64_t>(bytes / row_bytes, 1, rows);
}

// ---- from the masters in a file to a transposed tensor

// A block of the file's rows, and the strip of kTile rows of the parameter from which it is made.
struct TransposedBlock {
    int64_t file_rows, bytes, strip_bytes;

    TransposedBlock(const HfTensor& tensor, int64_t staging_bytes) {
        const int64_t row_bytes = tensor.part.rows * dtype_bytes(tensor.entry.dtype);
        file_rows = rows_that_fit(staging_bytes, row_bytes, tensor.entry.shape[0]);
        bytes = WriteBuffer::aligned(file_rows * row_bytes);
        strip_bytes = kTile * file_rows * 4;
    }
};

template <typename T>
void write_transposed(const HfTensor& t, const std::string& file, int64_t offset, const ReadMaster& read_master,
                      const TransposedBlock& size, WriteBuffer& out) {
    const int64_t rows = t.part.rows, cols = t.entry.shape[0];
    for (int64_t j = 0; j < cols; j += size.file_rows) {
        const int64_t width = std::min(size.file_rows, cols - j);
        out.begin(file, offset + j * rows * static_cast<int64_t>(sizeof(T)));
        char* const memory = out.room(size.bytes + size.strip_bytes);
        T* const block = reinterpret_cast<T*>(memory);
        float* const strip = reinterpret_cast<float*>(memory + size.bytes);
        for (int64_t i = 0; i < rows; i += kTile) {
            const int64_t height = std::min(kTile, rows - i), first = (t.part.row_begin + i) * cols + j;
            if (width == cols) read_master(first, height * cols, strip);
            else for (int64_t k = 0; k < height; k++) read_master(first + k * cols, width, strip + k * width);
            transpose_block(strip, width, height, width, block + i, rows);
        }
        out.filled(width * rows * static_cast<int64_t>(sizeof(T)));
    }
}

// ---- from files to masters

void fetch(const SafetensorsView& view, int64_t begin, int64_t count, float* out) {
    CHECK(read_as_fp32(view, begin, count, out), "%s read as fp32", view.dtype.c_str());
}

ElementRange elements_of(const Param& param, const HfPart& part) {
    return {part.row_begin * param.cols, part.rows * param.cols};
}

void import_rows(const Param& param, const HfTensor& t, const SafetensorsView& view, const StateAccess& access,
                 std::vector<float>& staging) {
    const ElementRange all = elements_of(param, t.part);
    const int64_t step = static_cast<int64_t>(staging.size());
    for (const ElementRange& part : held_within(access, t.param, all))
        for (int64_t done = 0; done < part.count; done += step) {
            const int64_t begin = part.begin + done, count = std::min(step, part.count - done);
            fetch(view, begin - all.begin, count, staging.data());
            for (int64_t i = 0; i < count && param.minus_one; i++) staging[static_cast<size_t>(i)] += 1;
            access.write(StateKind::kMaster, t.param, begin, count, staging.data());
        }
}

// The rows of a transposed tensor from which panels of a parameter's rows are made: strips of at most kTile file rows.
struct TransposedPanel {
    int64_t rows, strip_cols;

    TransposedPanel(const Param& param, int64_t held_rows, int64_t staging_bytes) {
        strip_cols = std::min(kTile, param.cols);
        rows = rows_that_fit(staging_bytes, (param.cols + strip_cols) * 4, held_rows);
    }
    int64_t elems(const Param& param) const { return rows * (param.cols + strip_cols); }
};

void import_transposed(const Param& param, const HfTensor& t, const SafetensorsView& view, const StateAccess& access,
                       std::vector<float>& staging) {
    const int64_t cols = param.cols;
    const ElementRange all = elements_of(param, t.part);
    for (const ElementRange& part : held_within(access, t.param, all)) {
        // The rows in which this rank holds `part`, from the first row of `all`.
        const int64_t from = (part.begin - all.begin) / cols;
        const int64_t to = ceil_div(part.begin + part.count - all.begin, cols);
        const TransposedPanel size(param, to - from, static_cast<int64_t>(staging.size()) * 4);
        float* const panel = staging.data();
        float* const strip = panel + size.rows * cols;
        for (int64_t row = from; row < to; row += size.rows) {
            const int64_t height = std::min(size.rows, to - row);
            for (int64_t j = 0; j < cols; j += size.strip_cols) {
                const int64_t width = std::min(size.strip_cols, cols - j);
                for (int64_t k = 0; k < width; k++)
                    fetch(view, (j + k) * t.part.rows + row, height, strip + k * height);
                transpose_block(strip, height, width, height, panel + j, cols);
            }
            const int64_t first = all.begin + row * cols;
            const int64_t begin = std::max(first, part.begin);
            const int64_t end = std::min(first + height * cols, part.begin + part.count);
            access.write(StateKind::kMaster, t.param, begin, end - begin, panel + (begin - first));
        }
    }
}

}  // namespace

std::string shape_text(const std::vector<int64_t>& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); i++) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
}

std::vector<HfTensor> hf_tensors(const ParamTable& table, Dtype dtype, bool stacked) {
    std::vector<HfTensor> tensors;
    for (size_t i = 0; i < table.params.size(); i++) {
        const Param& param = table.params[i];
        if (stacked && !param.hf_stacked.empty()) {
            const std::vector<int64_t> shape{param.experts, param.rows / param.experts, param.cols};
            tensors.push_back({{param.hf_stacked, dtype, shape}, static_cast<int>(i),
                               {.name = param.hf_stacked, .rows = param.rows}});
            continue;
        }
        for (const HfPart& part : param.hf) {
            std::vector<int64_t> shape{part.rows, param.cols};
            if (part.transposed) shape = {param.cols, part.rows};
            if (param.is_vector()) shape = {part.rows};
            tensors.push_back({{part.name, dtype, shape}, static_cast<int>(i), part});
        }
    }
    return tensors;
}

std::vector<SafetensorsEntry> entries_of(const std::vector<HfTensor>& tensors) {
    std::vector<SafetensorsEntry> entries;
    for (const HfTensor& tensor : tensors) entries.push_back(tensor.entry);
    return entries;
}

std::vector<std::vector<HfTensor>> split_parts(const std::vector<HfTensor>& tensors, int64_t max_part_bytes) {
    std::vector<std::vector<HfTensor>> parts;
    int64_t bytes = 0;
    for (const HfTensor& tensor : tensors) {
        if (parts.empty() || bytes + tensor.entry.bytes() > max_part_bytes) {
            parts.emplace_back();
            bytes = 0;
        }
        parts.back().push_back(tensor);
        bytes += tensor.entry.bytes();
    }
    return parts;
}

std::string part_file_name(size_t part, size_t parts) {
    return parts == 1 ? "model.safetensors" : strf("model-%05zu-of-%05zu.safetensors", part + 1, parts);
}

std::string part_index_json(const std::vector<std::vector<HfTensor>>& parts) {
    nlohmann::json map;
    int64_t bytes = 0, elems = 0;
    for (size_t i = 0; i < parts.size(); i++)
        for (const HfTensor& tensor : parts[i]) {
            map[tensor.entry.name] = part_file_name(i, parts.size());
            bytes += tensor.entry.bytes();
            elems += tensor.entry.elems();
        }
    nlohmann::json index = {{"metadata", {{"total_size", bytes}, {"total_parameters", elems}}},
                            {"weight_map", map}};
    return index.dump(2) + "\n";
}

int64_t hf_rows(const Param& param) {
    int64_t rows = 0;
    for (const HfPart& part : param.hf) rows = std::max(rows, part.row_begin + part.rows);
    return rows;
}

int64_t transposed_room_bytes(const HfTensor& tensor, int64_t staging_bytes) {
    const TransposedBlock size(tensor, staging_bytes);
    return size.bytes + size.strip_bytes;
}

void export_transposed(const HfTensor& tensor, const std::string& file, int64_t offset, const ReadMaster& read_master,
                       int64_t staging_bytes, WriteBuffer& out) {
    const Dtype dtype = tensor.entry.dtype;
    CHECK(dtype == Dtype::kFp32 || dtype == Dtype::kBf16, "weights in %s", dtype_name(dtype));
    auto write = dtype == Dtype::kFp32 ? write_transposed<float> : write_transposed<bf16>;
    write(tensor, file, offset, read_master, TransposedBlock(tensor, staging_bytes), out);
}

int64_t least_import_bytes(const Param& param) { return TransposedPanel(param, 1, 0).elems(param) * 4; }

void import_tensor(const ParamTable& table, const HfTensor& tensor, const SafetensorsView& view,
                   const StateAccess& access, std::vector<float>& staging) {
    const Param& param = table.params[static_cast<size_t>(tensor.param)];
    if (tensor.part.transposed) import_transposed(param, tensor, view, access, staging);
    else import_rows(param, tensor, view, access, staging);
}

HfModelFiles::HfModelFiles(const std::string& directory) : directory_(directory) {
    const std::string single = directory + "/model.safetensors", index_path = single + ".index.json";
    if (is_regular_file(single)) {
        add_file(single);
        return;
    }
    REQUIRE(is_regular_file(index_path), "%s has neither model.safetensors nor model.safetensors.index.json; %s",
            directory.c_str(), is_regular_file(directory + "/pytorch_model.bin") ? "save the model again in the "
            "safetensors format" : "download the weights into it, in the safetensors format");
    const auto index = read_json_object(index_path, kMaxIndexBytes);
    REQUIRE(index.contains("weight_map") && index["weight_map"].is_object(),
            "%s is not a JSON object with a weight_map", index_path.c_str());
    std::set<std::string> files;
    for (const auto& [name, file] : index["weight_map"].items()) {
        REQUIRE(file.is_string(), "%s: the file of tensor %s is not text", index_path.c_str(), printable(name).c_str());
        const std::string part = file.get<std::string>();
        REQUIRE(is_file_name(part), "%s: \"%s\" is not a file name in this directory", index_path.c_str(),
                printable(part).c_str());
        files.insert(part);
    }
    for (const std::string& file : files) add_file(directory + "/" + file);
    for (const auto& [name, file] : index["weight_map"].items()) {
        auto found = tensors_.find(name);
        REQUIRE(found != tensors_.end() && found->second.file == directory + "/" + file.get<std::string>(),
                "%s says that tensor %s is in %s, where it is not", index_path.c_str(),
                printable(name).c_str(), printable(file.get<std::string>()).c_str());
    }
}

void HfModelFiles::add_file(const std::string& path) {
    readers_.push_back(std::make_unique<SafetensorsReader>(path));
    for (const auto& [name, view] : readers_.back()->tensors()) {
        auto [place, is_new] = tensors_.try_emplace(name, Found{&view, path});
        REQUIRE(is_new, "tensor %s is in %s and in %s", printable(name).c_str(), place->second.file.c_str(),
                path.c_str());
    }
}
