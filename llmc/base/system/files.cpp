#include "llmc/base/system/files.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

// Included as source, so that nothing has to be linked and the hash uses this build's instruction set.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace fs = std::filesystem;

namespace {

constexpr int64_t kIoBytes = int64_t{1} << 20;  // block size of reads

std::atomic<int64_t> blocks_done{0};

[[noreturn]] void fail_disk(const char* call, const std::string& path, int error) {
    const char* advice = "";
    if (error == ENOSPC) advice = "; free space on that disk or choose another --save";
    if (error == EDQUOT) advice = "; the quota is used up";
    if (error == EMFILE) advice = "; raise the limit of open files (ulimit -n)";
    if (error == EFBIG) advice = "; raise the file size limit (ulimit -f)";
    FAIL(kExitDisk, "cannot %s %s: %s%s", call, path.c_str(), std::strerror(error), advice);
}

[[noreturn]] void fail_read(const std::string& path, int error) {
    FAIL(kExitBadInput, "cannot read %s: %s%s", path.c_str(), std::strerror(error),
         error == EMFILE ? "; raise the limit of open files (ulimit -n)" : "");
}

void ask_hook(const IoHook& hook, const char* call, const std::string& path) {
    if (!hook) return;
    if (int error = hook(call, path)) fail_disk(call, path, error);
}

std::string hex(XXH128_hash_t hash) {
    return strf("%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
}

constexpr int kNewFile = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;

Descriptor open_to_write(const std::string& path, int flags, const IoHook& hook) {
    ask_hook(hook, "open", path);
    Descriptor file(::open(path.c_str(), flags, 0666));
    if (file.fd < 0) fail_disk("open", path, errno);
    return file;
}

Descriptor open_new(const std::string& path, const IoHook& hook) { return open_to_write(path, kNewFile, hook); }

void write_all(int fd, const std::string& path, int64_t offset, const void* data, int64_t bytes, const IoHook& hook) {
    ask_hook(hook, "write", path);
    const char* next = static_cast<const char*>(data);
    for (int64_t left = bytes; left > 0;) {
        const size_t block = static_cast<size_t>(std::min<int64_t>(left, int64_t{1} << 30));
        const ssize_t done = ::pwrite(fd, next, block, offset);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) fail_disk("write", path, errno);
        next += done;
        offset += done;
        left -= done;
        blocks_done++;
    }
}

// Syncs and closes fd, which is -1 afterwards.
void close_synced(int& fd, const std::string& path, const IoHook& hook) {
    CHECK(fd >= 0, "%s closed twice", path.c_str());
    ask_hook(hook, "fsync", path);
    if (::fsync(fd) != 0) fail_disk("fsync", path, errno);
    const int closing = std::exchange(fd, -1);
    // Network file systems report a failed write only here.
    if (::close(closing) != 0 && errno != EINTR) fail_disk("close", path, errno);
}

std::string random_digits() {   // 16, for names that cannot be predicted
    uint64_t bits = 0;
    CHECK(::getrandom(&bits, sizeof bits, 0) == sizeof bits, "getrandom: %s", std::strerror(errno));
    return strf("%016llx", static_cast<unsigned long long>(bits));
}

}  // namespace

int64_t file_blocks() { return blocks_done; }

struct Xxh3::Impl {
    XXH3_state_t* state = XXH3_createState();
    ~Impl() { XXH3_freeState(state); }
};

Xxh3::Xxh3() : impl_(std::make_unique<Impl>()) { reset(); }
Xxh3::~Xxh3() = default;
void Xxh3::update(const void* data, int64_t bytes) {
    XXH3_128bits_update(impl_->state, data, static_cast<size_t>(bytes));
}
void Xxh3::reset() {
    CHECK(impl_->state && XXH3_128bits_reset(impl_->state) == XXH_OK, "no memory for a hash state");
}
std::string Xxh3::digest() const { return hex(XXH3_128bits_digest(impl_->state)); }

