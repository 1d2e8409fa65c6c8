// Options: the frozen list, every way to write a value, errors and their messages, resolved configurations.
#include "tests/support/config_test.h"

#include <algorithm>
#include <cstdlib>
#include <map>

namespace {

std::string option_lines() {
    std::string text;
    Config gpt2 = parse("gpt2", {"--dry-run"}).config, llama = parse("llama", {"--dry-run"}).config;
    for (const OptionRow& row : option_table()) {
        const char* resume[] = {"must match on resume", "reported on resume", "free on resume", "inherited on resume"};
        Json a = row.value.get(gpt2), b = row.value.get(llama);
        text += strf("--%s | %s | gpt2 %s | llama %s | %s%s%s\n", row.name, row.value.expects.c_str(),
                     a.is_null() ? "unset" : a.dump().c_str(), b.is_null() ? "unset" : b.dump().c_str(),
                     resume[static_cast<int>(row.on_resume)], row.llmc ? " | llm.c " : "", row.llmc ? row.llmc : "");
    }
    return text;
}

}  // namespace

// A new option is a new line of the file; a changed or missing line breaks users' scripts, so it must be intended.
// UPDATE_GOLDEN=1 rewrites the file. The commit of a new option says which user needs it.
constexpr size_t kOptions = 122;
TEST_CASE("config: the list of options is frozen") {
    fs::path path = "tests/golden/cli_options.txt";
    std::string now = option_lines();
    if (std::getenv("UPDATE_GOLDEN")) std::ofstream(path) << now;
    std::ifstream file(path);
    std::stringstream frozen;
    frozen << file.rdbuf();
    CHECK(frozen.str() == now);
    CHECK(option_table().size() == kOptions);
}

TEST_CASE("config: every option parses on the command line and in a file, and round-trips") {
    for (const OptionRow& row : option_table()) {
        CAPTURE(std::string(row.name));
        REQUIRE(samples().count(row.name) == 1);
        for (const std::string& value : samples().at(row.name).values) {
            CAPTURE(value);
            Words without = joined(base(row.name), beside(row.name));
            Config config = parse("gpt2", run_with(row.name, value)).config;
            Json got = row.value.get(config);
            Config check = config;
            CHECK(row.value.set(check, got));
            CHECK(check == config);
            Json expected = row.value.parse(value);
            if (row.value.list) expected = Json::array({expected});
            CHECK(got == expected);

            // Two words instead of one; true-or-false options alone mean true.
            Words apart = joined(without, {"--" + std::string(row.name)});
            if (!row.value.flag) apart.push_back(value);
            CHECK(parse("gpt2", apart).config == config);

            // The same value in a file, with _ instead of -, gives the same configuration as on the command line.
            std::string key = row.name;
            std::replace(key.begin(), key.end(), '-', '_');
            TempFile file(Json{{key, expected}}.dump());
            CHECK(parse("gpt2", joined(without, {"--config", file.path})).config == config);

            // The default is another value, so that an ignored option would be noticed.
            if (std::string(row.name) != "train-data" && std::string(row.name) != "train-iters")
                CHECK(row.value.get(parse("gpt2", joined(without, {"--dry-run"})).config)
                      != (std::string(row.name) == "dry-run" ? Json(false) : got));

            TempFile resolved(config_to_json(config));
            CHECK(parse("gpt2", {"--config", resolved.path}).config == config);
        }
    }
}

