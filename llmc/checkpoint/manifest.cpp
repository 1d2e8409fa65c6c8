#include "llmc/checkpoint/manifest.h"

#include <functional>

#include "llmc/base/check.h"
#include "llmc/base/json_object.h"
#include "llmc/base/system/files.h"
#include "llmc/checkpoint/saved_state.h"
#include "llmc/parallel/comm/comm.h"

namespace {

using Json = nlohmann::json;

constexpr const char* kFormat = "llm.fp8 checkpoint";
constexpr const char* kManifestFile = "manifest.json";
constexpr int kVersion = 2;

// The manifest's text with a hash of its content. It is compared as text, so that a flipped bit in it is found, too.
std::string text_with_hash(Json manifest) {
    manifest.erase("xxh3");
    manifest["xxh3"] = xxh3_of_text(manifest.dump());
    return manifest.dump(2) + "\n";
}

Json file_json(const ManifestFile& file) {
    Json json = {{"bytes", file.bytes}};
    if (file.ranges.size() == 1) {
        json["xxh3"] = file.ranges[0].xxh3;
        return json;
    }
    for (const HashedRange& range : file.ranges)
        json["ranges"].push_back(
            {{"begin", range.begin}, {"bytes", range.bytes}, {"rank", range.rank}, {"xxh3", range.xxh3}});
    return json;
}

ManifestFile file_of(const JsonFields& fields) {
    ManifestFile file{fields.integer("bytes", 0, INT64_MAX), {}};
    if (fields.has("xxh3")) {
        file.ranges.push_back({0, file.bytes, 0, fields.text("xxh3")});
        return file;
    }
    for (const Json& json : fields.list("ranges")) {
        if (!json.is_object()) fields.refuse("ranges", "a list of objects is needed");
        const JsonFields range{json, fields.where + ": ranges"};
        file.ranges.push_back({range.integer("begin", 0, file.bytes), range.integer("bytes", 0, file.bytes),
                               static_cast<int>(range.integer("rank", 0, INT32_MAX)), range.text("xxh3")});
    }
    return file;
}

// Reads the entries of a manifest. Each names a file of the checkpoint, or a file in a folder of it.
Manifest entries_of(const JsonFields& manifest) {
    Manifest entries;
    const JsonFields files = manifest.child("files");
    for (const auto& [name, ignored] : files.object.items()) {
        const size_t slash = name.find('/');
        const bool below = slash == std::string::npos ? is_file_name(name)
                                                      : is_file_name(name.substr(0, slash))
                                                            && is_file_name(name.substr(slash + 1));
        REQUIRE(below, "manifest.json: files: \"%s\" is not the name of a file in the checkpoint",
                printable(name).c_str());
        entries[name] = file_of(files.child(name.c_str()));
    }
    return entries;
}

// Whether a run, or a program that loads the model, reads this file of a checkpoint. Users may add other files, such as
// a README.
bool is_read(const std::string& name) {
    return name == "config.json" || name == "state.json" || name.starts_with("model") || name.starts_with("optimizer/");
}

// The first file that is read but has no entry, or that is missing although every checkpoint has it.
std::string unlisted(const std::string& directory, const std::string& prefix, const Manifest& entries) {
    std::vector<std::string> needed = {"config.json", "state.json"};
    for (const std::string& name : list_directory(directory)) needed.push_back(name);
    if (is_directory(directory + "/optimizer"))
        for (const std::string& name : list_directory(directory + "/optimizer")) needed.push_back("optimizer/" + name);
    for (const std::string& name : needed)
        if (is_read(name) && name.starts_with(prefix) && !entries.contains(name)
            && !is_directory(directory + "/" + name))
            return "manifest.json has no entry for " + name;
    return "";
}

// The byte at which the ranges of a file leave a gap, overlap or end early; -1 if they cover the file.
int64_t uncovered(const ManifestFile& file) {
    int64_t end = 0;
    for (const HashedRange& range : file.ranges) {
        if (range.begin != end || range.bytes > file.bytes - end) return end;
        end += range.bytes;
    }
    return end == file.bytes ? -1 : end;
}

std::string size_damage(const std::string& directory, const std::string& name, int64_t wanted) {
    const int64_t bytes = file_bytes(directory + "/" + name);
    if (bytes < 0)
        return name + (path_exists(directory + "/" + name) ? " is not a regular file" : " is missing");
    if (bytes != wanted)
        return strf("%s has %s instead of %lld", name.c_str(), count_text(bytes, "byte").c_str(), ll(wanted));
    return "";
}

std::string range_damage(const std::string& directory, const std::string& name, const ManifestFile& file,
                         const HashedRange& range) {
    if (xxh3_of_range(directory + "/" + name, range.begin, range.bytes) == range.xxh3) return "";
    if (file.ranges.size() == 1) return name + " is damaged: its XXH3 is not the manifest's";
    return strf("%s is damaged: the XXH3 of bytes %lld to %lld, written by rank %d, is not the manifest's",
                name.c_str(), ll(range.begin), ll(range.begin + range.bytes), range.rank);
}

// Whether the directory has a manifest of ours. A state.json shows it even if the name of the format is damaged.
bool looks_like_a_checkpoint(const std::string& path) {
    const std::string manifest_path = path + "/" + kManifestFile;
    if (!is_regular_file(manifest_path)) return false;
    return is_regular_file(path + "/state.json")
           || read_text_file(manifest_path, kMaxIndexBytes).find(kFormat) != std::string::npos;
}

Json parse_manifest(const std::string& text) {
    try {
        return parse_json_object(text, "manifest.json");
    } catch (const Error& error) {
        FAIL(kExitNoCheckpoint, "manifest.json is damaged: %s", error.what());
    }
}

std::string damage_of(const std::string& path, const std::string& prefix, bool hashes, int part, int parts) {
    if (!is_directory(path)) return "it is not a directory";
    const std::string manifest_path = path + "/" + kManifestFile;
    if (!is_regular_file(manifest_path)) return "manifest.json is missing";
    const std::string text = read_text_file(manifest_path, kMaxIndexBytes);
    const Json manifest = parse_manifest(text);
    if (text_with_hash(manifest) != text) return "manifest.json is damaged: its XXH3 is another";
    const JsonFields fields{manifest, "manifest.json"};
    if (fields.text("format") != kFormat) fields.refuse("format", strf("\"%s\" is needed", kFormat));
    fields.integer("version", kVersion, kVersion);
    const Manifest entries = entries_of(fields);
    if (const std::string name = unlisted(path, prefix, entries); !name.empty()) return name;
    int64_t number = 0;
    for (const auto& [name, file] : entries) {
        if (name.rfind(prefix, 0) != 0) continue;
        std::string damage = size_damage(path, name, file.bytes);
        if (const int64_t at = uncovered(file); damage.empty() && at >= 0)
            damage = strf("manifest.json has no hash for byte %lld of %s", ll(at), name.c_str());
        for (size_t i = 0; i < file.ranges.size() && hashes && damage.empty(); i++)
            if (number++ % parts == part) damage = range_damage(path, name, file, file.ranges[i]);
        if (!damage.empty()) return damage;
    }
    return "";
}

// The result of `damage`, or the text of an error while reading.
std::string as_text(const std::function<std::string()>& damage) {
    try {
        return damage();
    } catch (const Error& error) {
        return error.what();
    }
}

}  // namespace

