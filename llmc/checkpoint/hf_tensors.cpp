#include "llmc/checkpoint/hf_tensors.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "llmc/base/check.h"
#include "llmc/base/json_object.h"

namespace {

constexpr int64_t kTile = 32;  // elements: source and result of a tile stay in the L1 cache

// out[j * out_stride + i] = in[i * in_stride + j] for i < rows, j < cols.
template <typename T>
void transpose_block(const T* in, int64_t in_stride, int64_t rows, int64_t cols, T* out, int64_t out_stride) {
    for (int64_t i0 = 0; i0 < rows; i0 += kTile)
        for (int64_t j0 = 0; j0 < cols; j0 += kTile)
            for (int64_t i = i0; i < std::min(rows, i0 + kTile); i++)
                for (int64_t j = j0; j < std::min(cols, j0 + kTile); j++)
                    out[j * out_stride + i] = in[i * in_stride + j];
}

// Number of rows of `row_elems` elements that fit into the staging memory; at least one.
int64_t rows_that_fit(int64_t staging_bytes, int64_t row_elems, int64_t element_bytes, int64_t rows) {
    return std::clamp<int64_t>(staging_bytes / (row_elems * element_bytes), 1, rows);
}

template <typename T>
void export_rows(const Param& param, const HfTensor& t, const StateAccess& access, int64_t staging, WriteBuffer& out) {
    const int64_t first = t.part.row_begin * param.cols, elems = t.part.rows * param.cols;
    const int64_t step = rows_that_fit(staging, 1, sizeof(T), elems);
    for (int64_t done = 0; done < elems; done += step) {
        const int64_t count = std::min(step, elems - done), bytes = count * static_cast<int64_t>(sizeof(T));
        access.read(StateKind::kWeight, t.param, first + done, count, out.room(bytes));
        out.filled(bytes);
    }
}

// The file's rows are our columns, which StateAccess cannot read alone. So each block of file rows is assembled from
// panels of whole parameter rows, with large contiguous reads for any size of the matrix.
template <typename T>
void export_transposed(const Param& param, const HfTensor& t, const StateAccess& access, int64_t staging,
                       WriteBuffer& out) {
    const int64_t rows = t.part.rows, cols = param.cols;
    const int64_t panel_rows = rows_that_fit(staging, cols, sizeof(T), rows);
    const int64_t block_cols = rows_that_fit(staging, rows, sizeof(T), cols);
    std::vector<T> panel(static_cast<size_t>(panel_rows * cols));
    for (int64_t j = 0; j < cols; j += block_cols) {
        const int64_t width = std::min(block_cols, cols - j), bytes = width * rows * static_cast<int64_t>(sizeof(T));
        T* const block = reinterpret_cast<T*>(out.room(bytes));
        for (int64_t i = 0; i < rows; i += panel_rows) {
            const int64_t height = std::min(panel_rows, rows - i);
            access.read(StateKind::kWeight, t.param, (t.part.row_begin + i) * cols, height * cols, panel.data());
            transpose_block(panel.data() + j, cols, height, width, block + i, rows);
        }
        out.filled(bytes);
    }
}

// Reads elements of a view: converted to fp32, or 16-bit elements copied.
void fetch(const SafetensorsView& view, int64_t begin, int64_t count, float* out) {
    CHECK(read_as_fp32(view, begin, count, out), "%s read as fp32", view.dtype.c_str());
}
void fetch(const SafetensorsView& view, int64_t begin, int64_t count, uint16_t* out) {
    view.read(begin * 2, count * 2, out);
}

template <typename T>
void import_rows(const Param& param, const HfTensor& t, const SafetensorsView& view, StateKind kind,
                 const StateAccess& access, int64_t staging) {
    const int64_t first = t.part.row_begin * param.cols, elems = t.part.rows * param.cols;
    const int64_t step = rows_that_fit(staging, 1, sizeof(T), elems);
    std::vector<T> block(static_cast<size_t>(step));
    for (const ElementRange& part : held_within(access, kind, t.param, {first, elems}))
        for (int64_t done = 0; done < part.count; done += step) {
            const int64_t begin = part.begin + done, count = std::min(step, part.count - done);
            fetch(view, begin - first, count, block.data());
            access.write(kind, t.param, begin, count, block.data());
        }
}

// A panel of parameter rows is a column block of the file: strips of kTile file rows are read and transposed.
template <typename T>
void import_transposed(const Param& param, const HfTensor& t, const SafetensorsView& view, StateKind kind,
                       const StateAccess& access, int64_t staging) {
    const int64_t rows = t.part.rows, cols = param.cols;
    const int64_t panel_rows = rows_that_fit(staging / 2, cols, sizeof(T), rows);
    std::vector<T> panel(static_cast<size_t>(panel_rows * cols));
    std::vector<T> strip(static_cast<size_t>(panel_rows * std::min(kTile, cols)));
    for (int64_t i = 0; i < rows; i += panel_rows) {
        const int64_t height = std::min(panel_rows, rows - i), first = (t.part.row_begin + i) * cols;
        const auto parts = held_within(access, kind, t.param, {first, height * cols});
        for (int64_t j = 0; j < cols && !parts.empty(); j += kTile) {
            const int64_t width = std::min(kTile, cols - j);
            for (int64_t k = 0; k < width; k++)
                fetch(view, (j + k) * rows + i, height, strip.data() + k * height);
            transpose_block(strip.data(), height, width, height, panel.data() + j, cols);
        }
        for (const ElementRange& part : parts)
            access.write(kind, t.param, part.begin, part.count, panel.data() + (part.begin - first));
    }
}

}  // namespace

