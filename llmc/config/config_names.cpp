// Other names of options: former names, and Megatron-LM flags.
#include "llmc/config/config_table.h"

const std::vector<RenamedOption>& renamed_options() {
    static const std::vector<RenamedOption> all = {
        {"fp8-min-gain", "fp8-min-speedup"},
        {"fp8-health-interval", "fp8-stats-interval"},
    };
    return all;
}

const char* current_name(const std::string& old_name) {
    for (const RenamedOption& renamed : renamed_options())
        if (old_name == renamed.old_name) return renamed.name;
    return nullptr;
}

const std::vector<Spelling>& spellings() {
    static const std::vector<Spelling> all = {
        {"use-distributed-optimizer", "zero", "1", "0"},
        {"overlap-grad-reduce", "overlap", "on", "off"},
        {"overlap-param-gather", "overlap", "on", "off"},
        {"fp8-param-gather", "param-comm-dtype", "fp8", "bf16"},
        {"swiglu", "activation", "swiglu", "gelu"},
        {"squared-relu", "activation", "relu2", "gelu"},
        {"disable-bias-linear", "linear-bias", "none", "all"},
    };
    return all;
}

const Spelling* find_spelling(const std::string& name) {
    for (const Spelling& spelling : spellings())
        if (name == spelling.name) return &spelling;
    return nullptr;
}

Json with_current_names(Json saved) {
    for (const RenamedOption& renamed : renamed_options())
        if (const auto found = saved.find(renamed.old_name); found != saved.end()) {
            saved[renamed.name] = *found;
            saved.erase(renamed.old_name);
        }
    for (const Spelling& spelling : spellings()) {
        const auto flag = saved.find(spelling.name);
        if (flag == saved.end() || !flag->is_boolean() || saved.contains(spelling.option)) continue;
        saved[spelling.option] = flag->get<bool>() ? spelling.when_true : spelling.when_false;
        saved.erase(spelling.name);
    }
    return saved;
}
