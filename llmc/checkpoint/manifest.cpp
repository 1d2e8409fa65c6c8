#include "llmc/checkpoint/manifest.h"

#include <functional>
#include <nlohmann/json.hpp>

#include "llmc/base/check.h"
#include "llmc/base/files.h"
#include "llmc/base/text.h"

namespace {

using Json = nlohmann::json;

constexpr const char* kFormat = "llm.fp8 checkpoint";
constexpr const char* kManifestFile = "manifest.json";
constexpr int kVersion = 2;   // 1: one hash for each file
constexpr int64_t kMaxManifestBytes = int64_t{64} << 20;

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

ManifestFile file_of(const Json& json) {
    ManifestFile file{json.at("bytes").get<int64_t>(), {}};
    if (json.contains("xxh3")) {
        file.ranges.push_back({0, file.bytes, 0, json.at("xxh3").get<std::string>()});
        return file;
    }
    for (const Json& range : json.at("ranges"))
        file.ranges.push_back({range.at("begin").get<int64_t>(), range.at("bytes").get<int64_t>(),
                               range.at("rank").get<int>(), range.at("xxh3").get<std::string>()});
    return file;
}

// The byte at which the ranges of a file leave a gap, overlap or end early; -1 if they cover the file.
int64_t uncovered(const ManifestFile& file) {
    int64_t end = 0;
    for (const HashedRange& range : file.ranges) {
        if (range.begin != end || range.bytes < 0) return end;
        end += range.bytes;
    }
    return end == file.bytes ? -1 : end;
}

std::string size_damage(const std::string& directory, const std::string& name, int64_t wanted) {
    const int64_t bytes = file_bytes(directory + "/" + name);
    if (bytes < 0) return name + " is missing";
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

// Whether the directory has a manifest of ours. If the damage is in the format's name, a state.json shows it.
bool looks_like_a_checkpoint(const std::string& path) {
    const std::string manifest_path = path + "/" + kManifestFile;
    if (!is_regular_file(manifest_path)) return false;
    return is_regular_file(path + "/state.json")
           || read_text_file(manifest_path, kMaxManifestBytes).find(kFormat) != std::string::npos;
}

std::string damage_of(const std::string& path, const std::string& prefix, bool hashes, int part, int parts) {
    if (!is_directory(path)) return "it is no directory";
    const std::string manifest_path = path + "/" + kManifestFile;
    if (!is_regular_file(manifest_path)) return "manifest.json is missing";
    const std::string text = read_text_file(manifest_path, kMaxManifestBytes);
    const Json manifest = Json::parse(text, nullptr, false);
    if (!manifest.is_object() || text_with_hash(manifest) != text) return "manifest.json is damaged";
    const int version = manifest.value("version", 0);
    if (manifest.value("format", "") != kFormat || version < 1 || version > kVersion)
        return "manifest.json is of another format or version";
    int64_t number = 0;
    for (const auto& [name, json] : manifest.at("files").items()) {
        if (name.rfind(prefix, 0) != 0) continue;
        const ManifestFile file = file_of(json);
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
    } catch (const Json::exception&) {
        return "manifest.json does not have the expected fields";
    }
}

}  // namespace

std::string manifest_text(const Manifest& manifest) {
    Json json = {{"format", kFormat}, {"version", kVersion}, {"files", Json::object()}};
    for (const auto& [name, file] : manifest) {
        CHECK(uncovered(file) < 0, "nobody wrote byte %lld of %s, or two did", ll(uncovered(file)), name.c_str());
        json["files"][name] = file_json(file);
    }
    return text_with_hash(json);
}

std::string checkpoint_damage(const std::string& path, bool hashes, int part, int parts) {
    return as_text([&] { return damage_of(path, "", hashes, part, parts); });
}

std::string model_damage(const std::string& path, const std::string& prefix, int part, int parts) {
    return as_text([&] { return looks_like_a_checkpoint(path) ? damage_of(path, prefix, true, part, parts) : ""; });
}
