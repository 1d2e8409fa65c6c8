// The safetensors container: 8 bytes little-endian header length, JSON header, raw little-endian data.
// Source: the format description of huggingface/safetensors.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "llmc/base/dtype.h"
#include "llmc/base/system/files.h"

struct SafetensorsEntry {
    std::string name;
    Dtype dtype = Dtype::kFp32;  // fp32, bf16, fp64, int32 or e4m3
    std::vector<int64_t> shape;
    int64_t elems() const {
        int64_t n = 1;
        for (int64_t d : shape) n *= d;
        return n;
    }
    int64_t bytes() const { return elems() * dtype_bytes(dtype); }
};

// The length and JSON header of a file with these tensors in this order without gaps; a multiple of 8 bytes. The
// metadata has the format "pt", which transformers requires.
std::string safetensors_header(const std::vector<SafetensorsEntry>& entries);

struct SafetensorsView {
    std::string dtype;  // as in the file: "F32", "BF16", "F16", ...
    std::vector<int64_t> shape;
    int64_t bytes = 0;
    const InputFile* file = nullptr;   // open as long as its reader
    int64_t offset = 0;          // in the file
    int64_t elems() const;
    // out (count) = bytes [begin, begin + count) of the tensor. Exit 5 if the file was truncated since it was opened.
    void read(int64_t begin, int64_t count, void* out) const;
};

// Opens a file and checks its header: at most 100 MB, every offset inside the file, no overlap, gap or overflow, no
// duplicate name, sizes that match dtype and shape. Exit 2, naming the file and the fault, if it is damaged.
class SafetensorsReader {
public:
    explicit SafetensorsReader(const std::string& path);
    SafetensorsReader(const SafetensorsReader&) = delete;
    SafetensorsReader& operator=(const SafetensorsReader&) = delete;
    const std::map<std::string, SafetensorsView>& tensors() const { return views_; }

private:
    const InputFile file_;
    const std::map<std::string, SafetensorsView> views_;
};

// The format's name of a dtype that we write: "F32", "BF16", "F64", "I32", "F8_E4M3" or "U8".
const char* safetensors_dtype(Dtype dtype);

// Reads elements [begin, begin + count) of an F32, BF16 or F16 tensor as fp32, exactly. Returns false for other dtypes.
// Exit 5 as SafetensorsView::read.
bool read_as_fp32(const SafetensorsView& view, int64_t begin, int64_t count, float* out);
