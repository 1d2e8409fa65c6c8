// Checkpoints whose JSON files contradict each other although their checksums are right: each contradiction is named,
// and the previous checkpoint is used.
#include "tests/support/checkpoint_test.h"

#include <functional>

#include "llmc/base/system/files.h"
#include "llmc/parallel/comm/comm.h"

using namespace checkpoint_test;

namespace {

using Json = nlohmann::json;

// Rewrites the manifest of a checkpoint as the trainer would, after `change` has modified it.
void seal(const std::string& path, const std::function<void(Json&)>& change = {}) {
    Json manifest = Json::parse(slurp(path + "/manifest.json"));
    for (auto& [name, file] : manifest["files"].items()) {
        const int64_t bytes = file_bytes(path + "/" + name);
        file = {{"bytes", bytes}, {"xxh3", xxh3_of_range(path + "/" + name, 0, bytes)}};
    }
    if (change) change(manifest);
    manifest.erase("xxh3");
    manifest["xxh3"] = xxh3_of_text(manifest.dump());
    spill(path + "/manifest.json", manifest.dump(2) + "\n");
}

Json whole_state() {
    Json state = Json::parse(state_json(10));
    state["samples"] = 40;
    state["adam_step"] = 9;
    state["skips"] = 1;
    state["config"] = {{"global-batch-size", 4}, {"seq-length", 16}, {"fp8-recipe", "delayed"}};
    state["train_data"] = {{"shards", {{{"name", "a.bin"}, {"tokens", 999}, {"token_bytes", 2}, {"masked", false},
                                        {"fingerprint", "00ff"}}}}};
    const auto tensor = [](int updates) {
        return Json{{"quant_mul_bits", 0x42e00000}, {"updates", updates}, {"history_bits", {0x40800000, 0}}};
    };
    state["fp8"] = {{"recipe", "delayed"}, {"x", "e4m3"}, {"dy", "e5m2"}, {"history_len", 2}, {"primed", true},
                    {"tensors", {{"0.qkv.dy", tensor(10)}, {"0.qkv.weight", tensor(9)}, {"0.qkv.x", tensor(10)}}}};
    state["loss_watch"] = {{"first", {4.0, 3.5, 3.0}}, {"last", {4.0, 3.5, 3.0}}, {"above", false}};
    return state;
}

struct Row {
    const char* pointer;   // of the value that is replaced, by RFC 6901; null removes it
    Json value;
    const char* said;
};

}  // namespace

