// What the layers of a decoder share: the model's shape, parameters, memory and FP8 state, and the functions that run
// norms and quantize the x and dy of linears.
#pragma once

#include "llmc/config/config.h"
#include "llmc/model/activation_offload.h"
#include "llmc/model/expert_exchange.h"
#include "llmc/model/head_exchange.h"
#include "llmc/model/linear.h"
#include "llmc/model/parameters/param_store.h"
#include "llmc/model/parameters/params.h"
#include "llmc/ops/arena.h"
#include "llmc/ops/ops.h"

// One micro-batch on the device.
struct DeviceBatch {
    const int32_t* tokens = nullptr;        // (B*T)
    const int32_t* targets = nullptr;       // (B*T), kIgnoreIndex is ignored
    const int32_t* token_order = nullptr;   // (B*T), see embedding_backward; backward only
    int32_t* bad_tokens = nullptr;          // (1), +=: ids outside the vocabulary
    const int32_t* documents = nullptr;     // (2, B, whole T) optional, see AttentionForwardArgs
    int64_t B = 0, T = 0;                   // with DecoderOptions::exchange, T is this rank's part of the sequences
    const int32_t* positions = nullptr;     // (B*T) optional: within documents, instead of within sequences
    const int32_t* whole_positions = nullptr;   // (B, whole T) the same with `exchange`, for FP8 attention only
    const int32_t* position_order = nullptr;    // (B*T) with `positions`, learned positions and backward only
    int64_t rows() const { return B * T; }
};

struct DecoderOptions {
    int64_t max_batch = 1, max_seq = 1;   // T is at most max_seq, and B * T at most their product
    Dtype dtype = Dtype::kBf16;           // working type
    Recompute recompute = Recompute::kNone;
    bool fp8_attention = false;
    bool offload_activations = false;
    bool forward_only = false;            // no backward follows: the layers share all buffers
    Tensor cos_sin = {};                  // that of another decoder of the same model and positions; empty: takes one
    const HeadExchange* exchange = nullptr;   // not owned; null: this rank has whole sequences
    int64_t ranks_of_sequence() const { return exchange ? exchange->ranks : 1; }
    // The position of the first of T tokens, which are this rank's part of a sequence.
    int64_t first_position(int64_t T) const { return exchange ? exchange->rank * T : 0; }
    int64_t loss_chunk = 0;        // rows that head and loss compute at once; 0: all
    double z_loss = 0;             // see ClassifierArgs
    Tensor max_logits = {};        // (layers, all NH) fp32, optional: see AttentionForwardArgs
    // Mixtures of experts: weights of the losses of RouterBackwardArgs, and, both or neither, for every layer the load
    // (E) that the first has, and the sums of router_stats.
    double aux_loss = 0, router_z_loss = 0;
    Tensor expert_load = {}, router_stats = {};
    bool even_experts = false;   // see RouterForwardArgs
    const ExpertExchange* experts = nullptr;   // not owned; null: this rank has all experts
    // With `experts`: the rows that this rank has memory for, by token of its micro-batch, and for every layer the most
    // rows so far (1 int32), =.
    int64_t rows_of_token = 0;
    Tensor expert_rows = {};
    int64_t max_rows() const { return max_batch * max_seq; }
    int64_t positions() const { return max_seq * ranks_of_sequence(); }
};

// Which FP8 layouts of an x are written. If none is, the x is written in the working type only.
struct XUsage {
    bool rowwise;      // for the forward matmul
    bool transposed;   // for the weight gradient
    bool recomputed;   // forward has recorded the statistics, so nothing is recorded
};

// The x or dy of a linear, from begin_x or begin_dy to finish. In between, the operation that computes it writes its
// result to `out`, unless that is empty, and executes `quant`.
struct PendingOperand {
    int64_t N = 0;
    bool recomputed = false;
    Tensor out;                          // (N, C) T
    QuantOut quant = {};
    LinearOperand operand;
    const Fp8Linear* linear = nullptr;   // null: not quantized
    Fp8Role role = Fp8Role::kX;
    QuantOut second_pass = {};           // Fp8Passes::second
    Tensor separate_dbias = {};          // the bias gradient, if `quant` cannot sum it
};

