// Checkpoints when files are damaged, processes are killed, disk calls fail or space runs out. A partial checkpoint
// must never be used as a complete one, and a complete one must never be lost.
#include "tests/support/checkpoint_test.h"

#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>

#include "llmc/checkpoint/checkpoint_dir.h"

using namespace checkpoint_test;

namespace {

std::string step_path(const std::string& root, int64_t step) {
    return root + "/" + step_directory_name(step);
}

// Checks that this is the newest complete checkpoint of `root`, that no damaged one was skipped, and that it has this
// state.
void check_newest(const std::string& root, int64_t step, FakeState& state) {
    const FoundCheckpoint found = find_checkpoint("auto", root);
    CHECK(found.path == step_path(root, step));
    CHECK(found.skipped.empty());
    if (found.path.empty()) return;
    CHECK(load(found.path, state).same_as(state));
}

}  // namespace

TEST_CASE("checkpoint: the newest complete one is found; having none is no error; steps are compared as numbers") {
    TempDir dir;
    CHECK(find_checkpoint("auto", dir / "none").path.empty());
    CHECK(find_checkpoint("auto", dir.path).path.empty());
    FakeState state = random_state(1);
    for (int64_t step : {99999999, 100000000, 7}) save(state, request_of(dir.path, step));
    CHECK(find_checkpoint("auto", dir.path).path == dir / "step-100000000");
    CHECK(find_checkpoint(dir / "step-00000007/", "").path == dir / "step-00000007");
    CHECK(checkpoint_steps(dir.path) == std::vector<int64_t>{7, 99999999, 100000000});
    CHECK(step_of_directory("step-000000120") == -1);
    CHECK(step_of_directory("step-120") == -1);
    CHECK(step_of_directory("step-00000120.bak") == -1);
    CHECK(step_of_directory("step-99999999999999999999") == -1);
}

TEST_CASE("checkpoint: a file that cannot be read back during the save is an error of the disk") {
    TempDir dir;
    FakeState state = random_state(1, gpt2_config());   // its matrices are transposed from the file of masters
    CheckpointRequest request = request_of(dir.path, 1);
    request.io_hook = [](const char* call, const std::string& path) {
        if (std::string(call) == "fsync" && path.find("master") != std::string::npos) std::filesystem::remove(path);
        return 0;
    };
    check_contains(error_of([&] { save(state, request); }), {"exit 7: cannot read ", "master"});
}

TEST_CASE("checkpoint: damage of any file is found and named, and the previous checkpoint is used") {
    TempDir dir;
    FakeState first = random_state(1), second = random_state(2);
    CheckpointRequest request = request_of(dir.path, 1);
    spill(dir / "tokenizer.json", "{}");
    request.tokenizer = dir / "tokenizer.json";
    request.max_part_bytes = 2000;
    save(first, request);
    request.step = 2;
    request.state_json = state_json(2);
    const std::string newest = save(second, request);
    const std::vector<std::string> files = files_under(newest);
    REQUIRE(files.size() >= 9);

    auto check_found = [&](const std::string& file, const char* what) {
        CAPTURE(file, what);
        const FoundCheckpoint found = find_checkpoint("auto", dir.path);
        CHECK(found.path == step_path(dir.path, 1));
        REQUIRE(found.skipped.size() == 1);
        check_contains(found.skipped[0], {newest + ": ", file});
        check_contains(error_of([&] { find_checkpoint(newest, ""); }), {"exit 5", newest, file, "--resume auto"});
    };
    uint64_t draws = 0;
    for (const std::string& file : files) {
        const std::string path = newest + "/" + file, bytes = slurp(path);
        for (int flip = 0; flip < 4; flip++) {
            const Philox4 random = philox(5, draws++);
            std::string damaged = bytes;
            damaged[random.word[0] % damaged.size()] ^= static_cast<char>(1 << random.word[1] % 8);
            spill(path, damaged);
            check_found(file, "bit flipped");
        }
        spill(path, bytes.substr(0, bytes.size() - 1));
        check_found(file, "truncated");
        spill(path, "");
        check_found(file, "empty");
        spill(path, bytes + "\n");
        check_found(file, "longer");
        std::filesystem::remove(path);
        check_found(file, "deleted");
        std::filesystem::create_directory(path);
        check_found(file, "a folder");
        std::filesystem::remove(path);
        spill(path, bytes);
        check_newest(dir.path, 2, second);
    }
    // Other files in the folder have no effect.
    spill(newest + "/README.md", "notes");
    check_newest(dir.path, 2, second);
}

