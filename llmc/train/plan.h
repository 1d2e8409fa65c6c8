// What a run will need, found by rehearsing its step: the same code with a null arena and no operation executed.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/model/fp8_recipe.h"
#include "llmc/model/params.h"
#include "llmc/ops/arena.h"
#include "llmc/ops/op_cost.h"
#include "llmc/parallel/comm_dry_run.h"

struct MemoryPlan {
    int64_t arena_bytes = 0;
    std::array<int64_t, kPurposes> purpose_bytes{};
    int64_t save_bytes = 0;                // pinned host memory of a rank
    int64_t flat_elems = 0;                // parameters as stored
    int64_t checkpoint_bytes = 0;          // of one on disk, all ranks together
    std::vector<PlannedGemm> step_gemms;   // of one optimizer step
    std::vector<PlannedOp> step_ops;       // all else of it
    int ranks = 1;
    int64_t buckets = 0;
    double edge_share = 0;                 // of the parameters: embeddings, whose transfers nothing hides
    std::vector<PlannedCollective> collectives;   // of one optimizer step
};

// Rehearses one optimizer step of one of `ranks` ranks, an evaluation and a sample. The plan is that of every rank.
MemoryPlan plan_memory(const Config& config, const ParamTable& table, const Fp8Plan& fp8_plan, int ranks = 1);

// Model FLOPs per trained token: 6 per matmul parameter (true vocabulary) and causal attention (half the square),
// backward twice the forward; recomputation is not counted. Source: Chowdhery et al., arXiv 2204.02311, appendix B,
// with the attention term halved for the causal mask.
double model_flops_per_token(const Config& config, const ParamTable& table);
