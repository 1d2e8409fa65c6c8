// The options of FP8: which of them turn it on, what each recipe refuses, spellings of other trainers, resuming with
// another recipe; and the environment variables that guides recommend.
#include "tests/support/config_test.h"

#include <algorithm>
#include <cstdlib>
#include <set>

#include "llmc/base/system/host.h"
#include "llmc/config/environment.h"
#include "llmc/model/activation_buffers.h"
#include "llmc/perf/fp8_speedup.h"

namespace {

const Words kRecipeNames = {"none", "delayed", "tensorwise", "blockwise", "blockwise-bf16-wgrad",
                            "int8-forward"};

Config fp8_config(const Words& words) { return parse("gpt2", joined({"--dry-run"}, words)).config; }

std::string fp8_refusal(const Words& words) { return refusal("gpt2", joined({"--dry-run"}, words)); }

// Everything in a step that depends on FP8 options: the plan, and the fields that the optimizer and the log read.
std::string effect_of(const Config& c) {
    const Fp8Plan plan = fp8_plan_of(c, make_param_table(c.shape));
    std::string text = fp8_plan_text(plan, c) + strf(" stats %lld", static_cast<long long>(c.fp8_stats_interval));
    text += strf(" attention %d, BF16 %g %g", c.fp8_attention, c.fp8_first_bf16, c.fp8_final_bf16);
    return text + strf(" matmuls %lld", static_cast<long long>(planned_fp8_matmuls(plan, c.recompute, 1)));
}

// A value of --fp8-min-speedup that some linear layers reach and others do not.
std::string gain_between(const std::string& recipe) {
    const Config c = fp8_config({"--fp8-recipe", recipe});
    const Fp8Plan plan = fp8_plan_of(c, make_param_table(c.shape));
    double low = 1e9, high = 0;
    for (int k = 0; k < kLinearsPerLayer; k++) {
        const double speedup = predict_speedup(c, plan, plan.linear(0, static_cast<LinearKind>(k)));
        low = std::min(low, speedup);
        high = std::max(high, speedup);
    }
    return strf("%.4f", (low + high) / 2);
}

}  // namespace

TEST_CASE("fp8 options: either the recipe or the format turns FP8 on, with the default of the other") {
    struct Case {
        Words words;
        Fp8Recipe recipe;
        Fp8Format format;
    };
    for (const Case& c : std::vector<Case>{
             {{}, Fp8Recipe::kNone, Fp8Format::kHybrid},
             {{"--fp8-recipe", "delayed"}, Fp8Recipe::kDelayed, Fp8Format::kHybrid},
             {{"--fp8-recipe", "tensorwise"}, Fp8Recipe::kTensorwise, Fp8Format::kHybrid},
             {{"--fp8-recipe", "blockwise"}, Fp8Recipe::kBlockwise, Fp8Format::kE4m3},
             {{"--fp8-recipe", "int8-forward"}, Fp8Recipe::kInt8Forward, Fp8Format::kHybrid},
             {{"--fp8-format", "hybrid"}, Fp8Recipe::kDelayed, Fp8Format::kHybrid},
             {{"--fp8-format", "E4M3"}, Fp8Recipe::kDelayed, Fp8Format::kE4m3},
             {{"--fp8-format", "e4m3", "--fp8-recipe", "tensorwise"}, Fp8Recipe::kTensorwise, Fp8Format::kE4m3},
             {{"--fp8-format", "hybrid", "--fp8-recipe", "blockwise"}, Fp8Recipe::kBlockwise, Fp8Format::kHybrid}}) {
        const Config config = fp8_config(c.words);
        CHECK(config.fp8_recipe == c.recipe);
        CHECK(config.fp8_format == c.format);
    }
    const std::string e5m2 = fp8_refusal({"--fp8-format", "e5m2"});
    CHECK(contains(e5m2, "--fp8-format e5m2: "));
    CHECK(contains(e5m2, "no matmul of E5M2 by E5M2"));
    CHECK(contains(fp8_refusal({"--fp8-format", "E5M2", "--fp8-recipe", "blockwise"}), "mantissa"));
    CHECK(contains(fp8_refusal({"--fp8-recipe", "rowwise"}),
                   "one of none, delayed, tensorwise, blockwise, blockwise-bf16-wgrad, int8"));
    CHECK(contains(fp8_refusal({"--fp8-recipe", "delayed", "--dtype", "fp32"}), "needs --dtype bf16"));

    // Only E5M2 gradients with blockwise scaling, and fast accumulation of gradients, cause a warning.
    CHECK(parse("gpt2", {"--dry-run", "--fp8-recipe", "blockwise"}).notes.empty());
    CHECK(parse("gpt2", {"--dry-run", "--fp8-format", "hybrid"}).notes.empty());
    CHECK(parse("gpt2", {"--dry-run", "--fp8-recipe=delayed", "--fp8-fast-accum=none"}).notes.empty());
    const Words fast = parse("gpt2", {"--dry-run", "--fp8-recipe=delayed", "--fp8-fast-accum=all"}).notes;
    REQUIRE(fast.size() == 1);
    CHECK(contains(fast[0], "makes the loss worse"));
    const Words notes = parse("gpt2", {"--dry-run", "--fp8-recipe=blockwise", "--fp8-format=hybrid"}).notes;
    REQUIRE(notes.size() == 1);
    CHECK(contains(notes[0], "E5M2"));
}

