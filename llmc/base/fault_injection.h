// Points at which tests disturb a run. Only the executables build/*/faults/train_* have a fault_hook
// (tests/support/faults.cpp); in every other one it is null, and a point does nothing.
#pragma once
#include <string>

[[gnu::weak]] bool fault_hook(const std::string& point);
// Whether the caller shall fail at this point. May also end or suspend this process.
inline bool fault_at(const std::string& point) { return fault_hook && fault_hook(point); }
