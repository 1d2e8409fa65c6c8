// Checkpoints: tensors have the names and layouts of transformers, every bit is read back, and weights that
// transformers saved are loaded.
#include "tests/support/checkpoint_test.h"

#include <nlohmann/json.hpp>

#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/checkpoint/huggingface/hf_tensors.h"

using namespace checkpoint_test;
using Json = nlohmann::json;

namespace {

// Element `i` of an F32 tensor of a file.
float at(const SafetensorsView& view, int64_t i) {
    float value = 0;
    REQUIRE(read_as_fp32(view, i, 1, &value));
    return value;
}

// One tensor as it is stored in a file.
struct RawTensor {
    SafetensorsEntry entry;
    std::string data;
};

// The content of a model's files, so that a test can change it and write it again.
std::vector<RawTensor> raw_tensors(const std::string& directory) {
    std::vector<RawTensor> tensors;
    const HfModelFiles files(directory);
    for (const auto& [name, found] : files.tensors()) {
        const SafetensorsView& view = *found.view;
        const Dtype dtype = view.dtype == "F32" ? Dtype::kFp32 : Dtype::kBf16;
        REQUIRE(view.dtype == safetensors_dtype(dtype));
        tensors.push_back({{name, dtype, view.shape}, content_of(view)});
    }
    return tensors;
}

void write_raw(const std::string& path, const std::vector<RawTensor>& tensors) {
    std::vector<SafetensorsEntry> entries;
    for (const RawTensor& tensor : tensors) entries.push_back(tensor.entry);
    std::string data;
    for (const RawTensor& tensor : tensors) data += tensor.data;
    spill_tensors(path, entries, data);
}

RawTensor zeros(const std::string& name, std::vector<int64_t> shape, Dtype dtype = Dtype::kFp32) {
    SafetensorsEntry entry{name, dtype, std::move(shape)};
    const size_t bytes = static_cast<size_t>(entry.bytes());
    return {std::move(entry), std::string(bytes, '\0')};
}

FakeState import(const std::string& directory, const ModelConfig& config, int64_t staging = kStagingBytes) {
    FakeState state(config);
    load_hf_weights(directory, config, state.table, state.access(), *open_single(), staging);
    return state;
}

bool same_masters(FakeState& a, FakeState& b) { return a.of(StateKind::kMaster) == b.of(StateKind::kMaster); }

}  // namespace

TEST_CASE("checkpoint: every bit is read back, for every class, dtype, part size and staging size") {
    for (const NamedConfig& c : all_configs())
        for (Dtype weight : {Dtype::kBf16, Dtype::kFp32})
            for (bool small : {false, true}) {
                CAPTURE(c.name, dtype_name(weight), small);
                TempDir dir;
                FakeState state(c.config, {weight, !small ? Dtype::kFp32 : weight == Dtype::kFp32 ? Dtype::kE4m3
                                                                                                  : Dtype::kBf16});
                state.randomise(11);
                CheckpointRequest request = request_of(dir.path, 120);
                if (small) {
                    request.max_part_bytes = 30000;
                    request.staging_bytes = 1000;  // fewer than two rows of some matrices
                }
                const std::string path = save(state, request);
                CHECK(path == dir / "step-00000120");
                CHECK(state.largest_request_bytes <= request.staging_bytes);
                CHECK(is_regular_file(path + "/model.safetensors") == !small);

                FoundCheckpoint found = find_checkpoint("auto", dir.path);
                CHECK(found.path == path);
                CHECK(found.state_json == state_json(120));
                CHECK(found.skipped.empty());
                FakeState back(c.config, state.dtypes);
                load_checkpoint(path, c.config, back.table, back.access(), *open_single(), request.staging_bytes);
                CHECK(back.largest_request_bytes <= request.staging_bytes);
                CHECK(back.same_as(state));
                check_weights(path, state);
                back.of(StateKind::kExpAvgSq).back().back() ^= 1;
                CHECK_FALSE(back.same_as(state));
            }
}

TEST_CASE("checkpoint: the predicted size is sufficient and close to the real one") {
    for (int64_t part_bytes : {kMaxPartBytes, int64_t{1}}) {
        TempDir dir;
        FakeState state(gpt2_config());
        CheckpointRequest request = request_of(dir.path, 1);
        request.max_part_bytes = part_bytes;
        const std::string path = save(state, request);
        int64_t bytes = 0;
        for (const std::string& file : files_under(path)) bytes += file_bytes(path + "/" + file);
        const int64_t announced =
            CheckpointSaver(request, state.config, state.table, state.access(), *open_single()).checkpoint_bytes();
        CHECK(bytes <= announced);
        CHECK(announced < bytes + (160 << 10));
    }
}