TEST_CASE("config: values of the wrong kind or out of range are named") {
    for (const OptionRow& row : option_table()) {
        CAPTURE(std::string(row.name));
        if (row.value.any_text) continue;
        for (const char* junk : {"x", "nan", "1e999", "-1", "1:2:3", "5 5", ""}) {
            CAPTURE(std::string(junk));
            if (!*junk && std::string(row.name) == "token-dtype") continue;   // unsets it
            std::string message = refusal("gpt2", {"--" + std::string(row.name) + "=" + junk});
            CHECK(contains(message, "--" + std::string(row.name) + " " + (*junk ? junk : "''") + ": must be "));
            CHECK(contains(message, row.value.expects));
        }
        for (const char* json : {"null", "{}", "[true]", "\"x\""}) {
            CAPTURE(std::string(json));
            TempFile file("{\"" + std::string(row.name) + "\": " + json + "}");
            CHECK(contains(refusal("gpt2", {"--config", file.path}), file.path + ": " + row.name));
        }
    }
    CHECK(contains(refusal("gpt2", {"--lr=10.000001"}), "in (0, 10]"));
    CHECK(contains(refusal("gpt2", {"--lr=0"}), "in (0, 10]"));
    CHECK(contains(refusal("gpt2", {"--adam-beta2=1"}), "in [0, 1)"));
    CHECK(contains(refusal("gpt2", {"--adam-beta2=0.99999999"}), "in [0, 1), also in FP32"));   // there 1
    CHECK(contains(refusal("gpt2", {"--adam-eps=1e-46"}), "in (0, 1), also in FP32"));           // there 0
    CHECK(contains(refusal("gpt2", {"--norm-epsilon=1e-50"}), "in (0, 1)"));
    CHECK(contains(refusal("gpt2", {"--num-layers=1025"}), "in [1, 1024]"));
    CHECK(contains(refusal("gpt2", {"--num-layers=2.0"}), "an integer"));
    CHECK(contains(refusal("gpt2", {"--num-layers=2", "--sliding-window=8,8,0"}), "3 windows for --num-layers 2"));
    CHECK(parse("gpt2", joined(base("train-iters"), {"--train-iters=2e3", "--seed=1e6"})).config.train_iters == 2000);
    CHECK(contains(refusal("gpt2", {"--seed=9223372036854775808"}),
                   "an integer >= 0; the largest integer is 9223372036854775807"));
    CHECK(contains(refusal("gpt2", {"--train-data="}), "--train-data"));
}

TEST_CASE("config: the error of an unknown name suggests the nearest one") {
    CHECK(contains(refusal("gpt2", {"--train-itres", "3"}), "option --train-itres: did you mean --train-iters?"));
    CHECK(contains(refusal("gpt2", {"--micro_batch_sizes", "3"}), "did you mean --micro-batch-size?"));
    CHECK(contains(refusal("gpt2", {"-lr", "3"}), "did you mean --lr?"));
    CHECK(contains(refusal("gpt2", {"--model", "gpt2-1558"}), "did you mean gpt2-1558M?"));
    CHECK(contains(refusal("gpt2", {"--model", "llama-tiny"}), "train_llama"));
    CHECK(contains(refusal("gpt2", {"word"}), "unexpected word \"word\""));
    CHECK(contains(refusal("gpt2", {"--qk-layernorm", "false"}), "unexpected word \"false\""));
    CHECK(contains(refusal("gpt2", {"--rampup-batch-size", "2", "2", "8"}),
                   "\"2\": the values of --rampup-batch-size are one word, in quotes: \"START INC SAMPLES\""));
    CHECK(contains(refusal("gpt2", {"--no-qk-layernorm"}), "--no-qk-layernorm: write --qk-layernorm=false"));
    CHECK(contains(refusal("gpt2", {"--dry-run", "--lr"}), "--lr needs a value"));
    CHECK(contains(refusal("gpt2", {"--lr", "--dry-run"}), "--lr needs a value"));
    CHECK(contains(refusal("gpt2", {"--train-data", "--dry-run"}), "--train-data needs a value"));
    TempFile nested("{\"lr\": {\"peak\": 1e-3}}");
    CHECK(contains(refusal("gpt2", {"--config", nested.path}), "\"lr\" has a plain value here, not an object"));
    TempFile file("{\"grad_dtyp\": \"fp32\"}");
    CHECK(contains(refusal("gpt2", {"--config", file.path}), "\"grad_dtyp\": did you mean \"grad-dtype\"?"));
}

