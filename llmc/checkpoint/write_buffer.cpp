#include "llmc/checkpoint/write_buffer.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace {

constexpr int64_t kBlockBytes = int64_t{4} << 20;   // written, hashed and rounded together, while they are in the cache
static_assert(WriteBuffer::kHashBytes % kBlockBytes == 0);

// Rounds fp32 values to bf16, which take the first half of the same bytes. The bytes need not be aligned.
void round_in_place(char* values, int64_t count) {
    constexpr int64_t kBlock = 1024;
    float in[kBlock];
    bf16 out[kBlock];
    for (int64_t done = 0; done < count; done += kBlock) {
        const int64_t n = std::min(kBlock, count - done);
        std::memcpy(in, values + done * 4, static_cast<size_t>(n * 4));
        for (int64_t i = 0; i < n; i++) out[i] = bf16(in[i]);
        std::memcpy(values + done * 2, out, static_cast<size_t>(n * 2));
    }
}

void add_in_place(char* values, int64_t count, float add) {
    for (char* at = values; at < values + count * 4; at += 4) {
        float value;
        std::memcpy(&value, at, 4);
        value += add;
        std::memcpy(at, &value, 4);
    }
}

}  // namespace

void WriteBuffer::reset(const IoHook& hook) {
    used_ = 0;
    hook_ = hook;
    directory_.clear();
    segments_.clear();
    files_.clear();
    written_.clear();
}

void WriteBuffer::begin(const std::string& file, int64_t offset, const std::optional<Copy>& copy) {
    used_ = aligned(used_);
    segments_.push_back({file, offset, used_, 0, copy});
}

char* WriteBuffer::room(int64_t bytes) {
    CHECK(!segments_.empty() && bytes <= bytes_, "%lld bytes through a buffer of %lld", ll(bytes), ll(bytes_));
    if (used_ + bytes > bytes_) {
        Segment rest = segments_.back();
        write_out();
        rest.offset += rest.bytes;
        if (rest.copy) rest.copy->offset += rest.bytes / 4 * dtype_bytes(rest.copy->dtype);
        rest.at = rest.bytes = 0;
        segments_.push_back(rest);
    }
    return memory_ + used_;
}

void WriteBuffer::filled(int64_t bytes) {
    segments_.back().bytes += bytes;
    used_ += bytes;
}

void WriteBuffer::write_out() {
    CHECK(segments_.empty() || !directory_.empty(), "bytes for %s before there is a directory",
          segments_.back().file.c_str());
    for (const Segment& segment : segments_)
        for (int64_t done = 0; done < segment.bytes; done += kBlockBytes) {
            char* const data = memory_ + segment.at + done;
            const int64_t bytes = std::min(segment.bytes - done, kBlockBytes);
            write(segment.file, segment.offset + done, data, bytes);
            if (!segment.copy) continue;
            const int64_t size = dtype_bytes(segment.copy->dtype);
            if (segment.copy->add != 0) add_in_place(data, bytes / 4, segment.copy->add);
            if (size == 2) round_in_place(data, bytes / 4);
            write(segment.copy->file, segment.copy->offset + done / 4 * size, data, bytes / 4 * size);
        }
    segments_.clear();
    used_ = 0;
}

// Writes bytes of a file, and hashes them in ranges of at most kHashBytes.
void WriteBuffer::write(const std::string& name, int64_t offset, const char* data, int64_t bytes) {
    OpenFile& file = files_.try_emplace(name, directory_ + "/" + name, hook_).first->second;
    while (bytes > 0) {
        if (cancelled_) FAIL(kExitBug, "saving was cancelled");
        if (file.range.begin + file.range.bytes != offset || file.range.bytes == kHashBytes) end_range(file);
        if (file.range.bytes == 0) file.range = {name, offset, 0, ""};
        const int64_t n = std::min(bytes, kHashBytes - file.range.bytes);
        file.file.write(offset, data, n);
        file.hash.update(data, n);
        file.range.bytes += n;
        data += n;
        offset += n;
        bytes -= n;
    }
}

void WriteBuffer::end_range(OpenFile& file) {
    if (file.range.bytes > 0) {
        file.range.xxh3 = file.hash.digest();
        written_.push_back(std::move(file.range));
    }
    file.range = {};
    file.hash.reset();
}

std::vector<WriteBuffer::Written> WriteBuffer::finish() {
    write_out();
    for (auto& [name, file] : files_) {
        if (cancelled_) FAIL(kExitBug, "saving was cancelled");
        end_range(file);
        file.file.close();
    }
    files_.clear();
    return std::exchange(written_, {});
}