TEST_CASE("checkpoint: GPT-2 matrices are stored as [in, out], Llama's are rows of ours, and padding is not stored") {
    TempDir dir;
    FakeState gpt2(gpt2_config(), {.weight = Dtype::kFp32}), llama(llama_config(), {.weight = Dtype::kFp32});
    gpt2.randomise(1);
    llama.randomise(2);
    // Every element has its own number; random bits would include NaN.
    for (FakeState* state : {&gpt2, &llama})
        for (auto& data : state->of(StateKind::kMaster))
            for (size_t i = 0; i < data.size() / 4; i++) {
                const float value = static_cast<float>(i);
                std::memcpy(&data[4 * i], &value, 4);
            }
    SafetensorsReader g(save(gpt2, request_of(dir / "g", 1)) + "/model.safetensors");
    const SafetensorsView& c_attn = g.tensors().at("transformer.h.1.attn.c_attn.weight");
    CHECK(c_attn.shape == std::vector<int64_t>{40, 120});
    for (int64_t in : {0, 7, 39})
        for (int64_t out : {0, 41, 119})
            CHECK(at(c_attn, in * 120 + out) == static_cast<float>(out * 40 + in));
    CHECK(g.tensors().at("transformer.h.0.mlp.c_fc.weight").shape == std::vector<int64_t>{40, 56});
    CHECK(g.tensors().at("transformer.h.0.mlp.c_proj.weight").shape == std::vector<int64_t>{56, 40});
    CHECK(g.tensors().at("transformer.h.0.mlp.c_fc.bias").shape == std::vector<int64_t>{56});
    CHECK(g.tensors().at("transformer.wpe.weight").shape == std::vector<int64_t>{19, 40});
    CHECK(g.tensors().at("transformer.wte.weight").shape == std::vector<int64_t>{131, 40});
    CHECK(g.tensors().size() == 2 + 2 * 12 + 2);
    CHECK(g.tensors().count("lm_head.weight") == 0);

    SafetensorsReader l(save(llama, request_of(dir / "l", 1)) + "/model.safetensors");
    const SafetensorsView& v = l.tensors().at("model.layers.1.self_attn.v_proj.weight");
    CHECK(v.shape == std::vector<int64_t>{32, 40});
    CHECK(at(v, 3 * 40 + 5) == static_cast<float>((64 + 32 + 3) * 40 + 5));
    CHECK(at(l.tensors().at("model.layers.0.mlp.up_proj.weight"), 0) == 56.0f * 40);
    CHECK(at(l.tensors().at("model.layers.0.mlp.gate_proj.weight"), 0) == 0.0f);
    CHECK(l.tensors().at("model.layers.0.self_attn.o_proj.weight").shape == std::vector<int64_t>{40, 64});
    CHECK(l.tensors().at("lm_head.weight").shape == std::vector<int64_t>{131, 40});
    CHECK(l.tensors().size() == 2 + 2 * 9 + 1);
    // In memory the padded rows keep their values.
    SafetensorsReader own(dir / "l/step-00000001/optimizer/master.safetensors");
    CHECK(own.tensors().at("wte.weight").shape == std::vector<int64_t>{256, 40});
    CHECK(own.tensors().at("final_norm.weight").shape == std::vector<int64_t>{40});
}

TEST_CASE("checkpoint: parts and their index") {
    TempDir dir;
    FakeState state(gpt2_config());
    CheckpointRequest request = request_of(dir.path, 1);
    request.max_part_bytes = 12000;
    const std::string path = save(state, request);
    const Json index = Json::parse(slurp(path + "/model.safetensors.index.json"));
    int64_t total = 0;
    size_t parts = 0, tensors = 0;
    for (const std::string& file : files_under(path)) {
        if (file.rfind("model-", 0) != 0) continue;
        parts++;
        SafetensorsReader reader(path + "/" + file);
        int64_t bytes = 0;
        for (const auto& [name, view] : reader.tensors()) {
            CHECK(index["weight_map"][name] == file);
            bytes += view.bytes;
            tensors++;
        }
        total += bytes;
        CHECK((bytes <= 12000 || reader.tensors().size() == 1));
    }
    CHECK(parts > 3);
    CHECK(is_regular_file(path + strf("/model-%05zu-of-%05zu.safetensors", parts, parts)));
    CHECK(index["metadata"]["total_size"] == total);
    CHECK(index["weight_map"].size() == tensors);
}

