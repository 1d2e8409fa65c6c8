#include "llmc/data/loss_mask.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>

#include "llmc/base/dtype.h"

namespace {

constexpr char kMaskMagic[] = "LOSSMASK";
constexpr uint64_t kVersion = 1;
constexpr int64_t kMaskHeaderBytes = 32;
constexpr int64_t kMaskBlockBytes = int64_t{1} << 18;   // of reads; a multiple of 8

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
    if (path_exists(path)) return LossMask(path, tokens);
    REQUIRE(!sidecar_has_mask(stem + ".meta.json"),
            "data shard '%s': its loss mask '%s' is missing, although '%s.meta.json' names it; to train on all tokens "
            "remove loss_mask there", shard.c_str(), path.c_str(), stem.c_str());
    return std::nullopt;
}

LossMask::LossMask(const std::string& path, int64_t tokens) : file_(path, "loss mask '" + path + "'") {
    const char* name = path.c_str();
    const int64_t bytes = file_.bytes(), expected = kMaskHeaderBytes + (tokens + 7) / 8;
    REQUIRE(bytes >= kMaskHeaderBytes, "loss mask '%s': truncated in the header: it ends at byte %lld of %lld", name,
            (long long)bytes, (long long)kMaskHeaderBytes);
    uint8_t p[kMaskHeaderBytes];
    file_.read(0, kMaskHeaderBytes, p);
    REQUIRE(std::memcmp(p, kMaskMagic, 8) == 0, "loss mask '%s': byte 0: wrong magic, expected %s", name, kMaskMagic);
    REQUIRE(load<uint64_t>(p + 8) == kVersion, "loss mask '%s': byte 8: version %llu, expected %llu", name,
            (unsigned long long)load<uint64_t>(p + 8), (unsigned long long)kVersion);
    REQUIRE(load<uint64_t>(p + 16) == static_cast<uint64_t>(tokens), "loss mask '%s': byte 16: it is for %llu tokens, "
            "the shard has %lld", name, (unsigned long long)load<uint64_t>(p + 16), (long long)tokens);
    REQUIRE(bytes == expected, "loss mask '%s': %lld tokens are %lld bytes, the file has %lld", name, (long long)tokens,
            (long long)expected, (long long)bytes);
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, p, kMaskHeaderBytes);
    uint8_t last = 0;
    file_.read_blocks(kMaskHeaderBytes, bytes - kMaskHeaderBytes, kMaskBlockBytes, [&](const uint8_t* bits, int64_t n) {
        XXH3_64bits_update(&state, bits, static_cast<size_t>(n));
        int64_t i = 0;
        for (; i + 8 <= n; i += 8) counted_ += std::popcount(load<uint64_t>(bits + i));
        for (; i < n; i++) counted_ += std::popcount(bits[i]);
        last = bits[n - 1];
    });
    fingerprint_ = XXH3_64bits_digest(&state);
    REQUIRE(tokens % 8 == 0 || last >> (tokens % 8) == 0,
            "loss mask '%s': byte %lld: bits after the last token are set", name, (long long)(bytes - 1));
    REQUIRE(load<uint64_t>(p + 24) == static_cast<uint64_t>(counted_),
            "loss mask '%s': byte 24: the header says that %llu tokens count, the bits say %lld", name,
            (unsigned long long)load<uint64_t>(p + 24), (long long)counted_);
}

void LossMask::apply(int64_t first, int64_t count, int32_t* targets) const {
    uint8_t bits[4096];
    for (int64_t done = 0; done < count;) {
        const int64_t from = (first + done) / 8, skipped = (first + done) % 8;
        const int64_t n = std::min<int64_t>(count - done, 8 * static_cast<int64_t>(sizeof bits) - skipped);
        file_.read(kMaskHeaderBytes + from, (skipped + n + 7) / 8, bits);
        for (int64_t i = 0; i < n; i++)
            if (!(bits[(skipped + i) / 8] >> ((skipped + i) % 8) & 1)) targets[done + i] = kIgnoreIndex;
        done += n;
    }
}
