#include "llmc/train/run/rank_consistency.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>

namespace {

constexpr const char* kFormNames[kParamForms] = {"linears in FP8", "linears in BF16", "others"};

bool is_reused(const Fp8State& state, const std::string& tensor) {
    return state.plan().row().history || tensor.ends_with(".weight");
}

}  // namespace

void check_scales(Comm& comm, const Fp8State& state, const void* fp8_report, int64_t step) {
    if (!state.on() || comm.world().ranks == 1) return;
    std::vector<std::string> names;
    std::vector<float> mine;
    for (const Fp8State::TensorReport& report : state.read_report(fp8_report)) {
        if (!is_reused(state, report.name)) continue;
        names.push_back(report.name);
        mine.push_back(report.entry.scale);
    }
    Xxh3 hash;
    hash.update(mine.data(), static_cast<int64_t>(mine.size() * sizeof(float)));
    const std::vector<std::string> hashes = comm.gather(hash.digest());
    if (std::all_of(hashes.begin(), hashes.end(), [&](const std::string& hash) { return hash == hashes[0]; })) return;
    const std::vector<std::vector<float>> all = gather_values(comm, mine);
    for (size_t i = 0; i < names.size(); i++)
        for (size_t rank = 1; rank < all.size(); rank++)
            if (std::bit_cast<uint32_t>(all[0][i]) != std::bit_cast<uint32_t>(all[rank][i]))
                FAIL(kExitBug, "step %lld: FP8 scales differ between ranks: the scale of %s is %.9g on rank 0 and %.9g "
                     "on rank %zu", (long long)step, names[i].c_str(), static_cast<double>(all[0][i]),
                     static_cast<double>(all[rank][i]), rank);
}

std::vector<GradCommRecord> grad_comm_records(const std::vector<GradCommReport>& reports) {
    std::vector<GradCommRecord> records;
    for (size_t form = 0; form < kParamForms; form++) {
        double sums[4] = {};
        Fp8Counts counts{};
        for (const GradCommReport& report : reports) {
            for (int i = 0; i < 4; i++) sums[i] += report.sums[form][i];
            counts.elems += report.counts[form].elems;
            counts.saturated += report.counts[form].saturated;
            counts.flushed += report.counts[form].flushed;
            counts.nonfinite += report.counts[form].nonfinite;
        }
        if (counts.elems == 0) continue;   // none of this kind was reduced in FP8
        const auto elems = static_cast<double>(counts.elems);
        const bool zeros = sums[0] == 0 && sums[1] == 0;
        records.push_back({.name = kFormNames[form], .relative_l2 = zeros ? 0 : std::sqrt(sums[3] / sums[0]),
                           .cosine = zeros ? 1 : sums[2] / std::sqrt(sums[0] * sums[1]),
                           .saturated = static_cast<double>(counts.saturated) / elems,
                           .flushed = static_cast<double>(counts.flushed) / elems,
                           .nonfinite = static_cast<int64_t>(counts.nonfinite)});
    }
    return records;
}

void report_grad_comm(RunLog& log, Comm& comm, const StagedStep& staged, int64_t step) {
    if (!staged.grad_comm_report || !staged.count_fp8) return;
    std::vector<GradCommReport> reports;
    const auto* mine = static_cast<const GradCommReport*>(staged.grad_comm_report);
    for (const auto& report : gather_values<GradCommReport>(comm, {*mine})) reports.push_back(report[0]);
    nlohmann::ordered_json list = nlohmann::ordered_json::array();
    for (const GradCommRecord& r : grad_comm_records(reports))
        list.push_back({{"name", r.name}, {"relative_l2", exact(r.relative_l2)}, {"cosine", exact(r.cosine)},
                        {"saturated", r.saturated}, {"flushed", r.flushed}, {"nonfinite", r.nonfinite}});
    log.record("grad_wire", step, {{"gradients", list}});
}

std::string share_matmul_plans(Ctx& ctx, Comm& comm) {
    if (comm.world().ranks == 1) return "";
    const std::vector<std::string> plans = comm.gather(comm.root() ? device::gemm_export_plans(ctx) : "");
    const std::vector<std::string> reasons = comm.gather(comm.root() ? "" : device::gemm_import_plans(ctx, plans[0]));
    for (size_t rank = 0; rank < reasons.size(); rank++)
        if (!reasons[rank].empty())
            return strf("rank %zu keeps its own, so the resumed run may differ in last bits: %s", rank,
                        reasons[rank].c_str());
    return "";
}
