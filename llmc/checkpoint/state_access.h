// How checkpoints read and write the training state: the states of parameters. Working weights are not part of it,
// since they are the rounded masters. Ranges are elements within one parameter.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "llmc/model/parameters/optimizer_state.h"

struct ElementRange {
    int64_t begin, count;
};

struct StateAccess {
    StateDtypes dtypes = {};   // in a checkpoint weights are bf16 or fp32
    // Copy values [begin, begin + count) of a state of parameter `index` to or from host memory, in its dtype; they are
    // numbered as OptimizerState::values does.
    std::function<void(StateKind kind, int index, int64_t begin, int64_t count, void* host)> read;
    std::function<void(StateKind kind, int index, int64_t begin, int64_t count, const void* host)> write;
    // The elements of a parameter's states that this rank holds, ascending; read and write must stay within them. All
    // ranks together hold every element; with --zero 0 each rank holds all. If empty, this rank holds all elements.
    std::function<std::vector<ElementRange>(int index)> held = {};
};

// The part of range `all` of a parameter that this rank holds.
std::vector<ElementRange> held_within(const StateAccess& access, int index, const ElementRange& all);

// Host memory for one block between state and file.
inline constexpr int64_t kStagingBytes = int64_t{32} << 20;
