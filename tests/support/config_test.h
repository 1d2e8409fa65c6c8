// Helpers for tests of options: parsing of command lines, errors, and values of every option other than its default.
#pragma once
#include "tests/support/doctest.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/config/config_table.h"

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

inline ParsedConfig parse(const std::string& family, const Words& words, const Machine& machine = {}) {
    std::vector<const char*> argv = {"train"};
    for (const std::string& word : words) argv.push_back(word.c_str());
    return parse_config(static_cast<int>(argv.size()), argv.data(), family, machine);
}

// Returns the error message of these options (exit 2), or "" if they are valid.
inline std::string refusal(const std::string& family, const Words& words, const Machine& machine = {}) {
    return refusal_of([&] { parse(family, words, machine); });
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

inline Words joined(Words a, const Words& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

// A file of the test, removed with it.
struct TempFile {
    std::string path;
    explicit TempFile(const std::string& text) {
        static int count = 0;
        path = (fs::temp_directory_path() / strf("llmc_config_%d_%d.json", getpid(), count++)).string();
        std::ofstream(path) << text;
    }
    ~TempFile() { fs::remove(path); }
};

// For every option: values other than its default, and the options (option, value, ...) without which it has no effect.
struct Sample {
    Words values;
    Words beside;
};

inline const std::map<std::string, Sample>& samples() {
    static const Words rope = {"--position-embedding-type", "rope"};
    static const Words scaled = joined(rope, {"--rope-scaling-factor", "8"});
    static const Words mixtral = joined(rope, {"--normalization", "RMSNorm", "--activation", "swiglu", "--linear-bias",
                                               "none"});
    static const Words mixture = joined(mixtral, {"--num-experts", "4"});
    static const Words shared = joined(mixture, {"--moe-shared-experts", "1"});
    static const Words valid = {"--valid-data", "v"};
    static const Words sampled = {"--sample-every", "10"};
    static const Words save = {"--save", "out"};
    static const Words fp8 = {"--fp8-recipe", "delayed"};
    static const Words some_bf16 = joined(fp8, {"--first-last-layers-bf16", "true"});
    static const std::map<std::string, Sample> table = {
        {"model", {{"gpt2-tiny", "gpt2-350M"}, {}}},          {"num-layers", {{"1", "7"}, {}}},
        {"hidden-size", {{"384", "1536"}, {}}},               {"activation", {{"swiglu", "relu2"}, {}}},
        {"ffn-hidden-size", {{"8", "1000"}, {}}},             {"num-attention-heads", {{"6", "24"}, {}}},
        {"num-query-groups", {{"1", "4"}, {}}},               {"kv-channels", {{"128", "8"}, {}}},
        {"vocab-size", {{"2", "50304"}, {}}},                 {"seq-length", {{"1", "511"}, {}}},
        {"max-position-embeddings", {{"2048", "1100"}, {}}},  {"normalization", {{"RMSNorm"}, {}}},
        {"norm-epsilon", {{"1e-6", "0.000123456789012345"}, {}}},
        {"position-embedding-type", {{"rope"}, {}}},          {"rotary-base", {{"500000", "12345.678"}, rope}},
        {"rope-scaling-factor", {{"8", "32.5"}, rope}},
        {"rope-scaling-type", {{"yarn"}, scaled}},
        {"qk-layernorm", {{"true"}, {}}},                     {"linear-bias", {{"none", "qkv"}, {}}},
        {"untie-embeddings-and-output-weights", {{"true"}, {}}},
        {"sliding-window", {{"1", "100", "128,128,0"}, {}}},  {"attention-sinks", {{"true"}, {}}},
        {"init-method-std", {{"0.01", "0.006"}, {}}},         {"micro-batch-size", {{"1", "3"}, {}}},
        {"global-batch-size", {{"32", "1024"}, {}}},
        {"rampup-batch-size", {{"8 8 1000", "16 24 1"}, {"--global-batch-size", "64"}}},
        {"train-iters", {{"77", "1"}, {}}},                   {"epochs", {{"1", "0.3"}, {}}},
        {"train-data", {{"a/*.bin", "b"}, {}}},               {"valid-data", {{"v/*.bin", "w"}, {}}},
        {"token-dtype", {{"uint16", "uint32"}, {}}},          {"reset-attention-mask", {{"true"}, {}}},
        {"reset-position-ids", {{"true"}, {}}},               {"align-documents", {{"on", "off"}, {}}},
        {"eval-interval", {{"0", "33"}, valid}},
        {"eval-bf16", {{"on", "off"}, joined(valid, fp8)}},
        {"eval-iters", {{"1", "1000"}, valid}},               {"lr", {{"1e-3", "0.1"}, {}}},
        {"min-lr", {{"0", "1.7e-5"}, {}}}, {"lr-decay-style", {{"constant", "wsd", "linear"}, {}}},
        {"lr-warmup-iters", {{"3", "70"}, {}}}, {"lr-wsd-decay-iters", {{"5", "20"}, {"--lr-decay-style", "wsd"}}},
        {"weight-decay", {{"0", "0.01"}, {}}},                {"adam-beta1", {{"0", "0.85"}, {}}},
        {"adam-beta2", {{"0.999", "0.98"}, {}}},              {"adam-eps", {{"1e-5", "3e-9"}, {}}},
        {"clip-grad", {{"0", "0.5"}, {}}},                    {"stop-on-divergence", {{"2", "1.25"}, {}}},
        {"qk-clip", {{"100", "0.5"}, {}}},
        {"num-experts", {{"4"}, mixtral}},
        {"moe-router-topk", {{"1", "3"}, mixture}},
        {"moe-aux-loss-coeff", {{"0.001"}, mixture}},
        {"moe-z-loss-coeff", {{"0.001"}, mixture}},
        {"moe-shared-experts", {{"1", "2"}, mixture}},
        {"moe-router-bias-update-rate", {{"0", "0.01"}, shared}},
        {"moe-capacity",
         {{"1", "1.25"}, joined(mixture, {"--expert-parallel", "2", "--ranks", "2", "--dry-run", "true"})}},
        {"skip-grad-norm", {{"5", "1.5"}, {}}},               {"z-loss", {{"1e-4", "0.5"}, {}}},
        {"ema", {{"0.999", "0.5"}, {}}}, {"optimizer", {{"muon"}, {}}},
        {"muon-scale", {{"spectral"}, {"--optimizer", "muon"}}},
        {"muon-momentum", {{"0", "0.9"}, {"--optimizer", "muon"}}},
        {"muon-beta2", {{"0.95", "0.5"}, {"--optimizer", "muon"}}}, {"lr-scale", {{"vector=0.5", "embedding=2"}, {}}},
        {"mup-base-width", {{"256", "64"}, {"--untie-embeddings-and-output-weights", "true"}}},
        {"dtype", {{"fp32"}, {}}},                            {"grad-dtype", {{"bf16"}, {}}},
        {"moment-dtype", {{"bf16", "fp8"}, {}}}, {"recompute", {{"norm-act", "block-keep-attention"}, {}}},
        {"offload", {{"masters", "activations"}, {}}},
        {"offload-fraction", {{"0.5", "0.125"}, {"--offload", "masters"}}}, {"gemm-search", {{"off"}, {}}},
        {"loss-chunk", {{"1", "4096"}, {}}}, {"seed", {{"0", "9223372036854775807"}, {}}},
        {"fp8-recipe", {{"delayed", "tensorwise", "blockwise", "int8-forward"}, {}}},
        {"fp8-format", {{"e4m3"}, fp8}},                      {"fp8-margin", {{"1", "4"}, fp8}},
        {"fp8-interval", {{"2", "10"}, fp8}},                 {"fp8-amax-history-len", {{"1", "1024"}, fp8}},
        {"fp8-amax-compute-algo", {{"most_recent"}, fp8}},    {"fp8-fast-accum", {{"all", "none"}, fp8}},
        {"first-last-layers-bf16", {{"true"}, fp8}}, {"num-layers-at-start-in-bf16", {{"0", "3"}, some_bf16}},
        {"num-layers-at-end-in-bf16", {{"2", "0"}, some_bf16}},
        {"bf16-linears", {{"3.down", "0.*"}, fp8}},           {"fp8-lm-head", {{"true"}, fp8}},
        {"fp8-attention", {{"true"}, {}}},
        {"fp8-min-speedup", {{"1", "0.95"}, fp8}},               {"fp8-stats-interval", {{"0", "10"}, fp8}},
        {"fp8-first-bf16", {{"7", "0.25"}, fp8}},             {"fp8-final-bf16", {{"1", "0.125"}, fp8}},
        {"ranks", {{"4", "1"}, {"--dry-run", "true"}}},       {"synthetic-data", {{"true"}, {}}},
        {"expert-parallel", {{"2", "4"}, joined(mixture, {"--ranks", "4", "--dry-run", "true"})}},
        {"context-parallel", {{"2", "4"}, {"--ranks", "4", "--dry-run", "true"}}},
        {"zero", {{"0", "2", "3"}, {}}},                      {"bucket-mb", {{"25", "0.5"}, {}}},
        {"zero-group", {{"2", "8"}, {}}},
        {"overlap", {{"off"}, {}}},                           {"grad-comm-dtype", {{"bf16", "fp8"}, {}}},
        {"grad-shard-dtype", {{"bf16"}, {"--zero", "2"}}},
        {"save", {{"out", "ckpt dir"}, {}}},
        {"save-interval", {{"0", "20"}, save}},               {"keep", {{"1", "5"}, save}},
        {"save-async", {{"true"}, save}},
        {"load", {{"hf", "other"}, {}}},                      {"resume", {{"auto", "out/step-1"}, save}},
        {"tokenizer", {{"tok.json"}, save}},                  {"log-interval", {{"10", "99"}, {}}},
        {"log-file", {{"x.jsonl", "y/z"}, {}}},               {"sample-every", {{"10", "500"}, {}}},
        {"gpu", {{"H200"}, {"--dry-run", "true"}}},           {"json", {{"true"}, {"--dry-run", "true"}}},
        {"sample-tokens", {{"1", "100"}, sampled}},           {"prompt", {{"1 2 3", "a text"}, sampled}},
        {"temperature", {{"0", "1.5"}, sampled}},             {"top-k", {{"1", "50"}, sampled}},
        {"hellaswag-data", {{"h.bin", "i"}, {}}},             {"dry-run", {{"true"}, {}}},
        {"profile", {{"1:1", "3:50"}, {}}},                   {"exit-duration-in-mins", {{"90", "0.5"}, {}}},
        {"comm-timeout", {{"0", "7.5"}, {}}},
    };
    return table;
}

// Later words win over those that came before.
inline Words last_words(const std::vector<Words>& parts) {
    Words all;
    for (const Words& part : parts)
        for (size_t i = 0; i < part.size(); i += 1) {
            auto same = std::find(all.begin(), all.end(), part[i]);
            if (part[i].rfind("--", 0) == 0 && same != all.end()) {
                *(same + 1) = part[++i];
            } else {
                all.push_back(part[i]);
            }
        }
    return all;
}

// Options that every run needs in addition to the one under test.
inline Words base(const std::string& option) {
    Words words;
    if (option != "train-data" && option != "synthetic-data") words = {"--train-data", "t"};
    if (option != "train-iters" && option != "epochs") words = joined(words, {"--train-iters", "100"});
    return words;
}

// Options without which the one under test has no effect, as --option=value.
inline Words beside(const std::string& name) {
    const Words& pairs = samples().at(name).beside;
    Words words;
    for (size_t i = 0; i + 1 < pairs.size(); i += 2) words.push_back(pairs[i] + "=" + pairs[i + 1]);
    return words;
}

// The option under test, what it needs, and what every run needs.
inline Words run_with(const std::string& name, const std::string& value) {
    return joined(joined(base(name), beside(name)), {"--" + name + "=" + value});
}
