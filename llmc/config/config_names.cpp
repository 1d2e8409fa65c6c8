// Flags of Megatron-LM and others that stand for a value of an option.
#include "llmc/config/config_table.h"

const std::vector<Spelling>& spellings() {
    static const std::vector<Spelling> all = {
        {"use-distributed-optimizer", "zero", "1", "0"},
        {"overlap-grad-reduce", "overlap", "on", "off"},
        {"overlap-param-gather", "overlap", "on", "off"},
        {"swiglu", "activation", "swiglu", "gelu"},
        {"squared-relu", "activation", "relu2", "gelu"},
        {"disable-bias-linear", "linear-bias", "none", "all"},
        {"fp8-param-gather", nullptr, "weights of FP8 linear layers are always all-gathered as FP8 bytes", nullptr},
        {"use-fp8", "fp8-recipe", "delayed", "none"},   // of guides that add Transformer Engine to a GPT-2 script
    };
    return all;
}

const Spelling* find_spelling(const std::string& name) {
    for (const Spelling& spelling : spellings())
        if (name == spelling.name) return &spelling;
    return nullptr;
}
