// The optimizer's state slots of a parameter: their memory purpose, dtype and checkpoint file. Memory planning and
// checkpoints follow from these rows; no slot is named a second time.
#pragma once
#include <array>
#include <cstdint>

#include "llmc/base/dtype.h"
#include "llmc/ops/arena.h"

enum class StateKind : uint8_t { kMaster, kExpAvg, kExpAvgSq };
inline constexpr int kStateKinds = 3;

struct StateSlot {
    StateKind kind;
    const char* name;    // as in PyTorch
    const char* file;    // of a checkpoint
    Purpose purpose;     // row of the memory table
    bool moment;         // in --moment-dtype, else in FP32
};
inline constexpr StateSlot kStateSlots[] = {
    {StateKind::kMaster, "master", "optimizer/master.safetensors", Purpose::kMaster, false},
    {StateKind::kExpAvg, "exp_avg", "optimizer/m.safetensors", Purpose::kMoments, true},
    {StateKind::kExpAvgSq, "exp_avg_sq", "optimizer/v.safetensors", Purpose::kMoments, true},
};
constexpr const StateSlot& state_slot(StateKind kind) { return kStateSlots[static_cast<size_t>(kind)]; }

// Which optimizer updates a parameter, and the slots that it needs.
enum class OptimizerKind : uint8_t { kAdamW };
struct OptimizerRow {
    OptimizerKind kind;
    std::array<StateKind, 3> slots;
};
inline constexpr OptimizerRow kOptimizers[] = {
    {OptimizerKind::kAdamW, {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq}},
};
constexpr bool keeps(OptimizerKind optimizer, StateKind slot) {
    for (StateKind kind : kOptimizers[static_cast<size_t>(optimizer)].slots)
        if (kind == slot) return true;
    return false;
}

// How a parameter may be sharded over ranks.
enum class ShardPolicy : uint8_t {
    kElementwise,   // at any element
    kWholeMatrix,   // not at all: one rank updates the whole matrix
    kExpert,        // over the ranks that share its expert
};

// The types that the options decide. FP64 is for tests, which use it for all state.
struct StateDtypes {
    Dtype weight = Dtype::kBf16;
    Dtype moment = Dtype::kFp32;   // bf16 or fp32

    Dtype of(StateKind kind) const {
        if (weight == Dtype::kFp64) return weight;
        return state_slot(kind).moment ? moment : Dtype::kFp32;
    }
};
