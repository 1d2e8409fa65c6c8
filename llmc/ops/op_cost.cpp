// Bytes that every operation moves, from its arguments. An operation that reads only part of a tensor, or the same row
// for many tokens, is counted by the size of its arguments; its measured rate is defined in the same way.
#include "llmc/ops/op_cost.h"

#include <algorithm>

#include "llmc/base/check.h"

namespace {

constexpr const char* kOpNames[] = {
#define OP(name, Args) #name,
#include "llmc/ops/ops.inl"
#undef OP
};

bool same_kind(const GemmArgs& a, const GemmArgs& b) {
    return a.M == b.M && a.N == b.N && a.K == b.K && a.layout == b.layout && a.accumulate == b.accumulate
           && a.symmetric == b.symmetric && a.matrices == b.matrices
           && static_cast<bool>(a.bias) == static_cast<bool>(b.bias) && a.A.dtype == b.A.dtype
           && a.D.dtype == b.D.dtype;
}

bool same_kind(const PlannedOp& a, const PlannedOp& b) {
    return a.kind == b.kind && a.mode == b.mode && a.dtype == b.dtype && a.bytes == b.bytes
           && a.attention == b.attention && a.activation == b.activation && a.in_update == b.in_update;
}

int64_t sum(std::initializer_list<Tensor> tensors) {
    int64_t bytes = 0;
    for (const Tensor& tensor : tensors) bytes += tensor.bytes();
    return bytes;
}

int64_t quantized_bytes(const QuantOut& quant) {
    return sum({quant.rowwise, quant.transposed, quant.rowwise_scale_inv, quant.transposed_scale_inv});
}

OpMode mode(const QuantOut& quant) {
    if (quant.only_sums()) return OpMode::kSums;
    if (!quant.copies()) return quant.record ? OpMode::kRecord : OpMode::kPlain;
    return quant.granularity == Granularity::kTensor ? OpMode::kCopies : OpMode::kBlocks;
}

void record(Ctx& ctx, PlannedOp op) {
    op.in_update = ctx.in_update;
    if (ctx.recorder) ctx.recorder->add(op, ctx.recorded_times);
}

// Records an operation that moves `bytes` in addition to what it quantizes.
void record(Ctx& ctx, OpKind kind, Dtype dtype, int64_t bytes, const QuantOut& quant = {},
            Activation activation = Activation::kGelu) {
    record(ctx, {.kind = kind, .mode = mode(quant), .dtype = dtype, .bytes = bytes + quantized_bytes(quant),
                 .attention = {}, .activation = activation});
}

// Attention executes its QuantOut in a separate pass over its result. A bias gradient counts as bias_backward.
void record_pass(Ctx& ctx, const QuantOut& quant, const Tensor& in) {
    if (!quant) return;
    if (quant.only_sums()) return record(ctx, OpKind::bias_backward, in.dtype, in.bytes());
    record(ctx, quant.copies() ? OpKind::quantize : OpKind::amax, in.dtype, in.bytes(), quant);
}

// rope and qk-norm use such a pass only if the bias gradient is all that is asked for.
void record_in_place(Ctx& ctx, OpKind kind, int64_t bytes, const QuantOut& quant, const Tensor& out) {
    if (!quant.only_sums()) return record(ctx, kind, out.dtype, bytes, quant);
    record(ctx, kind, out.dtype, bytes);
    record_pass(ctx, quant, out);
}

}  // namespace

double PlannedAttention::share(double more) const {
    const double reach = (static_cast<double>(window) + more) / static_cast<double>(T);
    const double most = window > 0 ? std::min(reach, 1.0) : 1;
    return most * (2 - most);
}

const char* op_name(OpKind kind) { return kOpNames[static_cast<int>(kind)]; }

std::string rate_name(OpKind kind, Activation activation) {
    const std::string function = activation_function(activation).name;
    switch (kind) {
        case OpKind::activation_forward: return function + "_forward";
        case OpKind::activation_backward: return function + "_backward";
        default: return op_name(kind);
    }
}

const char* layout_name(GemmLayout layout) {
    constexpr const char* kNames[] = {"forward", "dgrad", "wgrad"};
    return kNames[static_cast<int>(layout)];
}