// A norm layer: numbers of its parameters, and the statistics of its N rows.
struct NormLayer {
    int weight = -1, bias = -1;
    Tensor mean, rstd;   // (N) stat; mean for layernorm only
};
// x = in + residual, written to residual_out; without residual x = in. stream: see NormForwardArgs.
struct NormInput {
    Tensor in;                                // (N, C) T
    Tensor residual = {}, residual_out = {};  // (N, C) T
    Tensor stream = {};
};
// Gradients of a norm's result, and of x on the residual path (empty: 0).
struct NormGrads {
    Tensor dout;             // (N, C) T
    Tensor dresidual = {};   // (N, C) T
};

class ModelContext {
public:
    // Owns none of its arguments.
    ModelContext(const ModelConfig& shape, const ParamTable& params, const DecoderOptions& decoder_options,
                 Arena& memory, ParamStore& param_store, Fp8State& fp8_state);
    void upload_constants(Ctx& ctx);
    Tensor rope_of(int layer) const;   // (positions, HS/2, 2) stat; empty as cos_sin

    // Empty for a parameter that the model does not have (-1). See ParamStore for when they are valid.
    Tensor weight(int param) const { return param < 0 ? Tensor{} : store->weight(param); }
    Tensor grad(int param) const { return param < 0 ? Tensor{} : store->grad(param); }
    const LayerParams& params_of(int layer) const { return table.layers[static_cast<size_t>(layer)]; }
    Linear linear(int layer, LinearKind kind) const;
    Linear linear_of(int weight, int bias = -1, const Fp8Linear* fp8_linear = nullptr) const;   // of these parameters
    int head_layer() const { return static_cast<int>(config.num_layers); }

    Tensor scratch(Dtype dtype, int64_t elems) const { return arena.scratch(dtype, elems); }

    // The model's norm; for out, dx and quant see NormForwardArgs and NormBackwardArgs.
    void norm_forward(Ctx& ctx, const NormLayer& norm, const NormInput& x, int64_t N, Tensor out,
                      const QuantOut& quant) const;
    void norm_backward(Ctx& ctx, const NormLayer& norm, const NormGrads& grads, Tensor x, int64_t N, Tensor dx,
                       const QuantOut& quant) const;

    // ---- the x and dy of linears, see PendingOperand. keep_unquantized: the caller also reads the unquantized result
    // of a linear in FP8.
    // saved: the buffers in which backward finds the x. What else is needed (the rowwise layout, a result in BF16 that
    // is quantized in a second pass) is scratch until the caller's Arena::Scope ends.
    PendingOperand begin_x(const Linear& linear, const LinearOperand& saved, int64_t N, XUsage usage,
                           bool keep_unquantized = false) const;
    // to: memory from alloc_dy. The bias gradient is computed, too; its sums are scratch of the caller's scope.
    PendingOperand begin_dy(const Linear& linear, const LinearOperand& to, int64_t N, bool keep_unquantized) const;
    LinearOperand finish(Ctx& ctx, const PendingOperand& pending) const;
    // Memory of a dy (N, C): `unquantized`, and with in_fp8 its FP8 layouts as scratch of the caller's scope.
    LinearOperand alloc_dy(int64_t N, int64_t C, Tensor unquantized, bool in_fp8) const;
    // The function that Fp8State::alloc_operand takes memory from.
    auto take_scratch() const {
        return [this](Dtype dtype, int64_t elems) { return scratch(dtype, elems); };
    }

    const ModelConfig config;
    const ParamTable& table;
    const DecoderOptions options;
    Arena& arena;
    ParamStore* store;
    Fp8State& fp8;
    const Dtype stat;        // dtype of statistics and sums
    // (1 or 2, positions, HS/2, 2) stat: the rope table, and that of layers with a window if it differs; empty with
    // learned positions.
    Tensor cos_sin;
    ActivationOffload offload;
    bool training = true;    // a backward follows the current forward

private:
    void quantize(PendingOperand& operand, const Fp8Linear& linear, Fp8Role role, bool keep_unquantized) const;
};
