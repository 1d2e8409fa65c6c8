#include "llmc/train/log/fp8_monitor.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "llmc/base/fp8.h"
#include "llmc/config/schedule.h"

namespace {

// Fractions above which a tensor is reported. Current scaling saturates nothing; delayed scaling sometimes clips single
// outliers, which is harmless. Some tiny values flush to zero in every healthy run.
constexpr double kSaturatedShare = 1e-3, kFlushedShare = 0.2, kEndShare = 1e-3;
constexpr size_t kNamed = 3;   // worst tensors that a line names

double share(unsigned long long part, unsigned long long whole) {
    return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0.0;
}

float amax_of(const ScaleEntry& entry) {
    return std::bit_cast<float>(std::max(entry.amax_bits, entry.step_amax_bits));
}

std::string linear_of(const std::string& tensor) { return tensor.substr(0, tensor.rfind('.')); }

std::string bf16_advice(const std::string& linear) {
    return linear == "head" ? "leave out --fp8-lm-head" : "keep it in BF16 with --bf16-linears " + linear;
}

using Report = Fp8State::TensorReport;
using Share = std::function<double(const Report&)>;
Share share_of(unsigned long long Fp8Counts::*part) {
    return [part](const Report& report) { return share(report.counts.*part, report.counts.elems); };
}

// Without the head's dy, of which a quarter is flushed always: what its rows lose is given back (dlogits_residual).
double flushed_share(const Report& report) {
    return report.name == "head.dy" ? 0 : share(report.counts.flushed, report.counts.elems);
}

double share_at_ends(const Report& report) {
    const auto scales = block_scales_of(report.scale_bins, report.format);
    return scales ? scales->at_ends : 0;
}

// The worst tensors by one fraction: "31.down.x 0.4%, 30.down.x 0.2%". `first` = the linear of the worst one.
std::string worst(const std::vector<Report>& reports, const Share& share, double limit, std::string& first) {
    std::vector<std::pair<double, const Report*>> found;
    for (const Report& r : reports)
        if (const double s = share(r); s > limit) found.push_back({s, &r});
    std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    std::string text;
    for (size_t i = 0; i < std::min(kNamed, found.size()); i++)
        text += strf("%s%s %.2g%%", i ? ", " : "", found[i].second->name.c_str(), 100 * found[i].first);
    if (found.size() > kNamed) text += strf(" and %zu more", found.size() - kNamed);
    if (!found.empty()) first = linear_of(found[0].second->name);
    return text;
}

// The scale whose inverse has these exponent bits.
double scale_of_bin(size_t bin) { return std::ldexp(1.0, 127 - static_cast<int>(bin)); }

}  // namespace

std::string Fp8Monitor::after_first_step(const Ctx& ctx, const Fp8Plan& plan, int64_t micro_batches) {
    const int64_t executed = device::fp8_matmuls(ctx) - count_before_;
    const int64_t planned = planned_fp8_matmuls(plan, config_.recompute, micro_batches, loss_chunks(config_));
    const char* const precision = plan.on() ? "FP8" : "BF16";
    const std::string step = "first step" + (switches_precision(config_) ? strf(" in %s", precision) : "");
    const std::string batches = count_text(micro_batches, "micro-batch", "micro-batches");
    if (executed != planned) {
        FAIL(kExitFp8NotEffective, "%s was requested and is not effective: the %s (%s) ran %s, the plan has %lld",
             precision, step.c_str(), batches.c_str(), count_text(executed, "FP8 matmul").c_str(), (long long)planned);
    }
    const bool int8 = plan.on() && config_.fp8_recipe == Fp8Recipe::kInt8Forward;
    return strf("%s ran in the %s (%s), as planned%s", count_text(executed, "FP8 matmul").c_str(), step.c_str(),
                batches.c_str(), int8 ? "; those of the forward pass among them are in INT8" : "");
}

void Fp8Monitor::gather(Comm& comm, const Fp8State& state, const StagedStep& staged) const {
    if (state.report_bytes() == 0 || comm.world().ranks == 1) return;
    const auto* mine = static_cast<const char*>(staged.fp8_report);
    const auto all = comm.gather(std::string(mine, static_cast<size_t>(state.report_bytes())));
    for (size_t rank = 0; rank < all.size(); rank++)
        if (static_cast<int>(rank) != comm.world().rank) state.merge_report(staged.fp8_report, all[rank].data());
}

