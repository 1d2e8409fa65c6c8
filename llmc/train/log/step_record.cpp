#include "llmc/train/log/step_record.h"

#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "llmc/base/check.h"

namespace {

using OrderedJson = nlohmann::ordered_json;
using Step = StepRecord;
using Gpu = GpuRecord;

bool positive(double x) { return std::isfinite(x) && x > 0; }

// Three significant digits: 845, 2.04k, 144k, 1.23M.
std::string rate(double per_second) {
    if (!positive(per_second)) return "  n/a";
    const char* unit = "";
    for (const char* larger : {"k", "M", "G"}) {
        if (per_second < 999.5) break;
        per_second /= 1e3;
        unit = larger;
    }
    const int decimals = per_second < 9.995 ? 2 : per_second < 99.95 ? 1 : 0;
    return strf("%5s", strf("%.*f%s", decimals, per_second, unit).c_str());
}

std::string clock_text(double seconds) {
    if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e12) return "n/a";
    const long long whole = std::llround(seconds);
    return strf("%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60, whole % 60);
}

// The MFU, or tokens per second where the peak of the device is not known.
std::string efficiency(const Step& r) {
    if (r.mfu && std::isfinite(*r.mfu)) return ", " + figure(true, 2, "%.0f", 100 * *r.mfu) + "% MFU";
    return ", " + rate(r.tokens_per_second) + " tok/s";
}

constexpr StepField kStepFields[] = {
    {"step", &Step::step, "steps done, from 1 on", [](const Step& r) { return strf("step %lld", ll(r.step)); }},
    {"train_iters", &Step::train_iters, "steps of the whole run",
     [](const Step& r) { return r.train_iters > 0 ? strf("/%lld", ll(r.train_iters)) : ""; }},
    {"loss", &Step::loss, "mean over the counted targets of the step",
     [](const Step& r) { return " | loss " + figure(true, 6, "%.4f", r.loss); }},
    {"z_loss", &Step::z_loss, "`--z-loss` times the mean square of their log-sum-exps, not in `loss`; null without it",
     [](const Step& r) { return r.z_loss ? strf(" + z %.4f", *r.z_loss) : ""; }},
    {"grad_norm", &Step::grad_norm, "global L2 norm of the gradients before clipping",
     [](const Step& r) { return " | norm " + figure(true, 4, "%.2f", r.grad_norm); }},
    {"grad_mul", &Step::grad_mul, "what clipping multiplied the gradients by"},
    {"lr", &Step::lr, "learning rate"},
    {"step_seconds", &Step::step_seconds, "wall time of the step",
     [](const Step& r) { return " | " + figure(positive(r.step_seconds), 5, "%.3f", r.step_seconds) + " s/it"; }},
    {"forward_seconds", &Step::forward_seconds, "forward pass of the first micro-batch"},
    {"backward_seconds", &Step::backward_seconds, "its loss and backward pass"},
    {"exposed_comm_seconds", &Step::exposed_comm_seconds,
     "communication that compute did not hide; null for one rank"},
    {"tokens_per_second", &Step::tokens_per_second, "of all ranks"},
    {"samples_per_second", &Step::samples_per_second, "sequences per second of all ranks"},
    {"mfu", &Step::mfu, "model FLOPs of the step, of what the GPUs' BF16 peak allows; null if the peak is not known",
     efficiency},
    {"memory_gib", &Step::memory_gib, "memory of this process on rank 0's device"},
    {"eta_seconds", &Step::eta_seconds, "time left, from the mean of the last 20 steps",
     [](const Step& r) { return " | eta " + clock_text(r.eta_seconds); }},
    {"samples", &Step::samples, "sequences read since the start of training"},
    {"tokens", &Step::tokens, "their tokens"},
    {"counted_tokens", &Step::counted_tokens, "targets of the step that no loss mask ignores"},
    {"skipped", &Step::skipped, "whether the update was skipped: a gradient was not finite, or `norm_skipped`",
     [](const Step& r) {
         if (r.norm_skipped) return strf(" | norm above %.3g: update skipped", r.norm_limit.value_or(0));
         return std::string(r.skipped ? " | not finite: update skipped" : "");
     }},
    {"norm_skipped", &Step::norm_skipped, "whether it was skipped because `grad_norm` exceeded `norm_limit`"},
    {"norm_limit", &Step::norm_limit, "`--skip-grad-norm` times the median of earlier norms; null if there is none"},
    {"max_logit", &Step::max_logit, "the largest attention logit of the step, at least 0; null without `--qk-clip`"},
    {"clipped_heads", &Step::clipped_heads, "heads that `--qk-clip` scaled after the step"},
    {"router_loss", &Step::router_loss,
     "auxiliary and z-losses of all routers with their weights, over the step, not in `loss`; null without experts"},
    {"router_entropy", &Step::router_entropy, "of a token's probabilities of experts, the mean over tokens and layers"},
    {"expert_load", &Step::expert_load,
     "rows of the fullest expert of any layer, 1 if all experts of its layer had the same number"},
    {"rank_load", &Step::rank_load,
     "rows of the experts of a rank in a micro-batch, the most of any layer and rank, 1 if all experts had the same "
     "number; null without `--expert-parallel`"},
    {"dead_experts", &Step::dead_experts, "experts of all layers that no token of the step went to"},
    {"skips", &Step::skips, "skipped steps since the start of training"},
    {"norm_skips", &Step::norm_skips, "those of them with `norm_skipped`"},
    {"gpu_utilization", &Gpu::utilization, "percent of the time in which a kernel ran, mean of the GPUs"},
    {"power_w", &Gpu::power_w, "watts of one GPU, mean of the GPUs"},
    {"sm_clock_mhz", &Gpu::sm_clock_mhz, "mean of the GPUs"},
    {"gpu_temperature_c", &Gpu::temperature_c, "of the hottest GPU"},
    {"gpu_memory_gib", &Gpu::memory_gib, "of the fullest GPU, with the memory of all its processes"},
    {"energy_j", &Gpu::energy_j, "joules by the GPUs' energy counters, summed"},
    {"joules_per_token", &Gpu::joules_per_token, "`energy_j` divided by the tokens of its steps"},
    {"throttled_by", &Gpu::throttled_by, "every reason that lowered the clocks, for instance `power cap`, or `none`"},
};

// Adds a field, in a way that its type decides.
struct Add {
    OrderedJson& json;
    const StepRecord& record;
    const char* name;
    void operator()(int64_t Step::*field) const { json[name] = record.*field; }
    void operator()(bool Step::*field) const { json[name] = record.*field; }
    void operator()(double Step::*field) const { json[name] = exact(record.*field); }
    void operator()(std::optional<double> Step::*field) const {
        json[name] = record.*field ? exact(*(record.*field)) : OrderedJson();
    }
    void operator()(std::optional<double> Gpu::*field) const {
        if (const std::optional<double>& value = record.gpu.*field) json[name] = exact(*value);
    }
    void operator()(std::string Gpu::*field) const {
        if (const std::string& value = record.gpu.*field; !value.empty()) json[name] = value;
    }
};

}  // namespace

std::span<const StepField> step_fields() { return kStepFields; }

OrderedJson step_json(const StepRecord& record) {
    OrderedJson json = {{"type", "step"}};
    for (const StepField& field : kStepFields) std::visit(Add{json, record, field.name}, field.member);
    return json;
}

std::string step_line(const StepRecord& record) {
    std::string line;
    for (const StepField& field : kStepFields)
        if (field.print) line += field.print(record);
    return line + (record.synthetic ? " | synthetic data" : "");
}

OrderedJson exact(double x) {
    if (std::isnan(x)) return "nan";
    if (std::isinf(x)) return x > 0 ? "inf" : "-inf";
    return x;
}

std::string figure(bool known, int width, const char* format, double x) {
    char text[64] = "n/a";
    if (known) std::snprintf(text, sizeof(text), format, std::isnan(x) ? std::fabs(x) : x);   // never "-nan"
    return strf("%*s", width, text);
}
