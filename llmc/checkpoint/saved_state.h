// Checks the content of a checkpoint's state.json, whose bytes the manifest has confirmed. Without this check, a run
// that resumes from contradictory numbers would go on with wrong results.
#pragma once
#include <string>

// What is wrong with DIRECTORY/state.json, "" if nothing: "state.json: "step" is -3: a whole number of at least 0 is
// needed". The step must agree with the updates, the skipped steps, the samples by the saved options, the FP8 state and
// the name of the directory. Another model or other data is not noticed here: only the present run can tell.
std::string state_damage(const std::string& directory);
