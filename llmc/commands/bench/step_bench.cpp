#include "llmc/commands/bench/step_bench.h"

#include <algorithm>

#include "llmc/base/check.h"

namespace {

OpClass class_of(const OpCall& call) {
    if (!call.work.gemms.empty()) return OpClass::kMatmul;
    for (const PlannedOp& op : call.work.ops)
        if (op.attention.HS > 0) return OpClass::kAttention;
    return OpClass::kMemory;
}

std::string name_of(const OpCall& call) {
    std::string name = call.transfer ? call.transfer : "";
    auto add = [&](const std::string& part) { name += (name.empty() ? "" : " + ") + part; };
    for (const PlannedGemm& g : call.work.gemms) add(gemm_text(g.shape));
    for (const PlannedOp& op : call.work.ops) add(op_text(op));
    return name;
}

double floor_of(const OpCall& call, const Ceilings& ceilings) {
    double ms = call.transfer ? ceilings.copy_ms(call.bytes) : 0;
    for (const PlannedGemm& g : call.work.gemms) ms += ceilings.floor_ms(g.shape);
    for (const PlannedOp& op : call.work.ops) ms += ceilings.floor_ms(op);
    return ms;
}

}  // namespace

const char* op_class_name(OpClass op_class) {
    constexpr const char* kNames[] = {"matmul", "attention", "memory-bound"};
    return kNames[static_cast<int>(op_class)];
}

void BenchRows::add_step(const std::deque<OpCall>& calls, size_t count) {
    std::map<std::pair<bool, std::string>, int64_t> seen;
    for (size_t i = 0; i < count; i++) {
        const OpCall& call = calls[i];
        const auto key = std::make_pair(call.on_side_stream, name_of(call));
        Sums& sums = sums_[key];
        sums.row.name = key.second;
        sums.row.op_class = class_of(call);
        sums.row.overlapped = call.on_side_stream;
        if (steps_ == 0) {
            sums.row.calls++;
            sums.row.floor_ms += floor_of(call, ceilings_);
            for (const PlannedOp& op : call.work.ops) sums.row.bytes += op.bytes;
        }
        sums.ms.resize(steps_ + 1);
        sums.ms[steps_] += call.ms;
        seen[key]++;
    }
    for (const auto& [key, sums] : sums_)
        CHECK(seen[key] == sums.row.calls, "%s ran %lld times in step %zu of those that are timed, %lld in the first",
              key.second.c_str(), ll(seen[key]), steps_ + 1, ll(sums.row.calls));
    steps_++;
}

std::vector<BenchRow> BenchRows::rows() const {
    std::vector<BenchRow> rows;
    for (const auto& [key, sums] : sums_) {
        rows.push_back(sums.row);
        rows.back().ms = std::max(0.0, median_of(sums.ms) - static_cast<double>(sums.row.calls) * ceilings_.event_ms);
    }
    std::stable_sort(rows.begin(), rows.end(), [](const BenchRow& a, const BenchRow& b) {
        return a.difference_ms() > b.difference_ms();
    });
    return rows;
}

double StepBench::exposed() const {
    std::vector<double> others;
    for (size_t i = 0; i < step_ms.size(); i++) others.push_back(step_ms[i] - exposed_ms[i]);
    return ms() - median_of(others);
}

BenchRow StepBench::class_total(OpClass op_class) const {
    BenchRow total;
    for (const BenchRow& row : rows) {
        if (row.overlapped || row.op_class != op_class) continue;
        total.ms += row.ms;
        total.floor_ms += row.floor_ms;
    }
    return total;
}

int64_t StepBench::calls() const {
    int64_t calls = 0;
    for (const BenchRow& row : rows) calls += row.calls;
    return calls;
}

double StepBench::gaps_ms() const {
    return ms() - exposed() - class_total(OpClass::kMatmul).ms - class_total(OpClass::kAttention).ms
           - class_total(OpClass::kMemory).ms;
}