TEST_CASE("config: an option without effect is refused with the reason") {
    struct Case {
        std::string family;
        Words words;
        std::string option, reason;
    };
    const std::vector<Case> cases = {
        {"gpt2", {"--rotary-base", "10000"}, "--rotary-base", "learned"},
        {"llama", {"--position-embedding-type=learned_absolute", "--rotary-base=1e4"}, "--rotary-base", "learned"},
        {"gpt2", {"--rope-scaling-factor", "8"}, "--rope-scaling-factor", "learned"},
        {"llama", {"--rope-scaling-type", "yarn"}, "--rope-scaling-type", "--rope-scaling-factor 0"},
        {"gpt2", {"--loss-chunk", "8192"}, "--loss-chunk", "no more tokens than one chunk"},
        {"gpt2", {"--sliding-window", "64", "--seq-length", "64"}, "--sliding-window", "hides nothing"},
        {"gpt2", {"--sliding-window", "70,0", "--seq-length", "64"}, "--sliding-window", "hides nothing"},
        {"gpt2", {"--fp8-attention", "--dtype", "fp32"}, "--fp8-attention", "BF16"},
        {"gpt2", {"--fp8-attention", "--kv-channels", "80"}, "--fp8-attention", "head dims of 64 and 128"},
        {"gpt2", {"--offload-fraction", "0.5"}, "--offload-fraction", "no optimizer state"},
        {"gpt2", {"--eval-iters", "20"}, "--eval-iters", "--valid-data"},
        {"gpt2", {"--eval-interval", "20"}, "--eval-interval", "--valid-data"},
        {"gpt2", {"--keep", "3"}, "--keep", "--save"}, {"gpt2", {"--save-async"}, "--save-async", "--save"},
        {"gpt2", {"--save-interval", "3"}, "--save-interval", "--save"},
        {"gpt2", {"--tokenizer", "t"}, "--tokenizer", "--save"},
        {"gpt2", {"--min-lr", "0", "--lr-decay-style", "constant"}, "--min-lr", "constant"},
        {"gpt2", {"--muon-scale", "spectral"}, "--muon-scale", "--optimizer adamw"},
        {"gpt2", {"--muon-momentum", "0.9"}, "--muon-momentum", "--optimizer adamw"},
        {"gpt2", {"--muon-beta2", "0.95"}, "--muon-beta2", "--optimizer adamw"},
        {"llama", {"--moe-router-topk", "2"}, "--moe-router-topk", "no experts"},
        {"llama", {"--moe-aux-loss-coeff", "0"}, "--moe-aux-loss-coeff", "no experts"},
        {"llama", {"--moe-z-loss-coeff", "1e-3"}, "--moe-z-loss-coeff", "no experts"},
        {"llama", {"--moe-shared-experts", "1"}, "--moe-shared-experts", "no experts"},
        {"llama", {"--num-experts", "4", "--moe-router-bias-update-rate", "0.01"}, "--moe-router-bias-update-rate",
         "only the router of a model with shared experts"},
        {"llama", {"--num-experts", "4", "--moe-shared-experts", "1", "--moe-aux-loss-coeff", "0.01"},
         "--moe-aux-loss-coeff", "balances by a bias"},
        {"llama", {"--moe-capacity", "2"}, "--moe-capacity", "--expert-parallel 1"},
        {"gpt2", {"--lr-wsd-decay-iters", "10"}, "--lr-wsd-decay-iters", "wsd"},
        {"gpt2", {"--sample-tokens", "10"}, "--sample-tokens", "--sample-every 0"},
        {"gpt2", {"--prompt", "1"}, "--prompt", "--sample-every 0"},
        {"gpt2", {"--temperature", "1"}, "--temperature", "--sample-every 0"},
        {"gpt2", {"--top-k", "5"}, "--top-k", "--sample-every 0"},
        {"gpt2", {"--sample-every", "9", "--temperature", "0", "--top-k", "5"}, "--top-k", "--temperature 0"},
        {"gpt2", {"--init-method-std", "0.1", "--load", "d"}, "--init-method-std", "--load"},
        {"gpt2", {"--init-method-std", "0.1", "--resume", "d"}, "--init-method-std", "--resume"},
        {"gpt2", {"--load", "d", "--resume", "e"}, "--load", "--resume"},
        {"gpt2", {"--epochs", "2"}, "--train-iters", "--epochs"}, {"gpt2", {"--gpu", "H200"}, "--gpu", "only plan"},
        {"gpt2", {"--json"}, "--json", "only plan"},
    };
    for (const Case& c : cases) {
        Words words = joined(base(""), c.words);
        CAPTURE(c.option);
        CHECK(contains(refusal(c.family, words), c.option));
        CHECK(contains(refusal(c.family, words), "has no effect: "));
        CHECK(contains(refusal(c.family, words), c.reason));
    }
    // For an option from a file the error names the place, and options that the user did not set are not mentioned.
    TempFile file("{\"keep\": 3}");
    CHECK(contains(refusal("gpt2", joined(base(""), {"--config", file.path})), file.path + ": keep has no effect"));
    CHECK(refusal("gpt2", base("")) == "");
    // The same command line starts a run and restarts it after a crash, so --resume auto also works without
    // checkpoints.
    CHECK(refusal("gpt2", joined(base(""), {"--save", "s", "--resume", "auto", "--load", "d"})) == "");
    // Every option that can be without effect has a case above. Those of FP8, ranks and data are in
    // test_fp8_options.cpp, test_rank_options.cpp and test_synthetic.cpp.
    const auto elsewhere = [](const OptionRow& row) {
        return row.group == OptionGroup::kFp8 || row.group == OptionGroup::kRanks || row.group == OptionGroup::kData
               || std::string(row.name) == "epochs";
    };
    for (const OptionRow& row : option_table())
        for (const Condition& condition : conditions_of(row.name)) {
            std::istringstream names(std::string(condition.options) + " " + condition.deciders);
            for (std::string name; names >> name;) CHECK_MESSAGE(find_option(name), name);
        }
    for (const OptionRow& row : option_table())
        if (!conditions_of(row.name).empty() && !elsewhere(row))
            CHECK_MESSAGE(std::any_of(cases.begin(), cases.end(), [&](const Case& c) {
                return contains("--" + std::string(row.name), c.option);
            }), row.name);
}

