// The FP8 part of a checkpoint's state.json: the recipe, the linears that run in FP8 (for scripts/export_fp8) and, by
// tensor name, scale and amax history as bits, and the number of updates.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "llmc/model/parameters/fp8_state.h"

// Both block until the device is done.
std::string fp8_state_json(Ctx& ctx, const Fp8State& state);
// Returns "", or a note if the checkpoint has another recipe, format, history length or set of FP8 linears: delayed
// scaling is then calibrated again. `saved` is the object that state_damage has checked.
std::string restore_fp8_state(Ctx& ctx, Fp8State& state, const nlohmann::json& saved);