TEST_CASE("fp8 options: with every recipe each option acts, or is refused with the recipe's name") {
    const std::set<std::string> blockwise = {"blockwise", "blockwise-bf16-wgrad"};
    std::set<std::string> current = blockwise;
    current.insert("tensorwise");
    const std::map<std::string, std::set<std::string>> refused_by = {
        {"fp8-margin", current},           {"fp8-interval", current},
        {"fp8-amax-history-len", current}, {"fp8-amax-compute-algo", current}, {"fp8-fast-accum", blockwise},
    };
    int acted = 0;
    for (const OptionRow& row : option_table()) {
        if (row.group != OptionGroup::kFp8 || std::string(row.name) == "fp8-recipe") continue;
        for (const std::string& recipe : kRecipeNames)
            for (std::string value : samples().at(row.name).values) {
                if (std::string(row.name) == "fp8-format" && blockwise.count(recipe)) value = "hybrid";
                CAPTURE(std::string(row.name), recipe, value);
                Words words = {"--fp8-recipe", recipe};
                const bool layers = contains(row.name, "num-layers-at");
                if (layers && recipe != "none") words.push_back("--first-last-layers-bf16");
                if (std::string(row.name) == "fp8-min-speedup" && recipe != "none") value = gain_between(recipe);
                const Words with = joined(words, {"--" + std::string(row.name) + "=" + value});
                const bool exact = recipe == "int8-forward" && value == "none";   // its forward pass is exact anyway
                const auto by = refused_by.find(row.name);
                const bool any_recipe = std::string(row.name) == "fp8-attention";
                if ((recipe == "none" && !any_recipe) || exact
                    || (by != refused_by.end() && by->second.count(recipe))) {
                    CHECK(contains(fp8_refusal(with), "--" + std::string(row.name) + " has no effect: "));
                    CHECK(contains(fp8_refusal(with), "--fp8-recipe " + recipe));
                } else {
                    REQUIRE(fp8_refusal(with) == "");
                    CHECK(effect_of(fp8_config(with)) != effect_of(fp8_config(words)));
                    acted++;
                }
            }
    }
    CHECK(acted > 40);

    // Its default value is refused, too: the user expects an effect.
    CHECK(contains(fp8_refusal({"--fp8-recipe", "tensorwise", "--fp8-margin", "0"}), "tensorwise"));
    CHECK(contains(fp8_refusal({"--fp8-recipe=delayed", "--num-layers-at-end-in-bf16=1"}), "--first-last-layers-bf16"));
    // One of two options that each make the other ineffective.
    const Words recent = {"--fp8-recipe=delayed", "--fp8-amax-compute-algo=most_recent", "--fp8-amax-history-len=1"};
    CHECK(contains(fp8_refusal(recent), "--fp8-amax-history-len has no effect: --fp8-recipe delayed"));
    CHECK(fp8_refusal({"--fp8-format=e4m3", "--fp8-amax-compute-algo=max", "--fp8-amax-history-len=1"}) == "");
    CHECK(contains(fp8_refusal({"--fp8-format=hybrid", "--first-last-layers-bf16", "--num-layers-at-start-in-bf16=0",
                                "--num-layers-at-end-in-bf16=0"}), "keeps nothing in BF16"));
    CHECK(contains(fp8_refusal({"--fp8-format=hybrid", "--first-last-layers-bf16", "--num-layers-at-end-in-bf16=13"}),
                   "--num-layers-at-end-in-bf16 13 exceeds --num-layers 12"));
}

