// How a checkpoint reaches the training state, wherever it lives. Ranges are elements within one parameter.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "llmc/model/state_slots.h"

struct ElementRange {
    int64_t begin, count;
};

struct StateAccess {
    StateDtypes dtypes = {};   // of a checkpoint: weights in bf16 or fp32
    // Copy elements [begin, begin + count) of parameter `index` to or from host memory, in that kind's dtype.
    std::function<void(StateKind kind, int index, int64_t begin, int64_t count, void* host)> read;
    std::function<void(StateKind kind, int index, int64_t begin, int64_t count, const void* host)> write;
    // With several ranks. The elements that this rank holds of a parameter's slots, ascending; read and write stay
    // within them. Together the ranks hold every element, some perhaps twice (--zero 0). Empty function: all of them.
    std::function<std::vector<ElementRange>(int index)> held = {};
    // Every rank calls it for every parameter, in table order, before any rank reads kWeight of that parameter, which
    // then works on all of them until the next call. Empty function: kWeight can be read at any time.
    std::function<void(int index)> gather_weight = {};
};

// Of these elements of a parameter those that this rank holds.
std::vector<ElementRange> held_within(const StateAccess& access, StateKind kind, int index, const ElementRange& all);

// Host memory for one block on its way between state and file; a transposing copy uses two.
inline constexpr int64_t kStagingBytes = int64_t{32} << 20;
