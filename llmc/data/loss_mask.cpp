#include "llmc/data/loss_mask.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "llmc/base/check.h"

namespace {

constexpr char kMagic[] = "LOSSMASK";
constexpr uint64_t kVersion = 1;
constexpr int64_t kHeaderBytes = 32;

// Reads only the start of the sidecar, because the list of documents at its end may be long.
bool sidecar_has_mask(const std::string& path) {
    std::string head(size_t{1} << 16, '\0');
    std::ifstream file(path, std::ios::binary);
    file.read(head.data(), static_cast<std::streamsize>(head.size()));
    return head.substr(0, static_cast<size_t>(file.gcount())).find("\"loss_mask\"") != std::string::npos;
}

}  // namespace

std::optional<LossMask> LossMask::of_shard(const std::string& shard, int64_t tokens) {
    const std::string stem = shard_stem(shard), path = stem + ".mask";
    if (std::filesystem::exists(path)) return LossMask(path, tokens);
    REQUIRE(!sidecar_has_mask(stem + ".meta.json"),
            "data shard '%s': its loss mask '%s' is missing, although '%s.meta.json' names it; to train on all tokens "
            "remove loss_mask there", shard.c_str(), path.c_str(), stem.c_str());
    return std::nullopt;
}

LossMask::LossMask(const std::string& path, int64_t tokens) : file_(path) {
    const char* name = path.c_str();
    const uint8_t* p = file_.data();
    const int64_t bytes = file_.bytes(), expected = kHeaderBytes + (tokens + 7) / 8;
    REQUIRE(bytes >= kHeaderBytes, "loss mask '%s': truncated in the header: it ends at byte %lld of %lld", name,
            (long long)bytes, (long long)kHeaderBytes);
    REQUIRE(std::memcmp(p, kMagic, 8) == 0, "loss mask '%s': byte 0: wrong magic, expected %s", name, kMagic);
    REQUIRE(load<uint64_t>(p + 8) == kVersion, "loss mask '%s': byte 8: version %llu, expected %llu", name,
            (unsigned long long)load<uint64_t>(p + 8), (unsigned long long)kVersion);
    REQUIRE(load<uint64_t>(p + 16) == static_cast<uint64_t>(tokens),
            "loss mask '%s': byte 16: it is for %llu tokens, the shard has %lld", name,
            (unsigned long long)load<uint64_t>(p + 16), (long long)tokens);
    REQUIRE(bytes == expected, "loss mask '%s': %lld tokens are %lld bytes, the file has %lld", name, (long long)tokens,
            (long long)expected, (long long)bytes);
    bits_ = p + kHeaderBytes;
    int64_t i = 0;
    for (; i + 8 <= bytes - kHeaderBytes; i += 8) counted_ += std::popcount(load<uint64_t>(bits_ + i));
    for (; i < bytes - kHeaderBytes; i++) counted_ += std::popcount(bits_[i]);
    REQUIRE(tokens % 8 == 0 || bits_[tokens / 8] >> (tokens % 8) == 0,
            "loss mask '%s': byte %lld: bits after the last token are set", name, (long long)(bytes - 1));
    REQUIRE(load<uint64_t>(p + 24) == static_cast<uint64_t>(counted_),
            "loss mask '%s': byte 24: the header says that %llu tokens count, the bits say %lld", name,
            (unsigned long long)load<uint64_t>(p + 24), (long long)counted_);
}

uint64_t LossMask::fingerprint() const { return XXH3_64bits(file_.data(), static_cast<size_t>(file_.bytes())); }
