// Files for checkpoints: hashed while they are written and synced to disk. Errors name path and reason; the exit code
// is 7 (kExitDisk) for functions that change the disk and 2 for those that only read. Only these call
// std::filesystem, whose functions without an error_code throw at loops of links, long names and folders that are gone.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "llmc/base/check.h"
#include "llmc/base/system/descriptor.h"

// A hook for tests, empty otherwise. It is called before every call that changes the disk ("mkdir",
// "open", "allocate", "write", "fsync", "rename") with the path of the call; if it returns a nonzero errno, the call
// fails with it.
using IoHook = std::function<int(const char* call, const std::string& path)>;

// Number of file blocks that this process has read or written so far. While it grows, the process makes progress.
int64_t file_blocks();

// XXH3-128 of bytes that several calls add.
class Xxh3 {
public:
    Xxh3();
    ~Xxh3();

    void update(const void* data, int64_t bytes);
    void reset();                  // back to the initial state
    std::string digest() const;    // 32 hexadecimal digits

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// Writes a new file and fsyncs it; nothing may be at its path, not even a link. The owner of the directory removes
// files that a failure leaves unfinished.
void write_file(const std::string& path, const std::string& text, const IoHook& hook = {});

// A file that is written beside `path`, under a name that cannot be predicted, and then renamed to `path`. An existing
// link at `path` is replaced, not followed: a caller that accepts links from users must resolve them first.
class ReplacementFile {
public:
    explicit ReplacementFile(const std::string& path);
    ~ReplacementFile();   // removes it if it was not published

    void write(const std::string& text);
    void publish();   // fsync, then rename to `path`, with the permissions of the file that was there

private:
    void flush();

    const std::string path_;
    std::string aside_, buffer_;
    Descriptor file_;
    int64_t bytes_ = 0;   // written to the file so far
};

// Creates a file of `bytes` bytes, which must not exist; several processes may then write it through RangeFile.
// Reserves the space if the file system can, so that a full disk is found here.
void create_file(const std::string& path, int64_t bytes, const IoHook& hook = {});

// An existing file that is written at given offsets; a link is not followed. The destructor only closes.
class RangeFile {
public:
    explicit RangeFile(const std::string& path, const IoHook& hook = {});

    void write(int64_t offset, const void* data, int64_t bytes);
    void close();   // fsync, then close; only now the bytes are safe

private:
    const std::string path_;
    const IoHook hook_;
    Descriptor file_;
};

// Opens a regular file for reading. Anything else is an error with exit code 2 that names the file: a device, a socket,
// a folder, or a FIFO, on which it does not block.
Descriptor open_regular(const std::string& path);
// Whether a text can be the name of a file in a folder: not empty, "." or "..", without slashes and control characters.
bool is_file_name(const std::string& name);

// An existing regular file that is read at given offsets. It is not mapped, because an access to a mapping of a file
// that was truncated ends the process with SIGBUS. Movable; any number of threads may read.
class InputFile {
public:
    // Opens like open_regular. name: the file's name in messages, with its path: "data shard 'a.bin'". cut_code: the
    // exit code if a read finds fewer than bytes(), because the file was truncated. Exit 2 if it is a git-lfs pointer.
    explicit InputFile(const std::string& path, const std::string& name, int cut_code = kExitBadInput);

    int64_t bytes() const { return bytes_; }   // the size when it was opened
    const std::string& name() const { return name_; }
    // out (bytes) = the bytes from `offset` on, which must lie within bytes(). The error names the missing byte.
    void read(int64_t offset, int64_t bytes, void* out) const;
    // Calls use(data, count) for blocks of at most block_bytes of the bytes [begin, begin + bytes), front to back.
    void read_blocks(int64_t begin, int64_t bytes, int64_t block_bytes,
                     const std::function<void(const uint8_t* data, int64_t count)>& use) const;
    // Calls posix_fadvise (POSIX_FADV_WILLNEED, ...) for `count` bytes (0: up to the end); ignores errors.
    void advise(int64_t first, int64_t count, int advice) const;

private:
    std::string name_;
    int cut_code_;
    Descriptor file_;
    int64_t bytes_ = 0;
};

// These functions read regular files only (open_regular).
std::string read_text_file(const std::string& path, int64_t max_bytes);  // longer than max_bytes is an error
std::string xxh3_of_range(const std::string& path, int64_t begin, int64_t bytes);   // a shorter file is an error
std::string xxh3_of_text(const std::string& text);

bool is_directory(const std::string& path);  // follows links
bool is_regular_file(const std::string& path);
bool path_exists(const std::string& path);   // whatever it is, also a link that leads nowhere
bool is_link(const std::string& path);
bool is_same_path(const std::string& a, const std::string& b);   // both exist, and are one file or folder
// The path without links; `path` itself if nothing is there.
std::string resolved_path(const std::string& path);
// The absolute path, by its names alone; it remains relative if the working folder was removed.
std::string absolute_path(const std::string& path);
int64_t file_bytes(const std::string& path);                       // -1 if it is not a regular file
std::vector<std::string> list_directory(const std::string& path);  // names, sorted, without . and ..

void make_directory(const std::string& path, const IoHook& hook = {});    // must not exist
void make_directories(const std::string& path, const IoHook& hook = {});  // with parents; syncs new entries
void sync_directory(const std::string& path, const IoHook& hook = {});
void rename_path(const std::string& from, const std::string& to, const IoHook& hook = {});
// Swaps two existing paths atomically. Returns false if the file system cannot.
bool exchange_paths(const std::string& a, const std::string& b, const IoHook& hook = {});
bool remove_tree(const std::string& path) noexcept;  // false if something is left

// Returns `path` or its nearest existing parent directory.
std::string existing_part(const std::string& path);
// Free bytes for an unprivileged user on the file system of `path`.
int64_t free_bytes(const std::string& path);
// Fails with exit 7 if the file system of `path` has less than `needed_bytes` free. `what` needs them, for the error.
void require_free_space(const std::string& path, int64_t needed_bytes, const std::string& what);