void write_file(const std::string& path, const std::string& text, const IoHook& hook) {
    Descriptor file = open_new(path, hook);
    write_all(file.fd, path, 0, text.data(), static_cast<int64_t>(text.size()), hook);
    close_synced(file.fd, path, hook);
}

ReplacementFile::ReplacementFile(const std::string& path) : path_(path) {
    do {
        aside_ = path + "." + random_digits();
        file_.fd = ::open(aside_.c_str(), kNewFile, 0666);
    } while (file_.fd < 0 && errno == EEXIST);
    if (file_.fd < 0) fail_disk("open", aside_, errno);
}

ReplacementFile::~ReplacementFile() {
    if (!aside_.empty()) ::unlink(aside_.c_str());
}

void ReplacementFile::write(const std::string& text) {
    buffer_ += text;
    if (static_cast<int64_t>(buffer_.size()) >= kIoBytes) flush();
}

void ReplacementFile::flush() {
    write_all(file_.fd, aside_, bytes_, buffer_.data(), static_cast<int64_t>(buffer_.size()), {});
    bytes_ += static_cast<int64_t>(buffer_.size());
    buffer_.clear();
}

void ReplacementFile::publish() {
    flush();
    struct stat old {};
    if (::lstat(path_.c_str(), &old) == 0 && S_ISREG(old.st_mode)) ::fchmod(file_.fd, old.st_mode & 07777);
    close_synced(file_.fd, aside_, {});
    rename_path(aside_, path_);
    aside_.clear();
}

void create_file(const std::string& path, int64_t bytes, const IoHook& hook) {
    const Descriptor file = open_new(path, hook);
    ask_hook(hook, "allocate", path);
    if (::fallocate(file.fd, 0, 0, bytes) == 0) return;
    const bool unknown = errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL;
    if (!unknown || ::ftruncate(file.fd, bytes) != 0) fail_disk("allocate", path, errno);
}

RangeFile::RangeFile(const std::string& path, const IoHook& hook)
    : path_(path), hook_(hook), file_(open_to_write(path, O_WRONLY | O_NOFOLLOW | O_CLOEXEC, hook)) {}

void RangeFile::write(int64_t offset, const void* data, int64_t bytes) {
    CHECK(file_.fd >= 0, "write to %s after it was closed", path_.c_str());
    write_all(file_.fd, path_, offset, data, bytes, hook_);
    // Starts writeback now, so that the final fsync, which reports errors, has less to do.
    ::sync_file_range(file_.fd, offset, bytes, SYNC_FILE_RANGE_WRITE);
}

void RangeFile::close() { close_synced(file_.fd, path_, hook_); }

Descriptor open_regular(const std::string& path) {
    const auto require_regular = [&](const struct stat& info) {
        const char* kind = S_ISDIR(info.st_mode)    ? "a folder"
                           : S_ISFIFO(info.st_mode) ? "a FIFO (pipe)"
                           : S_ISSOCK(info.st_mode) ? "a socket"
                                                    : "a device";
        REQUIRE(S_ISREG(info.st_mode), "cannot read %s: %s, not a file", path.c_str(), kind);
    };
    REQUIRE(path.find('\0') == std::string::npos, "cannot read %s: a name with a NUL byte", path.c_str());
    // The type is checked before the file is opened, since opening a device may have an effect, and again afterwards,
    // since another file may have taken its place.
    struct stat info {};
    if (::stat(path.c_str(), &info) != 0) fail_read(path, errno);
    require_regular(info);
    Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (file.fd < 0 || ::fstat(file.fd, &info) != 0) fail_read(path, errno);
    require_regular(info);
    return file;
}

bool is_file_name(const std::string& name) {
    return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos && escaped(name) == name;
}

