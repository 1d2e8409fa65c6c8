// What `bench` prints, as text and as JSON.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "llmc/base/check.h"
#include "llmc/base/text.h"
#include "llmc/commands/bench/step_bench.h"

namespace {

using OrderedJson = nlohmann::ordered_json;

double least(const std::vector<double>& values) { return *std::min_element(values.begin(), values.end()); }
double most(const std::vector<double>& values) { return *std::max_element(values.begin(), values.end()); }

// "BF16", "tensorwise, ends BF16".
std::string bench_recipe(const Config& c) {
    const char* names[] = {"BF16", "delayed", "tensorwise", "blockwise"};
    std::string text = names[static_cast<int>(c.fp8_recipe)];
    if (c.fp8_recipe == Fp8Recipe::kNone && c.dtype != Dtype::kBf16) text = dtype_name(c.dtype);
    if (c.first_last_layers_bf16) text += ", ends BF16";
    if (c.fp8_lm_head) text += ", FP8 head";
    if (c.fp8_attention) text += ", FP8 attention";
    return text;
}

std::string ceilings_text(const Ceilings& c) {
    std::string text = strf("ceilings    device copy %.0f GB/s (read + written), host link %.1f GB/s each way",
                            1e-9 * c.copy_rate, 1e-9 * c.host_link);
    for (const auto& [dtype, flops] : c.flops)
        text += strf(", %s matmul %.4g TFLOP/s", dtype_name(dtype), 1e-12 * flops);
    return text + (c.flops.empty() ? "\n" : strf(" (%lld^3)\n", ll(c.matmul_size)));
}

std::string clocks_text(const GpuSamples& c) {
    const std::optional<double> mhz = c.mean(&GpuState::sm_mhz);
    if (!mhz)
        return strf("clocks      not known: %s\n", c.error.empty() ? "this GPU does not report them" : c.error.c_str());
    return strf("clocks      SM %.0f MHz (%lld to %lld) of %lld, %.0f W, %lld samples; throttled by: %s\n",
                *mhz, ll(*c.lowest(&GpuState::sm_mhz)), ll(*c.highest(&GpuState::sm_mhz)),
                ll(c.highest(&GpuState::max_sm_mhz).value_or(0)), 1e-3 * c.mean(&GpuState::milliwatts).value_or(0),
                ll(static_cast<int64_t>(c.states.size())), throttle_text(c.throttle().value_or(0)).c_str());
}

std::string step_text(const StepBench& b) {
    std::string text = strf("step        %.3f ms, median of %zu (%.3f to %.3f): %.4g s/it, %.0f tokens/s", b.ms(),
                            b.step_ms.size(), least(b.step_ms), most(b.step_ms), 1e-3 * b.ms(), b.tokens_per_second());
    if (b.mfu() > 0) text += strf(", MFU %.1f %%", 100 * b.mfu());
    const double micro_batch = median_of(b.micro_batch_ms);
    text += strf("\nmicro-batch %.3f ms; %.1f %% of the step is in micro-batches; forward pass of the first %.3f ms, "
                 "loss and backward pass %.3f ms", micro_batch, 100 * micro_batch * b.micro_batches / b.ms(),
                 median_of(b.forward_ms), median_of(b.backward_ms));
    const double timed = median_of(b.timed_step_ms), calls = static_cast<double>(std::max<int64_t>(b.calls(), 1));
    text += strf("\nevents      with an event before and after each of %lld calls a step takes %.3f ms, %+.2f us per "
                 "call; %.2f us are\n            subtracted from each call for its events\n",
                 ll(b.calls()), timed, 1e3 * (timed - b.ms()) / calls, 1e3 * b.ceilings.event_ms);
    return text;
}

std::string row_text(const std::string& name, const std::string& calls, double ms, double floor_ms, double step_ms) {
    return strf("  %-70s %6s %10.3f %10.3f %10.3f %6.1f\n", name.c_str(), calls.c_str(), ms, floor_ms, ms - floor_ms,
                100 * ms / step_ms);
}

std::string table_text(const StepBench& b) {
    std::string text = strf("  %-70s %6s %10s %10s %10s %6s\n", "of one step, by difference", "calls", "ms", "floor",
                            "difference", "%"), overlapped;
    for (const BenchRow& row : b.rows)
        (row.overlapped ? overlapped : text) +=
            row_text(row.name, std::to_string(row.calls), row.ms, row.floor_ms, b.ms());
    text += "totals\n";
    double floors = 0;
    for (OpClass op_class : kOpClasses) {
        const BenchRow total = b.class_total(op_class);
        floors += total.floor_ms;
        text += row_text(op_class_name(op_class), "", total.ms, total.floor_ms, b.ms());
    }
    text += row_text("exposed communication", "", b.exposed(), 0, b.ms());
    text += row_text("gaps", "", b.gaps_ms(), 0, b.ms());
    text += row_text("step", "", b.ms(), floors, b.ms());
    return overlapped.empty() ? text : text + "on the communication stream, overlapped with compute\n" + overlapped;
}

OrderedJson row_json(const BenchRow& row) {
    return {{"name", row.name}, {"class", op_class_name(row.op_class)}, {"overlapped", row.overlapped},
            {"calls", row.calls}, {"ms", row.ms}, {"floor_ms", row.floor_ms}, {"bytes", row.bytes},
            {"difference_ms", row.difference_ms()}};
}

OrderedJson totals_json(const StepBench& b) {
    OrderedJson totals = OrderedJson::object();
    for (OpClass op_class : kOpClasses) {
        const BenchRow total = b.class_total(op_class);
        totals[op_class_name(op_class)] = {{"ms", total.ms}, {"floor_ms", total.floor_ms}};
    }
    totals["exposed communication"] = {{"ms", b.exposed()}, {"floor_ms", 0}};
    totals["gaps"] = {{"ms", b.gaps_ms()}, {"floor_ms", 0}};
    return totals;
}

}  // namespace

