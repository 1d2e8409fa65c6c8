// The memory, operations and communication of a run, found by rehearsing its step: the same code with a null arena,
// executing no operation.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/model/parameters/fp8_recipe.h"
#include "llmc/model/parameters/params.h"
#include "llmc/ops/arena.h"
#include "llmc/ops/op_cost.h"
#include "llmc/parallel/comm/rehearsal_comm.h"

// What checkpoints of a run take, even if it has no --save, --load or --resume. Host memory is that of the rank that
// needs most.
struct HostPlan {
    int64_t load_bytes = 0;         // while a checkpoint or weights are read
    int64_t save_bytes = 0;         // pinned, with --save
    int64_t save_async_bytes = 0;   // pinned, with --save-async
    int64_t checkpoint_bytes = 0;   // of the tensors of one checkpoint on disk
};

struct MemoryPlan {
    int64_t arena_bytes = 0;               // of a run: the larger of its precisions
    int64_t peak_bytes = 0;                // of the steps planned here
    std::array<int64_t, kPurposes> purpose_bytes{};
    int64_t pinned_bytes = 0;              // host memory of a rank for --save; 0 without it
    int64_t state_host_bytes = 0;          // pinned for offloaded optimizer state,
    int64_t activation_host_bytes = 0;     // and for offloaded activations
    int64_t host_bytes() const { return pinned_bytes + state_host_bytes + activation_host_bytes; }
    int64_t flat_elems = 0;                // of the flat buffers
    HostPlan host;
    std::vector<PlannedGemm> step_gemms;   // of one optimizer step
    std::vector<PlannedOp> step_ops;       // its other operations
    int ranks = 1;
    int64_t buckets = 0;
    double edge_share = 0;                 // fraction of flat_elems in embeddings, whose communication is exposed
    std::vector<PlannedCollective> collectives;   // of one optimizer step
    std::vector<StepRecorder> exchanges;   // those of tokens of experts, see StepRecorder
    std::vector<MemoryPlan> bf16 = {};     // the steps in BF16 of a run that switches, one plan; the rest is FP8's
};

// Rehearses one optimizer step of one of `ranks` ranks, its evaluations and samples. All ranks have the same plan.
MemoryPlan plan_memory(const Config& config, const ParamTable& table, const Fp8Plan& fp8_plan, int ranks = 1);

// The number of checkpoints on disk at the end of the run: one at the end and one per --save-interval before, at most
// --keep.
int64_t planned_checkpoints(const Config& config);

// The elements of a parameter that a token uses: those of its experts.
double used_elems(const ModelConfig& shape, const Param& param);
double used_params(const ModelConfig& shape, const ParamTable& table);   // of all, as ParamTable::param_elems counts
// Model FLOPs per trained token: 6 per matmul parameter (true vocabulary) and causal attention (half the square),
// backward twice the forward; recomputation is not counted. Source: Chowdhery et al., arXiv 2204.02311, appendix B,
// with the attention term halved for the causal mask.
double model_flops_per_token(const Config& config, const ParamTable& table);
