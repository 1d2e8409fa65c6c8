#include "llmc/checkpoint/huggingface/hf_tensors.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "llmc/base/json_object.h"

namespace {

constexpr int64_t kTile = 32;  // elements: source and result of a tile stay in the L1 cache

// out[j * out_stride + i * step] = in[i * in_stride + j] for i < rows, j < cols.
template <typename In, typename Out>
void transpose_block(const In* in, int64_t in_stride, int64_t rows, int64_t cols, Out* out, int64_t out_stride,
                     int64_t step = 1) {
    for (int64_t i0 = 0; i0 < rows; i0 += kTile)
        for (int64_t j0 = 0; j0 < cols; j0 += kTile)
            for (int64_t i = i0; i < std::min(rows, i0 + kTile); i++)
                for (int64_t j = j0; j < std::min(cols, j0 + kTile); j++)
                    out[j * out_stride + i * step] = Out(in[i * in_stride + j]);
}

// Number of rows of `row_bytes` bytes that fit into `bytes`; at least one.
int64_t rows_that_fit(int64_t bytes, int64_t row_bytes, int64_t rows) {
    return std::clamp<int64_t>(bytes / row_bytes, 1, rows);
}

// The columns of a transposed tensor's matrix: row r of each is column r % run * step + r / run.
struct Columns {
    int64_t rows, step, run;
    explicit Columns(const HfPart& part)
        : rows(part.matrix_rows()), step(part.interleaved ? 2 : 1), run(rows / step) {}
    int64_t of(int64_t row) const { return row % run * step + row / run; }
};

// ---- from the masters in a file to a transposed tensor

// A block of the file's rows, and the strip of kTile rows of the parameter from which it is made.
struct TransposedBlock {
    int64_t cols, file_rows, bytes, strip_bytes;

    TransposedBlock(const HfTensor& tensor, int64_t staging_bytes) {
        const int64_t row_bytes = tensor.part.matrix_rows() * dtype_bytes(tensor.entry.dtype);
        cols = tensor.entry.elems() / tensor.part.rows;
        file_rows = rows_that_fit(staging_bytes, row_bytes, cols);
        bytes = WriteBuffer::aligned(file_rows * row_bytes);
        strip_bytes = kTile * file_rows * 4;
    }
};

// One matrix, the rows of the parameter from `begin` on, at `offset` of the file.
template <typename T>
void write_transposed(const HfPart& part, int64_t begin, const std::string& file, int64_t offset,
                      const ReadMaster& read_master, const TransposedBlock& size, WriteBuffer& out) {
    const Columns columns(part);
    const int64_t rows = columns.rows, cols = size.cols;
    for (int64_t j = 0; j < cols; j += size.file_rows) {
        const int64_t width = std::min(size.file_rows, cols - j);
        out.begin(file, offset + j * rows * static_cast<int64_t>(sizeof(T)));
        char* const memory = out.room(size.bytes + size.strip_bytes);
        T* const block = reinterpret_cast<T*>(memory);
        float* const strip = reinterpret_cast<float*>(memory + size.bytes);
        int64_t height = 0;
        for (int64_t i = 0; i < rows; i += height) {
            height = std::min(kTile, columns.run - i % columns.run);
            const int64_t first = (begin + i) * cols + j;
            if (width == cols) read_master(first, height * cols, strip);
            else for (int64_t k = 0; k < height; k++) read_master(first + k * cols, width, strip + k * width);
            transpose_block(strip, width, height, width, block + columns.of(i), rows, columns.step);
        }
        out.filled(width * rows * static_cast<int64_t>(sizeof(T)));
    }
}

// ---- from files to masters

constexpr int64_t kMxfp4Block = 32;   // codes of a scale

// code: E2M1 in the lower 4 bits; scale: E8M0. Source: OCP Microscaling Formats specification, 5.3.3 and 5.4.1.
float from_mxfp4(int code, uint8_t scale) {
    constexpr float kMagnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    if (scale == 255) return std::nanf("");
    const float magnitude = std::ldexp(kMagnitudes[code & 7], scale - 127);
    return code & 8 ? -magnitude : magnitude;
}

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

// The rows of a transposed tensor from which panels of a parameter's rows are made: strips of at most kTile file rows,
// and room for those between them in the last one, if they are interleaved.
struct TransposedPanel {
    int64_t rows, strip_cols;

