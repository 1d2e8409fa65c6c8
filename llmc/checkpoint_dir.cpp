#include "llmc/checkpoint_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "llmc/check.h"
#include "llmc/checkpoint.h"

namespace {

using Json = nlohmann::json;

constexpr const char* kFormat = "llm.fp8 checkpoint";
constexpr int kVersion = 1;
constexpr const char* kStepPrefix = "step-";
constexpr const char* kTemporaryPrefix = ".tmp-step-";
constexpr int64_t kMaxManifestBytes = int64_t{16} << 20, kMaxStateBytes = int64_t{1} << 30;

// The manifest carries the hash of its own content and is compared as text, so that a flipped bit in it is
// found too.
std::string sealed(Json manifest) {
    manifest.erase("xxh3");
    manifest["xxh3"] = xxh3_of_text(manifest.dump());
    return manifest.dump(2) + "\n";
}

// A descriptor that holds the lock of a directory, -1 if another process has it. Where the file system knows
// no locks, any descriptor will do.
int lock_directory(const std::string& path) {
    int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0 && ::flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        ::close(fd);
        return -1;
    }
    return fd;
}

bool exists(const std::string& path) {
    std::error_code ignored;
    return std::filesystem::symlink_status(path, ignored).type() != std::filesystem::file_type::not_found;
}

// What is wrong with one file of the manifest, "" if nothing.
std::string file_damage(const std::string& directory, const std::string& name, const Json& expected,
                        bool hashes) {
    const std::string path = directory + "/" + name;
    const int64_t bytes = file_bytes(path), wanted = expected.value("bytes", int64_t{-1});
    if (bytes < 0) return name + " is missing";
    if (bytes != wanted)
        return strf("%s has %lld bytes instead of %lld", name.c_str(), static_cast<long long>(bytes),
                    static_cast<long long>(wanted));
    if (hashes && xxh3_of_file(path) != expected.value("xxh3", std::string()))
        return name + " is damaged: its XXH3 is not the manifest's";
    return "";
}

std::string damage_of(const std::string& path, bool hashes) {
    if (!is_directory(path)) return "it is no directory";
    const std::string manifest_path = path + "/manifest.json";
    if (!is_regular_file(manifest_path)) return "manifest.json is missing";
    const std::string text = read_text_file(manifest_path, kMaxManifestBytes);
    const Json manifest = Json::parse(text, nullptr, false);
    if (!manifest.is_object() || sealed(manifest) != text) return "manifest.json is damaged";
    if (manifest.value("format", "") != kFormat || manifest.value("version", 0) != kVersion)
        return "manifest.json is of another format or version";
    for (const auto& [name, expected] : manifest.at("files").items()) {
        std::string damage = file_damage(path, name, expected, hashes);
        if (!damage.empty()) return damage;
    }
    return "";
}

}  // namespace

std::string step_directory_name(int64_t step) {
    return strf("%s%08lld", kStepPrefix, static_cast<long long>(step));
}

int64_t step_of_directory(const std::string& name) {
    const size_t prefix = std::char_traits<char>::length(kStepPrefix);
    const bool digits = name.size() >= prefix + 8 && name.size() <= prefix + 18
                        && name.rfind(kStepPrefix, 0) == 0
                        && name.find_first_not_of("0123456789", prefix) == std::string::npos;
    if (!digits) return -1;
    const int64_t step = std::stoll(name.substr(prefix));
    return step_directory_name(step) == name ? step : -1;  // "step-000000120" is not ours
}

std::vector<int64_t> checkpoint_steps(const std::string& root) {
    std::vector<int64_t> steps;
    if (!exists(root)) return steps;
    for (const std::string& name : list_directory(root))
        if (int64_t step = step_of_directory(name); step >= 0) steps.push_back(step);
    std::sort(steps.begin(), steps.end());
    return steps;
}

StagedDirectory::StagedDirectory(const std::string& root, const std::string& name, const IoHook& hook)
    : root_(root),
      name_(name),
      temporary_(root + "/.tmp-" + name + "." + std::to_string(::getpid())),
      hook_(hook) {
    make_directory(temporary_, hook_);
    lock_ = lock_directory(temporary_);
}

StagedDirectory::~StagedDirectory() {
    if (!committed_) remove_tree(temporary_);
    if (lock_ >= 0) ::close(lock_);
}

std::string StagedDirectory::path(const std::string& file) const { return temporary_ + "/" + file; }

void StagedDirectory::make_subdirectory(const std::string& name) {
    make_directory(path(name), hook_);
    subdirectories_.push_back(name);
}

void StagedDirectory::write_text(const std::string& file, const std::string& text) {
    OutputFile out(path(file), hook_);
    out.write(text.data(), static_cast<int64_t>(text.size()));
    out.close();
    add(file, out.bytes(), out.xxh3());
}

void StagedDirectory::copy_file(const std::string& source, const std::string& file) {
    OutputFile out(path(file), hook_);
    read_file(source, [&](const void* data, int64_t bytes) { out.write(data, bytes); });
    out.close();
    add(file, out.bytes(), out.xxh3());
}

void StagedDirectory::add(const std::string& file, int64_t bytes, const std::string& xxh3) {
    const bool is_new = files_.insert({file, {bytes, xxh3}}).second;
    CHECK(is_new, "%s written twice", file.c_str());
}

