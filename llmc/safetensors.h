// The safetensors container: 8 bytes little-endian header length, JSON header, raw little-endian data.
// Source: the format description of huggingface/safetensors.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "llmc/dtype.h"

struct SafetensorsEntry {
    std::string name;
    Dtype dtype = Dtype::kFp32;      // writers: fp32 or bf16 (and int32); readers also F16, converted by read_as_fp32
    std::vector<int64_t> shape;
    int64_t elems() const {
        int64_t n = 1;
        for (int64_t d : shape) n *= d;
        return n;
    }
};

// Streams tensors in the order of `entries`; memory use does not grow with the file.
class SafetensorsWriter {
public:
    SafetensorsWriter(const std::string& path, std::vector<SafetensorsEntry> entries);
    ~SafetensorsWriter();
    void write(const void* data, int64_t bytes);   // the next bytes in order; errors: exit 7 with file and reason
    void close();                                  // checks that every byte came, then fsync
    int64_t bytes_written() const;
    std::string xxh3() const;                      // XXH3-128 of the whole file, hex, after close

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// Maps a file and checks its header: length cap 100 MB, offsets in order, no overlap, no hole, no overflow, sizes match
// dtype and shape. A damaged file is an Error (exit 2) that names the file and what is wrong.
class SafetensorsReader {
public:
    explicit SafetensorsReader(const std::string& path);
    ~SafetensorsReader();
    struct View {
        std::string dtype;             // as in the file: "F32", "BF16", "F16", ...
        std::vector<int64_t> shape;
        const void* data = nullptr;
        int64_t bytes = 0;
    };
    const std::map<std::string, View>& tensors() const;
    const View& tensor(const std::string& name) const;   // exit 2 if absent

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};
