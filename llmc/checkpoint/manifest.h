// manifest.json of a checkpoint: size and hashes of every other file in it. It is written last, so that files that
// match it are whole. Knows files and hashes, nothing of models.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

// Bytes of a file that were hashed together, by the rank that wrote them.
struct HashedRange {
    int64_t begin = 0, bytes = 0;
    int rank = 0;
    std::string xxh3;
};

struct ManifestFile {
    int64_t bytes = 0;
    std::vector<HashedRange> ranges;   // ascending, without overlap or hole
};
using Manifest = std::map<std::string, ManifestFile>;   // by path within the checkpoint

// Its text; exit 1 where ranges do not make up a file.
std::string manifest_text(const Manifest& manifest);

// What is wrong with a checkpoint, "" if it is complete: "optimizer/m.safetensors: 120 bytes instead of 400". Without
// hashes only presence and sizes are compared. Of the hashes it checks every `parts`-th from the `part`-th on, so that
// several ranks share the reading.
std::string checkpoint_damage(const std::string& path, bool hashes, int part = 0, int parts = 1);

// The same for those who read a model: of the files whose names begin with `prefix` alone, with hashes. "" where the
// directory is no checkpoint: models of others have no manifest, or one of another format.
std::string model_damage(const std::string& path, const std::string& prefix, int part = 0, int parts = 1);
