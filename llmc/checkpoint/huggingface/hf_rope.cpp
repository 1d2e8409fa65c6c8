#include "llmc/checkpoint/huggingface/hf_rope.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr double kMostFactor = 1e6, kMostMscale = 1e3;
constexpr const char* kOriginal = "original_max_position_embeddings";
constexpr const char* kNeedsTypes = "versions of transformers read it differently: rope_parameters with a dictionary "
                                    "for each type of layers is needed";

// Returns the factor of cosines and sines, 0 for the default. DeepSeek's models give it by mscale and mscale_all_dim,
// which multiply ln(factor).
double read_attention_factor(const HfFields& rope, double factor) {
    const double over = rope.number_or("mscale", 0), under = rope.number_or("mscale_all_dim", 0);
    for (const char* name : {"mscale", "mscale_all_dim"})
        if (rope.has(name) && rope.number(name) > 0) rope.positive(name, kMostMscale);
    if (rope.has("attention_factor")) return rope.positive("attention_factor", kMostFactor);
    if (over == 0 || under == 0 || factor <= 1) return 0;
    return (0.1 * over * std::log(factor) + 1) / (0.1 * under * std::log(factor) + 1);
}

void check_scaling(const HfFields& rope, const RopeScaling& scaling) {
    if (scaling.factor < 1) rope.refuse("factor", "at least 1 is needed");
    if (scaling.beta_fast <= scaling.beta_slow || scaling.beta_slow <= 0)
        rope.refuse("beta_fast", "0 < beta_slow < beta_fast is needed");
    if (scaling.high_freq_factor <= scaling.low_freq_factor || scaling.low_freq_factor <= 0)
        rope.refuse("high_freq_factor", "0 < low_freq_factor < high_freq_factor is needed");
}

RopeScaling read_yarn(const HfFields& rope, int64_t original_positions) {
    RopeScaling scaling{.factor = rope.positive("factor", kMostFactor), .original_max_positions = original_positions,
                        .type = RopeScalingType::kYarn, .beta_fast = rope.positive_or("beta_fast", 32, kMostFactor),
                        .beta_slow = rope.positive_or("beta_slow", 1, kMostFactor),
                        .truncate = rope.boolean_or("truncate", true)};
    check_scaling(rope, scaling);
    rope.ignore({"finetuned"});   // says how the weights were made
    scaling.attention_factor = read_attention_factor(rope, scaling.factor);
    return scaling;
}

// The original positions of a scaling, which stand in its dictionary, beside it, or in both if they agree.
int64_t read_original(const HfFields& rope, const HfFields& beside, int64_t otherwise) {
    if (!beside.has(kOriginal))
        return otherwise > 0 && !rope.has(kOriginal) ? otherwise : rope.size(kOriginal, kMaxPositions);
    const int64_t original = beside.size(kOriginal, kMaxPositions);
    if (rope.has(kOriginal) && rope.size(kOriginal, kMaxPositions) != original)
        beside.refuse(kOriginal, rope.where + " says otherwise");
    return original;
}

std::vector<double> read_factors(const HfFields& rope, const char* name, int64_t pairs) {
    rope.ignore({name});   // read here
    std::vector<double> factors;
    if (rope.has(name) && rope.object[name].is_array())
        for (const nlohmann::json& value : rope.object[name])
            if (value.is_number() && value > 0 && value < kMostFactor) factors.push_back(value.get<double>());
    if (!rope.has(name) || factors.size() != rope.object[name].size() || std::ssize(factors) != pairs)
        rope.refuse(name, strf("a list of %lld positive numbers is needed, one a rotated pair", ll(pairs)));
    return factors;
}

