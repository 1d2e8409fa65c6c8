// What the operations of a rehearsed step are, how often each runs and how many bytes it moves: predictions of time are
// made from that.
#pragma once
#include <vector>

#include "llmc/ops.h"

// What an operation does besides its own result; see QuantOut.
enum class OpMode {
    kPlain,
    kRecord,   // the largest value
    kCopies,   // FP8 copies with one factor
    kBlocks,   // FP8 copies with a factor for each block
};

// Head sizes and so on of attention; HS = 0 for all others.
struct AttentionShape {
    int64_t B = 0, T = 0, NH = 0, HS = 0;
    bool backward = false, fp8 = false;
    bool operator==(const AttentionShape&) const = default;
};

// One kind of operation and how often the rehearsed phase runs it.
struct PlannedOp {
    OpKind kind;
    OpMode mode = OpMode::kPlain;
    Dtype dtype = Dtype::kBf16;   // working type; of adamw the moments', of casts and sums that of what is read
    int64_t bytes = 0;            // read and written by one call, each tensor of its arguments once
    AttentionShape attention;
    int64_t count = 0;
};
const char* op_name(OpKind kind);

// One kind of matmul and how often the rehearsed phase runs it.
struct PlannedGemm {
    GemmArgs shape;      // pointers are meaningless
    int64_t count = 0;
};

// Collects the operations of a rehearsal.
struct StepRecorder {
    std::vector<PlannedGemm> gemms;
    std::vector<PlannedOp> ops;   // all others
    void add(const GemmArgs& args);
    void add(const PlannedOp& op);
};
