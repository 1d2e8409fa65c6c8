// Every checkpoint also has the tokenizer, chat template, generation defaults and special tokens of the model that was
// loaded.
#include <sys/stat.h>

#include "llmc/checkpoint/huggingface/model_extras.h"
#include "tests/support/checkpoint_test.h"

using namespace checkpoint_test;
using Json = nlohmann::json;

namespace {

// The folder of an instruction-tuned Llama 3.1, without weights.
std::string write_model(const TempDir& dir, const char* name = "model") {
    const std::string model = dir / name;
    make_directories(model);
    Json config = Json::parse(hf_config_json(one_layer(), Dtype::kBf16));
    config["bos_token_id"] = 3;
    config["eos_token_id"] = {4, 11, 12};
    config["pad_token_id"] = 7;
    spill(model + "/config.json", config.dump());
    spill(model + "/generation_config.json", R"({"eos_token_id": [4, 11, 12], "temperature": 0.6})");
    for (const char* file : {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model",
                             "chat_template.jinja", "vocab.json", "merges.txt", "added_tokens.json"})
        spill(model + "/" + file, std::string("of the model: ") + file + '\0' + "\n");
    spill(model + "/model.safetensors.index.json", "not this one");
    spill(model + "/training_args.bin", "nor this one");
    return model;
}

Json config_of(const std::string& path) { return Json::parse(slurp(path + "/config.json")); }

std::string save(const FakeState& state, const CheckpointRequest& request) {
    FakeState copy = state;
    return save_checkpoint(request, state.config, copy.table, copy.access());
}

CheckpointRequest request_from(const TempDir& dir, int64_t step, const std::string& model,
                               const std::string& tokenizer = "") {
    CheckpointRequest request = request_of(dir / "run", step);
    request.model = model;
    request.tokenizer = tokenizer;
    return request;
}

}  // namespace

TEST_CASE("checkpoint: the model's other files are copied from checkpoint to checkpoint") {
    TempDir dir;
    const std::string model = write_model(dir);
    const FakeState state(one_layer());
    std::string from = model;
    for (int64_t step = 1; step <= 3; step++) {   // each starts from the one before
        const std::string path = save(state, request_from(dir, step, from));
        CHECK(checkpoint_damage(path, true).empty());
        for (const std::string& file : files_under(model)) {
            CAPTURE(file);
            if (file == "config.json" || file == "training_args.bin" || file.rfind("model", 0) == 0) continue;
            CHECK(slurp(path + "/" + file) == slurp(model + "/" + file));
        }
        CHECK_FALSE(is_regular_file(path + "/training_args.bin"));
        const Json config = config_of(path);
        CHECK(config["bos_token_id"] == 3);
        CHECK(config["eos_token_id"] == Json({4, 11, 12}));
        CHECK(config["pad_token_id"] == 7);
        CHECK(eos_token_ids(path) == std::vector<int32_t>{4, 11, 12});
        spill(path + "/chat_template.jinja", "another");
        check_contains(checkpoint_damage(path, true), {"chat_template.jinja"});
        check_contains(error_of([&] { read_model_extras(path, ""); }), {"exit 5", "chat_template.jinja"});
        spill(path + "/chat_template.jinja", slurp(model + "/chat_template.jinja"));
        from = path;
    }
}

TEST_CASE("checkpoint: --tokenizer replaces all tokenizer files and nothing else") {
    TempDir dir;
    const std::string model = write_model(dir);
    make_directories(dir / "other");
    spill(dir / "other/tokenizer.json", "another");
    const std::string path = save(FakeState(one_layer()), request_from(dir, 1, model, dir / "other"));
    CHECK(slurp(path + "/tokenizer.json") == "another");
    for (const char* file : {"tokenizer_config.json", "tokenizer.model", "chat_template.jinja", "merges.txt"})
        CHECK_FALSE(is_regular_file(path + "/" + file));
    CHECK(is_regular_file(path + "/generation_config.json"));
    CHECK(config_of(path)["bos_token_id"] == 3);
    spill(dir / "other/config.json", "not this one");
    CHECK(is_regular_file(save(FakeState(one_layer()), request_from(dir, 2, "", dir / "other/tokenizer.json"))
                          + "/tokenizer.json"));
    CHECK(tokenizer_files("").empty());
    check_contains(error_of([&] { tokenizer_files(dir / "none"); }), {"exit 2", "--tokenizer", "none"});
    check_contains(error_of([&] { tokenizer_files(dir / "run"); }), {"exit 2", "--tokenizer", "no tokenizer.json"});
    check_contains(error_of([&] { tokenizer_files(dir / "other/config.json"); }), {"exit 2", "rename"});
}