TEST_CASE("checkpoint: a state of another shape, dtype or arithmetic is refused by name") {
    TempDir dir;
    FakeState state(llama_config());
    state.randomise(3);
    const std::string path = save(state, request_of(dir.path, 1));
    auto loading = [&](const ModelConfig& c, Dtype weight = Dtype::kBf16, Dtype moment = Dtype::kFp32) {
        FakeState other(c, {weight, moment});
        return error_of([&] { load_checkpoint(path, c, other.table, other.access(), *open_single()); });
    };
    CHECK(loading(llama_config()) == "nothing");
    check_contains(loading(llama_config(), Dtype::kFp32), {"exit 2", "model.embed_tokens.weight", "BF16", "F32"});
    check_contains(loading(llama_config(), Dtype::kBf16, Dtype::kBf16),
                   {"exit 2", "m.safetensors", "wte.weight", "F32"});
    ModelConfig c = llama_config();
    c.vocab_size = 130;
    check_contains(loading(c), {"exit 2", "config.json", "vocab_size", "131", "130"});
    c = llama_config();
    c.rotary_base = 10000;
    check_contains(loading(c), {"exit 2", "config.json", "rope_theta"});
    c = llama_config();
    c.init_std = 0.5;  // has no effect on a trained model
    c.max_positions = 4096;
    CHECK(loading(c) == "nothing");
    // Files that disagree with their own config.json, as after a mix-up of directories.
    std::filesystem::remove(path + "/optimizer/v.safetensors");
    check_contains(loading(llama_config()), {"exit 2", "optimizer/v.safetensors"});
    std::filesystem::remove(path + "/model.safetensors");
    check_contains(loading(llama_config()), {"exit 2", path, "neither model.safetensors nor"});
}

TEST_CASE("import: files of transformers, element by element") {
    for (const char* name : {"gpt2", "llama", "llama_tied", "qwen3", "llama_attention_bias", "llama_mlp_bias",
                             "mistral", "mistral_window", "qwen2", "qwen2_window", "qwen3_bias_window", "qwen3_yarn"})
        for (int64_t staging : {kStagingBytes, int64_t{700}}) {
            CAPTURE(name, staging);
            const HfModelFiles files(fixture(name));
            FakeState state = import(fixture(name), model_config_from_hf(fixture(name)), staging);
            CHECK(state.largest_request_bytes <= staging);
            int64_t wrong = 0, checked = 0;
            for (size_t p = 0; p < state.table.params.size(); p++) {
                const Param& param = state.table.params[p];
                for (int64_t row = 0; row < param.rows; row++)
                    for (int64_t col = 0; col < param.cols; col++) {
                        float expected = 0;  // of vocabulary padding
                        for (const HfPart& part : param.hf) {
                            const int64_t r = row - part.row_begin;
                            if (r < 0 || r >= part.rows) continue;
                            const int64_t place = part.transposed ? col * part.rows + r : r * param.cols + col;
                            REQUIRE(read_as_fp32(*files.tensors().at(part.name).view, place, 1, &expected));
                            checked++;
                        }
                        wrong += state.master(static_cast<int>(p), row, col) != expected;
                    }
            }
            CHECK(wrong == 0);
            CHECK(checked == state.table.param_elems);
        }
}

TEST_CASE("import: the shapes of GPT-2 on the hub") {
    TempDir dir;
    const ModelConfig config = model_config_from_hf(fixture("gpt2"));
    FakeState expected = import(fixture("gpt2"), config);
    std::vector<RawTensor> tensors = raw_tensors(fixture("gpt2"));
    RawTensor head;
    for (RawTensor& tensor : tensors) {
        if (tensor.entry.name == "transformer.wte.weight") head = tensor;
        tensor.entry.name = tensor.entry.name.substr(std::string("transformer.").size());
    }
    head.entry.name = "lm_head.weight";
    tensors.push_back(zeros("h.0.attn.bias", {1, 1, 32, 32}));
    tensors.push_back(zeros("h.0.attn.masked_bias", {}));
    tensors.push_back(head);  // tied, but stored in the file
    write_raw(dir / "model.safetensors", tensors);
    FakeState state = import(dir.path, config);
    CHECK(same_masters(state, expected));
    tensors.back().data[5] ^= 1;
    write_raw(dir / "model.safetensors", tensors);
    check_contains(error_of([&] { import(dir.path, config); }),
                   {"exit 2", "lm_head.weight differs from ", "set \"tie_word_embeddings\""});
}

