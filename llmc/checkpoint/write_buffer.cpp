#include "llmc/checkpoint/write_buffer.h"

#include <algorithm>
#include <utility>

#include "llmc/base/check.h"

namespace {

constexpr int64_t kBlockBytes = int64_t{4} << 20;   // written and hashed at a time, while it is in the cache

}  // namespace

void WriteBuffer::reset(const IoHook& hook) {
    used_ = 0;
    hook_ = hook;
    directory_.clear();
    runs_.clear();
    files_.clear();
    range_ = {};
    written_.clear();
}

void WriteBuffer::begin(const std::string& file, int64_t offset) {
    used_ = bytes_of_run(used_);
    runs_.push_back({file, offset, used_, 0});
}

char* WriteBuffer::room(int64_t bytes) {
    CHECK(!runs_.empty() && bytes <= bytes_, "%lld bytes through a buffer of %lld", static_cast<long long>(bytes),
          static_cast<long long>(bytes_));
    if (used_ + bytes > bytes_) {
        Run rest = runs_.back();
        write_out();
        rest.offset += rest.bytes;
        runs_.push_back({rest.file, rest.offset, 0, 0});
    }
    return memory_ + used_;
}

void WriteBuffer::filled(int64_t bytes) {
    runs_.back().bytes += bytes;
    used_ += bytes;
}

void WriteBuffer::write_out() {
    CHECK(!directory_.empty(), "bytes for %s before there is a directory", runs_.back().file.c_str());
    for (const Run& run : runs_) {
        const bool continues = range_.file == run.file && range_.begin + range_.bytes == run.offset;
        if (!continues) {
            end_range();
            range_ = {run.file, run.offset, 0, ""};
        }
        for (int64_t done = 0; done < run.bytes;) {
            if (range_.bytes == kHashBytes) {
                end_range();
                range_ = {run.file, run.offset + done, 0, ""};
            }
            const int64_t block = std::min({run.bytes - done, kBlockBytes, kHashBytes - range_.bytes});
            write_block(run, done, block);
            done += block;
        }
    }
    runs_.clear();
    used_ = 0;
}

void WriteBuffer::write_block(const Run& run, int64_t done, int64_t bytes) {
    if (cancelled_) FAIL(kExitBug, "saving was cancelled");
    const char* data = memory_ + run.at + done;
    RangeFile& file = files_.try_emplace(run.file, directory_ + "/" + run.file, hook_).first->second;
    file.write(run.offset + done, data, bytes);
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