TEST_CASE("checkpoint: the chat template of the training data takes the place of the model's") {
    TempDir dir;
    const std::string model = write_model(dir), trained = "{{ 'trained' }}";
    spill(model + "/tokenizer_config.json", R"({"chat_template": [{"name": "default"}], "eos_token": "</s>"})");
    CheckpointRequest request = request_from(dir, 1, model);
    request.facts.chat_template = trained;
    std::string path = save(FakeState(one_layer()), request);
    CHECK(slurp(path + "/chat_template.jinja") == trained);
    CHECK(Json::parse(slurp(path + "/tokenizer_config.json"))
          == Json({{"chat_template", trained}, {"eos_token", "</s>"}}));
    path = save(FakeState(one_layer()), request_from(dir, 2, path));   // a later phase on data without a template
    CHECK(slurp(path + "/chat_template.jinja") == trained);
    request = request_from(dir, 3, "");
    request.facts.chat_template = trained;
    CHECK_FALSE(is_regular_file(save(FakeState(one_layer()), request) + "/chat_template.jinja"));   // nor a tokenizer
}

TEST_CASE("checkpoint: special tokens are guessed only for a model trained from initial weights") {
    TempDir dir;
    const FakeState state(one_layer());
    CHECK(config_of(save(state, request_from(dir, 1, "")))["eos_token_id"].is_null());
    const ModelConfig llama3 = find_model_preset("llama3-8B")->config;
    CHECK(Json::parse(hf_config_json(llama3, Dtype::kBf16))["eos_token_id"] == 128001);
    const HfOrigin origin{.model_type = "llama", .special_tokens = R"({"eos_token_id": [128001, 128008, 128009]})"};
    const Json brought = Json::parse(hf_config_json(llama3, Dtype::kBf16, 0, origin));
    CHECK(brought["eos_token_id"] == Json({128001, 128008, 128009}));
    CHECK_FALSE(brought.contains("bos_token_id"));   // as in the model's file, so that the class's default applies
    const HfOrigin silent{.model_type = "llama", .special_tokens = "{}"};
    CHECK_FALSE(Json::parse(hf_config_json(llama3, Dtype::kBf16, 0, silent)).contains("eos_token_id"));
}

TEST_CASE("checkpoint: special tokens are those of the training data where the model does not know them") {
    TempDir dir;
    const FakeState state(one_layer());
    const auto saved = [&](int64_t step, const std::string& model, const TokenizerFacts& facts,
                           const std::string& tokenizer = "") {
        CheckpointRequest request = request_from(dir, step, model, tokenizer);
        request.facts = facts;
        return save(state, request);
    };
    const auto ids = [](const std::string& path) {
        const Json config = config_of(path);
        return Json{config["bos_token_id"], config["eos_token_id"]};
    };
    TokenizerFacts text, chat;
    text.vocabulary = "bytes";
    text.separator = chat.separator = 9;
    chat.end_of_turn = 6;
    CHECK(ids(saved(1, "", text)) == Json{9, 9});
    CHECK(ids(saved(2, dir / "run/step-00000001", {})) == Json{9, 9});
    CHECK(ids(saved(3, dir / "run/step-00000001", chat)) == Json{9, {6, 9}});
    // A model's own ids stay, and gain the end of a turn, also in generation_config.json.
    const std::string model = write_model(dir);
    CHECK(ids(saved(4, model, text)) == Json{3, {4, 11, 12}});
    const std::string tuned = saved(5, model, chat);
    CHECK(ids(tuned) == Json{3, {6, 4, 11, 12}});
    CHECK(config_of(tuned)["pad_token_id"] == 7);
    CHECK(Json::parse(slurp(tuned + "/generation_config.json"))
          == Json({{"eos_token_id", {6, 4, 11, 12}}, {"temperature", 0.6}}));
    CHECK(ids(saved(6, tuned, chat)) == Json{3, {6, 4, 11, 12}});
    // Those of another vocabulary say nothing.
    spill(model + "/tokenizer.json", R"({"model": {"vocab": {"a": 0}}})");
    for (const std::string tokenizer : {"bytes", ""}) {
        const std::string path = saved(tokenizer.empty() ? 8 : 7, model, text, tokenizer);
        CHECK(ids(path) == (tokenizer.empty() ? Json{3, {4, 11, 12}} : Json{9, 9}));
        CHECK(config_of(path).contains("pad_token_id") == tokenizer.empty());
        CHECK(eos_token_ids(path) == (tokenizer.empty() ? std::vector<int32_t>{4, 11, 12} : std::vector<int32_t>{9}));
        CHECK(is_regular_file(path + "/tokenizer.json") == tokenizer.empty());
    }
}