    TransposedPanel(const Param& param, int64_t held_rows, int64_t staging_bytes) {
        strip_cols = std::min(kTile, param.cols);
        rows = rows_that_fit(staging_bytes, (param.cols + strip_cols + 1) * 4, held_rows);
    }
    int64_t elems(const Param& param) const { return rows * (param.cols + strip_cols + 1); }
};

// Reads row j of a matrix of the file: `height` columns, from that of row `row` of all matrices on, of one run.
void fetch_columns(const Columns& columns, const SafetensorsView& view, int64_t cols, int64_t row, int64_t height,
                   int64_t j, float* out) {
    const int64_t line = (row / columns.rows * cols + j) * columns.rows, step = columns.step;
    fetch(view, line + columns.of(row % columns.rows), (height - 1) * step + 1, out);
    for (int64_t i = 1; i < height && step > 1; i++) out[i] = out[i * step];
}

void import_transposed(const Param& param, const HfTensor& t, const SafetensorsView& view, const StateAccess& access,
                       std::vector<float>& staging) {
    const int64_t cols = param.cols;
    const Columns columns(t.part);
    const int64_t run = columns.run;
    const ElementRange all = elements_of(param, t.part);
    for (const ElementRange& part : held_within(access, t.param, all)) {
        // The rows in which this rank holds `part`, from the first row of `all`.
        const int64_t from = (part.begin - all.begin) / cols;
        const int64_t to = ceil_div(part.begin + part.count - all.begin, cols);
        const TransposedPanel size(param, std::min(run, to - from), static_cast<int64_t>(staging.size()) * 4);
        float* const panel = staging.data();
        float* const strip = panel + size.rows * cols;
        int64_t height = 0;
        for (int64_t row = from; row < to; row += height) {
            height = std::min({size.rows, to - row, run - row % run});
            for (int64_t j = 0; j < cols; j += size.strip_cols) {
                const int64_t width = std::min(size.strip_cols, cols - j);
                for (int64_t k = 0; k < width; k++)
                    fetch_columns(columns, view, cols, row, height, j + k, strip + k * height);
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
            std::vector<int64_t> shape{part.matrix_rows(), param.cols};
            if (part.transposed) std::swap(shape[0], shape[1]);
            if (param.is_vector()) shape = {part.matrix_rows()};
            if (part.stacked > 0) shape.insert(shape.begin(), part.stacked);
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
    const auto write = dtype == Dtype::kFp32 ? write_transposed<float> : write_transposed<bf16>;
    const HfPart& part = tensor.part;
    const TransposedBlock size(tensor, staging_bytes);
    const int64_t rows = part.matrix_rows(), bytes = rows * size.cols * dtype_bytes(dtype);
    for (int64_t m = 0; m < part.rows / rows; m++)
        write(part, part.row_begin + m * rows, file, offset + m * bytes, read_master, size, out);
}

int64_t least_import_bytes(const Param& param) { return TransposedPanel(param, 1, 0).elems(param) * 4; }

void import_tensor(const ParamTable& table, const HfTensor& tensor, const SafetensorsView& view,
                   const StateAccess& access, std::vector<float>& staging) {
    const Param& param = table.params[static_cast<size_t>(tensor.param)];
    if (tensor.part.transposed) import_transposed(param, tensor, view, access, staging);
    else import_rows(param, tensor, view, access, staging);
}

std::vector<int64_t> Mxfp4::shape(const HfTensor& tensor, bool of_blocks) {
    const int64_t rows = tensor.part.matrix_rows(), cols = tensor.entry.elems() / tensor.part.rows;
    REQUIRE(cols % kMxfp4Block == 0, "tensor %s in MXFP4: rows of %lld elements are no multiple of %lld, the elements "
            "of a scale", tensor.entry.name.c_str(), ll(cols), ll(kMxfp4Block));
    std::vector<int64_t> shape{tensor.part.stacked, rows, cols / kMxfp4Block};
    if (of_blocks) shape.push_back(kMxfp4Block / 2);
    return shape;
}

void import_mxfp4(const ParamTable& table, const HfTensor& t, const Mxfp4& view, const StateAccess& access) {
    const Columns columns(t.part);
    const int64_t cols = table.params[static_cast<size_t>(t.param)].cols, blocks = cols / kMxfp4Block;
    std::vector<uint8_t> codes(static_cast<size_t>(cols / 2)), scales(static_cast<size_t>(blocks));
    std::vector<float> values(static_cast<size_t>(cols));
    for (const ElementRange& part : held_within(access, t.param, {0, t.part.rows * cols}))
        for (int64_t begin = part.begin, end = part.begin + part.count; begin < end;) {
            const int64_t row = begin / cols, first = row * cols, count = std::min(end, first + cols) - begin;
            const int64_t line = row / columns.rows * columns.rows + columns.of(row % columns.rows);
            view.blocks.read(line * cols / 2, cols / 2, codes.data());
            view.scales.read(line * blocks, blocks, scales.data());
            for (size_t i = 0; i < values.size(); i++)
                values[i] = from_mxfp4(codes[i / 2] >> i % 2 * 4, scales[i / kMxfp4Block]);
            access.write(StateKind::kMaster, t.param, begin, count, values.data() + (begin - first));
            begin += count;
        }
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
