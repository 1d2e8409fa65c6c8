// The FP8 part of a checkpoint's state.json: recipe, and by tensor name scale, updates and history, as bits.
#pragma once
#include <string>

#include "llmc/model/fp8_state.h"

// Blocking.
std::string fp8_state_json(Ctx& ctx, const Fp8State& state);
// "" or, where the checkpoint has another recipe, format or history length: what is started anew (explicit migration:
// delayed scaling is calibrated again).
std::string restore_fp8_state(Ctx& ctx, Fp8State& state, const std::string& json);
