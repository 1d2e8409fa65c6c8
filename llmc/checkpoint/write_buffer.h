// Buffers one rank's bytes for the files of a checkpoint, as segments with their places in the files. Writes and hashes
// them when the memory is full, or all at the end, in another thread.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "llmc/base/dtype.h"
#include "llmc/base/system/files.h"

class WriteBuffer {
public:
    static constexpr int64_t kHashBytes = int64_t{64} << 20;   // at most per hash, so that ranks can share the checking

    // `memory` is not owned.
    WriteBuffer(char* memory, int64_t bytes) : memory_(memory), bytes_(bytes) {}

    // The memory that a segment of `bytes` takes.
    static int64_t aligned(int64_t bytes) { return round_up(bytes, kAlign); }

    // Empties the buffer for another checkpoint.
    void reset(const IoHook& hook);
    // The directory of the files, which must exist. Call it before the memory is full.
    void set_directory(const std::string& directory) { directory_ = directory; }

    // A second place of fp32 values, in another file, where they are written plus `add` in this dtype: bf16 (rounded)
    // or fp32.
    struct Copy {
        std::string file;
        int64_t offset;
        Dtype dtype;
        float add = 0;
    };
    // Starts a segment at this offset of this file. With `copy` its bytes are fp32 values.
    void begin(const std::string& file, int64_t offset, const std::optional<Copy>& copy = {});
    // Returns memory for the next bytes, valid until the next call; writes if the memory is full.
    char* room(int64_t bytes);
    // Adds the bytes that the caller has written to room(); in a segment with `copy`, these must be whole values.
    void filled(int64_t bytes);

    struct Written {
        std::string file;
        int64_t begin, bytes;
        std::string xxh3;
    };
    // Writes the rest and fsyncs every file; the buffer is empty then. Uses only this object and the files, so that any
    // thread can call it.
    std::vector<Written> finish();
    // Makes finish and room, in any thread, end soon with an Error.
    void cancel() { cancelled_ = true; }

private:
    static constexpr int64_t kAlign = 64;
    struct Segment {
        std::string file;
        int64_t offset, at, bytes;   // in the file; in memory
        std::optional<Copy> copy;
    };
    // Segments that follow each other in a file have common hashes, whatever is written to other files in between.
    struct OpenFile {
        explicit OpenFile(const std::string& path, const IoHook& hook) : file(path, hook) {}
        RangeFile file;
        Written range{};   // the range that is being hashed
        Xxh3 hash;
    };

    void write_out();
    void write(const std::string& name, int64_t offset, const char* data, int64_t bytes);
    void end_range(OpenFile& file);

    char* memory_;
    int64_t bytes_, used_ = 0;
    IoHook hook_;
    std::string directory_;
    std::vector<Segment> segments_;
    std::map<std::string, OpenFile> files_;
    std::vector<Written> written_;
    std::atomic<bool> cancelled_{false};
};