TEST_CASE("config: rules between options") {
    auto refused = [](const Words& words, const std::string& part, const Machine& machine = {}) {
        CAPTURE(part);
        CHECK(contains(refusal("gpt2", joined(base(""), words), machine), part));
    };
    CHECK(contains(refusal("gpt2", {}), "--train-data is missing"));
    CHECK(contains(refusal("gpt2", {"--train-data", "t"}), "how long to train?"));
    CHECK(refusal("gpt2", {"--dry-run"}) == "");
    refused({"--global-batch-size", "9"}, "--global-batch-size 9 must be a multiple of --micro-batch-size 8 x 1 rank");
    refused({"--global-batch-size", "24"}, "x 2 ranks", {.ranks = 2});
    refused({"--rampup-batch-size", "4 8 100", "--global-batch-size", "64"}, "START 4");
    refused({"--rampup-batch-size", "8 12 100", "--global-batch-size", "64"}, "INC 12");
    refused({"--rampup-batch-size", "8 16 100", "--global-batch-size", "64"}, "do not lead from 8");
    refused({"--rampup-batch-size", "64 8 100", "--global-batch-size", "64"}, "do not lead from 64");
    refused({"--seq-length", "1025"}, "--seq-length 1025 exceeds --max-position-embeddings 1024");
    refused({"--min-lr", "1e-3"}, "--min-lr 0.001 exceeds --lr 0.0006");
    refused({"--mup-base-width", "256"}, "--mup-base-width: the output matrix is the embedding");
    refused({"--lr-warmup-iters", "101"}, "--lr-warmup-iters 101 exceeds --train-iters 100");
    refused({"--lr-decay-style=wsd", "--lr-wsd-decay-iters=60", "--lr-warmup-iters=41"}, "exceed --train-iters 100");
    refused({"--profile", "5:4"}, "--profile 5:4 ends before it starts");
    refused({"--profile", "101:104"}, "step 101 of 100");
    refused({"--resume", "auto"}, "--save");
    refused({"--num-query-groups", "5"}, "must be a multiple of --num-query-groups 5");
    refused({"--hidden-size", "100"}, "set --kv-channels");
    refused({"--position-embedding-type=rope", "--rope-scaling-factor=0.5"}, "at least 1");
    const Words rows = {"--model", "qwen3-30B-A3B", "--seq-length", "32768", "--global-batch-size=65536", "--dry-run"};
    CHECK(refusal("llama", joined(rows, {"--micro-batch-size", "2048"})) == "");   // 2^29 rows
    CHECK(contains(refusal("llama", joined(rows, {"--micro-batch-size", "4096"})), "have 1073741824 rows"));
}