std::string bench_text(const BenchSubject& subject, const StepBench& b) {
    const Config& c = subject.config;
    std::string text = strf("bench       %s, %s, T %lld, micro-batch %lld, global batch %lld, %s\n",
                            c.model.c_str(), bench_recipe(c).c_str(), ll(c.seq_length), ll(c.micro_batch_size),
                            ll(c.global_batch_size), count_text(subject.ranks, "rank").c_str());
    text += strf("device      %s, %s, commit %s\n", subject.device.name.c_str(),
                 subject.device.matmul_library.c_str(), subject.commit.c_str());
    text += ceilings_text(b.ceilings) + clocks_text(b.clocks) + step_text(b);
    text += "floors      bytes at the rate of a copy, FLOPs at the rate of a matmul of their dtype; attention: half of "
            "T x T, at the rate of a matmul\n";
    text += table_text(b);
    for (const std::string& note : subject.notes) text += "note: " + note + "\n";
    return text;
}

std::string bench_json(const BenchSubject& subject, const StepBench& b) {
    OrderedJson flops = OrderedJson::object(), rows = OrderedJson::array();
    for (const auto& [dtype, rate] : b.ceilings.flops) flops[dtype_name(dtype)] = rate;
    for (const BenchRow& row : b.rows) rows.push_back(row_json(row));
    const OrderedJson json = {
        {"type", "bench"},
        {"config", OrderedJson::parse(config_to_json(subject.config))},
        {"recipe", bench_recipe(subject.config)},
        {"device", subject.device.name},
        {"matmul_library", subject.device.matmul_library},
        {"commit", subject.commit},
        {"ranks", subject.ranks},
        {"ceilings", {{"copy_bytes_per_s", b.ceilings.copy_rate},
                      {"host_link_bytes_per_s", b.ceilings.host_link}, {"flops", flops},
                      {"matmul_size", b.ceilings.matmul_size}, {"event_ms", b.ceilings.event_ms}}},
        {"clocks", {{"samples", b.clocks.states.size()}, {"sm_mhz", b.clocks.mean(&GpuState::sm_mhz).value_or(0)},
                    {"least_sm_mhz", b.clocks.lowest(&GpuState::sm_mhz).value_or(0)},
                    {"most_sm_mhz", b.clocks.highest(&GpuState::sm_mhz).value_or(0)},
                    {"max_sm_mhz", b.clocks.highest(&GpuState::max_sm_mhz).value_or(0)},
                    {"watts", 1e-3 * b.clocks.mean(&GpuState::milliwatts).value_or(0)},
                    {"throttled_by", throttle_text(b.clocks.throttle().value_or(0))},
                    {"error", b.clocks.error}}},
        {"step_ms", b.ms()},
        {"steps_ms", b.step_ms},
        {"micro_batch_ms", median_of(b.micro_batch_ms)},
        {"forward_ms", median_of(b.forward_ms)},
        {"backward_ms", median_of(b.backward_ms)},
        {"timed_steps_ms", b.timed_step_ms},
        {"tokens_per_second", b.tokens_per_second()},
        {"mfu", b.mfu() > 0 ? OrderedJson(b.mfu()) : OrderedJson(nullptr)},
        {"rows", rows},
        {"totals", totals_json(b)},
        {"notes", subject.notes},
    };
    return json.dump(1) + "\n";
}
