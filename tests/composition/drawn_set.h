// A set of options drawn from the option table: one run, which a second one may continue from its checkpoint.
#pragma once
#include <algorithm>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "llmc/base/rng.h"
#include "llmc/base/text.h"
#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/checkpoint/load.h"
#include "llmc/config/prompt.h"
#include "llmc/perf/fp8_speedup.h"
#include "tests/composition/option_values.h"

namespace composition {

constexpr int kSteps = 3;

struct Setting {
    const OptionRow* row;
    std::string value;
    bool operator==(const Setting&) const = default;
};
inline bool is(const Setting& setting, const std::string& option) { return setting.row->name == option; }

// One process of a run, of a number of ranks.
struct Part {
    int ranks = 1;
    std::vector<Setting> settings = {};
    bool defers_compute = false;   // the compute stream is the late one, instead of the side streams

    // Only the settings that may change at least so much.
    Part at_least(MayChange changes) const {
        Part part{.ranks = ranks};
        for (const Setting& setting : settings)
            if (setting.row->may_change() >= changes) part.settings.push_back(setting);
        return part;
    }
};

// The words of a run on the shards in the folder `data`. Settings come last, so they win.
inline Words words_of(const std::string& family, const Part& part, const std::string& data) {
    Words words = {"--model", family + "-tiny", "--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "48",
                   "--num-attention-heads", "4", "--kv-channels", "8", "--vocab-size", "61",
                   "--max-position-embeddings", "24", "--seq-length", "16", "--micro-batch-size", "1",
                   "--global-batch-size", "12", "--train-iters", std::to_string(kSteps), "--save", "out"};
    const auto is_data = [](const Setting& setting) { return is(setting, "train-data"); };
    if (std::none_of(part.settings.begin(), part.settings.end(), is_data))
        words = joined(words, {"--train-data", data + "/masked.bin", data + "/whole.bin"});
    for (const Setting& setting : part.settings) {
        std::string value = setting.value;
        for (size_t at; (at = value.find("{}")) != std::string::npos;) value.replace(at, 2, data);
        if (setting.row->value.list) {
            words.push_back("--" + std::string(setting.row->name));
            std::istringstream elements(value);
            for (std::string element; elements >> element;) words.push_back(element);
        } else {
            words.push_back("--" + std::string(setting.row->name) + "=" + value);
        }
    }
    return words;
}

// The options of a run. Exit 2 if they are not legal.
inline ParsedConfig parsed(const std::string& family, const Part& part, const std::string& data) {
    return parse(family, words_of(family, part, data),
                 {.gpu = false, .ranks = part.ranks, .read_shape = model_config_from_hf, .read_saved = saved_options});
}

inline bool is_legal(const std::string& family, const Part& part, const std::string& data) {
    try {
        const Config config = parsed(family, part, data).config;
        fp8_plan_of(config, expert_part(make_param_table(config), config.expert_parallel, 0));
        const bool bytes = is_bytes("", config.shape.vocab_size);
        if (config.sample_every > 0) read_prompt(config, bytes, config.seq_length, "--seq-length");
        return true;
    } catch (const Error&) {
        return false;
    }
}

// Whether all that is added is added in FP32, so that another order of additions shows in the last digits alone.
inline bool is_fp32(const Config& config) {
    return config.dtype == Dtype::kFp32 && config.moment_dtype == Dtype::kFp32
           && config.grad_comm_dtype == Dtype::kFp32 && config.grad_shard_dtype == Dtype::kFp32;
}

struct DrawnSet {
    std::string family;         // "gpt2" or "llama"
    std::vector<Part> parts;    // one, or two if the run is resumed
    int resume_at = 0;          // the step after which the second part begins

    // The options as on a command line.
    std::string text() const {
        std::string text = "train_" + family;
        for (const Part& part : parts) {
            if (&part != &parts[0]) text += strf("\n  resumed at step %d", resume_at);
            text += " on " + count_text(part.ranks, "rank")
                    + (part.defers_compute ? ", compute stream late:" : ", side streams late:");
            for (const Setting& setting : part.settings)
                text += strf(" --%s=%s", setting.row->name, setting.value.c_str());
        }
        return text;
    }
};

class Draw {
public:
    Draw(uint64_t seed, uint64_t number, const std::string& data)
        : data_(data), random_(rng_key(seed, std::to_string(number))) {}

    DrawnSet set() {
        set_.family = chance(0.5) ? "gpt2" : "llama";
        plain_ = parsed(set_.family, {}, data_).config;
        Part part{.ranks = ranks(), .defers_compute = chance(0.5)};
        share_ = std::vector{0.1, 0.3, 0.6}[static_cast<size_t>(below(3))];
        fp32_ = chance(0.5);
        add(part, fp32_ ? "dtype" : "fp8-recipe");
        add_some(part, MayChange::kNumerics);
        set_.parts = {part};
        if (chance(0.6)) resume();
        return set_;
    }

private:
    bool chance(double share) { return static_cast<double>(random_() >> 11) * 0x1p-53 < share; }
    int ranks() { return std::vector{1, 2, 2, 3, 4, 4}[static_cast<size_t>(below(6))]; }
    int below(size_t n) { return static_cast<int>(random_() % n); }