std::string shape_text(const std::vector<int64_t>& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); i++) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
}

std::vector<HfTensor> hf_tensors(const ParamTable& table, Dtype dtype) {
    std::vector<HfTensor> tensors;
    for (size_t i = 0; i < table.params.size(); i++) {
        const Param& param = table.params[i];
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

void export_tensor(const ParamTable& table, const HfTensor& tensor, const StateAccess& access,
                   int64_t staging_bytes, WriteBuffer& out) {
    const Param& param = table.params[static_cast<size_t>(tensor.param)];
    const bool wide = access.dtypes.weight == Dtype::kFp32;
    CHECK(wide || access.dtypes.weight == Dtype::kBf16, "weights in %s", dtype_name(access.dtypes.weight));
    auto copy = tensor.part.transposed ? (wide ? export_transposed<uint32_t> : export_transposed<uint16_t>)
                                       : (wide ? export_rows<uint32_t> : export_rows<uint16_t>);
    copy(param, tensor, access, staging_bytes, out);
}

void import_tensor(const ParamTable& table, const HfTensor& tensor, const SafetensorsView& view,
                   StateKind kind, const StateAccess& access, int64_t staging_bytes) {
    const Param& param = table.params[static_cast<size_t>(tensor.param)];
    const bool wide = kind == StateKind::kMaster || access.dtypes.weight == Dtype::kFp32;
    CHECK(kind == StateKind::kMaster || kind == StateKind::kWeight, "moments are not in the layout of transformers");
    CHECK(wide || view.dtype == "BF16", "%s copied as BF16", view.dtype.c_str());
    auto copy = tensor.part.transposed ? (wide ? import_transposed<float> : import_transposed<uint16_t>)
                                       : (wide ? import_rows<float> : import_rows<uint16_t>);
    copy(param, tensor, view, kind, access, staging_bytes);
}

HfModelFiles::HfModelFiles(const std::string& directory) : directory_(directory) {
    const std::string single = directory + "/model.safetensors", index_path = single + ".index.json";
    if (is_regular_file(single)) {
        add_file(single);
        return;
    }
    REQUIRE(is_regular_file(index_path), "%s has neither model.safetensors nor model.safetensors.index.json; %s",
            directory.c_str(), is_regular_file(directory + "/pytorch_model.bin")
                                   ? "save the model again in the safetensors format"
                                   : "download the weights into it, in the safetensors format");
    const auto index = read_json_object(index_path, kMaxIndexBytes);
    REQUIRE(index.contains("weight_map") && index["weight_map"].is_object(), "%s is no JSON object with a weight_map",
            index_path.c_str());
    std::set<std::string> files;
    for (const auto& [name, file] : index["weight_map"].items()) {
        REQUIRE(file.is_string(), "%s: the file of tensor %s is no text", index_path.c_str(), printable(name).c_str());
        const std::string part = file.get<std::string>();
        REQUIRE(is_file_name(part),
                "%s: \"%s\" is no file name in this directory", index_path.c_str(), printable(part).c_str());
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