InputFile::InputFile(const std::string& path, const std::string& name, int cut_code)
    : name_(name), cut_code_(cut_code), file_(open_regular(path)) {
    struct stat info {};
    if (::fstat(file_.fd, &info) == 0) bytes_ = info.st_size;
    constexpr std::string_view kLfsPointer = "version https://git-lfs.github.com/spec/";
    if (bytes_ < ll(kLfsPointer.size()) || bytes_ > 1024) return;   // a pointer is shorter
    std::string start(kLfsPointer.size(), '\0');
    read(0, ll(start.size()), start.data());
    REQUIRE(start != kLfsPointer, "%s: a git-lfs pointer in place of the file; git lfs pull fetches that",
            name.c_str());
}

void InputFile::read(int64_t offset, int64_t bytes, void* out) const {
    CHECK(offset >= 0 && bytes >= 0 && bytes <= bytes_ - offset, "bytes [%lld, +%lld) of %s with %lld", ll(offset),
          ll(bytes), name_.c_str(), ll(bytes_));
    char* next = static_cast<char*>(out);
    while (bytes > 0) {
        const ssize_t got = ::pread(file_.fd, next, static_cast<size_t>(bytes), offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            FAIL(cut_code_, "%s: cannot read byte %lld: %s", name_.c_str(), ll(offset), std::strerror(errno));
        if (got == 0) {
            struct stat now {};
            ::fstat(file_.fd, &now);
            FAIL(cut_code_, "%s: byte %lld is missing: the file had %lld bytes when it was opened and has %lld now; do "
                 "not change files that are being read", name_.c_str(), ll(offset), ll(bytes_), ll(now.st_size));
        }
        next += got;
        offset += got;
        bytes -= got;
        blocks_done++;
    }
}

void InputFile::read_blocks(int64_t begin, int64_t bytes, int64_t block_bytes,
                            const std::function<void(const uint8_t* data, int64_t count)>& use) const {
    const auto buffer = std::make_unique_for_overwrite<uint8_t[]>(static_cast<size_t>(std::min(bytes, block_bytes)));
    for (int64_t done = 0; done < bytes; done += block_bytes) {
        const int64_t count = std::min(block_bytes, bytes - done);
        read(begin + done, count, buffer.get());
        use(buffer.get(), count);
    }
}

void InputFile::advise(int64_t first, int64_t count, int advice) const {
    posix_fadvise(file_.fd, first, count, advice);
}

std::string read_text_file(const std::string& path, int64_t max_bytes) {
    const InputFile file(path, path);
    REQUIRE(file.bytes() <= max_bytes, "%s is longer than %lld bytes", path.c_str(), ll(max_bytes));
    std::string text(static_cast<size_t>(file.bytes()), '\0');
    file.read(0, file.bytes(), text.data());
    return text;
}

std::string xxh3_of_range(const std::string& path, int64_t begin, int64_t bytes) {
    const InputFile file(path, path);
    REQUIRE(bytes <= file.bytes() - begin, "%s ends %lld bytes early", path.c_str(), ll(begin + bytes - file.bytes()));
    file.advise(begin, bytes, POSIX_FADV_SEQUENTIAL);
    Xxh3 hash;
    file.read_blocks(begin, bytes, kIoBytes, [&](const uint8_t* data, int64_t count) { hash.update(data, count); });
    return hash.digest();
}

std::string xxh3_of_text(const std::string& text) { return hex(XXH3_128bits(text.data(), text.size())); }

bool is_directory(const std::string& path) {
    std::error_code ignored;
    return fs::is_directory(path, ignored);
}

bool is_regular_file(const std::string& path) {
    std::error_code ignored;
    return fs::is_regular_file(path, ignored);
}

bool path_exists(const std::string& path) {
    std::error_code error;
    return fs::symlink_status(path, error).type() != fs::file_type::not_found && error != std::errc::filename_too_long;
}

bool is_link(const std::string& path) {
    std::error_code ignored;
    return fs::is_symlink(path, ignored);
}

bool is_same_path(const std::string& a, const std::string& b) {
    std::error_code ignored;
    return fs::equivalent(a, b, ignored);
}

std::string resolved_path(const std::string& path) {
    std::error_code missing;
    const fs::path resolved = fs::canonical(path, missing);
    return missing ? path : resolved.string();
}

std::string absolute_path(const std::string& path) {
    std::error_code gone;
    const fs::path absolute = fs::absolute(path, gone);
    return (gone ? fs::path(path) : absolute).lexically_normal().string();
}

int64_t file_bytes(const std::string& path) {
    struct stat info {};
    return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) ? static_cast<int64_t>(info.st_size) : -1;
}