std::string op_text(const PlannedOp& op) {
    constexpr const char* kModes[] = {"", ", sums", ", amax", ", FP8", ", FP8 blocks"};
    std::string text = rate_name(op.kind, op.activation);
    const PlannedAttention& s = op.attention;
    if (s.HS > 0) text += strf(" %lld x %lld, %lld heads of %lld", ll(s.B), ll(s.T), ll(s.NH), ll(s.HS));
    if (s.share() < 1) text += strf(", window %lld", ll(s.window));
    return text + " " + (s.fp8 ? "e4m3" : dtype_name(op.dtype)) + kModes[static_cast<int>(op.mode)];
}

std::string gemm_text(const GemmArgs& g) {
    std::string text = strf("matmul %s %lld x %lld x %lld %s", layout_name(g.layout), ll(g.M), ll(g.N), ll(g.K),
                            dtype_name(g.A.dtype));
    if (g.matrices > 0) text = strf("%lld x ", ll(g.matrices)) + text;
    if (g.A_granularity == Granularity::kRow) text += " rows";
    else if (g.A_granularity != Granularity::kTensor) text += " blocks";
    return text + strf(" %s %s%s", g.accumulate ? "+=" : "to", dtype_name(g.D.dtype),
                       g.fast_accumulation ? ", fast" : "");
}

void StepRecorder::begin_exchange(const std::string& what, bool beside) {
    const auto known = std::find_if(exchanges.begin(), exchanges.end(),
                                    [&](const StepRecorder& e) { return e.purpose == what; });
    begun = static_cast<int>(known - exchanges.begin());
    if (known == exchanges.end()) exchanges.push_back({.purpose = what});
    if (beside) travelling = begun;
}

void StepRecorder::add(const GemmArgs& args, int64_t count, bool in_update, int64_t experts) {
    if (travelling >= 0) exchanges[static_cast<size_t>(travelling)].add(args, count, in_update, experts);
    auto known = std::find_if(gemms.begin(), gemms.end(), [&](const PlannedGemm& g) {
        return g.in_update == in_update && g.experts == experts && same_kind(g.shape, args);
    });
    if (known != gemms.end()) known->count += count;
    else gemms.push_back({args, count, in_update, experts});
}

void StepRecorder::add(const PlannedOp& op, int64_t count) {
    if (travelling >= 0) exchanges[static_cast<size_t>(travelling)].add(op, count);
    auto known = std::find_if(ops.begin(), ops.end(), [&](const PlannedOp& o) { return same_kind(o, op); });
    if (known == ops.end()) {
        known = ops.insert(ops.end(), op);
        known->count = 0;
    }
    known->count += count;
}

// ---- a row for each argument struct: the dtype and the bytes that the operation moves; what it quantizes is added

#define COST(Args, dtype, ...) \
    void rehearse_op(Ctx& ctx, OpKind kind, [[maybe_unused]] const Args& a) { record(ctx, kind, dtype, __VA_ARGS__); }

// ---- layers

