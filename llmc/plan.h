// What a run will need, found by rehearsing its step: the same code with a null arena and no operation executed.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "llmc/arena.h"
#include "llmc/comm_plan.h"
#include "llmc/config.h"
#include "llmc/ops.h"
#include "llmc/params.h"

// One kind of matmul and how often the rehearsed phase runs it.
struct PlannedGemm {
    GemmArgs shape;      // pointers are meaningless
    int64_t count = 0;
};

// Collects the matmuls of a rehearsal.
struct StepRecorder {
    std::vector<PlannedGemm> gemms;
    void add(const GemmArgs& args);
};

struct MemoryPlan {
    int64_t arena_bytes = 0;
    std::array<int64_t, kPurposes> purpose_bytes{};
    int64_t save_bytes = 0;                // pinned host memory of a rank
    int64_t flat_elems = 0;                // parameters as stored
    std::vector<PlannedGemm> step_gemms;   // of one optimizer step
    int ranks = 1;
    int64_t buckets = 0;
    std::vector<PlannedCollective> collectives;   // of one optimizer step
};

// Rehearses one optimizer step of one of `ranks` ranks, an evaluation and a sample. The plan is that of every rank.
MemoryPlan plan_memory(const Config& config, const ParamTable& table, int ranks = 1);

// Model FLOPs per trained token: 6 per matmul parameter (true vocabulary) and causal attention (half the square),
// backward twice the forward; recomputation is not counted. Source: Chowdhery et al., arXiv 2204.02311, appendix B,
// with the attention term halved for the causal mask.
double model_flops_per_token(const Config& config, const ParamTable& table);

// The text of --dry-run: parameters, bytes by purpose against the card, FLOPs, tokens and steps, matmul shapes.
std::string plan_text(const Config& config, const ParamTable& table, const MemoryPlan& plan, const DeviceInfo& device);