void Fp8Monitor::report(RunLog& log, const Fp8State& state, const StagedStep& staged, int64_t step) const {
    if (!state.on()) return;
    const std::string nonfinite = state.first_nonfinite(staged.fp8_report);
    if (!nonfinite.empty())
        log.event("warning", strf("step %lld: the first value that is not finite is in %s", (long long)step,
                                  nonfinite.c_str()));
    if (!staged.count_fp8) return;
    const auto reports = state.read_report(staged.fp8_report);
    nlohmann::ordered_json tensors = nlohmann::ordered_json::array();
    for (const auto& r : reports) {
        const std::optional<BlockScales> blocks = block_scales_of(r.scale_bins, r.format);
        nlohmann::ordered_json tensor = {
            {"name", r.name}, {"format", dtype_name(r.format)}, {"amax", exact(static_cast<double>(amax_of(r.entry)))},
            // Of the next step (delayed) or of the latest cast.
            {"quant_mul", exact(blocks ? blocks->median : static_cast<double>(r.entry.scale))},
            {"saturated", share(r.counts.saturated, r.counts.elems)},
            {"flushed", share(r.counts.flushed, r.counts.elems)}, {"nonfinite", r.counts.nonfinite}};
        if (blocks)
            tensor["block_scales"] = {{"blocks", blocks->blocks}, {"min", blocks->min}, {"median", blocks->median},
                                      {"max", blocks->max}, {"at_ends", blocks->at_ends}, {"zeros", blocks->zeros}};
        tensors.push_back(std::move(tensor));
    }
    log.record("fp8", step, {{"tensors", tensors}});
    const std::string scales = block_scales_line(reports);
    if (!scales.empty()) log.event("note", strf("step %lld: scales of blocks: %s", (long long)step, scales.c_str()));
    const std::string line = fp8_health_line(reports, plan_);
    if (!line.empty()) log.event("fp8", strf("step %lld: %s", (long long)step, line.c_str()));
}

std::optional<BlockScales> block_scales_of(const std::vector<uint64_t>& bins, Dtype format) {
    BlockScales scales;
    for (uint64_t bin : bins) scales.blocks += static_cast<int64_t>(bin);
    if (scales.blocks == 0) return {};
    const auto share_of_blocks = [&](uint64_t count) {
        return static_cast<double>(count) / static_cast<double>(scales.blocks);
    };
    const auto middle = (scales.blocks - static_cast<int64_t>(bins[kZeroBlocks]) + 1) / 2;
    int64_t seen = 0;   // blocks of smaller scales
    for (size_t bin = kZeroBlocks; bin-- > 0;) {   // from the smallest scale on
        const auto count = static_cast<int64_t>(bins[bin]);
        if (count == 0) continue;
        scales.max = scale_of_bin(bin);
        if (seen == 0) scales.min = scales.max;
        if (seen < middle && seen + count >= middle) scales.median = scales.max;
        seen += count;
    }
    // The ends are the scale of the largest finite bf16 value, and that of amaxes so small that the quotient overflows.
    const float smallest = block_scale_of(amax_bits_of(0x1.fep127f), fp8_largest(format));
    scales.at_ends = share_of_blocks(bins[static_cast<size_t>(127 - std::ilogb(smallest))] + bins[0]);
    scales.zeros = share_of_blocks(bins[kZeroBlocks]);
    return scales;
}

std::string block_scales_line(const std::vector<Report>& reports) {
    std::string text;
    for (const auto& [role, label] : {std::pair{".x", "x"}, std::pair{".dy", "dy"}, std::pair{".weight", "weights"}}) {
        std::vector<uint64_t> bins(kScaleBins);
        for (const Report& report : reports) {
            if (!report.name.ends_with(role)) continue;
            for (size_t i = 0; i < report.scale_bins.size(); i++) bins[i] += report.scale_bins[i];
        }
        // The format only matters for at_ends, which this line does not use.
        const std::optional<BlockScales> scales = block_scales_of(bins, Dtype::kE4m3);
        if (!scales || scales->zeros == 1) continue;
        text += strf("%s%s 2^%d to 2^%d, median 2^%d", text.empty() ? "" : "; ", label, std::ilogb(scales->min),
                     std::ilogb(scales->max), std::ilogb(scales->median));
    }
    return text;
}

std::string fp8_health_line(const std::vector<Report>& reports, const Fp8Plan& plan) {
    std::vector<std::string> clauses;
    const auto add = [&](const std::string& what, const Share& share, double limit, const char* before_advice) {
        std::string linear;
        const std::string tensors = worst(reports, share, limit, linear);
        if (tensors.empty()) return;
        clauses.push_back(what + tensors + (before_advice ? before_advice + bf16_advice(linear) : ""));
    };
    add("saturated: ", share_of(&Fp8Counts::saturated), kSaturatedShare,
        plan.row().history ? "; raise --fp8-margin, or " : "; ");
    add("flushed to zero: ", flushed_share, kFlushedShare, "; ");
    add("block scales at an end of their range: ", share_at_ends, kEndShare, "; ");
    add("not finite: ", share_of(&Fp8Counts::nonfinite), 0.0, nullptr);
    return list_text(clauses, " | ");
}