TEST_CASE("checkpoint: any flipped bit of the small files is found") {
    TempDir dir;
    FakeState state = random_state(1);
    const std::string path = save(state, request_of(dir.path, 1));
    for (const std::string file : {"manifest.json", "state.json", "config.json"}) {
        const std::string bytes = slurp(path + "/" + file);
        for (size_t bit = 0; bit < 8 * bytes.size(); bit += full_run() ? 1 : 9) {
            std::string damaged = bytes;
            damaged[bit / 8] ^= static_cast<char>(1 << bit % 8);
            spill(path + "/" + file, damaged);
            if (checkpoint_damage(path, true).empty())
                FAIL_CHECK(file << ": bit " << bit << " goes unnoticed");
        }
        spill(path + "/" + file, bytes);
        CHECK(checkpoint_damage(path, true).empty());
    }
}

TEST_CASE("checkpoint: without a usable checkpoint the error is exit 5, with the reason for each") {
    TempDir dir;
    FakeState state = random_state(1);
    for (int64_t step : {1, 2}) save(state, request_of(dir.path, step));
    std::filesystem::remove(step_path(dir.path, 1) + "/manifest.json");
    std::filesystem::remove_all(step_path(dir.path, 2) + "/optimizer");
    check_contains(error_of([&] { find_checkpoint("auto", dir.path); }),
        {"exit 5", "step-00000001: manifest.json is missing", "step-00000002: optimizer/m", "missing"});
    check_contains(error_of([&] { find_checkpoint(dir / "none", ""); }), {"exit 5", "none", "no such directory"});
    check_contains(error_of([&] { find_checkpoint(dir.path, ""); }), {"exit 5", dir.path, "step-*"});
    check_contains(error_of([&] { find_checkpoint(fixture("gpt2"), ""); }), {"exit 5", "gpt2", "--load"});
}

TEST_CASE("checkpoint: every file is synced before the rename, the manifest last") {
    TempDir dir(true);
    FakeState state = random_state(1);
    CheckpointRequest request = request_of(dir / "new/run", 1);
    std::vector<std::pair<std::string, std::string>> calls;
    request.io_hook = [&](const char* call, const std::string& path) {
        calls.emplace_back(call, path);
        return 0;
    };
    const std::string path = save(state, request);
    auto last = [&](const std::string& call, const std::string& name) {
        int64_t found = -1;
        for (size_t i = 0; i < calls.size(); i++)
            if (calls[i].first == call && calls[i].second.ends_with(name)) found = static_cast<int64_t>(i);
        CAPTURE(call, name);
        CHECK(found >= 0);
        return found;
    };
    const std::string temporary = calls[static_cast<size_t>(last("rename", ""))].second;
    check_contains(temporary, {dir / "new/run/.tmp-step-00000001"});
    const int64_t renamed = last("rename", temporary);
    for (const std::string& file : files_under(path)) {
        CHECK(last("write", "/" + file) < last("fsync", "/" + file));
        CHECK(last("fsync", "/" + file) < renamed);
        if (file != "manifest.json") CHECK(last("fsync", "/" + file) < last("open", "/manifest.json"));
    }
    CHECK(last("fsync", "/manifest.json") < last("fsync", temporary));
    CHECK(last("fsync", temporary + "/optimizer") < renamed);
    CHECK(last("fsync", temporary) < renamed);
    CHECK(last("fsync", dir / "new/run") > renamed);
    // The parent folders are new, too, so they are synced as well.
    CHECK(last("fsync", dir.path) < renamed);
    CHECK(last("fsync", dir / "new") < renamed);
}

