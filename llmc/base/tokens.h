// Constants of token ids. Includes nothing of llmc.
#pragma once
#include <cstdint>

inline constexpr int32_t kIgnoreIndex = -1;   // a target that does not count in the loss