COST(EmbeddingForwardArgs, a.out.dtype, (a.wpe ? 3 : 2) * a.out.bytes())   // every token reads a row of each table
void rehearse_op(Ctx& ctx, OpKind kind, const EmbeddingBackwardArgs& a) {
    // Counted as if all tokens were different. The position gradients add almost nothing, except where positions
    // restart and rows are added in another sorted order.
    const int64_t sums = a.positions ? 2 : 1;
    record(ctx, kind, a.dout.dtype, sums * (a.dout.bytes() + 2 * a.N * a.C * dtype_bytes(a.dwte.dtype)));
}
COST(NormForwardArgs, a.in.dtype, sum({a.in, a.residual, a.residual_out, a.stream, a.out}), a.quant)
COST(NormBackwardArgs, a.dout.dtype, sum({a.dx, a.dresidual, a.dout, a.x}), a.quant)
COST(QkNormForwardArgs, a.in.dtype, sum({a.in, a.out}))
void rehearse_op(Ctx& ctx, OpKind kind, const QkNormBackwardArgs& a) {
    record_in_place(ctx, kind, sum({a.dqkv, a.in}) + (a.quant.copies() ? 0 : a.dqkv.bytes()), a.quant, a.dqkv);
}
void rehearse_op(Ctx& ctx, OpKind kind, const RopeArgs& a) {
    const int64_t rotated = a.N * (a.NH + a.NKV) * a.HS * dtype_bytes(a.qkv.dtype), angles = a.N * a.HS * 4;
    const int64_t read = a.quant && !a.quant.only_sums() ? a.qkv.bytes() : rotated;
    record_in_place(ctx, kind, read + angles + (a.quant.copies() ? 0 : rotated), a.quant, a.qkv);
}
COST(QuantizeHeadsArgs, a.qkv.dtype, 2 * a.qkv.bytes() + sum({a.heads.bytes, a.heads.scales}))
void rehearse_op(Ctx& ctx, OpKind kind, const AttentionForwardArgs& a) {
    record(ctx, {.kind = kind, .dtype = a.qkv.dtype, .bytes = sum({a.qkv, a.out}),
                 .attention = {.B = a.B, .T = a.T, .NH = a.NH, .HS = a.HS, .fp8 = static_cast<bool>(a.heads),
                               .window = a.window}});
    record_pass(ctx, a.quant, a.out);
}
void rehearse_op(Ctx& ctx, OpKind kind, const AttentionBackwardArgs& a) {
    record(ctx, {.kind = kind, .dtype = a.qkv.dtype, .bytes = sum({a.qkv, a.dqkv, a.out, a.dout}),
                 .attention = {.B = a.B, .T = a.T, .NH = a.NH, .HS = a.HS, .backward = true, .window = a.window}});
    record_pass(ctx, a.quant, a.dqkv);
}
COST(SplitHeadsArgs, a.in.dtype, sum({a.in, a.out}))
COST(JoinHeadsArgs, a.in.dtype, sum({a.in, a.out}))
COST(ActivationForwardArgs, a.in.dtype, sum({a.in, a.out}), a.quant, a.kind)
COST(ActivationBackwardArgs, a.in.dtype, sum({a.in, a.dout, a.din}), a.quant, a.kind)
COST(BiasBackwardArgs, a.dout.dtype, a.dout.bytes())
COST(ClassifierArgs, a.logits.dtype, (a.write_dlogits ? 2 : 1) * a.logits.bytes())
COST(DlogitsResidualArgs, a.dx.dtype,
     sum({a.dlogits, a.codes}) + 3 * a.dx.bytes())   // every token reads a row of weight
COST(SumLossesArgs, a.losses.dtype, a.losses.bytes())
void rehearse_op(Ctx& ctx, OpKind, const GemmArgs& a) {
    if (ctx.recorder) ctx.recorder->add(a, ctx.recorded_times, ctx.in_update);
}
// The part of rows of experts that is used.
static int64_t used(const Ctx& ctx, int64_t rows) {
    return ctx.recorder ? static_cast<int64_t>(ctx.recorder->expert_rows * static_cast<double>(rows)) : rows;
}
// Counted as one matmul of all rows that are used.
void rehearse_op(Ctx& ctx, OpKind, const GroupedGemmArgs& a) {
    const bool wgrad = a.layout == GemmLayout::kWgrad;
    GemmArgs all{.D = a.D, .A = a.A, .B = a.B, .M = wgrad ? a.M : used(ctx, a.M), .N = a.N,
                 .K = wgrad ? used(ctx, a.K) : a.K, .layout = a.layout,
                 .accumulate = a.accumulate};
    if (a.A_scale_inv) all.A_granularity = Granularity::kBlock1x128, all.B_granularity = all.A_granularity;
    if (a.A_scale_inv && a.layout != GemmLayout::kWgrad) all.B_granularity = Granularity::kBlock128x128;
    if (ctx.recorder) ctx.recorder->add(all, ctx.recorded_times, ctx.in_update, a.E);
}
COST(TransposeScaledArgs, a.in.dtype, sum({a.in, a.in_scale_inv, a.out, a.out_scale_inv}))

// ---- mixtures of experts; int32 are few

