// One rank's bytes on their way into the files of a checkpoint. They are gathered in one block of memory as runs, each
// a place in a file, and written and hashed from there: when the memory is full, or all at once by another thread.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "llmc/base/files.h"

class WriteBuffer {
public:
    static constexpr int64_t kHashBytes = int64_t{64} << 20;   // hashed together at most: readers share the checking

    // Of `memory`, which is not owned.
    WriteBuffer(char* memory, int64_t bytes) : memory_(memory), bytes_(bytes) {}

    // What a run of this many bytes takes of the memory.
    static int64_t bytes_of_run(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

    // Empty; what comes next is of another checkpoint.
    void reset(const IoHook& hook);
    // Where the files are, which must exist when bytes are written. Needed before the memory is full.
    void set_directory(const std::string& directory) { directory_ = directory; }

    // The bytes that follow go to this place of this file.
    void begin(const std::string& file, int64_t offset);
    // Memory for the next bytes, valid until the next call; then how many of them there are. Writes when it is full.
    char* room(int64_t bytes);
    void filled(int64_t bytes);

    struct Written {
        std::string file;
        int64_t begin, bytes;
        std::string xxh3;
    };
    // Writes what is left and brings every file to the disk. Neither this nor what it calls touches anything but this
    // object and the files.
    std::vector<Written> finish();
    // From any thread: finish and room end soon with an Error.
    void cancel() { cancelled_ = true; }

private:
    static constexpr int64_t kAlign = 64;
    struct Run {
        std::string file;
        int64_t offset, at, bytes;   // in the file; in memory
    };

    void write_out();
    void write_block(const Run& run, int64_t done, int64_t bytes);
    void end_range();

    char* memory_;
    int64_t bytes_, used_ = 0;
    IoHook hook_;
    std::string directory_;
    std::vector<Run> runs_;
    std::map<std::string, RangeFile> files_;
    Written range_{};   // being hashed
    Xxh3 hash_;
    std::vector<Written> written_;
    std::atomic<bool> cancelled_{false};
};
