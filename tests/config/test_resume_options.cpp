// --resume takes the options that must be the checkpoint's from it, so that they need not be repeated.
#include "tests/support/config_test.h"

TEST_CASE("config: a resumed run has the checkpoint's values of options that must be the same and are not given") {
    // A run that began with --load on two ranks.
    Machine machine{.gpu = true, .ranks = 2};
    machine.read_shape = [](const std::string&) {
        ModelConfig shape = find_model_preset("qwen3-0.6B")->config;
        shape.init_std = 0.03;
        return shape;
    };
    const Words rest = {"--seq-length", "640", "--seed", "5", "--dtype", "fp32", "--lr", "1e-3"};
    const Config first = parse("llama", joined(joined(base(""), {"--load", "qwen"}), rest), machine).config;
    const std::string json = config_to_json(first);
    machine.read_saved = [&](const std::string& resume, const std::string& save) {
        return SavedOptions{resume == "auto" ? save + "/step-00000002" : resume, json};
    };
    const auto resumed = [&](int ranks, const Words& more) {
        machine.ranks = ranks;
        return parse("llama", joined(base(""), more), machine);
    };
    for (const Words& how : {Words{"--resume", "run/step-00000002"}, Words{"--resume", "auto", "--save", "run"}})
        for (int ranks : {1, 2}) {   // the global batch size by default depends on the ranks
            const ParsedConfig again = resumed(ranks, how);
            ConfigDiff diff = config_diff(json, again.config);
            CHECK(diff.must_match.empty());
            CHECK(diff.changed == Words{"--lr: 0.001 in the checkpoint, 0.0003 now",
                                        "--min-lr: 0.0001 in the checkpoint, 3e-05 now"});
            CHECK(again.config.shape == first.shape);
            CHECK(again.config.global_batch_size == 2);
            CHECK(contains(again.notes.back(), "not given, so as in run/step-00000002: --num-layers 28 --hidden-size"));
            CHECK(contains(again.notes.back(), "--seq-length 640"));
            CHECK(again.changed.size() == (how.size() == 2 ? 3 : 4));   // the words of the command line alone
        }
    // A given value is kept, and refused where the checkpoint is resumed.
    const ConfigDiff diff = config_diff(json, resumed(2, {"--resume", "x", "--seed", "6", "--num-layers", "3"}).config);
    CHECK(diff.must_match == Words{"--num-layers: 28 in the checkpoint, 3 now", "--seed: 5 in the checkpoint, 6 now"});
    const Config other = resumed(2, {"--resume", "x", "--model", "llama-tiny"}).config;
    CHECK(other.shape.hidden_size == find_model_preset("llama-tiny")->config.hidden_size);
    CHECK(other.seed == 5);
    // The ranks share the batch: with smaller micro-batches unless their size is given, or not at all.
    std::string batch = config_to_json(parse("gpt2", joined(base(""), {"--global-batch-size", "24"})).config);
    const auto micro = [&](int ranks, const Words& more) {
        Machine many{.gpu = true, .ranks = ranks};
        many.read_saved = [&](const std::string& resume, const std::string&) { return SavedOptions{resume, batch}; };
        const Words words = joined(joined(base(""), {"--resume", "x"}), more);
        const std::string error = refusal("gpt2", words, many);
        return error.empty() ? strf("%d", static_cast<int>(parse("gpt2", words, many).config.micro_batch_size)) : error;
    };
    CHECK(resumed(2, joined({"--resume", "auto", "--save", "run", "--load", "qwen"}, rest)).notes.empty());
    CHECK(micro(1, {}) == "8");
    CHECK(micro(3, {}) == "8");
    CHECK(micro(4, {}) == "6");
    CHECK(micro(8, {}) == "3");
    CHECK(micro(2, {"--context-parallel", "2"}) == "8");
    CHECK(contains(micro(2, {"--micro-batch-size", "8"}), "take --micro-batch-size 6, or leave it out"));
    CHECK(contains(micro(5, {}), "5 ranks cannot share the checkpoint's --global-batch-size 24"));
}

TEST_CASE("config: a resumed run has of its model also what no option says") {
    std::vector<ModelConfig> shapes(4, find_model_preset("llama-tiny")->config);
    shapes[0].embedding_multiplier = 12, shapes[0].attention_multiplier = 0.1;   // Granite
    shapes[1].sliding_window = {4096};                                           // longer than the sequences
    shapes[2].norm_place = NormPlace::kPost, shapes[2].qk_norm = shapes[2].qk_norm_whole = true;
    shapes[3].num_experts = 4, shapes[3].qk_norm = true, shapes[3].normalize_experts = false;
    for (const ModelConfig& shape : shapes) {
        Machine machine{.gpu = true};
        machine.read_shape = [&](const std::string&) { return shape; };
        const std::string json = config_to_json(parse("llama", joined(base(""), {"--load", "model"}), machine).config);
        machine.read_saved = [&](const std::string& resume, const std::string&) { return SavedOptions{resume, json}; };
        const Config again = parse("llama", joined(base(""), {"--resume", "x"}), machine).config;
        CHECK(again.shape == shape);
        CHECK(config_diff(json, again).must_match.empty());
    }
}
