// What the layers of a decoder share: the model's shape, its parameters, memory and FP8 state, and the two functions
// that make a result the operand of a linear.
#pragma once
#include "llmc/config/config.h"
#include "llmc/model/linear.h"
#include "llmc/model/param_store.h"
#include "llmc/model/params.h"
#include "llmc/ops/arena.h"
#include "llmc/ops/ops.h"

// One micro-batch on the device.
struct DeviceBatch {
    const int32_t* tokens = nullptr;        // (B*T)
    const int32_t* targets = nullptr;       // (B*T), kIgnoreIndex is not counted
    const int32_t* token_order = nullptr;   // (B*T), see embedding_backward; backward only
    int32_t* bad_tokens = nullptr;          // (1), +=: ids outside the vocabulary
    const int32_t* documents = nullptr;     // (2, B, T) optional, see AttentionForwardArgs
    int64_t B = 0, T = 0;
    int64_t rows() const { return B * T; }
};

struct DecoderOptions {
    int64_t max_batch = 1, max_seq = 1;   // largest T, and B * T at most their product
    Dtype dtype = Dtype::kBf16;           // working type
    Recompute recompute = Recompute::kNone;
    bool fuse_gelu = false;
    bool fp8_attention = false;
    bool attention_fast = false;   // AttentionBackwardArgs::fast
    int64_t max_rows() const { return max_batch * max_seq; }
};

// Which FP8 copies of an x its producer makes.
struct XCopies {
    bool rowwise;      // a forward matmul follows
    bool transposed;   // backward reads it for the weight gradient
    bool recomputed;   // records nothing: the first time did
};

// A norm layer: numbers of its parameters, and its statistics of the rows at hand.
struct NormLayer {
    int weight = -1, bias = -1;
    Tensor mean, rstd;   // (N) stat; mean for layernorm only
};
// x = in + residual, which goes to residual_out. Without residual x = in.
struct NormInput {
    Tensor in;                                // (N, C) T
    Tensor residual = {}, residual_out = {};  // (N, C) T
};
// Gradient of a norm's result, and of x past the norm (absent: 0).
struct NormGrads {
    Tensor dout;             // (N, C) T
    Tensor dresidual = {};   // (N, C) T
};

class ModelContext {
public:
    // Owns none of them.
    ModelContext(const ModelConfig& shape, const ParamTable& params, const DecoderOptions& decoder_options,
                 Arena& memory, ParamStore& param_store, Fp8State& fp8_state)
        : config(shape), table(params), options(decoder_options), arena(memory), store(&param_store), fp8(fp8_state),
          stat(decoder_options.dtype == Dtype::kFp64 ? Dtype::kFp64 : Dtype::kFp32) {}

    // Empty for a parameter that the model does not have (-1). Of a layer that the store holds open.
    Tensor weight(int param) const { return param < 0 ? Tensor{} : store->weight(param); }
    Tensor grad(int param) const { return param < 0 ? Tensor{} : store->grad(param); }
    const BlockParams& block(int layer) const { return table.blocks[static_cast<size_t>(layer)]; }
    Linear linear(int layer, LinearKind kind) const;
    int head_layer() const { return static_cast<int>(config.num_layers); }

    Tensor scratch(Dtype dtype, int64_t elems) const { return arena.scratch(dtype, elems); }

    // layernorm or rmsnorm, as the model has it; out and quant as NormForwardArgs and NormBackwardArgs say.
    void norm_forward(Ctx& ctx, const NormLayer& norm, const NormInput& x, int64_t N, Tensor out,
                      const QuantOut& quant) const;
    void norm_backward(Ctx& ctx, const NormLayer& norm, const NormGrads& grads, Tensor x, int64_t N, Tensor dx,
                       const QuantOut& quant) const;

    // Runs the producer of the x of a linear. `saved`: where the parts go that are kept. The rowwise copy and, where
    // nobody keeps the bf16 result, its working memory are scratch of the caller's scope: they live until the matmul
    // that follows. high_is_read: others than the linear read the bf16 result, too.
    LinearOperand make_x(Ctx& ctx, const Linear& linear, const LinearOperand& saved, int64_t N, XCopies copies,
                         bool high_is_read, const Producer& run) const;
    // Memory of a dy (N, C): scratch of the caller's scope for its FP8 copies.
    LinearOperand take_dy(int64_t N, int64_t C, Tensor high, bool fp8) const;
    // Runs the producer of the dy of a linear, which adds up the gradient of the bias as well. `to`: from take_dy.
    LinearOperand make_dy(Ctx& ctx, const Linear& linear, const LinearOperand& to, int64_t N, bool high_is_read,
                          const Producer& run) const;

    const ModelConfig config;
    const ParamTable& table;
    const DecoderOptions options;
    Arena& arena;
    ParamStore* store;
    Fp8State& fp8;
    const Dtype stat;        // of statistics and sums
    bool training = true;    // of the forward that runs: backward follows
};