RopeScaling read_longrope(const HfFields& rope, const HfFields& beside, const ModelConfig& c) {
    constexpr int64_t kDefault = 4096;   // of the class's field, which counts more than that of the dictionary
    if (!beside.has(kOriginal) && rope.has(kOriginal) && rope.size(kOriginal, kMaxPositions) != kDefault)
        rope.refuse(kOriginal, "transformers takes 4096 where config.json has none outside of this dictionary");
    RopeScaling scaling{.original_max_positions = read_original(rope, beside, kDefault),
                        .type = RopeScalingType::kLongrope,
                        .short_factors = read_factors(rope, "short_factor", c.rotated() / 2),
                        .long_factors = read_factors(rope, "long_factor", c.rotated() / 2)};
    const double ratio = static_cast<double>(c.max_positions) / static_cast<double>(scaling.original_max_positions);
    scaling.factor = std::max(1.0, ratio);
    if (rope.positive_or("factor", scaling.factor, kMostFactor) != scaling.factor)
        rope.refuse("factor", "max_position_embeddings / original_max_position_embeddings is needed");
    if (rope.has("attention_factor")) scaling.attention_factor = rope.positive("attention_factor", kMostFactor);
    return scaling;
}

RopeScaling read_scaling(const HfFields& rope, const HfFields& beside, const ModelConfig& c) {
    const char* name = rope.has("rope_type") ? "rope_type" : "type";
    const std::string type = rope.has(name) ? rope.text(name) : "default";
    rope.only("type", type, "rope_type says otherwise");
    for (const auto& item : rope.object.items())
        if (item.value().is_object())
            rope.refuse(item.key().c_str(), "rope parameters per layer type are not supported");
    if (type == "default") return {};
    // transformers knows no other one of Phi-3, and takes old names for it.
    if (c.fused_projections && (type == "longrope" || type == "su" || type == "yarn"))
        return read_longrope(rope, beside, c);
    if (type == "yarn") return read_yarn(rope, read_original(rope, beside, c.max_positions));
    if (type == "linear") return {.factor = rope.positive("factor", kMostFactor), .type = RopeScalingType::kLinear};
    if (type != "llama3")
        rope.refuse(name, "only \"default\", \"linear\", \"llama3\", \"yarn\" and Phi-3's \"longrope\" are supported");
    RopeScaling scaling{
        .factor = rope.positive("factor", kMostFactor),
        .low_freq_factor = rope.positive("low_freq_factor", kMostFactor),
        .high_freq_factor = rope.positive("high_freq_factor", kMostFactor),
        .original_max_positions = read_original(rope, beside, 0)};
    check_scaling(rope, scaling);
    return scaling;
}

// Reads rope_parameters that has a dictionary for each type of layers.
void read_rope_by_type(const HfFields& f, ModelConfig& c) {
    const HfFields types = f.child("rope_parameters");
    ModelConfig local = c;
    local.rotary_base = c.local_rotary_base;
    read_rope_dictionary(types, "full_attention", c);
    if (types.has("sliding_attention")) {
        read_rope_dictionary(types, "sliding_attention", local);
        if (local.rope_scaling.factor > 0)
            types.refuse("sliding_attention", "rope in layers with a window has no scaling");
        if (f.has("rope_local_base_freq") && local.rotary_base != c.local_rotary_base)
            f.refuse("rope_local_base_freq", "rope_parameters says otherwise");
        c.local_rotary_base = local.rotary_base;
    }
    types.require_all_read();
}

}  // namespace

nlohmann::ordered_json scaling_json(const RopeScaling& s) {
    if (s.factor == 0) return {{"rope_type", "default"}};
    if (s.type == RopeScalingType::kLinear) return {{"rope_type", "linear"}, {"factor", s.factor}};
    if (s.type == RopeScalingType::kLongrope) {   // transformers 4 takes these three alone
        nlohmann::ordered_json out = {
            {"type", "longrope"}, {"short_factor", s.short_factors}, {"long_factor", s.long_factors}};
        if (s.attention_factor > 0) out["attention_factor"] = s.attention_factor;
        return out;
    }
    const bool yarn = s.type == RopeScalingType::kYarn;
    nlohmann::ordered_json out = {{"rope_type", yarn ? "yarn" : "llama3"}, {"factor", s.factor}};
    if (yarn) {
        out["beta_fast"] = s.beta_fast;
        out["beta_slow"] = s.beta_slow;
        if (s.attention_factor > 0) out["attention_factor"] = s.attention_factor;
        out["truncate"] = s.truncate;
    } else {
        out["low_freq_factor"] = s.low_freq_factor;
        out["high_freq_factor"] = s.high_freq_factor;
    }
    out["original_max_position_embeddings"] = s.original_max_positions;
    return out;
}