TEST_CASE("import: missing, surplus, misshapen and mistyped tensors are named") {
    TempDir dir;
    const ModelConfig config = model_config_from_hf(fixture("llama"));
    const std::vector<RawTensor> good = raw_tensors(fixture("llama"));
    auto error = [&](std::vector<RawTensor> tensors) {
        write_raw(dir / "model.safetensors", tensors);
        return error_of([&] { import(dir.path, config); });
    };
    CHECK(error(good) == "nothing");
    auto surplus = good;
    surplus.push_back(zeros("model.layers.2.mlp.up_proj.weight", {96, 64}));
    check_contains(error(surplus), {"exit 2", "model.layers.2.mlp.up_proj.weight", "not a parameter of this model"});
    surplus.back() = zeros("model.layers.0.self_attn.rotary_emb.inv_freq", {8});
    CHECK(error(surplus) == "nothing");
    for (size_t i = 0; i < good.size(); i++) {
        CAPTURE(good[i].entry.name);
        auto missing = good, misshapen = good, mistyped = good;
        missing.erase(missing.begin() + static_cast<ptrdiff_t>(i));
        check_contains(error(missing), {"exit 2", good[i].entry.name, "missing"});
        misshapen[i].entry.shape.push_back(1);
        check_contains(error(misshapen), {"exit 2", good[i].entry.name, "shape", shape_text(good[i].entry.shape)});
        mistyped[i].entry.dtype = Dtype::kInt32;
        check_contains(error(mistyped), {"exit 2", good[i].entry.name, "I32"});
    }
    ModelConfig untied = model_config_from_hf(fixture("llama_tied"));
    untied.tied_head = false;
    check_contains(error_of([&] { import(fixture("llama_tied"), untied); }),
                   {"exit 2", "lm_head.weight is missing", "set \"tie_word_embeddings\""});
    check_contains(error_of([&] { import(fixture("gpt2"), config); }), {"exit 2", "model.embed_tokens.weight"});
}

TEST_CASE("import: index and parts that disagree") {
    TempDir dir;
    std::filesystem::copy(fixture("llama"), dir / "m");
    const std::string index_path = dir / "m/model.safetensors.index.json", first = "model.embed_tokens.weight";
    const Json index = Json::parse(slurp(index_path));
    auto error = [&](const Json& changed) {
        spill(index_path, changed.dump());
        return error_of([&] { HfModelFiles files(dir / "m"); });
    };
    CHECK(error(index) == "nothing");
    Json changed = index;
    changed["weight_map"]["ghost"] = index["weight_map"][first];
    check_contains(error(changed), {"exit 2", "ghost"});
    changed = index;
    changed["weight_map"][first] = "../m/model.safetensors";
    check_contains(error(changed), {"exit 2", "../m/model.safetensors", "not a file name"});
    changed["weight_map"][first] = "model-00009-of-00003.safetensors";
    check_contains(error(changed), {"exit 2", "model-00009-of-00003.safetensors"});
    changed["weight_map"][first] = 3;
    check_contains(error(changed), {"exit 2", first});
    check_contains(error(Json::array()), {"exit 2", "index.json: not a JSON object"});
    check_contains(error(Json::object()), {"exit 2", "weight_map"});
    std::filesystem::copy(dir / "m/model-00001-of-00003.safetensors", dir / "m/copy.safetensors");
    changed = index;
    changed["weight_map"]["x"] = "copy.safetensors";
    check_contains(error(changed), {"exit 2", "is in", "copy.safetensors"});
}

TEST_CASE("import: the model of a checkpoint must match its manifest; without a manifest it is not verified") {
    TempDir dir;
    FakeState state(one_layer());
    state.randomise(1);
    CheckpointRequest request = request_of(dir.path, 1);
    request.max_part_bytes = 2000;
    const std::string path = save(state, request);
    auto error = [&] { return error_of([&] { import(path, model_config_from_hf(path)); }); };
    uint64_t draws = 0;
    size_t parts = 0;
    for (const std::string& file : files_under(path)) {
        CAPTURE(file);
        const std::string bytes = slurp(path + "/" + file);
        const bool matters = file.rfind("model", 0) == 0 || file == "config.json" || file == "manifest.json";
        auto check = [&] {
            if (matters) check_contains(error(), {"exit 5", path, file, "take another checkpoint"});
            else CHECK(error() == "nothing");
        };
        for (int flip = 0; flip < 8; flip++) {
            const Philox4 random = philox(6, draws++);
            std::string damaged = bytes;
            damaged[random.word[0] % damaged.size()] ^= static_cast<char>(1 << random.word[1] % 8);
            spill(path + "/" + file, damaged);
            check();
        }
        spill(path + "/" + file, bytes + "\n");
        check();
        std::filesystem::remove(path + "/" + file);
        if (file != "manifest.json") check();
        spill(path + "/" + file, bytes);
        parts += file.rfind("model-", 0) == 0;
    }
    CHECK(error() == "nothing");
    CHECK(parts > 1);
    // Without a manifest, or with one of another format, nothing is verified, so a changed bit of the data is not
    // noticed.
    const std::string name = part_file_name(0, parts), weights = path + "/" + name;
    std::string damaged = slurp(weights);
    damaged.back() ^= 1;
    spill(weights, damaged);
    check_contains(error(), {"exit 5", name + " is damaged"});
    std::filesystem::remove(path + "/state.json");
    check_contains(error(), {"exit 5", name + " is damaged"});
    spill(path + "/manifest.json", "{\"format\": \"another\"}");
    CHECK(error() == "nothing");
    std::filesystem::remove(path + "/manifest.json");
    CHECK(error() == "nothing");
}