std::vector<std::string> list_directory(const std::string& path) {
    std::vector<std::string> names;
    std::error_code error;
    for (fs::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error))
        names.push_back(entry->path().filename().string());
    if (error) fail_read(path, error.value());
    std::sort(names.begin(), names.end());
    return names;
}

void make_directory(const std::string& path, const IoHook& hook) {
    ask_hook(hook, "mkdir", path);
    if (::mkdir(path.c_str(), 0777) != 0) fail_disk("mkdir", path, errno);
}

void make_directories(const std::string& path, const IoHook& hook) {
    if (is_directory(path)) return;
    const std::string parent = fs::path(path).parent_path().string();
    if (!parent.empty()) make_directories(parent, hook);
    ask_hook(hook, "mkdir", path);
    // Another process may have created it meanwhile.
    if (::mkdir(path.c_str(), 0777) != 0 && !(errno == EEXIST && is_directory(path)))
        fail_disk("mkdir", path, errno);
    sync_directory(parent.empty() ? "." : parent, hook);
}

void sync_directory(const std::string& path, const IoHook& hook) {
    ask_hook(hook, "fsync", path);
    Descriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (directory.fd < 0) fail_disk("open", path, errno);
    // Some network file systems have no fsync for directories and return EINVAL; their renames are synchronous.
    if (::fsync(directory.fd) != 0 && errno != EINVAL) fail_disk("fsync", path, errno);
}

void rename_path(const std::string& from, const std::string& to, const IoHook& hook) {
    ask_hook(hook, "rename", from);
    if (::rename(from.c_str(), to.c_str()) != 0) fail_disk("rename", from + " to " + to, errno);
}

bool exchange_paths(const std::string& a, const std::string& b, const IoHook& hook) {
    ask_hook(hook, "rename", a);
    if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return true;
    if (errno == EINVAL || errno == ENOSYS || errno == ENOTSUP || errno == EXDEV) return false;
    fail_disk("exchange", a + " and " + b, errno);
}

bool remove_tree(const std::string& path) noexcept {
    std::error_code error;
    fs::remove_all(path, error);
    return !error;
}

std::string existing_part(const std::string& path) {
    std::error_code gone;   // the working folder
    fs::path part = fs::absolute(path, gone);
    if (gone) part = path;
    std::error_code ignored;
    while (!fs::exists(part, ignored) && part.has_relative_path()) part = part.parent_path();
    return part.empty() ? "." : part.string();
}

int64_t free_bytes(const std::string& path) {
    struct statvfs info {};
    if (::statvfs(path.c_str(), &info) != 0) fail_read(path, errno);
    int64_t bytes = 0;  // some network file systems report more than an int64 holds
    if (__builtin_mul_overflow(info.f_bavail, info.f_frsize, &bytes)) return INT64_MAX;
    return bytes;
}

void require_free_space(const std::string& path, int64_t needed_bytes, const std::string& what) {
    const int64_t free = free_bytes(path);
    if (needed_bytes > free)
        FAIL(kExitDisk, "no space for %s under %s: %lld bytes needed, %lld free; free some, choose another --save or a "
             "smaller --keep", what.c_str(), path.c_str(), static_cast<long long>(needed_bytes), static_cast<long
             long>(free));
}
