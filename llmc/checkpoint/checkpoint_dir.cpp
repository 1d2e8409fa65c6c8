#include "llmc/checkpoint/checkpoint_dir.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <sstream>

#include "llmc/base/json_object.h"
#include "llmc/checkpoint/saved_state.h"
#include "llmc/parallel/comm/comm.h"

namespace {

constexpr const char* kStepPrefix = "step-";
constexpr const char* kTemporaryPrefix = ".tmp-step-";

// Broadcasts rank 0's text.
std::string broadcast(Comm& comm, const std::string& text) { return comm.gather(comm.root() ? text : "")[0]; }

FoundCheckpoint found_at(const std::string& path, Comm& comm) {
    return {path, broadcast(comm, comm.root() ? read_text_file(path + "/state.json", kMaxStateBytes) : ""), {}};
}

// Returns the damage of a checkpoint, the same on every rank; each rank reads a part of the files.
std::string shared_damage(const std::string& path, Comm& comm) {
    const World& world = comm.world();
    const std::vector<std::string> there = comm.gather(path_exists(path) ? "y" : "n");
    for (size_t rank = 1; rank < there.size(); rank++)
        REQUIRE(there[rank] == there[0], "rank %zu %s %s and rank 0 %s: checkpoints must be on storage that all ranks "
                "share", rank, there[rank] == "y" ? "sees" : "does not see", path.c_str(),
                there[0] == "y" ? "does" : "does not");
    return first_error(comm, checkpoint_damage(path, true, world.rank, world.ranks));
}

FoundCheckpoint find_explicit(std::string path, Comm& comm) {
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    const std::string damage = shared_damage(path, comm);
    if (!path_exists(path)) FAIL(kExitNoCheckpoint, "no checkpoint at %s: no such directory", path.c_str());
    if (damage.empty()) return found_at(path, comm);
    const bool is_root = is_directory(path) && !checkpoint_steps(path).empty();
    const bool is_model = is_regular_file(path + "/config.json") && !is_regular_file(path + "/manifest.json")
                          && !is_regular_file(path + "/state.json");
    const char* advice = "--resume auto takes the newest complete one";
    if (is_root) advice = "name one of the step-* directories in it, or --save it and --resume auto";
    if (is_model) advice = "--load reads the weights of a model that is not a checkpoint";
    FAIL(kExitNoCheckpoint, "no usable checkpoint at %s: %s; %s", path.c_str(), damage.c_str(), advice);
}

// The names of the checkpoints that rank 0 sees, the newest first.
std::vector<std::string> candidates(const std::string& root, Comm& comm) {
    std::string names;
    if (comm.root())
        for (int64_t step : checkpoint_steps(root)) names.insert(0, step_directory_name(step) + "\n");
    std::istringstream lines(broadcast(comm, names));
    return {std::istream_iterator<std::string>(lines), {}};
}

}  // namespace

std::string step_directory_name(int64_t step) { return strf("%s%08lld", kStepPrefix, ll(step)); }

int64_t step_of_directory(const std::string& name) {
    const size_t prefix = std::char_traits<char>::length(kStepPrefix);
    if (name.size() > prefix + 18) return -1;
    const int64_t step = name.size() > prefix ? std::atoll(name.c_str() + prefix) : -1;
    return step >= 0 && step_directory_name(step) == name ? step : -1;   // "step-000000120" has too many zeros
}

int64_t step_of_checkpoint(const std::string& path) {
    if (!is_regular_file(path + "/state.json")) return -1;
    try {
        const nlohmann::json state = read_json_object(path + "/state.json", kMaxStateBytes);
        return JsonFields{state, path + "/state.json"}.integer("step", 0, INT64_MAX);
    } catch (const Error&) {
        return -1;
    }
}

std::vector<int64_t> checkpoint_steps(const std::string& root) {
    std::vector<int64_t> steps;
    if (!path_exists(root)) return steps;
    for (const std::string& name : list_directory(root))
        if (int64_t step = step_of_directory(name); step >= 0) steps.push_back(step);
    std::sort(steps.begin(), steps.end());
    return steps;
}

