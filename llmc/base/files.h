// Files as checkpoints need them: hashed while they are written, flushed to the disk before they count, with errors
// that name path and reason.
//
// Everything that changes the disk raises Error exit 7 (kExitDisk) on failure; everything that only reads
// raises exit 2.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

// A hook for tests and fault injection, empty otherwise. It is called before every call that changes the disk ("mkdir",
// "open", "allocate", "write", "fsync", "rename") with the path the call acts on; if it returns an errno other than 0,
// the call fails with it.
using IoHook = std::function<int(const char* call, const std::string& path)>;

// Blocks of files that this process has read or written so far, by any thread: while they become more it goes on.
int64_t file_blocks();

// XXH3-128 of bytes that are added in several calls.
class Xxh3 {
public:
    Xxh3();
    ~Xxh3();
    Xxh3(const Xxh3&) = delete;
    Xxh3& operator=(const Xxh3&) = delete;

    void update(const void* data, int64_t bytes);
    void reset();                  // as if nothing had come
    std::string digest() const;    // 32 hexadecimal digits

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// A new file, written front to back. The destructor only closes: whoever made the folder removes what is
// unfinished.
class OutputFile {
public:
    explicit OutputFile(const std::string& path, const IoHook& hook = {});
    ~OutputFile();
    OutputFile(const OutputFile&) = delete;
    OutputFile& operator=(const OutputFile&) = delete;

    void write(const void* data, int64_t bytes);
    void close();              // fsync, then close; nothing counts before this returned
    int64_t bytes() const;     // written so far
    std::string xxh3() const;  // XXH3-128 of what was written, 32 hexadecimal digits

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// A file of `bytes` bytes that are to be written by RangeFile, by several processes perhaps. Reserves the space where
// the file system can, so that a full disk shows here. Must not exist.
void create_file(const std::string& path, int64_t bytes, const IoHook& hook = {});

// An existing file of which bytes are written at places of their own. The destructor only closes.
class RangeFile {
public:
    explicit RangeFile(const std::string& path, const IoHook& hook = {});
    ~RangeFile();
    RangeFile(const RangeFile&) = delete;
    RangeFile& operator=(const RangeFile&) = delete;

    void write(int64_t offset, const void* data, int64_t bytes);
    void close();   // fsync, then close; nothing counts before this returned

private:
    std::string path_;
    IoHook hook_;
    int fd_ = -1;
};

// Calls use(data, bytes) for every piece of the file, front to back.
void read_file(const std::string& path, const std::function<void(const void* data, int64_t bytes)>& use);
std::string read_text_file(const std::string& path, int64_t max_bytes);  // longer than max_bytes is an error
std::string xxh3_of_range(const std::string& path, int64_t begin, int64_t bytes);   // all of them must be there
std::string xxh3_of_text(const std::string& text);

bool is_directory(const std::string& path);  // follows links
bool is_regular_file(const std::string& path);
int64_t file_bytes(const std::string& path);                       // -1 if it is no regular file
std::vector<std::string> list_directory(const std::string& path);  // names, sorted, without . and ..

void make_directory(const std::string& path, const IoHook& hook = {});    // must not exist
void make_directories(const std::string& path, const IoHook& hook = {});  // and parents; new names fsynced
void sync_directory(const std::string& path, const IoHook& hook = {});
void rename_path(const std::string& from, const std::string& to, const IoHook& hook = {});
// Swaps two existing paths in one step. False where the file system cannot.
bool exchange_paths(const std::string& a, const std::string& b, const IoHook& hook = {});
bool remove_tree(const std::string& path) noexcept;  // false if something is left

// `path`, or the nearest folder above it that exists: where it would be made.
std::string existing_part(const std::string& path);
// Bytes an unprivileged writer can still put on the file system of `path`.
int64_t free_bytes(const std::string& path);
// Error exit 7 that names both figures when `path`'s file system has less than `needed_bytes` left. `what`
// says for what.
void require_free_space(const std::string& path, int64_t needed_bytes, const std::string& what);

// Text from a file for an error message: control characters and quotes escaped, at most 120 characters.
std::string printable(const std::string& text);