TEST_CASE("saved state: every contradiction is named with its key, and --resume auto uses the checkpoint before") {
    TempDir dir;
    FakeState tensors(one_layer());
    tensors.randomise(1);
    save(tensors, request_of(dir.path, 5));
    CheckpointRequest request = request_of(dir.path, 10);
    request.state_json = whole_state().dump();
    const std::string path = save(tensors, request), file = path + "/state.json";
    CHECK(checkpoint_damage(path, true) == "");
    const Json losses = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0};
    const Row rows[] = {
        {"/step", -1, "\"step\" is -1: a whole number from 0"}, {"/step", 3, "\"adam_step\" is 9"},
        {"/step", "10", "\"step\" is \"10\""}, {"/step", 1.5, "\"step\" is 1.5"},
        {"/step", 18446744073709551615ull, "\"step\" is 18446744073709551615"},
        {"/step", nullptr, "\"step\" is missing"},
        {"/format", 2, "\"format\" is 2: a whole number from 1 to 1 is needed"},
        {"/format", "x", "\"format\" is \"x\""},
        {"/adam_step", 0, "\"adam_step\" is 0: \"step\" 10 less \"skips\" 1 is needed"},
        {"/adam_step", -9, "\"adam_step\" is -9"},
        {"/skips", -1, "\"skips\" is -1"},
        {"/consecutive_skips", 2, "\"consecutive_skips\" is 2: a whole number from 0 to 1"},
        {"/norm_skips", 2, "\"norm_skips\" is 2: a whole number from 0 to 1"},
        {"/moments_begin", 10, "\"moments_begin\" is 10: a whole number from 0 to 9"},
        {"/norms", nullptr, "\"norms\" is missing"},
        {"/norms", {1.0, "x"}, "\"norms\" is [1.0,\"x\"]: finite norms are needed"},
        {"/norms", {1.0, -1.0}, "finite norms"}, {"/norms", {1e300}, "finite norms"},
        {"/norms", Json(std::vector<double>(11, 1.0)), "one of each step"}, {"/samples", -40, "\"samples\" is -40"},
        {"/samples", 0, "\"samples\" is 0: \"step\" is 10"},
        {"/samples", 39, "\"samples\" is 39: 10 steps by the options in \"config\" take 40"},
        {"/samples", 44, "\"samples\" is 44: 10 steps"},
        {"/missed", "eval", "\"missed\" is \"eval\": a list is needed"},
        {"/missed", {"everything"}, "\"missed\" is [\"everything\"]"},
        {"/config", {1}, "\"config\" is [1]: an object is needed"},
        {"/config/global-batch-size", "four", "config: \"global-batch-size\" four: must be an integer"},
        {"/config/fp8-recipe", "tensorwise", "fp8: \"recipe\" is \"delayed\": \"config\" says otherwise"},
        {"/train_data", nullptr, "\"train_data\" is missing"},
        {"/train_data/shards", {1}, "train_data: \"shards\" is [1]"},
        {"/train_data/shards/0/tokens", -1, "train_data: shards: \"tokens\" is -1"},
        {"/train_data/blend", {{1, -2}}, "train_data: \"blend\" is [[1,-2]]"},
        {"/gemm_plans", {{"library", "cpu"}}, "gemm_plans: \"plans\" is missing"},
        {"/gemm_plans/plans", {1}, "gemm_plans: \"plans\" is [1]"},
        {"/fp8/recipe", "magic", "fp8: \"recipe\" is \"magic\""},
        {"/fp8/x", "e3m4", "fp8: \"x\" is \"e3m4\": e4m3 or e5m2"},
        {"/fp8/history_len", 0, "fp8: \"history_len\" is 0"},
        {"/fp8/history_len", 3, "0.qkv.dy: \"history_bits\" has 2 numbers, \"history_len\" is 3"},
        {"/fp8/primed", 1, "fp8: \"primed\" is 1: true or false"},
        {"/fp8/tensors/0.qkv.x/quant_mul_bits", 0x7fc00000, "\"quant_mul_bits\" is 2143289344: the bits of nan"},
        {"/fp8/tensors/0.qkv.x/quant_mul_bits", 0x7f800000, "the bits of inf"},
        {"/fp8/tensors/0.qkv.x/quant_mul_bits", 0, "the bits of 0"},
        {"/fp8/tensors/0.qkv.x/quant_mul_bits", 0xc2e00000, "the bits of -112"},
        {"/fp8/tensors/0.qkv.x/updates", -1, "\"updates\" is -1"},
        {"/fp8/tensors/0.qkv.x/updates", 9, "0.qkv.x: \"updates\" is 9: tensors before it have 10"},
        {"/fp8/tensors/0.qkv.x/updates", 1000, "\"updates\" is 1000"},
        {"/fp8/tensors/0.qkv.x/history_bits", {1, 0x80000001}, "\"history_bits\" is [1,2147483649]"},
        {"/fp8/tensors/0.qkv.x/history_bits", {"a", "b"}, "\"history_bits\" is [\"a\",\"b\"]"},
        {"/fp8/tensors/0.qkv.x", 3, "\"0.qkv.x\" is 3: an object is needed"},
        {"/loss_watch/first", losses, "\"first\" is [1.0,2.0,3.0,4.0,5.0,6.0]: at most 5"},
        {"/loss_watch/first", {1.0, "x"}, "\"first\" is [1.0,\"x\"]: finite losses"},
        {"/loss_watch/last", {1.0}, "\"last\" is [1.0]: as many losses as in \"first\" are needed, 3"},
        {"/loss_watch/above", "no", "loss_watch: \"above\" is \"no\""},
    };
    for (const Row& row : rows) {
        Json state = whole_state();
        const Json::json_pointer pointer(row.pointer);
        if (row.value.is_null()) state.erase(row.pointer + 1);
        else state[pointer] = row.value;
        spill(file, state.dump(1));
        seal(path);
        CAPTURE(std::string(row.pointer));
        const std::string damage = checkpoint_damage(path, true);
        CHECK_MESSAGE(damage.find(row.said) != std::string::npos, damage);
        CHECK(damage.starts_with("state.json: "));
        CHECK(damage.find("json.exception") == std::string::npos);
        check_contains(error_of([&] { find_checkpoint(path, ""); }), {"exit 5", path, row.said});
        const FoundCheckpoint found = find_checkpoint("auto", dir.path);
        CHECK(found.path == dir / "step-00000005");
        REQUIRE(found.skipped.size() == 1);
        CHECK(found.skipped[0] == path + ": " + damage);
    }
    // No contradictions: batch ramp-up, batches that were ignored because of loss masks.
    Json state = whole_state();
    state["samples"] = 44;
    state["train_data"]["shards"][0]["masked"] = true;
    spill(file, state.dump(1));
    seal(path);
    CHECK(checkpoint_damage(path, true) == "");
    // The step must be that of the folder's name, unless the name is a link.
    std::filesystem::create_symlink(path, dir / "step-00000011");
    CHECK(checkpoint_damage(dir / "step-00000011", true) == "");
    std::filesystem::remove(dir / "step-00000011");
    std::filesystem::rename(path, dir / "step-00000012");
    CHECK(checkpoint_damage(dir / "step-00000012", true)
          == "state.json: \"step\" is 10: the folder is step-00000012: rename it to step-00000010");
}

