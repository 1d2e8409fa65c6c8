// The optimizer states of a parameter: their memory purpose, dtype and checkpoint file. Memory planning and checkpoints
// follow from these rows; no state is named a second time.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "llmc/base/fp8.h"
#include "llmc/config/config.h"
#include "llmc/ops/arena.h"

enum class StateKind : uint8_t {
    kMaster, kExpAvg, kExpAvgSq, kMomentum, kEma, kExpAvgScale, kExpAvgSqScale, kMomentumScale, kRowExpAvgSq
};
inline constexpr int kStateKinds = 9;

struct OptimizerState {
    StateKind kind;
    const char* name;    // as in PyTorch
    const char* file;    // of a checkpoint
    Purpose purpose;     // row of the memory table
    bool moment;         // in --moment-dtype, else in FP32
    const char* offload; // the word of --offload
    const char* model = nullptr;   // folder of a checkpoint for the model with these weights, "" is the checkpoint
    Dtype fp8 = Dtype::kFp32;      // of a moment with --moment-dtype fp8 (moment_codes.h)
    int64_t block = 1;             // elements for each value; > 1: scale_inv of a moment's blocks
    bool by_row = false;           // a value for each row of a matrix; every rank has all of them, on the device

    // The values of `elems` elements; of an index, the first value at or after it.
    constexpr int64_t values(int64_t elems) const { return ceil_div(elems, block); }
};
inline constexpr OptimizerState kOptimizerStates[] = {
    {StateKind::kMaster, "master", "optimizer/master.safetensors", Purpose::kMaster, false, "masters", ""},
    {StateKind::kExpAvg, "exp_avg", "optimizer/m.safetensors", Purpose::kMoments, true, "moments", nullptr,
     Dtype::kE4m3},
    {StateKind::kExpAvgSq, "exp_avg_sq", "optimizer/v.safetensors", Purpose::kMoments, true, "moments", nullptr,
     Dtype::kUe5m3},
    {StateKind::kMomentum, "momentum", "optimizer/momentum.safetensors", Purpose::kMoments, true, "moments",
     nullptr, Dtype::kE4m3},
    // Of the masters, beside any optimizer, with --ema. FP32: a share of 1e-4 is less than half a unit of BF16.
    {StateKind::kEma, "ema", "optimizer/ema.safetensors", Purpose::kEma, false, "moments", "ema/"},
    {StateKind::kExpAvgScale, "exp_avg_scale_inv", "optimizer/m_scale_inv.safetensors", Purpose::kMoments, true,
     "moments", nullptr, Dtype::kFp32, kScaleBlock},
    {StateKind::kExpAvgSqScale, "exp_avg_sq_scale_inv", "optimizer/v_scale_inv.safetensors", Purpose::kMoments, true,
     "moments", nullptr, Dtype::kFp32, kScaleBlock},
    {StateKind::kMomentumScale, "momentum_scale_inv", "optimizer/momentum_scale_inv.safetensors", Purpose::kMoments,
     true, "moments", nullptr, Dtype::kFp32, kScaleBlock},
    {StateKind::kRowExpAvgSq, "row_exp_avg_sq", "optimizer/row_v.safetensors", Purpose::kMoments, false, "", nullptr,
     Dtype::kFp32, 1, true},
};
constexpr const OptimizerState& state_row(StateKind kind) { return kOptimizerStates[static_cast<size_t>(kind)]; }

// The optimizers of parameters, and the states that each needs.
struct OptimizerRow {
    OptimizerKind kind;
    uint32_t states;   // bits by StateKind
};
constexpr uint32_t state_bits(std::initializer_list<StateKind> kinds) {
    uint32_t bits = 0;
    for (StateKind kind : kinds) bits |= 1u << static_cast<int>(kind);
    return bits;
}
inline constexpr OptimizerRow kOptimizers[] = {
    {OptimizerKind::kAdamW, state_bits({StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq,
                                         StateKind::kExpAvgScale, StateKind::kExpAvgSqScale})},
    {OptimizerKind::kMuon, state_bits({StateKind::kMaster, StateKind::kMomentum, StateKind::kMomentumScale,
                                        StateKind::kRowExpAvgSq})},
    {OptimizerKind::kRouterBias, state_bits({StateKind::kMaster})},
};
constexpr bool keeps(OptimizerKind optimizer, StateKind state) {
    return kOptimizers[static_cast<size_t>(optimizer)].states >> static_cast<int>(state) & 1;
}

// The types that the options decide. FP64 is for tests, which use it for all state.
struct StateDtypes {
    Dtype weight = Dtype::kBf16;
    Dtype moment = Dtype::kFp32;   // bf16 or fp32; e4m3: as OptimizerState::fp8 says

    Dtype of(StateKind kind) const {
        if (weight == Dtype::kFp64) return weight;
        if (moment == Dtype::kE4m3) return state_row(kind).fp8;
        return state_row(kind).moment ? moment : Dtype::kFp32;
    }
};
