#include "llmc/commands/bench/bench_table.h"

#include <algorithm>

double Ceilings::floor_ms(double bytes, double flop, Dtype dtype) const {
    const auto rate = flops.find(dtype_bytes(dtype) == 1 ? Dtype::kE4m3 : dtype);
    return 1e3 * std::max(bytes / copy_rate, rate == flops.end() ? 0 : flop / rate->second);
}

BenchRow row_of(const OpCall& call, const Ceilings& ceilings) {
    BenchRow row{"memory-bound", ""};
    const auto add = [&](const std::string& name, int64_t bytes, double flop, Dtype dtype) {
        row.name += (row.name.empty() ? "" : " + ") + name;
        row.bytes += real(bytes);
        row.flop += flop;
        row.floor_ms += ceilings.floor_ms(real(bytes), flop, dtype);
    };
    if (call.transfer) add(call.transfer, call.bytes, 0, Dtype::kBf16);
    for (const PlannedGemm& gemm : call.work.gemms) {
        const GemmArgs& g = gemm.shape;
        const bool wgrad = g.layout == GemmLayout::kWgrad;
        const int64_t matrices = std::max<int64_t>(1, gemm.experts);   // each has weights, or gradients of them
        const int64_t results = (wgrad ? matrices : 1) * g.M * g.N * dtype_bytes(g.D.dtype) * (g.accumulate ? 2 : 1);
        const int64_t operands = (g.M + (wgrad ? 1 : matrices) * g.N) * g.K * dtype_bytes(g.A.dtype);
        row.part = "matmul";
        add(gemm_text(g) + (gemm.experts > 0 ? strf(", %lld experts", ll(gemm.experts)) : ""),
            g.count() * (operands + results), 2 * real(g.count()) * real(g.M) * real(g.N) * real(g.K), g.A.dtype);
    }
    for (const PlannedOp& op : call.work.ops) {
        const PlannedAttention& s = op.attention;
        if (s.HS > 0) row.part = "attention";
        const double pairs = s.share() * real(s.B * s.NH) * real(s.T) * real(s.T);
        add(op_text(op), op.bytes, (s.backward ? 5 : 2) * pairs * real(s.HS),
            s.fp8 ? Dtype::kE4m3 : op.dtype);
    }
    if (call.on_side_stream) row.part = "overlapped";
    return row;
}

void BenchTable::add_timed_step(double ms, const std::deque<OpCall>& calls, size_t count) {
    timed_steps_ms_.push_back(ms);
    calls_ += static_cast<int64_t>(count);
    for (size_t i = 0; i < count; i++) {
        const BenchRow call = row_of(calls[i], ceilings_);
        BenchRow& row = operations_.try_emplace({call.part, call.name}, BenchRow{call.part, call.name}).first->second;
        row.calls++;
        row.ms += calls[i].ms;
        row.floor_ms += call.floor_ms;
        row.bytes += call.bytes;
        row.flop += call.flop;
    }
}

std::vector<BenchRow> BenchTable::rows() const {
    const auto fastest = [](const std::vector<double>& ms) { return *std::min_element(ms.begin(), ms.end()); };
    const auto steps = static_cast<int64_t>(timed_steps_ms_.size());
    const double event_ms = std::max(0.0, fastest(timed_steps_ms_) - fastest(steps_ms_)) * real(steps) / real(calls_);
    std::vector<BenchRow> rows, sums = {{"step", "matmul"}, {"step", "attention"}, {"step", "memory-bound"}};
    BenchRow step{"step", "step"}, gaps{"step", "gaps"}, exposed{"step", "exposed communication"};
    for (auto [key, row] : operations_) {
        row.ms = std::max(0.0, row.ms - event_ms * real(row.calls));
        for (double* sum : {&row.ms, &row.floor_ms, &row.bytes, &row.flop}) *sum /= real(steps);
        row.calls /= steps;
        rows.push_back(row);
        for (BenchRow& sum : sums)
            if (sum.name == row.part) sum.ms += row.ms, sum.floor_ms += row.floor_ms;
    }
    std::stable_sort(rows.begin(), rows.end(), [](const BenchRow& a, const BenchRow& b) {
        return a.ms - a.floor_ms > b.ms - b.floor_ms;
    });
    exposed.ms = median_of(exposed_ms_);
    step.ms = step_ms();
    gaps.ms = step.ms - exposed.ms;
    for (const BenchRow& sum : sums) gaps.ms -= sum.ms, step.floor_ms += sum.floor_ms;
    rows.insert(rows.begin(), ceilings_.rows.begin(), ceilings_.rows.end());
    rows.insert(rows.end(), sums.begin(), sums.end());
    rows.insert(rows.end(), {exposed, gaps, step});
    return rows;
}