void put_rope(nlohmann::ordered_json& out, const ModelConfig& c, double local_base) {
    nlohmann::ordered_json parameters = scaling_json(c.rope_scaling);
    if (c.rope_scaling.type == RopeScalingType::kLongrope) {
        parameters["rope_type"] = "longrope";
        out[kOriginal] = parameters[kOriginal] = c.rope_scaling.original_max_positions;
    }
    if (c.fused_projections)
        out["partial_rotary_factor"] = parameters["partial_rotary_factor"] =
            static_cast<double>(c.rotated()) / static_cast<double>(c.kv_channels);
    out["rope_theta"] = parameters["rope_theta"] = c.rotary_base;
    out["rope_scaling"] = c.rope_scaling.factor == 0 ? nlohmann::ordered_json() : scaling_json(c.rope_scaling);
    if (local_base == 0) {
        out["rope_parameters"] = parameters;
        return;
    }
    const double local = c.local_rotary_base > 0 ? c.local_rotary_base : c.rotary_base;
    if (local_base > 0) out["rope_local_base_freq"] = local;
    out["rope_parameters"] = {{"full_attention", parameters},
                              {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", local}}}};
}

// transformers truncates the number of rotated elements to a whole one.
static void read_rotary_dim(const HfFields& f, ModelConfig& c) {
    constexpr const char* kFactor = "partial_rotary_factor";
    if (!c.fused_projections) return f.only(kFactor, 1, "only rotation of the whole head is supported");
    const double factor = f.positive_or(kFactor, 1, 1);
    const auto dim = static_cast<int64_t>(static_cast<double>(c.kv_channels) * factor);
    if (f.has(kFactor)) c.rotary_dim = dim == c.kv_channels ? 0 : dim;
}

void read_rope_dictionary(const HfFields& f, const char* name, ModelConfig& c) {
    const HfFields rope = f.child(name);
    read_rotary_dim(rope, c);
    c.rope_scaling = read_scaling(rope, f, c);
    const double base = rope.positive_or("rope_theta", c.rotary_base, kMostBase);
    if (f.has("rope_theta") && base != c.rotary_base) f.refuse("rope_theta", strf("%s says otherwise", name));
    c.rotary_base = base;
    rope.require_all_read();
}

void read_rope(const HfFields& f, ModelConfig& c, double local_base) {
    const double usual = c.rotary_base;
    read_rotary_dim(f, c);
    f.ignore({kOriginal});   // without scaling it has no effect
    c.rotary_base = f.positive_or("rope_theta", c.rotary_base, kMostBase);
    if (f.has("rope_scaling")) read_rope_dictionary(f, "rope_scaling", c);
    if (local_base > 0) c.local_rotary_base = f.positive_or("rope_local_base_freq", local_base, kMostBase);
    const bool by_type = f.has("rope_parameters") && f.object["rope_parameters"].contains("full_attention");
    if (local_base == kBaseOfOthers) {
        c.local_rotary_base = c.rotary_base;
        // transformers 5 leaves layers with a window at the usual base.
        if (!by_type && c.rotary_base != usual)
            f.refuse(f.has("rope_theta") ? "rope_theta" : "rope_scaling", kNeedsTypes);
    }
    if (!f.has("rope_parameters")) return;
    const RopeScaling scaling = c.rope_scaling;
    const double base = c.rotary_base;
    if (local_base != 0) {
        // One for all layers is that of all layers in 5.0, and ignored by later versions.
        if (!by_type) f.refuse("rope_parameters", kNeedsTypes);
        read_rope_by_type(f, c);
    } else {
        read_rope_dictionary(f, "rope_parameters", c);
    }
    if (f.has("rope_theta") && c.rotary_base != base) f.refuse("rope_theta", "rope_parameters says otherwise");
    if (!f.has("rope_scaling")) return;
    const bool two = f.object["rope_scaling"].contains("rope_theta");
    if (!(c.rope_scaling == scaling) || (two && c.rotary_base != base))
        f.refuse("rope_parameters", "it contradicts rope_scaling");
}
