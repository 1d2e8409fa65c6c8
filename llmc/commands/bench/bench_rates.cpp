#include "llmc/commands/bench/bench_rates.h"

#include <algorithm>

#include "llmc/base/check.h"
#include "llmc/base/median.h"
#include "llmc/commands/bench/bench_launches.h"
#include "llmc/model/parameters/fp8_recipe.h"
#include "llmc/perf/kernel_rates.h"

namespace {

constexpr GemmMode kModes[] = {GemmMode::kBf16, GemmMode::kFp8Fast, GemmMode::kFp8Precise, GemmMode::kFp8Block};

bool supports(const DeviceInfo& device, GemmMode mode) {
    const Fp8Recipe recipe = mode == GemmMode::kBf16       ? Fp8Recipe::kNone
                             : mode == GemmMode::kFp8Block ? Fp8Recipe::kBlockwise
                                                           : Fp8Recipe::kDelayed;
    return fp8_device_error({.recipe = recipe}, device).empty();
}

// One matmul with so many alternating sets of operands that a set is no longer in the L2 cache when it is used again.
class RotatedGemm {
public:
    RotatedGemm(Ctx& ctx, const MeasuredGemm& shape, GemmMode mode, Dtype result)
        : ctx_(ctx), shape_(shape), mode_(mode), result_(result), slot_(ctx, memory_) {
        constexpr int64_t kRotatedBytes = int64_t{160} << 20;
        const int64_t most = ctx.sm > 0 ? kRotatedBytes : 1;
        int64_t bytes = 0;
        do {
            sets_.push_back(make_set());
            const GemmArgs& set = sets_.back();
            bytes += set.A.bytes() + set.B.bytes() + set.D.bytes();
        } while (bytes < most);
    }
    void launch() { ops::gemm(ctx_, sets_[next_++ % sets_.size()]); }

private:
    Tensor scales(Granularity granularity, int64_t rows) {
        if (granularity == Granularity::kTensor) return slot_.scale_inv();
        const Tensor out = memory_.take(Dtype::kFp32, scale_inv_elems(granularity, rows, shape_.K));
        ops::fill_constant(ctx_, {.out = out, .value = 1.0f / 64});
        return out;
    }

    // dy, the A of both gradients, is E5M2 if scales are per tensor.
    GemmArgs make_set() {
        const bool forward = shape_.pass == GemmLayout::kForward, wgrad = shape_.pass == GemmLayout::kWgrad;
        const bool fp8 = mode_ != GemmMode::kBf16, blocks = mode_ == GemmMode::kFp8Block;
        const Dtype b = fp8 ? Dtype::kE4m3 : Dtype::kBf16, a = fp8 && !blocks && !forward ? Dtype::kE5m2 : b;
        const auto key = static_cast<uint64_t>(2 * sets_.size());
        GemmArgs args{.D = memory_.random(ctx_, result_, shape_.M, shape_.N, nullptr, 99),
                      .A = memory_.random(ctx_, a, shape_.M, shape_.K, slot_.get(), key),
                      .B = memory_.random(ctx_, b, shape_.N, shape_.K, slot_.get(), key + 1), .M = shape_.M,
                      .N = shape_.N, .K = shape_.K, .layout = shape_.pass, .accumulate = wgrad};
        if (!fp8) return args;
        args.fast_accumulation = mode_ == GemmMode::kFp8Fast;
        if (blocks) {
            args.A_granularity = Granularity::kBlock1x128;
            args.B_granularity = wgrad ? Granularity::kBlock1x128 : Granularity::kBlock128x128;
        }
        args.A_scale_inv = scales(args.A_granularity, shape_.M);
        args.B_scale_inv = scales(args.B_granularity, shape_.N);
        return args;
    }

    Ctx& ctx_;
    const MeasuredGemm shape_;
    const GemmMode mode_;
    const Dtype result_;
    DeviceMemory memory_;
    CastSlot slot_;
    std::vector<GemmArgs> sets_;
    size_t next_ = 0;
};

// Fills shape.us; FP8 needs multiples of 16.
void measure(Ctx& ctx, const DeviceInfo& device, MeasuredGemm& shape, Dtype result) {
    const bool fp8 = shape.M % 16 == 0 && shape.N % 16 == 0 && shape.K % 16 == 0;
    std::deque<RotatedGemm> gemms;
    std::vector<Launch> launches;
    std::vector<double*> us;
    for (GemmMode mode : kModes) {
        if ((mode != GemmMode::kBf16 && !fp8) || !supports(device, mode)) continue;
        RotatedGemm& gemm = gemms.emplace_back(ctx, shape, mode, result);
        launches.push_back([&gemm] { gemm.launch(); });
        us.push_back(&shape.us[static_cast<int>(mode)]);
    }
    const auto series = series_in_turn(ctx, ctx.sm > 0 ? 15 : 1, launches);
    for (size_t i = 0; i < us.size(); i++) *us[i] = 1e3 * median_of(series[i]);
}

}  // namespace