TEST_CASE("checkpoint: a Mistral without a window is saved as a Mistral") {
    const ModelConfig config = find_model_preset("mistral-7B-v0.3")->config;
    const Json llama = Json::parse(hf_config_json(config, Dtype::kBf16));
    const HfOrigin origin{.model_type = "mistral", .special_tokens = "{}"};
    const Json mistral = Json::parse(hf_config_json(config, Dtype::kBf16, 0, origin));
    CHECK(llama["model_type"] == "llama");
    CHECK(mistral["model_type"] == "mistral");
    CHECK(mistral["architectures"] == Json{"MistralForCausalLM"});
    CHECK(mistral["sliding_window"].is_null());
    CHECK(model_config_from_json(mistral.dump(), "x") == config);
    ModelConfig biased = config;   // Mistral's class has no biases
    biased.linear_bias = LinearBias::kMlp;
    CHECK(Json::parse(hf_config_json(biased, Dtype::kBf16, 0, origin))["model_type"] == "llama");
}

TEST_CASE("checkpoint: links to files are followed, anything else with a known name is refused by name") {
    TempDir dir;
    const std::string model = write_model(dir), file = model + "/tokenizer.model";
    const auto replace_by = [&](auto&& make) {
        std::filesystem::remove_all(file);
        make();
    };
    replace_by([&] { std::filesystem::create_symlink("../model/merges.txt", file); });
    CHECK(slurp(save(FakeState(one_layer()), request_from(dir, 1, model)) + "/tokenizer.model")
          == slurp(model + "/merges.txt"));
    CHECK_FALSE(std::filesystem::is_symlink(dir / "run/step-00000001/tokenizer.model"));
    const auto check_refused = [&] {
        check_contains(error_of([&] { read_model_extras(model, ""); }),
                       {"exit 2", "tokenizer.model", "neither a file"});
        check_contains(error_of([&] { tokenizer_files(model); }), {"exit 2", "tokenizer.model", "neither a file"});
        check_contains(error_of([&] { save(FakeState(one_layer()), request_from(dir, 2, model)); }),
                       {"exit 2", "tokenizer.model"});
    };
    replace_by([&] { std::filesystem::create_symlink("none", file); });
    check_refused();
    replace_by([&] { make_directories(file); });
    check_refused();
    replace_by([&] { REQUIRE(mkfifo(file.c_str(), 0600) == 0); });
    check_refused();
    std::filesystem::remove(file);
    for (const char* wrong : {"\"</s>\"", "[1, \"x\"]", "-7", "1.5", "{}"}) {
        CAPTURE(wrong);
        Json config = config_of(model);
        config["eos_token_id"] = Json::parse(wrong);
        spill(model + "/config.json", config.dump());
        check_contains(error_of([&] { read_model_extras(model, ""); }), {"exit 2", "config.json", "eos_token_id"});
    }
    spill(dir / "generation_config.json", "{}");
    for (const char* ours : {"generation_config.json", "model/config.json"})
        check_contains(error_of([&] { tokenizer_files(dir / ours); }), {"exit 2", "rename"});
}

// A file of 2^29 bytes that occupies no space.
TEST_CASE("checkpoint: files of more than 512 MiB together are refused") {
    TempDir dir;
    const std::string model = write_model(dir);
    std::filesystem::resize_file(model + "/vocab.json", uintmax_t{1} << 29);
    check_contains(error_of([&] { read_model_extras(model, ""); }), {"exit 2", "vocab.json"});
}