TEST_CASE("saved state: text that is not JSON or too deeply nested, and a path that is no file, count as damage") {
    TempDir dir;
    FakeState tensors(one_layer());
    const std::string path = save(tensors, request_of(dir.path, 1)), file = path + "/state.json";
    const auto damage = [&](const std::string& text) {
        spill(file, text);
        seal(path);
        return checkpoint_damage(path, true);
    };
    check_contains(damage("{\"step\": }"), {"state.json: not JSON: parse error at line 1, column 10"});
    check_contains(damage(""), {"state.json: not JSON: "});
    check_contains(damage("{\"step\": 1, \"step\": 2}"), {"state.json: \"step\" is there twice"});
    const std::string deep = "{\"fp8\": " + std::string(100000, '[') + std::string(100000, ']') + "}";
    check_contains(damage(deep), {"state.json: \"fp8\" is nested deeper than 64 levels"});
    std::filesystem::remove(file);
    std::filesystem::create_symlink("state.json", file);   // a loop
    CHECK(checkpoint_damage(path, true) == "state.json is not a regular file");
    check_contains(error_of([&] { find_checkpoint("auto", dir.path); }), {"exit 5: ", "is not a regular file"});
    spill(path + "/manifest.json", deep);
    check_contains(checkpoint_damage(path, true), {"manifest.json is damaged: ", "\"fp8\" is nested deeper than 64"});
}

TEST_CASE("manifest: entries outside the folder, missing entries and wrong fields are named") {
    TempDir dir;
    FakeState tensors(one_layer());
    const std::string path = save(tensors, request_of(dir.path, 1)), manifest = slurp(path + "/manifest.json");
    const Json entry = {{"bytes", 0}, {"xxh3", "0"}};
    struct Change {
        std::function<void(Json&)> make;
        const char* said;
        bool of_model;   // config.json or the weights, which a model needs, too
    };
    const Change changes[] = {
        {[&](Json& m) { m["files"]["../x"] = entry; }, "\"../x\" is not the name of a file in the checkpoint", true},
        {[&](Json& m) { m["files"]["/etc/passwd"] = entry; }, "\"/etc/passwd\" is not the name", true},
        {[&](Json& m) { m["files"]["optimizer/../../x"] = entry; }, "\"optimizer/../../x\" is not the name", true},
        {[&](Json& m) { m["files"][".."] = entry; }, "\"..\" is not the name", true},
        {[&](Json& m) { m["files"][std::string("part\0x", 6)] = entry; }, "\"part\\x00x\" is not the name", true},
        {[&](Json& m) { m["files"].erase("config.json"); }, "manifest.json has no entry for config.json", true},
        {[&](Json& m) { m["files"].erase("state.json"); }, "manifest.json has no entry for state.json", false},
        {[&](Json& m) { m["files"].erase("model.safetensors"); }, "has no entry for model.safetensors", true},
        {[&](Json& m) { m["files"].erase("optimizer/m.safetensors"); }, "entry for optimizer/m.safetensors", false},
        {[&](Json& m) { m["files"]["config.json"]["bytes"] = -1; }, "config.json: \"bytes\" is -1", true},
        {[&](Json& m) { m["files"]["config.json"]["xxh3"] = 3; }, "config.json: \"xxh3\" is 3: text is needed", true},
        {[&](Json& m) { m["files"]["config.json"] = 3; }, "files: \"config.json\" is 3: an object", true},
        {[&](Json& m) { m["files"]["config.json"].erase("xxh3"); }, "config.json: \"ranges\" is missing", true},
        {[&](Json& m) { m["files"]["config.json"] = {{"bytes", 9}, {"ranges", {1}}}; }, "\"ranges\" is [1]", true},
        {[&](Json& m) { m["files"] = 3; }, "manifest.json: \"files\" is 3: an object is needed", true},
        {[&](Json& m) { m["format"] = "x"; }, "manifest.json: \"format\" is \"x\": \"llm.fp8 checkpoint\"", true},
        {[&](Json& m) { m["version"] = "x"; }, "manifest.json: \"version\" is \"x\"", true},
    };
    for (const Change& change : changes) {
        CAPTURE(std::string(change.said));
        spill(path + "/manifest.json", manifest);
        seal(path, change.make);
        check_contains(error_of([&] { find_checkpoint(path, ""); }), {"exit 5", change.said});
        const auto load = [&] {
            model_config_from_hf(path);
            require_undamaged(path, "model");
        };
        if (change.of_model) check_contains(error_of(load), {"exit 5", change.said});
        else CHECK(error_of(load) == "nothing");
    }
    // A file that is never read may be added.
    spill(path + "/manifest.json", manifest);
    spill(path + "/README.md", "mine");
    CHECK(checkpoint_damage(path, true) == "");
}
