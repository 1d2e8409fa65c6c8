#include "llmc/checkpoint/write_buffer.h"

#include <algorithm>
#include <utility>

#include "llmc/base/check.h"

namespace {

constexpr int64_t kBlockBytes = int64_t{4} << 20;   // written and hashed together, while they are in the cache

}  // namespace

void WriteBuffer::reset(const IoHook& hook) {
    used_ = 0;
    hook_ = hook;
    directory_.clear();
    segments_.clear();
    files_.clear();
    range_ = {};
    written_.clear();
}

void WriteBuffer::begin(const std::string& file, int64_t offset) {
    used_ = aligned(used_);
    segments_.push_back({file, offset, used_, 0});
}

char* WriteBuffer::room(int64_t bytes) {
    CHECK(!segments_.empty() && bytes <= bytes_, "%lld bytes through a buffer of %lld", ll(bytes), ll(bytes_));
    if (used_ + bytes > bytes_) {
        Segment rest = segments_.back();
        write_out();
        rest.offset += rest.bytes;
        segments_.push_back({rest.file, rest.offset, 0, 0});
    }
    return memory_ + used_;
}

void WriteBuffer::filled(int64_t bytes) {
    segments_.back().bytes += bytes;
    used_ += bytes;
}

void WriteBuffer::write_out() {
    CHECK(!directory_.empty(), "bytes for %s before there is a directory", segments_.back().file.c_str());
    for (const Segment& segment : segments_) {
        const bool continues = range_.file == segment.file && range_.begin + range_.bytes == segment.offset;
        if (!continues) {
            end_range();
            range_ = {segment.file, segment.offset, 0, ""};
        }
        for (int64_t done = 0; done < segment.bytes;) {
            if (range_.bytes == kHashBytes) {
                end_range();
                range_ = {segment.file, segment.offset + done, 0, ""};
            }
            const int64_t block = std::min({segment.bytes - done, kBlockBytes, kHashBytes - range_.bytes});
            write_block(segment, done, block);
            done += block;
        }
    }
    segments_.clear();
    used_ = 0;
}

void WriteBuffer::write_block(const Segment& segment, int64_t done, int64_t bytes) {
    if (cancelled_) FAIL(kExitBug, "saving was cancelled");
    const char* data = memory_ + segment.at + done;
    RangeFile& file = files_.try_emplace(segment.file, directory_ + "/" + segment.file, hook_).first->second;
    file.write(segment.offset + done, data, bytes);
    hash_.update(data, bytes);
    range_.bytes += bytes;
}

void WriteBuffer::end_range() {
    if (range_.bytes > 0) {
        range_.xxh3 = hash_.digest();
        written_.push_back(std::move(range_));
    }
    range_ = {};
    hash_.reset();
}

std::vector<WriteBuffer::Written> WriteBuffer::finish() {
    write_out();
    end_range();
    for (auto& [name, file] : files_) {
        if (cancelled_) FAIL(kExitBug, "saving was cancelled");
        file.close();
    }
    files_.clear();
    return std::exchange(written_, {});
}
