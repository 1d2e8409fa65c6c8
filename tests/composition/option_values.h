// What the composed runs draw for each option. Of a flag or a choice all words are drawn; a number or text has its
// values here, and an option without any is not drawn, for the reason that stands beside it.
#pragma once
#include <map>
#include <string>

#include "tests/support/config_test.h"

namespace composition {

// Numbers that suit a model of two layers of width 32. {} is the folder of the data, and a list is separated by spaces.
inline const std::map<std::string, Words>& option_values() {
    static const std::map<std::string, Words> table = {
        {"num-layers", {"1", "3", "5"}}, {"hidden-size", {"16", "48"}}, {"ffn-hidden-size", {"32", "80"}},
        {"num-attention-heads", {"2", "8"}}, {"num-query-groups", {"1", "2", "4"}}, {"kv-channels", {"16", "64"}},
        {"vocab-size", {"100", "131"}}, {"seq-length", {"8", "24"}}, {"max-position-embeddings", {"40"}},
        {"norm-epsilon", {"1e-6"}}, {"rotary-base", {"500"}}, {"rope-scaling-factor", {"8"}},
        {"sliding-window", {"1", "5", "3,0"}}, {"init-method-std", {"0.1"}},
        {"micro-batch-size", {"2", "3", "6"}}, {"global-batch-size", {"6", "24"}},
        {"rampup-batch-size", {"4 4 16", "6 6 12"}},
        {"train-data", {"{}/masked.bin", "0.7 {}/masked.bin 0.3 {}/whole.bin"}},
        {"valid-data", {"{}/valid.bin"}}, {"eval-interval", {"0", "1", "2"}}, {"eval-iters", {"1", "3"}},
        {"hellaswag-data", {"{}/hellaswag.bin"}},
        {"lr", {"1e-3", "1e-4"}}, {"min-lr", {"0"}}, {"lr-warmup-iters", {"1", "3"}}, {"lr-wsd-decay-iters", {"1"}},
        {"weight-decay", {"0", "0.3"}}, {"adam-beta1", {"0", "0.8"}}, {"adam-beta2", {"0.999"}},
        {"adam-eps", {"1e-5"}}, {"muon-momentum", {"0", "0.8"}}, {"muon-beta2", {"0.9", "0.95"}},
        {"clip-grad", {"0", "0.1"}},
        {"stop-on-divergence", {"9"}}, {"skip-grad-norm", {"1.01"}}, {"qk-clip", {"0.01", "30"}},
        {"num-experts", {"3", "4"}}, {"moe-router-topk", {"1", "3"}}, {"moe-aux-loss-coeff", {"0", "0.5"}},
        {"moe-z-loss-coeff", {"0.1"}}, {"moe-shared-experts", {"1"}}, {"moe-router-bias-update-rate", {"0", "0.02"}},
        {"moe-capacity", {"2"}}, {"expert-parallel", {"2"}}, {"z-loss", {"0.01"}}, {"ema", {"0.2", "0.9"}},
        {"lr-scale", {"embedding=0.5", "matrix=2,vector=0.3"}}, {"mup-base-width", {"16", "100"}},
        {"offload", {"moments", "masters", "moments,masters", "activations"}}, {"offload-fraction", {"0.5"}},
        {"loss-chunk", {"5", "16"}}, {"seed", {"7"}},
        {"fp8-margin", {"1"}}, {"fp8-interval", {"2"}}, {"fp8-amax-history-len", {"1", "2"}},
        {"num-layers-at-start-in-bf16", {"0"}}, {"num-layers-at-end-in-bf16", {"0"}},
        {"bf16-linears", {"*.down", "0.*"}}, {"fp8-min-speedup", {"1"}}, {"fp8-stats-interval", {"0", "1", "2"}},
        {"fp8-first-bf16", {"1", "0.3", "2"}}, {"fp8-final-bf16", {"1", "0.3", "2"}},
        {"context-parallel", {"2", "4"}}, {"zero-group", {"2"}}, {"bucket-mb", {"1e-6", "0.03"}},
        {"zero", {"0", "2", "3", "3"}}, {"comm-timeout", {"0"}}, {"keep", {"3"}}, {"log-interval", {"2"}},
        {"sample-every", {"1", "2"}}, {"sample-tokens", {"1", "3"}}, {"prompt", {"1 2 3"}}, {"temperature", {"0", "2"}},
        {"top-k", {"3"}}, {"exit-duration-in-mins", {"90"}},

        // Each run has its own: its length, its folder, the checkpoint that it continues.
        {"model", {}}, {"train-iters", {}}, {"epochs", {}}, {"ranks", {}}, {"save", {}}, {"save-interval", {}},
        {"resume", {}}, {"log-file", {}},
        // There is no training, or no device that does it.
        {"dry-run", {}}, {"json", {}}, {"gpu", {}}, {"profile", {}},
        // They take the place of other data: of files without a header, of all shards, of the initial weights.
        {"token-dtype", {}}, {"synthetic-data", {}}, {"load", {}}, {"tokenizer", {}},
    };
    return table;
}

inline Words values_of(const OptionRow& row) {
    if (const auto found = option_values().find(row.name); found != option_values().end()) return found->second;
    return row.value.flag ? Words{"true", "false"} : row.value.words;
}

}  // namespace composition
