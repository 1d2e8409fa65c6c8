// The safetensors container: 8 bytes little-endian header length, JSON header, raw little-endian data.
// Source: the format description of huggingface/safetensors.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "llmc/base/dtype.h"

struct SafetensorsEntry {
    std::string name;
    Dtype dtype = Dtype::kFp32;  // fp32, bf16, fp64 or int32
    std::vector<int64_t> shape;
    int64_t elems() const {
        int64_t n = 1;
        for (int64_t d : shape) n *= d;
        return n;
    }
    int64_t bytes() const { return elems() * dtype_bytes(dtype); }
};

// What comes before the data of these tensors, which follow it in this order without gaps: the length and the JSON
// text, a multiple of 8 bytes together. The metadata says format "pt", which transformers asks for.
std::string safetensors_header(const std::vector<SafetensorsEntry>& entries);

struct SafetensorsView {
    std::string dtype;  // as in the file: "F32", "BF16", "F16", ...
    std::vector<int64_t> shape;
    const void* data = nullptr;  // in the mapped file; aligned to its elements only if the writer saw to it
    int64_t bytes = 0;
    int64_t elems() const;
};

// Checks the header of a whole file in memory: length cap 100 MB, every offset inside, no overlap, no hole,
// no overflow, no name twice, sizes match dtype and shape. `path` is for messages. The views point into
// `file`.
std::map<std::string, SafetensorsView> parse_safetensors(const std::string& path, const void* file,
                                                         int64_t bytes);

// Maps a file and checks its header. A damaged file is an Error (exit 2) that names the file and what is
// wrong.
class SafetensorsReader {
public:
    using View = SafetensorsView;
    explicit SafetensorsReader(const std::string& path);
    ~SafetensorsReader();
    const std::map<std::string, View>& tensors() const;
    const View& tensor(const std::string& name) const;  // exit 2 if absent
    const std::string& path() const;

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// "F32", "BF16", "F64", "I32": what the format calls a dtype that we write.
const char* safetensors_dtype(Dtype dtype);

// Elements [begin, begin + count) of an F32, BF16 or F16 tensor as fp32; exact. False for any other dtype.
bool read_as_fp32(const SafetensorsView& view, int64_t begin, int64_t count, float* out);