TEST_CASE("checkpoint: leftovers of killed runs are removed, and other files remain") {
    TempDir dir;
    FakeState state = random_state(1);
    make_directories(dir / ".tmp-step-00000005.4711/optimizer");
    spill(dir / ".tmp-step-00000005.4711/config.json", "{}");
    make_directories(dir / ".tmp-mine");
    save(state, request_of(dir.path, 7));
    CHECK(list_directory(dir.path) == std::vector<std::string>{".tmp-mine", "step-00000007"});
}

TEST_CASE("checkpoint: saving a step again replaces its checkpoint") {
    TempDir dir;
    FakeState first = random_state(1), second = random_state(2);
    save(first, request_of(dir.path, 3));
    spill(step_path(dir.path, 3) + "/state.json", "damaged");
    save(second, request_of(dir.path, 3));
    check_newest(dir.path, 3, second);
    CHECK(list_directory(dir.path).size() == 1);
    spill(dir / "step-00000004", "a file");
    check_contains(error_of([&] { save(second, request_of(dir.path, 4)); }),
                   {"exit 7", "step-00000004", "exists but is not a directory"});
    CHECK(list_directory(dir.path).size() == 2);
}

TEST_CASE("checkpoint: keep N counts complete ones up to this step") {
    TempDir dir;
    FakeState state = random_state(1);
    auto save_step = [&](int64_t step, int64_t keep) {
        CheckpointRequest request = request_of(dir.path, step);
        request.keep = keep;
        save(state, request);
        return checkpoint_steps(dir.path);
    };
    using Steps = std::vector<int64_t>;
    CHECK(save_step(10, 0) == Steps{10});
    CHECK(save_step(20, 0) == Steps{10, 20});
    CHECK(save_step(30, 2) == Steps{20, 30});
    CHECK(save_step(40, 3) == Steps{20, 30, 40});
    // 40 is damaged and does not count as one of the two, so neither 20 nor 30 is removed because of it.
    std::filesystem::remove(step_path(dir.path, 40) + "/optimizer/m.safetensors");
    CHECK(save_step(50, 3) == Steps{20, 30, 40, 50});
    CHECK(save_step(60, 2) == Steps{50, 60});
    // A run that resumed 50 keeps its new checkpoints, although later steps of the earlier run exist.
    CHECK(save_step(55, 1) == Steps{55, 60});
    CHECK(list_directory(dir.path).size() == 2);
}

TEST_CASE("checkpoint: a full disk is an error with exit 7, before a save and during it") {
    TempDir dir;
    const std::string root = dir / "disk";
    make_directories(root);
    // The disk has room for four of these checkpoints and their slack.
    if (mount("tmpfs", root.c_str(), "tmpfs", 0, "size=512k") != 0) {
        MESSAGE("skipped: mounting a small tmpfs needs privileges (" << std::strerror(errno) << ")");
        return;
    }
    struct Unmount {
        std::string path;
        ~Unmount() { umount2(path.c_str(), MNT_DETACH); }
    } unmount{root};
    FakeState first = random_state(1), second = random_state(2);
    save(first, request_of(root, 1));
    // During a save: another file takes the space after the check.
    CheckpointRequest request = request_of(root, 2);
    request.io_hook = [&](const char*, const std::string& path) {
        if (path.ends_with("optimizer/master.safetensors") && !is_regular_file(root + "/filler")) {
            std::ofstream filler(root + "/filler", std::ios::binary);
            const std::string page(4096, 'x');
            while (filler.write(page.data(), 4096).flush()) {}
        }
        return 0;
    };
    check_contains(error_of([&] { save(second, request); }), {"exit 7", ".safetensors", "No space left on device"});
    CHECK(list_directory(root) == std::vector<std::string>{"filler", "step-00000001"});
    check_newest(root, 1, first);
    // Before a save: the error has the numbers, and nothing is written.
    const int64_t needed =
        CheckpointSaver(request_of(root, 2), second.config, second.table, second.access(), *open_single())
            .checkpoint_bytes() + static_cast<int64_t>(request_of(root, 2).state_json.size());
    check_contains(error_of([&] { save(second, request_of(root, 2)); }),
                   {"exit 7", root, std::to_string(needed) + " bytes needed", "free"});
    check_newest(root, 1, first);
    std::filesystem::remove(root + "/filler");
    save(second, request_of(root, 2));
    check_newest(root, 2, second);
}