TEST_CASE("config: presets, and defaults that follow from other options") {
    for (const ModelPreset& preset : model_presets()) {
        Config c = parse(preset.family, {"--dry-run", "--model", preset.name}).config;
        CHECK(c.shape == preset.config);
        CHECK(c.seq_length == preset.seq_length);
    }
    Config c = parse("gpt2", base("")).config;
    CHECK(c.model == "gpt2-124M");
    CHECK(c.lr == 6e-4);
    CHECK(c.min_lr == 6e-5);
    CHECK(c.lr_warmup_iters == 1);
    CHECK(c.global_batch_size == c.micro_batch_size);
    CHECK(c.profile_first == -1);
    CHECK(c.log_file == "");
    CHECK(parse("llama", base("")).config.lr == 3e-4);
    CHECK(parse("gpt2", base(""), {.ranks = 4}).config.global_batch_size == 4 * c.micro_batch_size);
    CHECK(parse("gpt2", joined(base(""), {"--save", "out"})).config.log_file == "out/log.jsonl");
    CHECK(parse("gpt2", joined(base(""), {"--save", "out", "--log-file="})).config.log_file == "");
    CHECK(parse("gpt2", {"--train-data", "t", "--train-iters", "1000000"}).config.lr_warmup_iters == 2000);
    CHECK(parse("gpt2", {"--train-data", "t", "--epochs", "1"}).config.lr_warmup_iters == 0);

    // Sizes that are derived if the user changes the shape, and are those of the preset otherwise.
    ModelConfig s = parse("gpt2", {"--dry-run", "--hidden-size", "512", "--num-attention-heads", "8"}).config.shape;
    CHECK(s.ffn_hidden_size == 2048);
    CHECK(s.kv_channels == 64);
    CHECK(s.num_query_groups == 8);
    CHECK(parse("gpt2", {"--dry-run", "--swiglu"}).config.shape.ffn_hidden_size == 2048);
    CHECK(parse("llama", {"--dry-run", "--hidden-size=1024"}).config.shape.ffn_hidden_size == 2688);
    CHECK(parse("llama", {"--dry-run", "--num-attention-heads", "32"}).config.shape.num_query_groups == 4);
    CHECK(parse("llama", {"--dry-run", "--swiglu=false"}).config.shape.activation == Activation::kGelu);
    CHECK(parse("gpt2", {"--dry-run", "--activation", "swiglu"}).config.shape.ffn_hidden_size == 2048);
    CHECK(parse("llama", {"--dry-run", "--seq-length", "4096"}).config.shape.max_positions == 4096);
    CHECK(parse("gpt2", {"--dry-run", "--max-position-embeddings", "64"}).config.seq_length == 64);
}

TEST_CASE("config: --load takes the shape from its directory") {
    Machine machine;
    machine.read_shape = [](const std::string& directory) {
        ModelConfig shape = find_model_preset("gpt2-tiny")->config;
        shape.num_layers = directory == "deep" ? 9 : 2;
        return shape;
    };
    Config c = parse("gpt2", joined(base(""), {"--load", "deep"}), machine).config;
    CHECK(c.shape == machine.read_shape("deep"));
    CHECK(c.seq_length == 256);   // no longer than its learned positions
    TempFile resolved(config_to_json(c));
    CHECK(parse("gpt2", {"--config", resolved.path}, machine).config == c);
    CHECK(contains(refusal("gpt2", joined(base(""), {"--load", "flat", "--num-layers", "3"}), machine),
                   "--num-layers is 3, and the model in flat has 2"));
    CHECK(contains(refusal("gpt2", joined(base(""), {"--load", "flat", "--model", "gpt2-tiny"}), machine),
                   "--num-layers is 4"));
    machine.read_shape = [](const std::string&) {
        ModelConfig shape = find_model_preset("qwen2.5-0.5B")->config;
        shape.sliding_window = {5, 0};
        return shape;
    };
    for (const auto& [option, told] :
         {std::pair{"--sliding-window=5", "--sliding-window is 5, and the model in m has 5,0"},
          {"--disable-bias-linear", "--linear-bias is none, and the model in m has qkv"},
          {"--untie-embeddings-and-output-weights", "-weights is true, and the model in m has false"}})
        CHECK(contains(refusal("llama", joined(base(""), {"--load", "m", option}), machine), told));
}

