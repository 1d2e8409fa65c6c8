// What the operations of a rehearsed step are, how often each runs and how many bytes it moves: predictions of time are
// made from that.
#pragma once
#include <string>
#include <vector>

#include "llmc/ops/ops.h"

// What an operation does besides its own result; see QuantOut.
enum class OpMode {
    kPlain,
    kSums,     // sums of the columns, a bias gradient
    kRecord,   // the largest value
    kCopies,   // FP8 copies with one factor
    kBlocks,   // FP8 copies with a factor for each block
};

// Head sizes and so on of attention; HS = 0 for all others.
struct PlannedAttention {
    int64_t B = 0, T = 0, NH = 0, HS = 0;
    bool backward = false, fp8 = false;
    bool operator==(const PlannedAttention&) const = default;
};

// One kind of operation and how often the rehearsed phase runs it.
struct PlannedOp {
    OpKind kind;
    OpMode mode = OpMode::kPlain;
    Dtype dtype = Dtype::kBf16;   // working type; of adamw the moments', of casts and sums that of what is read
    int64_t bytes = 0;            // read and written by one call, each tensor of its arguments once
    PlannedAttention attention;
    Activation activation = Activation::kGelu;   // of activation_forward and activation_backward
    int64_t count = 0;
};
const char* op_name(OpKind kind);
const char* op_mode_name(OpMode mode);   // "plain", "copies"
// "gelu_forward" of an activation function, whose rates are its own; op_name of others.
std::string rate_name(OpKind kind, Activation activation);
const char* layout_name(GemmLayout layout);

// One kind of matmul and how often the rehearsed phase runs it.
struct PlannedGemm {
    GemmArgs shape;      // pointers are meaningless
    int64_t count = 0;
};

// "matmul forward 8192 x 6144 x 4096 e4m3 to bf16", "rmsnorm_forward bf16, copies": without bytes.
std::string op_text(const PlannedOp& op);
std::string gemm_text(const GemmArgs& args);

// Collects the operations of a rehearsal.
struct StepRecorder {
    std::vector<PlannedGemm> gemms;
    std::vector<PlannedOp> ops;   // all others
    void add(const GemmArgs& args, int64_t count = 1);
    void add(const PlannedOp& op, int64_t count = 1);
    void add(const StepRecorder& more);
    // The first operation that the two did not run equally often, in words; "" if there is none.
    std::string difference(const StepRecorder& other) const;
};
