#include "llmc/checkpoint/fp8_state_json.h"

#include <bit>
#include <nlohmann/json.hpp>

using Json = nlohmann::json;

std::string fp8_state_json(Ctx& ctx, const Fp8State& state) {
    if (!state.on()) return Json{{"recipe", "none"}}.dump();
    const Fp8Plan& plan = state.plan();
    Json root = {{"recipe", plan.row().name}, {"x", dtype_name(plan.x_format)}, {"dy", dtype_name(plan.dy_format)}};
    for (const LinearPlan& linear : plan.linears)
        if (linear.fp8) root["linears"].push_back(linear.name);
    if (!plan.row().history) return root.dump();
    const Fp8State::Histories now = state.histories(ctx);
    root["history_len"] = state.history_len();
    root["primed"] = now.calibrated;
    for (size_t i = 0; i < now.scales.size(); i++) {
        const auto begin = now.amax_bits.begin() + static_cast<int64_t>(i) * state.history_len();
        root["tensors"][state.tensor_names()[i]] = {
            {"quant_mul_bits", std::bit_cast<uint32_t>(now.scales[i])},
            {"updates", now.updates[i]},
            {"history_bits", std::vector<uint32_t>(begin, begin + state.history_len())}};
    }
    return root.dump();
}

std::string restore_fp8_state(Ctx& ctx, Fp8State& state, const Json& root) {
    const Fp8Plan& plan = state.plan();
    const std::string recipe = root.at("recipe").get<std::string>();
    const char* ours = state.on() ? plan.row().name : "none";
    if (recipe != ours) {
        return strf("FP8 recipe changed from %s to %s%s", recipe.c_str(), ours,
                    state.needs_calibration() ? ": its scales start again, calibrated by the first micro-batch" : "");
    }
    if (!state.on() || !plan.row().history) return "";
    const std::vector<std::string>& names = state.tensor_names();
    const auto length = static_cast<size_t>(state.history_len());
    bool same = root.at("x").get<std::string>() == dtype_name(plan.x_format)
                && root.at("dy").get<std::string>() == dtype_name(plan.dy_format)
                && root.at("history_len").get<size_t>() == length && root.at("tensors").size() == names.size();
    Fp8State::Histories saved;
    for (size_t i = 0; same && i < names.size(); i++) {
        const auto found = root.at("tensors").find(names[i]);
        same = found != root.at("tensors").end() && found->at("history_bits").size() == length;
        if (!same) break;
        saved.scales.push_back(std::bit_cast<float>(found->at("quant_mul_bits").get<uint32_t>()));
        saved.updates.push_back(found->at("updates").get<int32_t>());
        for (const Json& bits : found->at("history_bits")) saved.amax_bits.push_back(bits.get<uint32_t>());
    }
    if (!same) {
        return "FP8 formats, history length or the linears in FP8 changed: scales start again, calibrated by the first "
               "micro-batch";
    }
    saved.calibrated = root.at("primed").get<bool>();
    state.set_histories(ctx, saved);
    return "";
}