TEST_CASE("fp8 options: patterns of linears are a list in every spelling") {
    const Words all = {"31.down", "0.*", "*.proj"};
    auto patterns = [](const Words& words) {
        return fp8_config(joined({"--fp8-recipe=delayed"}, words)).bf16_linears;
    };
    CHECK(patterns({"--bf16-linears", "31.down,0.*,*.proj"}) == all);
    CHECK(patterns({"--bf16-linears", "31.down", "0.*,*.proj"}) == all);
    CHECK(patterns({"--bf16-linears=31.down", "--bf16-linears=0.*", "*.proj"}) == all);
    TempFile file("{\"fp8_recipe\": \"delayed\", \"bf16_linears\": [\"31.down\", \"0.*,*.proj\"]}");
    CHECK(parse("gpt2", {"--dry-run", "--config", file.path}).config.bf16_linears == all);
    for (const char* bad : {"", ",", "0.qkv,", ",0.qkv", "0.qkv,,1.qkv"})
        CHECK(contains(fp8_refusal({"--fp8-recipe=delayed", std::string("--bf16-linears=") + bad}), "--bf16-linears"));
    // A comma is the separator of this list only.
    CHECK(fp8_config({"--train-data", "a,b"}).train_data == Words{"a,b"});
}

TEST_CASE("fp8 options: the keys of the H200 guide in a file") {
    auto from_file = [](const std::string& text, const Words& words = {}) {
        TempFile file(text);
        return parse("gpt2", joined({"--dry-run", "--config", file.path}, words));
    };
    auto file_refusal = [](const std::string& text) {
        TempFile file(text);
        return fp8_refusal({"--config", file.path});
    };
    const ParsedConfig p = from_file(R"({"use_fp8": true, "fp8_format": "hybrid", "fp8_margin": 1, "fp8_interval": 10,
                                         "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"})");
    CHECK(p.config == fp8_config({"--fp8-recipe=delayed", "--fp8-margin=1", "--fp8-interval=10",
                                  "--fp8-amax-history-len=1024"}));
    REQUIRE(p.notes.size() == 1);
    CHECK(contains(p.notes[0], "use-fp8 is --fp8-recipe delayed"));

    CHECK(from_file("{\"use-fp8\": true}").config == fp8_config({"--fp8-recipe=delayed"}));
    CHECK(from_file("{\"use_fp8\": false}").config == fp8_config({}));
    // The command line wins.
    CHECK(from_file("{\"use_fp8\": true}", {"--fp8-recipe=none"}).config == fp8_config({}));

    CHECK(contains(file_refusal("{\"use_fp8\": false, \"fp8_margin\": 0}"), "fp8-margin has no effect: FP8 is off"));
    CHECK(contains(file_refusal("{\"use_fp8\": true, \"fp8_format\": \"e5m2\"}"), "fp8-format e5m2: no training"));
    CHECK(contains(file_refusal("{\"use_fp8\": true, \"fp8_recipe\": \"none\"}"), "leave one of the two out"));
    CHECK(contains(file_refusal("{\"use_fp8\": 1}"), "must be true or false"));
}