TEST_CASE("checkpoint: a part of an MXFP4 tensor that is missing or has another shape or type is named") {
    TempDir dir;
    const ModelConfig config = model_config_from_hf(fixture("gpt_oss_mxfp4"));
    const std::string whole = slurp(fixture("gpt_oss_mxfp4/model.safetensors"));
    const std::string scales = "model.layers.0.mlp.experts.down_proj_scales\":{\"dtype\":\"U8\",\"shape\":[3,64,1]";
    const auto error_with = [&](const std::string& from, const std::string& to) {
        std::string bytes = whole;
        REQUIRE(from.size() == to.size());
        REQUIRE(bytes.find(from) != std::string::npos);
        spill(dir / "model.safetensors", bytes.replace(bytes.find(from), from.size(), to));
        return error_of([&] { import(dir.path, config); });
    };
    const auto changed = [&](const std::string& from, const std::string& to) {
        std::string text = scales;
        return error_with(scales, text.replace(text.find(from), from.size(), to));
    };
    CHECK(error_with(scales, scales) == "nothing");
    check_contains(changed("proj_scales", "proj_scalez"),
                   {"exit 2", "model.layers.0.mlp.experts.down_proj_scales is missing"});
    check_contains(changed("[3,64,1]", "[3,1,64]"),
                   {"exit 2", "down_proj_scales has shape [3, 1, 64], the model needs [3, 64, 1]"});
    check_contains(changed("U8", "I8"), {"exit 2", "down_proj_scales is I8, needed is U8"});
    check_contains(error_with("down_proj_blocks", "down_proj_blockz"), {"exit 2", "down_proj is missing"});
    spill(dir / "model.safetensors", whole.substr(0, whole.size() - 1));
    check_contains(error_of([&] { import(dir.path, config); }), {"exit 2", "model.safetensors"});
}

// Loads files of transformers, saves a checkpoint, and compares the logits that transformers computes from it. Not of
// longrope: where a text passes the original length, transformers' cache keeps keys of the short factors.
TEST_CASE("checkpoint: transformers computes the stored logits from what we save") {
    TempDir dir;
    const char* python = std::getenv("PYTHON");
    const std::string script = "tests/support/check_hf_load.py";
    std::string command = std::string(python ? python : "python3") + " " + script;
    for (const char* name : {"gpt2", "llama", "llama_tied", "qwen3", "llama_attention_bias", "llama_mlp_bias",
                             "mistral", "mistral_window", "qwen2", "qwen2_window", "qwen3_bias_window", "qwen3_moe",
                             "olmoe", "mixtral", "dots1", "solar_open", "olmo2", "olmo3", "granite", "gemma3",
                             "phi3", "dots1_dense", "qwen3_moe_dense", "gemma2",
                             "olmo2_grouped", "gpt_oss", "gpt_oss_mxfp4"}) {
        FakeState state(model_config_from_hf(fixture(name)), {.weight = Dtype::kFp32});
        load_hf_weights(fixture(name), state.config, state.table, state.access(), *open_single());
        CheckpointRequest request = request_of(dir / name, 1);
        if (std::string(name) == "qwen3") request.max_part_bytes = 100000;
        command += " " + save(state, request) + " " + fixture(std::string(name) + "/reference.safetensors");
    }
    const int status = std::system((command + " > " + (dir / "log") + " 2>&1").c_str());
    const std::string log = slurp(dir / "log");
    if (WEXITSTATUS(status) == 77) {
        MESSAGE("skipped: " << log);
        return;
    }
    CAPTURE(log);
    CHECK(status == 0);
}
