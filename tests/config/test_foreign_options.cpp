// Options and files of other trainers: the errors of the executables.
#include "tests/support/config_test.h"

#include <fnmatch.h>

#include <algorithm>
#include <set>
#include <sstream>

namespace {

Words words_of(const std::string& text) {
    std::istringstream all(text);
    Words words;
    for (std::string word; all >> word;) words.push_back(word);
    return words;
}

bool has(const Words& words, const std::string& word) {
    return std::find(words.begin(), words.end(), word) != words.end();
}

}  // namespace

TEST_CASE("config: the error of another trainer's option says what to write here") {
    const std::vector<ForeignRow>& rows = foreign_rows();
    std::set<std::string> answered;   // trainers
    for (const ForeignRow& row : rows) {
        const Words values = row.values.empty() ? Words{"1"} : words_of(row.values);
        for (const std::string& pattern : words_of(row.names)) {
            std::string name = pattern;
            const size_t star = name.find('*');
            if (star != std::string::npos) name.replace(star, 1, "anything-else");
            // A star alone and our own names are for the importer, which reads the same rows.
            const bool llmc = std::any_of(option_table().begin(), option_table().end(), [&](const OptionRow& row) {
                return row.llmc && pattern == row.llmc;
            });
            if (llmc || pattern == "-h" || pattern == "*" || find_option(name) || find_spelling(name)
                || name == "config")
                continue;
            const std::string option = (name[0] == '-' ? "" : "--") + name;
            for (const std::string& value : values) {
                CAPTURE(option, value);
                // Of several rows that match an option in full, or with a star, the first one for the value is used.
                const auto first = std::find_if(rows.begin(), rows.end(), [&](const ForeignRow& other) {
                    const Words names = words_of(other.names);
                    const bool named = std::any_of(names.begin(), names.end(), [&](const std::string& word) {
                        const bool same_way = (word.find('*') == std::string::npos) == (star == std::string::npos);
                        return same_way && word != "*" && fnmatch(word.c_str(), name.c_str(), 0) == 0;
                    });
                    return named && (other.values.empty() || has(words_of(other.values), value));
                });
                std::string text = first->text;
                if (text.find("{file}") != std::string::npos) text.replace(text.find("{file}"), 6, value);
                CHECK_EQ(refusal("gpt2", {option + "=" + value}),
                         "unknown option " + option + " (" + first->trainer + "): " + text);
                CHECK_EQ(text.find('\n'), std::string::npos);
                answered.insert(first->trainer);
            }
        }
        // The options that the errors recommend exist.
        const std::string& text = row.text;
        for (size_t at = text.find("--"); at != std::string::npos; at = text.find("--", at + 2)) {
            const std::string name = text.substr(at + 2, text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-",
                                                                                at + 2) - at - 2);
            CAPTURE(name);
            CHECK((find_option(name) || has({"config", "out", "to", "follow", "hostfile", "valid-fraction"}, name)));
        }
    }
    for (const char* trainer : {"llm.c", "Megatron-LM", "transformers", "accelerate", "DeepSpeed", "torchrun",
                                "mpirun, torchrun", "torchtitan", "nanoGPT", "other trainers"})
        CHECK_MESSAGE(answered.count(trainer) == 1, trainer);
    auto said = [](const Words& words) { return refusal("llama", words); };
    CHECK_EQ(said({"--deepspeed", "ds.json"}), "unknown option --deepspeed (DeepSpeed): scripts/import_config ds.json "
             "--out run.json converts it to a file for --config");
    CHECK_EQ(said({"--deepspeed_config=a.json"}), "unknown option --deepspeed_config (DeepSpeed): "
             "scripts/import_config a.json --out run.json converts it to a file for --config");
    CHECK(contains(said({"--deepspeed", "--bf16"}), "scripts/import_config FILE"));
    // A typing error is nearer than a name with the same beginning; without either no name is suggested.
    CHECK(contains(said({"--log-fil", "x"}), "did you mean --log-file?"));
    CHECK(contains(said({"--wandb-mode", "x"}), "scripts/export_log"));
    // The case of values does not matter; the error of a value without a row says what the other values become.
    CHECK(contains(said({"--bf16", "True"}), "--bf16 (other trainers): use --dtype bf16"));
    CHECK(contains(said({"--bf16", "False"}), "--bf16 (other trainers): leave it out: one of them off says nothing"));
    CHECK(contains(said({"--grad-reduce-in-bf16", "false"}), "(Megatron-LM): for true: use --grad-dtype bf16"));
    // Our own names with only one dash.
    CHECK(contains(said({"-num_layers", "3"}), "did you mean --num-layers?"));
    for (const char* far : {"--frobnicate", "-B", "--hidden-activation-function"})
        CHECK_EQ(said({far, "1"}), std::string("unknown option ") + far + ": --help-all lists all; "
                 "scripts/import_config translates scripts and files of other trainers");
    // Our options with another trainer's spelling of a value.
    for (const char* option : {"--fp8-format=hybrid", "--micro-batch-size=1", "--use-distributed-optimizer"})
        CHECK_EQ(said({option, "--dry-run"}), "");
}

TEST_CASE("config: the error of another trainer's file names the script that translates it") {
    auto said = [](const std::string& text) {
        TempFile file(text);
        const std::string error = refusal("llama", {"--config", file.path});
        const size_t at = error.find("scripts/import_config " + file.path);
        CHECK_EQ(error.find('\n'), std::string::npos);
        return at == std::string::npos ? error : error.substr(0, at);
    };
    CHECK(contains(said("{\"zero_optimization\": {\"stage\": 1}}"), "option \"zero_optimization\": --help-all"));
    CHECK(contains(said("{\"fp8\": {\"enabled\": true}}"), "unknown option \"fp8\": --help-all"));
    CHECK(contains(said("{\"finetuning_type\": \"full\"}"), "unknown option \"finetuning_type\""));
    CHECK(contains(said("{\"bf16\": true}"), "unknown option \"bf16\" (other trainers): use --dtype bf16"));
    CHECK(contains(said("{\"frobnicate\": 1}"), "--help-all lists all"));
    CHECK(contains(said("{\"lr\": 1e-3, \"gradient_accumulation_steps\": 4}"),
                   "(other trainers): use --global-batch-size, which is --micro-batch-size x ranks x this"));
    TempFile yaml("use_fp8: true\n");
    const std::string path = yaml.path.substr(0, yaml.path.size() - 5) + ".yaml";
    fs::rename(yaml.path, path);
    CHECK(contains(refusal("llama", {"--config", path}), "; scripts/import_config makes JSON of"));
    fs::remove(path);
    CHECK_EQ(refusal("llama", {"--config", "/"}), "cannot read /: a folder, not a file");
}
