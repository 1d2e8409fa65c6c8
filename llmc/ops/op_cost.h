// The operations of a rehearsed step: how often each runs and how many bytes it moves. Step times are predicted from
// them.
#pragma once
#include <string>
#include <vector>

#include "llmc/ops/ops.h"

// What an operation does besides computing its own result; see QuantOut.
enum class OpMode {
    kPlain,
    kSums,     // column sums: a bias gradient
    kRecord,   // amax
    kCopies,   // quantizes with one scale
    kBlocks,   // quantizes with a scale per block
};

// Shape of an attention operation; HS = 0 for all others.
struct PlannedAttention {
    int64_t B = 0, T = 0, NH = 0, HS = 0;
    bool backward = false, fp8 = false;
    int64_t window = 0;   // as in AttentionForwardArgs
    // The share of the pairs of causal attention that the window leaves, if every query sees `more` keys than that.
    double share(double more = 0) const;
    bool operator==(const PlannedAttention&) const = default;
};

// One kind of operation and how often the rehearsed phase runs it.
struct PlannedOp {
    OpKind kind;
    OpMode mode = OpMode::kPlain;
    Dtype dtype = Dtype::kBf16;   // working type; adamw: of the moments; casts and sums: of the input
    int64_t bytes = 0;            // read and written by one call, counting each tensor once
    PlannedAttention attention;
    Activation activation = Activation::kGelu;   // used by activation_forward and activation_backward
    bool in_update = false;                      // of Muon's matrices
    int64_t count = 0;
};
const char* op_name(OpKind kind);
// "gelu_forward" for activations, because each function has its own rates; op_name for all others.
std::string rate_name(OpKind kind, Activation activation);
const char* layout_name(GemmLayout layout);

// One kind of matmul and how often the rehearsed phase runs it.
struct PlannedGemm {
    GemmArgs shape;      // its pointers are meaningless
    int64_t count = 0;
    bool in_update = false;   // by the optimizer
    int64_t experts = 0;      // of a grouped matmul, whose rows together are those of `shape`
};

// "matmul forward 8192 x 6144 x 4096 e4m3 to bf16", "rmsnorm_forward bf16, FP8"; bytes are left out.
std::string op_text(const PlannedOp& op);
std::string gemm_text(const GemmArgs& args);

// Collects the operations of a rehearsal.
struct StepRecorder {
    std::vector<PlannedGemm> gemms = {};
    std::vector<PlannedOp> ops = {};   // all others
    double expert_rows = 1;       // with a balanced load, of those that there is memory for
    // Exchanges beside operations, by purpose: what a rank sends, and the operations while the exchange is the latest.
    std::string purpose = {};
    int64_t sent_bytes = 0;
    std::vector<StepRecorder> exchanges = {};
    int begun = -1, travelling = -1;   // the exchange whose collectives, and beside which operations are recorded now
    void begin_exchange(const std::string& what, bool beside);
    void add(const GemmArgs& args, int64_t count = 1, bool in_update = false, int64_t experts = 0);
    void add(const PlannedOp& op, int64_t count = 1);
};