    // Adds a value of the option other than its default, if that is legal.
    void add(Part& part, const OptionRow& row) {
        for (const Setting& setting : part.settings)
            if (setting.row == &row) return;
        Words values = values_of(row);
        const Json usual = row.value.get(plain_);
        std::erase_if(values, [&](const std::string& value) { return row.value.parse(value) == usual; });
        if (values.empty()) return;
        const std::vector<Setting> before = part.settings;
        const std::string value = values[static_cast<size_t>(below(values.size()))];
        if (value == "int8-forward")   // in-features are multiples of 64
            for (const auto& [name, size] : {std::pair("hidden-size", "64"), {"kv-channels", "16"},
                                             {"ffn-hidden-size", "64"}, {"num-attention-heads", "4"}})
                part.settings.push_back({find_option(name), size});
        if (value == "clamped_swiglu" && set_.family == "llama")   // gpt-oss
            for (const auto& [name, also] : {std::pair("num-experts", "4"), {"attention-sinks", "true"},
                                             {"linear-bias", "all"}})
                part.settings.push_back({find_option(name), also});
        part.settings.push_back({&row, value});
        if (!is_legal(set_.family, part, data_) || (fp32_ && !is_fp32(parsed(set_.family, part, data_).config)))
            part.settings = before;
    }
    void add(Part& part, const char* name) { add(part, *find_option(name)); }

    // Adds options that change no more than `most`, more of those that meet in the most ways. All get a second chance,
    // since some have an effect only beside others.
    void add_some(Part& part, MayChange most) {
        std::vector<const OptionRow*> rows;
        for (const OptionRow& row : option_table()) {
            const bool often = row.group == OptionGroup::kRanks || row.group == OptionGroup::kFp8;
            if (row.may_change() <= most && chance(often ? 0.45 : share_)) rows.push_back(&row);
        }
        std::shuffle(rows.begin(), rows.end(), random_);
        for (int round = 0; round < 2; round++)
            for (const OptionRow* row : rows) add(part, *row);
    }

    // What changes numerics stays. What changes rounding stays, or is drawn anew together with the number of ranks.
    void resume() {
        Part& first = set_.parts[0];
        const bool moves = chance(0.5);
        Part part = first.at_least(moves ? MayChange::kNumerics : MayChange::kRounding);
        if (moves) part.ranks = ranks();
        part.defers_compute = chance(0.5);
        if (!is_legal(set_.family, part, data_)) return;
        add_some(part, moves ? MayChange::kRounding : MayChange::kNothing);
        set_.parts.push_back(part);
        set_.resume_at = 1 + below(kSteps - 1);
    }

    const std::string data_;
    std::mt19937_64 random_;
    bool fp32_ = false;  // rounding can be told from faults; most other runs have FP8
    double share_ = 0;   // of the options
    Config plain_;       // without any
    DrawnSet set_;
};

inline DrawnSet draw_set(uint64_t seed, uint64_t number, const std::string& data) {
    return Draw(seed, number, data).set();
}

// The sets that are by one step smaller.
inline std::vector<DrawnSet> smaller(const DrawnSet& set) {
    std::vector<DrawnSet> all;
    if (set.parts.size() > 1) {
        const auto size = [](const Part& part) { return part.settings.size() + static_cast<size_t>(part.ranks); };
        all.push_back({set.family, {set.parts[0]}});
        if (size(set.parts[0]) <= size(set.parts[1]))   // else what is left out comes back, without end
            all.push_back({set.family, {set.parts[0], set.parts[0]}, set.resume_at});
    }
    for (size_t p = 0; p < set.parts.size(); p++) {
        for (int ranks = 1; ranks < set.parts[p].ranks; ranks++) (all.emplace_back(set)).parts[p].ranks = ranks;
        for (const Setting& setting : set.parts[p].settings) {
            const bool inherited = setting.row->may_change() == MayChange::kNumerics;   // by the second part
            if (p > 0 && inherited) continue;
            DrawnSet& without = all.emplace_back(set);
            for (size_t q = p; q < (inherited ? set.parts.size() : p + 1); q++)
                std::erase(without.parts[q].settings, setting);
        }
    }
    return all;
}

// Leaves out what can be left out while the set `fails`.
inline DrawnSet reduced(DrawnSet set, const std::string& data, const std::function<bool(const DrawnSet&)>& fails) {
    for (bool found = true; found;) {
        found = false;
        for (const DrawnSet& one : smaller(set)) {
            const bool legal = std::all_of(one.parts.begin(), one.parts.end(),
                                           [&](const Part& part) { return is_legal(one.family, part, data); });
            if (!legal || one.text() == set.text() || !fails(one)) continue;
            set = one;
            found = true;
            break;
        }
    }
    return set;
}

}  // namespace composition