TEST_CASE("environment: every variable of other trainers is listed with its effect here") {
    const Words none = environment_lines({"PATH=/bin", "HOME=h", "CUDA_VISIBLE_DEVICES=0", "NCCLX=1"}, 8, true);
    CHECK(none.empty());
    const Words variables = {"NVTE_FP8_ALLREDUCE=1", "NCCL_DEBUG=IN=FO", "CUDA_DEVICE_MAX_CONNECTIONS=1",
                             "NVTE_FP8_DPA_BWD=1", "NVTE_DEBUG=", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1\nx",
                             "LLMFP8_HOST=node3"};
    const Words lines = environment_lines(variables, 8, true);
    REQUIRE(lines.size() == variables.size());
    CHECK(contains(lines[0], "CUDA_DEVICE_MAX_CONNECTIONS=1 used by CUDA, WARNING"));
    CHECK(contains(lines[1], "LLMFP8_HOST=node3 used"));
    CHECK(contains(lines[2], "NCCL_DEBUG=IN=FO passed to NCCL"));
    CHECK(contains(lines[3], "NVTE_DEBUG= unused: it is Transformer Engine's"));
    CHECK(contains(lines[4], "NVTE_FP8_ALLREDUCE=1 unused: no version of Transformer Engine knows it"));
    CHECK(contains(lines[5], "FP32_SCALES=1?x unused"));
    CHECK(contains(lines[6], "NVTE_FP8_DPA_BWD=1 unused: it is for FP8 attention"));

    CHECK(contains(environment_lines({"NCCL_DEBUG=INFO"}, 1, true)[0], "unused: one rank"));
    CHECK(contains(environment_lines({"NCCL_DEBUG=INFO"}, 8, false)[0], "unused: no GPU"));
    CHECK(!contains(environment_lines({"CUDA_DEVICE_MAX_CONNECTIONS=8"}, 1, true)[0], "WARNING"));
    CHECK(contains(environment_lines({"CUDA_DEVICE_MAX_CONNECTIONS=1"}, 1, false)[0], "unused: no GPU"));
    CHECK(environment_lines({"OMP_NUM_THREADS=4"}, 1, false).empty());
    CHECK(environment_lines({"OMP_NUM_THREADS=junk"}, 1, false)[0]
          == "environment: OMP_NUM_THREADS=junk unused: it is not a positive number, so OpenMP uses all cores");
    for (const VariableEffect& e : environment_effects(variables, 8, true))   // for doctor
        CHECK(e.warn == (contains(e.name, "NVTE_") || e.name == "CUDA_DEVICE_MAX_CONNECTIONS"));
    CHECK(!environment_effects({"CUDA_DEVICE_MAX_CONNECTIONS=8"}, 2, true)[0].warn);

    CHECK(refusal_of([] { environment_lines({"NVTE_X=1", "LLMFP8_HOSTS=a"}, 1, true); })
          == "unknown environment variable LLMFP8_HOSTS: did you mean LLMFP8_HOST?");
}

TEST_CASE("environment: of this process") {
    setenv("LLMFP8_HOST", "node3", 1);
    CHECK(host_name() == "node3");
    const Words lines = environment_lines(own_environment(), 1, true);
    auto ours = [](const std::string& line) { return contains(line, "LLMFP8_HOST=node3 used"); };
    CHECK(std::count_if(lines.begin(), lines.end(), ours) == 1);
    unsetenv("LLMFP8_HOST");
    setenv("LLMFP8_", "1", 1);
    CHECK_THROWS_AS(environment_lines(own_environment(), 1, true), Error);
    unsetenv("LLMFP8_");
}