COST(RouterForwardArgs, a.probs.dtype, 2 * a.probs.bytes())
COST(RouterStatsArgs, a.probs.dtype, a.probs.bytes())
COST(RouterBackwardArgs, a.dlogits.dtype, sum({a.probs, a.dlogits}))
COST(RouterSummaryArgs, a.stats.dtype, a.stats.bytes())
COST(RouterBiasArgs, a.load.dtype, a.load.bytes())
COST(SortExpertsArgs, Dtype::kInt32, 2 * a.experts.bytes() + sum({a.row_slots, a.slot_rows}))
COST(GatherRowsArgs, a.in.dtype, sum({a.in, a.in_scale_inv}) + used(ctx, sum({a.out, a.out_scale_inv})))
COST(CombineRowsArgs, a.in.dtype, used(ctx, a.in.bytes()) + (a.accumulate ? 2 : 1) * a.out.bytes())
COST(ExpertActivationForwardArgs, a.in.dtype, used(ctx, sum({a.in, a.out})), a.quant)
COST(ExpertBiasBackwardArgs, a.dout.dtype, used(ctx, a.dout.bytes()))
COST(ExpertActivationBackwardArgs, a.in.dtype, used(ctx, sum({a.in, a.dout, a.din})), a.quant)

// ---- step

COST(SumSquaresArgs, a.in.dtype, a.in.bytes())
COST(StepGuardArgs, Dtype::kFp32, 0)
COST(AdamWArgs, a.m.dtype, sum({a.param, a.grad}) + 2 * sum({a.master, a.m, a.v, a.m_scale_inv, a.v_scale_inv}))
COST(EmaArgs, a.ema.dtype, a.master.bytes() + 2 * a.ema.bytes())
COST(QkClipFactorsArgs, Dtype::kFp32, 0)
COST(QkClipArgs, a.master.dtype, a.param.bytes() + 2 * a.master.bytes())
COST(MuonMomentumArgs, a.m.dtype, 2 * sum({a.m, a.m_scale_inv, a.grad}))
COST(MuonNormalizeArgs, a.matrix.dtype, 2 * a.matrix.bytes())
COST(MuonPolynomialArgs, a.gram.dtype, 2 * a.square.bytes() + a.gram.bytes())
COST(MuonRowNormArgs, a.matrix.dtype, 2 * a.matrix.bytes() + sum({a.v, a.new_v}))
COST(MuonUpdateArgs, a.direction.dtype, sum({a.param, a.direction}) + 2 * a.master.bytes())
COST(FillNormalArgs, a.out.dtype, a.out.bytes())
COST(FillConstantArgs, a.out.dtype, a.out.bytes())
COST(CastArgs, a.in.dtype, sum({a.in, a.out}))
COST(QuantizeArgs, a.in.dtype, a.in.bytes(), a.quant)
COST(AmaxArgs, a.in.dtype, a.in.bytes())
COST(Fp8ClearArgs, Dtype::kFp32, 0)
COST(Fp8UpdateArgs, Dtype::kFp32, 0)
COST(CountScalesArgs, Dtype::kFp32, a.scale_inv.bytes())   // and the codes of few blocks

// ---- communication of gradients and FP8 weights

COST(QuantizeChunksArgs, a.in.dtype, sum({a.in, a.out, a.scales}))
COST(SumRanksArgs, a.in.dtype, sum({a.in, a.out, a.scales, a.accumulate ? a.out : Tensor{}}))
COST(CompareSumsArgs, a.a.dtype, sum({a.a, a.b}))
COST(BlockAmaxArgs, a.in.dtype, a.in.bytes())
COST(Fp8ScalesArgs, Dtype::kFp32, 0)
COST(QuantizeRunArgs, a.in.dtype, sum({a.in, a.out}))
COST(BlockScalesArgs, Dtype::kFp32, sum({a.scale_inv, a.transposed_scale_inv}))
COST(TransposeBytesArgs, a.in.dtype, sum({a.in, a.out}))

// ---- INT8 matrices

COST(QuantizeInt8Args, a.in.dtype, sum({a.in, a.out, a.scale_inv}))
COST(RowAmaxArgs, a.in.dtype, a.in.bytes())
COST(QuantizeInt8RunArgs, a.in.dtype, sum({a.in, a.out}))
COST(RowScalesArgs, Dtype::kFp32, 2 * a.scale_inv.bytes())
COST(TransposeInt8Args, a.in.dtype, sum({a.in, a.out, a.scale_inv}))