StagedDirectory::StagedDirectory(const std::string& root, const std::string& name, const IoHook& hook)
    : root_(root), name_(name), temporary_(root + "/.tmp-" + name + "." + std::to_string(::getpid())), hook_(hook) {
    make_directory(temporary_, hook_);
}

StagedDirectory::~StagedDirectory() {
    if (!committed_) remove_tree(temporary_);
}

std::string StagedDirectory::path(const std::string& file) const { return temporary_ + "/" + file; }

void StagedDirectory::make_subdirectory(const std::string& name) {
    make_directory(path(name), hook_);
    subdirectories_.push_back(name);
}

void StagedDirectory::write_text(const std::string& file, const std::string& text) {
    write_file(path(file), text, hook_);
    const auto bytes = static_cast<int64_t>(text.size());
    add(file, {bytes, {{0, bytes, 0, xxh3_of_text(text)}}});
}

void StagedDirectory::add(const std::string& file, const ManifestFile& written) {
    const bool is_new = files_.insert({file, written}).second;
    CHECK(is_new, "%s written twice", file.c_str());
}

std::string StagedDirectory::commit() {
    write_text("manifest.json", manifest_text(files_));
    for (const std::string& name : subdirectories_) sync_directory(path(name), hook_);
    sync_directory(temporary_, hook_);
    const std::string final_path = root_ + "/" + name_;
    rename_to(final_path);
    sync_directory(root_, hook_);
    return final_path;
}

void StagedDirectory::rename_to(const std::string& final_path) {
    if (!path_exists(final_path)) {
        rename_path(temporary_, final_path, hook_);
        committed_ = true;
        return;
    }
    // A run can save a step twice, for example after it resumed from a checkpoint before a damaged one.
    if (!is_directory(final_path))
        FAIL(kExitDisk, "%s exists but is not a directory", final_path.c_str());
    if (exchange_paths(temporary_, final_path, hook_)) {
        committed_ = true;
        sync_directory(root_, hook_);
        remove_tree(temporary_);  // it now has the old checkpoint
        return;
    }
    // This file system cannot exchange paths: between the two renames only older checkpoints are complete.
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
        // A later save removes what cannot be removed now, such as files still open on a network file system.
        remove_tree(root + "/" + name);
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
        // Renamed first, so that a kill in the middle leaves a leftover and not half a checkpoint.
        const std::string name = step_directory_name(steps[i]);
        const std::string aside = root + "/.tmp-" + name + ".dropped." + std::to_string(::getpid());
        rename_path(root + "/" + name, aside, hook);
        remove_tree(aside);
    }
}

FoundCheckpoint find_checkpoint(const std::string& where, const std::string& root, Comm& comm) {
    if (where != "auto") return find_explicit(where, comm);
    std::vector<std::string> skipped;
    for (const std::string& name : candidates(root, comm)) {
        const std::string path = root + "/" + name;
        const std::string damage = shared_damage(path, comm);
        if (damage.empty()) {
            FoundCheckpoint found = found_at(path, comm);
            found.skipped = std::move(skipped);
            return found;
        }
        skipped.push_back(path + ": " + damage);
    }
    if (skipped.empty()) return {};
    FAIL(kExitNoCheckpoint, "no usable checkpoint under %s: %s", root.c_str(), list_text(skipped, "; ").c_str());
}

SavedOptions saved_options(const std::string& where, const std::string& root) {
    std::vector<std::string> paths;
    try {
        if (where != "auto") paths.push_back(where);
        for (int64_t step : where == "auto" ? checkpoint_steps(root) : std::vector<int64_t>{})
            paths.insert(paths.begin(), root + "/" + step_directory_name(step));
        for (const std::string& path : paths)
            if (checkpoint_damage(path, false).empty() && state_damage(path).empty())
                return {path, read_json_object(path + "/state.json", kMaxStateBytes, "config").dump()};
    } catch (const Error&) {   // the search for the checkpoint says what is wrong
    }
    return {};
}