std::string StagedDirectory::commit() {
    Json manifest = {{"format", kFormat}, {"version", kVersion}, {"files", Json::object()}};
    for (const auto& [name, file] : files_)
        manifest["files"][name] = {{"bytes", file.bytes}, {"xxh3", file.xxh3}};
    write_text("manifest.json", sealed(manifest));
    for (const std::string& name : subdirectories_) sync_directory(path(name), hook_);
    sync_directory(temporary_, hook_);
    const std::string final_path = root_ + "/" + name_;
    publish(final_path);
    sync_directory(root_, hook_);
    return final_path;
}

void StagedDirectory::publish(const std::string& final_path) {
    if (!exists(final_path)) {
        rename_path(temporary_, final_path, hook_);
        committed_ = true;
        return;
    }
    // The same step again, after a walk back past a damaged one for instance.
    if (!is_directory(final_path))
        FAIL(kExitDisk, "%s is in the way: it is no directory", final_path.c_str());
    if (exchange_paths(temporary_, final_path, hook_)) {
        committed_ = true;
        sync_directory(root_, hook_);
        remove_tree(temporary_);  // now the old one
        return;
    }
    // No exchange on this file system: between the two renames only older checkpoints are complete.
    const std::string aside = temporary_ + ".replaced";
    rename_path(final_path, aside, hook_);
    try {
        rename_path(temporary_, final_path, hook_);
    } catch (const Error&) {
        rename_path(aside, final_path);
        throw;
    }
    committed_ = true;
    sync_directory(root_, hook_);
    remove_tree(aside);
}

void remove_leftovers(const std::string& root) {
    for (const std::string& name : list_directory(root)) {
        if (name.rfind(kTemporaryPrefix, 0) != 0) continue;
        const std::string path = root + "/" + name;
        int lock = lock_directory(path);
        if (lock < 0) continue;
        // What cannot be removed now (still open on a network file system) goes at a later save.
        remove_tree(path);
        ::close(lock);
    }
}

std::string checkpoint_damage(const std::string& path, bool hashes) {
    try {
        return damage_of(path, hashes);
    } catch (const Error& error) {  // a file that cannot be read
        return error.what();
    } catch (const Json::exception&) {
        return "manifest.json does not have the expected fields";
    }
}

void drop_old_checkpoints(const std::string& root, int64_t step, int64_t keep, const IoHook& hook) {
    if (keep <= 0) return;
    std::vector<int64_t> steps = checkpoint_steps(root);
    std::erase_if(steps, [&](int64_t s) { return s > step; });
    int64_t complete = 0;
    size_t first_kept = steps.size();
    while (first_kept > 0 && complete < keep) {
        first_kept--;
        complete += checkpoint_damage(root + "/" + step_directory_name(steps[first_kept]), false).empty();
    }
    if (complete < keep) return;
    for (size_t i = 0; i < first_kept; i++) {
        // Out of sight first: a kill in the middle leaves a leftover, not half a checkpoint.
        const std::string name = step_directory_name(steps[i]);
        const std::string aside = root + "/.tmp-" + name + ".dropped." + std::to_string(::getpid());
        rename_path(root + "/" + name, aside, hook);
        remove_tree(aside);
    }
}

namespace {

FoundCheckpoint found_at(const std::string& path) {
    return {path, read_text_file(path + "/state.json", kMaxStateBytes), {}};
}

FoundCheckpoint find_explicit(std::string path) {
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    if (!exists(path)) FAIL(kExitNoCheckpoint, "no checkpoint at %s: no such directory", path.c_str());
    const std::string damage = checkpoint_damage(path, true);
    if (damage.empty()) return found_at(path);
    const bool is_root = is_directory(path) && !checkpoint_steps(path).empty();
    const bool is_model = is_regular_file(path + "/config.json") && !is_regular_file(path + "/manifest.json")
                          && !is_regular_file(path + "/state.json");
    const char* advice = "--resume auto takes the newest complete one";
    if (is_root) advice = "name one of the step-* directories in it, or --save it and --resume auto";
    if (is_model) advice = "--load takes the weights of a model that is no checkpoint";
    FAIL(kExitNoCheckpoint, "no usable checkpoint at %s: %s; %s", path.c_str(), damage.c_str(), advice);
}

}  // namespace

FoundCheckpoint find_checkpoint(const std::string& where, const std::string& root) {
    if (where != "auto") return find_explicit(where);
    std::vector<std::string> skipped;
    std::vector<int64_t> steps = checkpoint_steps(root);
    std::reverse(steps.begin(), steps.end());
    for (int64_t step : steps) {
        const std::string path = root + "/" + step_directory_name(step);
        const std::string damage = checkpoint_damage(path, true);
        if (damage.empty()) {
            FoundCheckpoint found = found_at(path);
            found.skipped = std::move(skipped);
            return found;
        }
        skipped.push_back(path + ": " + damage);
    }
    if (skipped.empty()) return {};
    std::string all;
    for (const std::string& line : skipped) all += (all.empty() ? "" : "; ") + line;
    FAIL(kExitNoCheckpoint, "no usable checkpoint under %s: %s", root.c_str(), all.c_str());
}