TEST_CASE("config: a rope model that is loaded keeps its length, unless asked for another") {
    Machine machine;
    machine.read_shape = [](const std::string&) { return find_model_preset("llama-tiny")->config; };
    const Words load = joined(base(""), {"--load", "tiny"});
    const int64_t positions = machine.read_shape("tiny").max_positions;
    const Config own = parse("llama", load, machine).config;   // the preset has longer sequences
    CHECK(own.seq_length == positions);
    CHECK(own.shape.max_positions == positions);
    const Config longer = parse("llama", joined(load, {"--seq-length", "512"}), machine).config;
    CHECK(longer.seq_length == 512);
    CHECK(longer.shape.max_positions == 512);
    CHECK(contains(refusal("llama", joined(load, {"--seq-length", "512", "--max-position-embeddings", "300"}), machine),
                   "exceeds --max-position-embeddings 300"));
    // Its checkpoints keep the length that its files say.
    CHECK(contains(refusal("llama", joined(load, {"--max-position-embeddings", "100"}), machine),
                   "--max-position-embeddings is 100, and the model in tiny has 256"));
}

TEST_CASE("config: rope scaling comes from the model's directory, and YaRN extends the length of a preset") {
    Machine machine;
    machine.read_shape = [](const std::string&) {
        ModelConfig shape = find_model_preset("llama-tiny")->config;
        shape.rope_scaling = {.factor = 4, .original_max_positions = 32, .type = RopeScalingType::kYarn,
                              .beta_fast = 9};
        return shape;
    };
    const Words load = joined(base(""), {"--load", "tiny"});
    const Config loaded = parse("llama", load, machine).config;
    CHECK(loaded.shape == machine.read_shape("tiny"));
    const TempFile resolved(config_to_json(loaded));   // has no option for beta_fast, but names the directory
    CHECK(parse("llama", {"--config", resolved.path}, machine).config == loaded);
    CHECK(contains(refusal("llama", joined(load, {"--rope-scaling-factor", "8"}), machine),
                   "--rope-scaling-factor is 8, and the model in tiny has 4"));
    const TempFile empty("{\"model\": \"llama-tiny\", \"load\": \"\"}");
    CHECK(parse("llama", joined(base(""), {"--config", empty.path}), machine).config.shape.rope_scaling.factor == 0);
    const Words resume = joined(base(""), {"--resume", "checkpoint"});
    CHECK(parse("llama", resume, machine).config.shape.rope_scaling.factor == 0);   // an error about it comes later
    machine.read_saved = [](const std::string& resume, const std::string&) { return SavedOptions{resume, "{}"}; };
    CHECK(parse("llama", resume, machine).config.shape.rope_scaling == loaded.shape.rope_scaling);
    machine.read_shape = [](const std::string&) -> ModelConfig { throw Error(kExitNoCheckpoint, "damaged"); };
    CHECK(parse("llama", resume, machine).config.shape.rope_scaling.factor == 0);   // told when it is searched for

    const Words yarn = {"--dry-run", "--rope-scaling-factor", "4", "--rope-scaling-type", "yarn"};
    CHECK(parse("llama", joined(yarn, {"--model", "qwen2.5-0.5B"})).config.shape.rope_scaling.original_max_positions
          == 32768);
    CHECK(parse("llama", {"--dry-run", "--rope-scaling-factor", "8"}).config.shape.rope_scaling.original_max_positions
          == 8192);   // as in Llama 3.1, whatever the preset
}

