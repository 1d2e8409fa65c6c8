// The activation buffers of a layer as a table: one row a buffer. How much memory activations take, and what backward
// recomputes, both follow from the rows.
#pragma once
#include <optional>
#include <vector>

#include "llmc/model/model_context.h"

// How long a buffer holds its value.
struct Lifetime {
    bool scratch = false;      // within one call
    // Bits of the values of --recompute under which backward recomputes it: layers then share one buffer. Under the
    // others each layer saves its own from forward to backward.
    unsigned recomputed = 0;
    bool recomputed_under(Recompute level) const { return (recomputed >> static_cast<int>(level) & 1) != 0; }
};
constexpr unsigned recompute_bit(Recompute level) { return 1u << static_cast<int>(level); }
inline constexpr unsigned kBlockLevels =
    recompute_bit(Recompute::kBlock) | recompute_bit(Recompute::kBlockKeepAttention);
inline constexpr Lifetime kSaved{};
inline constexpr Lifetime kScratch{.scratch = true};
// What a norm or an activation function computes.
inline constexpr Lifetime kSavedUnlessNormAct{.recomputed = recompute_bit(Recompute::kNormAct) | kBlockLevels};
// What else a block computes.
inline constexpr Lifetime kSavedUnlessBlock{.recomputed = kBlockLevels};

// What attention itself computes.
inline constexpr Lifetime kSavedUnlessAttention{.recomputed = recompute_bit(Recompute::kBlock)};

enum class Form : uint8_t {
    kWorking,          // (N, width) T
    kStat,             // (N, width) stat
    kFp8Rowwise,       // (N, width) FP8 copy of the x of a linear
    kFp8Transposed,    // (width, N) FP8 copy of the x of a linear
};

struct BufferRow {
    const char* name;
    int64_t width;   // elements a token; 0: this model has none
    Form form;
    Lifetime lifetime;
    // The linear that reads it as x. FP8 copies exist only where that runs in FP8, and the working type only where it
    // runs in BF16 or others read it, too.
    std::optional<LinearKind> x_of = {};
    bool others_read = false;
};

class ActivationBuffers {
public:
    // Takes what lives beyond a call from the arena, for layers [first_layer, first_layer + layers).
    ActivationBuffers(ModelContext& model, std::vector<BufferRow> rows, int first_layer, int layers);

    // Whether backward recomputes the row.
    bool recomputed(int row) const;
    // A buffer of kWorking or kStat, cut to N rows; empty where the row has none. Scratch lives in the caller's scope.
    Tensor at(int row, int layer, int64_t N) const;
    Tensor scratch(int row, int64_t N) const;
    // The x of a linear as backward finds it, from the row of its working type and those of its copies.
    LinearOperand x(int high, int fp8_transposed, int layer, int64_t N) const;
    Fp8Operand fp8(int row, int layer, int64_t N) const;

    // Copies to make in forward: those that backward recomputes are left out.
    XCopies first_copies(int fp8_transposed) const;

private:
    struct Buffer {
        Tensor tensor;        // kWorking, kStat
        Fp8Operand operand;   // FP8 copies
    };
    const BufferRow& row(int number) const { return rows_[static_cast<size_t>(number)]; }
    Buffer take(const BufferRow& row, int first_layer, int layers);
    const Buffer& buffer(int row, int layer) const;

    ModelContext& model_;
    const std::vector<BufferRow> rows_;
    const int first_layer_, layers_;
    std::vector<Buffer> buffers_;   // by row, then layer
};

// Whether the forward matmul of a linear runs again in backward: its output is recomputed.
bool linear_runs_again(LinearKind kind, Recompute recompute);