void measure_linears(Ctx& ctx, const DeviceInfo& device, const StepRecorder& work, Rates& rates) {
    for (const PlannedGemm& g : work.gemms) {
        if (g.shape.layout != GemmLayout::kForward) continue;
        const int64_t tokens = g.shape.M, out = g.shape.N, in = g.shape.K;
        const bool known = std::any_of(rates.gemms.begin(), rates.gemms.end(), [&](const MeasuredGemm& m) {
            return m.pass == GemmLayout::kForward && m.M == tokens && m.N == out && m.K == in;
        });
        if (known) continue;   // measured already, in another precision
        for (MeasuredGemm shape : {MeasuredGemm{GemmLayout::kForward, tokens, out, in, {}},
                                   MeasuredGemm{GemmLayout::kDgrad, tokens, in, out, {}},
                                   MeasuredGemm{GemmLayout::kWgrad, out, in, tokens, {}}}) {
            const bool wgrad = shape.pass == GemmLayout::kWgrad;
            measure(ctx, device, shape, wgrad ? Dtype::kFp32 : Dtype::kBf16);
            rates.gemms.push_back(shape);
            if (!wgrad) continue;
            MeasuredGemm bf16 = shape;
            measure(ctx, device, bf16, Dtype::kBf16);
            WgradRatio row{shape.M, shape.N, shape.K, {1, 1, 1, 1}};
            for (int mode = 0; mode < kGemmModes; mode++)
                if (bf16.us[mode] > 0) row.ratio[mode] = shape.us[mode] / bf16.us[mode];
            rates.bf16_wgrads.push_back(row);
        }
    }
}

void RateRows::add_step(const std::deque<OpCall>& calls, size_t count, double event_ms) {
    for (size_t i = 0; i < count; i++) {
        const OpCall& call = calls[i];
        if (call.transfer) continue;
        std::string name;
        for (const PlannedGemm& g : call.work.gemms)
            name += strf("%s %d ", gemm_text(g.shape).c_str(), static_cast<int>(gemm_mode(g.shape)));
        for (const PlannedOp& op : call.work.ops) name += strf("%s %lld ", op_text(op).c_str(), ll(op.bytes));
        Calls& same = calls_[name];
        same.work = call.work;
        same.us.push_back(1e3 * std::max(0.0, call.ms - event_ms));
    }
}

// Replaces the time of a matmul that was measured alone by its time within a step.
static void put_gemm(const GemmArgs& g, double us, Rates& rates) {
    if (g.layout == GemmLayout::kWgrad && g.D.dtype != Dtype::kFp32) return;
    for (MeasuredGemm& row : rates.gemms)
        if (row.pass == g.layout && row.M == g.M && row.N == g.N && row.K == g.K)
            row.us[static_cast<int>(gemm_mode(g))] = us;
}

static void put_attention(const PlannedOp& op, double us, Rates& rates) {
    const PlannedAttention& s = op.attention;
    auto row = std::find_if(rates.attention.begin(), rates.attention.end(), [&](const MeasuredAttention& a) {
        return a.dtype == op.dtype && a.B == s.B && a.NH == s.NH && a.T == s.T && a.HS == s.HS;
    });
    if (row == rates.attention.end())
        row = rates.attention.insert(row, {op.dtype, s.B, s.NH, s.T, s.HS, 0, 0, 0});
    (s.backward ? row->backward_us : s.fp8 ? row->fp8_forward_us : row->forward_us) = us;
}

static void put_op(const PlannedOp& op, double us, Rates& rates) {
    if (op.bytes == 0) return;   // times are predicted per byte
    rates.ops.push_back({op.kind, op.mode, op.dtype, static_cast<double>(op.bytes), us, op.activation});
}

void RateRows::put(Rates& rates) const {
    for (const auto& [name, calls] : calls_) {
        const auto& [gemms, ops] = calls.work;
        const double us = median_of(calls.us);
        if (gemms.size() == 1 && ops.empty()) put_gemm(gemms[0].shape, us, rates);
        if (gemms.empty() && ops.size() == 1 && ops[0].attention.HS == 0) put_op(ops[0], us, rates);
    }
    // A call of attention often includes a quantizing pass over its result, whose time is subtracted.
    for (const auto& [name, calls] : calls_) {
        const std::vector<PlannedOp>& ops = calls.work.ops;
        if (ops.empty() || ops[0].attention.HS == 0) continue;
        double us = median_of(calls.us);
        for (size_t pass = 1; pass < ops.size(); pass++) us -= predicted_op_us(ops[pass], rates);
        put_attention(ops[0], us, rates);
    }
}