TEST_CASE("config: the command line wins over the file, lists are replaced, globs may be many words") {
    TempFile file("{\"lr\": 1e-3, // peak\n \"min_lr\": 0, \"train-data\": [\"x\", \"y\"], \"train-iters\": 1e2}");
    Words words = {"--config", file.path};
    Config c = parse("gpt2", words).config;
    CHECK(c.lr == 1e-3);
    CHECK(c.min_lr == 0);
    CHECK(c.train_iters == 100);
    CHECK(c.train_data == Words{"x", "y"});
    c = parse("gpt2", joined(words, {"--lr", "2e-3", "--train-data", "a", "b", "--train-data=c", "d"})).config;
    CHECK(c.lr == 2e-3);
    CHECK(c.min_lr == 0);
    CHECK(c.train_data == Words{"a", "b", "c", "d"});
    c = parse("gpt2", {"--lr=1e-4", "--config", file.path, "--lr=5e-4", "--save=two\nlines"}).config;
    CHECK(c.lr == 5e-4);
    CHECK(c.save == "two\nlines");

    CHECK(contains(refusal("gpt2", {"--config", "no/such.json"}), "no/such.json"));
    for (const char* text : {"[1]", "{\"lr\": }", "", "{\"lr\": 1, \"lr\": 2}", "{\"min-lr\": 0, \"min_lr\": 0}",
                             "{\"config\": \"x\"}", "{\"lr\": \"1e-3\"}", "{\"seed\": 1.5}"}) {
        TempFile bad(text);
        CHECK(contains(refusal("gpt2", {"--dry-run", "--config", bad.path}), bad.path));
    }
}

TEST_CASE("config: llm.c's options are accepted where they mean the same, with a note") {
    ParsedConfig p = parse("gpt2", {"-i", "a", "b", "-j", "v", "-b", "4", "-t", "512", "-x", "100", "-l", "1e-3", "-u",
                                    "7", "-c", "0.2", "-v", "9", "-m", "8", "-s", "6", "-g", "5", "--save", "o", "-n",
                                    "50", "-nk", "2"});
    const Config& c = p.config;
    CHECK(c.train_data == Words{"a", "b"});
    CHECK(c.valid_data == Words{"v"});
    CHECK(std::vector<int64_t>{c.micro_batch_size, c.seq_length, c.train_iters, c.lr_warmup_iters, c.eval_interval,
                               c.eval_iters, c.sample_every, c.sample_tokens, c.save_interval, c.keep}
          == std::vector<int64_t>{4, 512, 100, 7, 9, 8, 6, 5, 50, 2});
    CHECK(c.lr == 1e-3);
    CHECK(c.weight_decay == 0.2);
    CHECK(p.notes.size() == 14);
    CHECK(p.notes[2] == "-b is --micro-batch-size");
}

TEST_CASE("config: any accepted set of options is the same after writing and reading JSON") {
    uint64_t state = 88172645463325252ull;   // xorshift64
    auto random = [&](size_t n) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return static_cast<size_t>(state % n);
    };
    const auto& rows = option_table();
    int accepted = 0, refused = 0;
    for (int trial = 0; trial < 1500; trial++) {
        const std::string family = trial % 2 ? "llama" : "gpt2";
        std::map<std::string, std::string> chosen = {{"train-data", "t"}, {"train-iters", "90"}};
        for (size_t i = 0, n = 1 + random(8); i < n; i++) {
            const OptionRow& row = rows[random(rows.size())];
            const Words& values = samples().at(row.name).values;
            if (family == "llama" && std::string(row.name) == "model") continue;
            if (std::string(row.name) == "epochs") chosen.erase("train-iters");
            chosen[row.name] = row.value.flag && random(2) ? "false" : values[random(values.size())];
            const Words& beside = samples().at(row.name).beside;
            for (size_t j = 0; j + 1 < beside.size(); j += 2) chosen[beside[j].substr(2)] = beside[j + 1];
        }
        Words words;
        for (const auto& [name, value] : chosen) words.push_back("--" + name + "=" + value);
        bool taken = refusal(family, words).empty();
        (taken ? accepted : refused)++;
        if (!taken) continue;
        Config config = parse(family, words).config;
        std::string json = config_to_json(config);
        TempFile file(json);
        Config again = parse(family, {"--config", file.path}).config;
        CHECK_MESSAGE(again == config, json);
        CHECK(config_to_json(again) == json);
        ConfigDiff diff = config_diff(json, config);
        CHECK(diff.must_match.empty());
        CHECK(diff.changed.empty());
    }
    CHECK(accepted > 400);
    CHECK(refused > 100);
}

