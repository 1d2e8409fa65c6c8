// The safetensors container: 8 bytes little-endian header length, JSON header, raw little-endian data.
// Source: the format description of huggingface/safetensors.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "llmc/dtype.h"
#include "llmc/file_util.h"

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

// Size of the file that SafetensorsWriter makes of these entries, header included.
int64_t safetensors_bytes(const std::vector<SafetensorsEntry>& entries);

// Streams tensors in the order of `entries`; memory use does not grow with the file. The metadata says format
// "pt", which transformers asks for.
class SafetensorsWriter {
public:
    SafetensorsWriter(const std::string& path, const std::vector<SafetensorsEntry>& entries,
                      const IoHook& hook = {});
    ~SafetensorsWriter();
    void write(const void* data, int64_t bytes);  // the next bytes in order; errors: exit 7, file and reason
    void close();                                 // checks that every byte came, then fsync
    int64_t bytes_written() const;
    std::string xxh3() const;  // XXH3-128 of the whole file, hex, after close

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

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
