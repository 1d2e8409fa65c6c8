// The activation buffers of a layer as a table with a row per buffer. The rows decide how much memory activations take
// and what backward recomputes.
#pragma once
#include <optional>
#include <vector>

#include "llmc/model/model_context.h"

// How long a buffer holds its value.
struct Lifetime {
    bool scratch = false;      // only within one call
    // Bit set of the --recompute levels at which backward recomputes the buffer; then all layers share one. At the
    // other levels each layer keeps its own buffer from forward to backward.
    unsigned recomputed = 0;
    bool recomputed_under(Recompute level) const { return (recomputed >> static_cast<int>(level) & 1) != 0; }
};
constexpr unsigned recompute_bit(Recompute level) { return 1u << static_cast<int>(level); }
inline constexpr unsigned kBlockLevels =
    recompute_bit(Recompute::kBlock) | recompute_bit(Recompute::kBlockKeepAttention);
inline constexpr Lifetime kSaved{};
inline constexpr Lifetime kScratch{.scratch = true};
// In this order: results of norms and activation functions, of attention itself, and of the rest of a block.
inline constexpr Lifetime kSavedUnlessNormAct{.recomputed = recompute_bit(Recompute::kNormAct) | kBlockLevels};
inline constexpr Lifetime kSavedUnlessAttention{.recomputed = recompute_bit(Recompute::kBlock)};
inline constexpr Lifetime kSavedUnlessBlock{.recomputed = kBlockLevels};

enum class Form : uint8_t {
    kWorking,          // (N, width) T
    kStat,             // (N, width) stat
    kIndex,            // (N, width) int32
    kFp8Transposed,    // (width, N) FP8, the x of a linear
    kFp8Rowwise,       // (N, width) FP8, the x of a linear of experts: width / its in-features rows of a token
};

struct BufferRow {
    const char* name;
    int64_t width;   // elements per token; 0: this model has no such buffer
    Form form;
    Lifetime lifetime;
    // The linear that reads the buffer as its x. FP8 buffers exist only where that linear runs in FP8, and kWorking
    // only where it runs in BF16 or another operation reads the buffer, too.
    std::optional<LinearKind> x_of = {};
    bool others_read = false;
};

class ActivationBuffers {
public:
    // Allocates all buffers but scratch from the arena, for layers [first_layer, first_layer + layers).
    ActivationBuffers(ModelContext& model, std::vector<BufferRow> rows, int first_layer, int layers);

    // Whether backward recomputes the row, or there is none: then all layers share one buffer.
    bool recomputed(int row) const;
    // A buffer that is not in FP8 cut to N rows, or empty. Scratch lives in the arena scope of the caller.
    Tensor at(int row, int layer, int64_t N) const;
    Tensor scratch(int row, int64_t N) const;
    // The saved x of a linear, from its kWorking and FP8 rows.
    LinearOperand x(int working, int fp8, int layer, int64_t N) const;
    Fp8Operand fp8(int row, int layer, int64_t N) const;

    // The layouts that forward writes; it omits the transposed one if backward recomputes it.
    XUsage forward_usage(int fp8_transposed) const;

private:
    struct Buffer {
        Tensor tensor;        // kWorking, kStat, kIndex
        Fp8Operand operand;   // kFp8Transposed, kFp8Rowwise
    };
    const BufferRow& row(int number) const { return rows_[static_cast<size_t>(number)]; }
    Dtype dtype_of(Form form) const;
    Buffer take(const BufferRow& row, int first_layer, int layers);
    void offload(int row, int layer);
    const Buffer& buffer(int row, int layer) const;

    ModelContext& model_;
    const std::vector<BufferRow> rows_;
    const int first_layer_, layers_;
    std::vector<Buffer> buffers_;   // by row, then layer
};

// The number of FP8 matmuls in one optimizer step: 3 for each linear and micro-batch, or 4 if the linear's fprop is
// recomputed; the head has 2 for each of its chunks (loss_chunks). The trainer compares this with the number of
// executed FP8 matmuls.
int64_t planned_fp8_matmuls(const Fp8Plan& plan, Recompute recompute, int64_t micro_batches, int64_t head_chunks = 1);