TEST_CASE("config: differences from a checkpoint's options") {
    const Words run = {"--train-data", "t", "--train-iters", "100"};
    const std::string saved = config_to_json(parse("gpt2", run).config);
    for (const OptionRow& row : option_table()) {
        CAPTURE(std::string(row.name));
        Config now = parse("gpt2", run_with(row.name, samples().at(row.name).values[0])).config;
        ConfigDiff diff = config_diff(saved, now);
        auto names = [&](const std::vector<std::string>& lines) {
            return std::any_of(lines.begin(), lines.end(), [&](const std::string& line) {
                return contains(line, "--" + std::string(row.name) + ": ");
            });
        };
        CHECK(names(diff.must_match) == (row.on_resume == OnResume::kMustMatch));
        CHECK(names(diff.changed) == (row.on_resume == OnResume::kReport || row.on_resume == OnResume::kInherited));
        // A setting that must match is also reported if it is missing.
        ConfigDiff back = config_diff(config_to_json(now), parse("gpt2", run).config);
        for (const ConfigDiff& both : {diff, back})
            for (const std::string& line : both.changed) CHECK_FALSE(contains(line, "  "));   // a value that is empty
        CHECK(names(back.must_match) == (row.on_resume == OnResume::kMustMatch));
    }
    ConfigDiff diff = config_diff(saved, parse("gpt2", joined(run, {"--lr", "1e-3", "--seed", "5"})).config);
    CHECK(diff.must_match == std::vector<std::string>{"--seed: 1234 in the checkpoint, 5 now"});
    CHECK(diff.changed[0] == "--lr: 0.0006 in the checkpoint, 0.001 now");
    Json old = Json::parse(saved);
    old["gone-option"] = 7;
    old.erase("clip-grad");   // an option that the checkpoint's version did not have
    diff = config_diff(old.dump(), parse("gpt2", run).config);
    CHECK(diff.must_match.empty());
    CHECK(diff.changed == std::vector<std::string>{"gone-option: 7 in the checkpoint, unknown to this version"});
}

TEST_CASE("config: help, and options without effect on this machine") {
    for (const char* family : {"gpt2", "llama"}) {
        ParsedConfig p = parse(family, {"--help-all"});
        CHECK(p.help);
        for (const OptionRow& row : option_table()) CHECK(contains(p.text, "  --" + std::string(row.name)));
        for (const ModelPreset& preset : model_presets())
            CHECK(contains(p.text, "  " + std::string(preset.name) + " ") == (std::string(preset.family) == family));
        std::stringstream lines(p.text);
        for (std::string line; std::getline(lines, line);) CHECK_MESSAGE(line.size() <= 100, line);
    }
    CHECK(contains(parse("llama", {"--help-all", "--model", "llama3-8B"}).text,
                   "an integer in [1, 1024] (default: 32)"));
    for (const char* family : {"gpt2", "llama"}) {   // one screen
        const std::string text = parse(family, {"--help"}).text;
        CHECK(std::count(text.begin(), text.end(), '\n') <= 40);
        std::stringstream lines(text);
        int options = 0;
        for (std::string line; std::getline(lines, line);) {
            CHECK_MESSAGE(line.size() <= 120, line);
            options += line.rfind("  --", 0) == 0;
        }
        CHECK(options == 25 + 2);
    }
    Words words = joined(base(""), {"--gemm-search", "off"});
    CHECK(parse("gpt2", words).no_effect.empty());
    CHECK(parse("gpt2", words, {.gpu = false}).no_effect.size() == 1);
    CHECK(parse("gpt2", base(""), {.gpu = false}).no_effect.empty());
    words = joined(words, {"--profile", "2:3"});
    CHECK(contains(refusal("gpt2", words, {.gpu = false}), "--profile has no effect without a GPU: leave it out"));
    CHECK(parse("gpt2", words).no_effect.empty());
    CHECK(parse("gpt2", joined(words, {"--dry-run"}), {.gpu = false}).no_effect.size() == 2);   // plans for a GPU
}