std::string manifest_text(const Manifest& manifest) {
    Json json = {{"format", kFormat}, {"version", kVersion}, {"files", Json::object()}};
    for (const auto& [name, file] : manifest) {
        CHECK(uncovered(file) < 0, "no rank wrote byte %lld of %s, or two did", ll(uncovered(file)), name.c_str());
        json["files"][name] = file_json(file);
    }
    return text_with_hash(json);
}

std::string checkpoint_damage(const std::string& path, bool hashes, int part, int parts) {
    return as_text([&] {
        const std::string damage = damage_of(path, "", hashes, part, parts);
        // One rank checks the content of state.json, which matters only to a run that resumes from it.
        return damage.empty() && hashes && part == 0 ? state_damage(path) : damage;
    });
}

std::string model_damage(const std::string& path, const std::string& prefix, int part, int parts) {
    return as_text([&]() -> std::string {
        if (looks_like_a_checkpoint(path)) return damage_of(path, prefix, true, part, parts);
        const std::string manifest = path + "/" + kManifestFile;
        if (!is_regular_file(manifest) && path_exists(manifest)) return std::string(kManifestFile) + " is not a file";
        const bool lost = is_regular_file(path + "/state.json") && !is_regular_file(path + "/config.json");
        return lost ? "config.json is missing" : "";
    });
}

void require_undamaged(const std::string& directory, const std::string& prefix, Comm* comm) {
    const World world = comm ? comm->world() : World{};
    std::string damage = model_damage(directory, prefix, world.local_rank, world.local_ranks);
    if (comm) damage = first_error(*comm, damage);
    if (!damage.empty())
        FAIL(kExitNoCheckpoint, "no usable model at %s: %s; take another checkpoint, or remove its manifest.json if "
             "files were changed on purpose", directory.c_str(), damage.c_str());
}
