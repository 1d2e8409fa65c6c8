// The content of a checkpoint's state.json, whose bytes the manifest has confirmed: a run that goes on from numbers
// that contradict each other would train on, wrongly.
#pragma once
#include <string>

// What is wrong with DIRECTORY/state.json, "" if nothing: "state.json: "step" is -3: a whole number of at least 0 is
// needed". Compared are the step with the updates, the skipped steps, the samples by the saved options, the FP8 state
// and the name of the directory. What only the present run can tell, as another model or other data, is not looked at.
std::string state_damage(const std::string& directory);
