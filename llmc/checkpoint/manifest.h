// manifest.json of a checkpoint: sizes and hashes of all other files. It is written last, so that files that match it
// are complete.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

class Comm;

// Bytes of a file with one hash, and the rank that wrote them.
struct HashedRange {
    int64_t begin = 0, bytes = 0;
    int rank = 0;
    std::string xxh3;
};

struct ManifestFile {
    int64_t bytes = 0;
    std::vector<HashedRange> ranges;   // ascending, without overlap or gap
};
using Manifest = std::map<std::string, ManifestFile>;   // by path within the checkpoint

// The file's text; exit 1 if the ranges of a file do not cover it.
std::string manifest_text(const Manifest& manifest);

// The first damage of a checkpoint, "" if it is complete: "optimizer/m.safetensors has 120 bytes instead of 400".
// Without `hashes` it compares only presence and sizes. With them it also checks every `parts`-th hashed range from
// number `part` on, so that several ranks can share the reading; part 0 checks what state.json says (state_damage).
// Every file that a run or a reader of the model takes must have an entry, and every entry must lie in the checkpoint.
std::string checkpoint_damage(const std::string& path, bool hashes, int part = 0, int parts = 1);

// The same with hashes, for files whose names begin with `prefix`. Returns "" if the directory is not a checkpoint:
// other models have no manifest, or one of another format. A directory with a state.json but without a config.json is a
// damaged checkpoint.
std::string model_damage(const std::string& path, const std::string& prefix, int part = 0, int parts = 1);

// If `directory` is a checkpoint, requires that its files whose names begin with `prefix` match the manifest (exit 5,
// naming the first that does not). The ranks of each host share the work, since hosts may have separate copies; without
// comm this process does all of it.
void require_undamaged(const std::string& directory, const std::string& prefix, Comm* comm = nullptr);
