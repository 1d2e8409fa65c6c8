// Step times that `plan` predicts, beside measured ones.
#include "tests/support/plan_test.h"

#include <cmath>
#include <cstdlib>

#include "llmc/perf/rates.h"
#include "llmc/perf/step_time.h"

namespace {

// A step time that was measured on an H200 with the kernels of that date.
struct MeasuredStep {
    const char* name;
    const char* family;
    std::vector<Words> words;
    double ms;
    double gib = 0;          // memory in use according to the driver; 0: not in the tables
    double within = 0.05;
};

const Words kSmall = {"--model", "llama3-small", "--micro-batch-size", "8", "--global-batch-size", "64"};
const Words kTensorwise = {"--fp8-recipe", "tensorwise"}, kBlockwise = {"--fp8-recipe", "blockwise"},
            kEnds = {"--first-last-layers-bf16"}, kSpeedup = {"--fp8-min-speedup", "1"},
            kSixteen = {"--global-batch-size", "32"}, kOne = {"--global-batch-size", "2", "--grad-comm-dtype", "bf16"};

// GiB that two ranks took more when they gathered the weights of FP8 linears in BF16: speed-1 and speed-1-gather8 in
// dev/results/2026-11-21-h200-zero.md.
constexpr double kBf16Gather = 14.67 - 14.53;

// From dev/results/2026-11-21-h200-fp8-small.md and -zero.md: configurations that were not measured again. For two
// ranks with one micro-batch each, which hides little communication, the tolerance is 8 %.
const std::vector<MeasuredStep> kMeasuredSteps = {
    {"small, 16 micro-batches of 1", "llama", {kTwo, {"--ranks", "1", "--global-batch-size", "16"}}, 289.66, 19.46},
    {"two ranks, FP32 gradients", "llama", {kTwo, kSixteen}, 295.98, 13.70 - kBf16Gather},
    {"two ranks, BF16 gradients", "llama", {kTwo, kSixteen, {"--grad-comm-dtype", "bf16"}}, 296.07,
     14.68 - kBf16Gather},
    {"two ranks, one micro-batch", "llama", {kTwo, kOne}, 30.19, 14.54, 0.08},
    {"the same, no overlap", "llama", {kTwo, kOne, {"--overlap", "off"}}, 35.06, 14.68 - kBf16Gather, 0.08},
    {"the same, all have all", "llama", {kTwo, kOne, {"--zero", "0"}}, 36.14, 20.44, 0.08},
};

// From dev/results/2026-11-22-h200-tables/, -zero.md and 2026-11-24-two-gpus.md, measured after the rates of matmuls.
const Words k20B = {"--model", "llama3-8B", "--hidden-size", "6144", "--num-layers", "48", "--ffn-hidden-size", "16384",
                    "--num-attention-heads", "48", "--num-query-groups", "8", "--seq-length", "8192",
                    "--micro-batch-size", "1", "--global-batch-size", "8", "--moment-dtype", "bf16", "--grad-dtype",
                    "bf16", "--recompute", "block", "--loss-chunk", "2048"},
            kZero2 = {"--zero", "2", "--grad-shard-dtype", "bf16"},
            kZero3 = {"--zero", "3", "--grad-shard-dtype", "bf16"};
const Words kTwo8 = {"--fp8-recipe", "delayed", "--ranks", "2"},
            kOne8 = {"--global-batch-size", "2", "--grad-comm-dtype", "bf16"};
const std::vector<MeasuredStep> kStepsAfterRates = {
    {"8B BF16", "llama", {kLlama8}, 2823, 126.07}, {"8B delayed", "llama", {kLlama8, kDelayed}, 1907, 121.63},
    {"8B tensorwise", "llama", {kLlama8, kTensorwise}, 1979, 121.63},
    {"8B tensorwise, ends BF16", "llama", {kLlama8, kTensorwise, kEnds}, 2031, 121.91},
    {"8B blockwise", "llama", {kLlama8, kBlockwise}, 2171, 121.84},
    {"8B delayed, 16 micro-batches", "llama", {kLlama8, kDelayed, {"--global-batch-size", "16"}}, 7564, 121.63},
    {"8B, two ranks", "llama", {kLlama8, kTwo8, {"--global-batch-size", "32", "--grad-comm-dtype", "bf16"}}, 7583,
     107.95},
    {"8B, two ranks, one micro-batch", "llama", {kLlama8, kTwo8, kOne8}, 552.2, 107.95, 0.08},
    {"the same, no overlap", "llama", {kLlama8, kTwo8, kOne8, {"--overlap", "off"}}, 581.9, 107.95, 0.08},
    {"8B, two ranks, 8 micro-batches", "llama", {kLlama8, kTwo8, {"--global-batch-size", "16"}}, 3775, 107.95},
    {"the same, ZeRO-2", "llama", {kLlama8, kTwo8, {"--global-batch-size", "16"}, kZero2}, 3902, 87.05},
    {"the same, ZeRO-3", "llama", {kLlama8, kTwo8, {"--global-batch-size", "16"}, kZero3}, 3957, 77.70},
    {"20B, two ranks, ZeRO-3", "llama", {k20B, kTwo8, kZero3}, 5863, 118.3},
    {"124M BF16", "gpt2", {kGpt2}, 850.6, 26.75},
    {"124M delayed", "gpt2", {kGpt2, kDelayed, kSpeedup}, 687.0, 24.03},
    {"124M tensorwise", "gpt2", {kGpt2, kTensorwise, kSpeedup}, 736.9, 24.03},
    {"124M tensorwise, ends BF16", "gpt2", {kGpt2, kTensorwise, kSpeedup, kEnds}, 752.7, 24.50},
    // With --fp8-min-speedup 1, whose prediction of that time left all linears in FP8.
    {"124M blockwise", "gpt2", {kGpt2, kBlockwise}, 784.2, 24.16}, {"small BF16", "llama", {kSmall}, 1145, 32.89},
    {"small delayed", "llama", {kSmall, kDelayed, kSpeedup}, 859.9, 31.57},
    {"small tensorwise", "llama", {kSmall, kTensorwise, kSpeedup}, 898.2, 31.57},
    {"small tensorwise, ends BF16", "llama", {kSmall, kTensorwise, kSpeedup, kEnds}, 935.3, 31.80},
    {"small blockwise", "llama", {kSmall, kBlockwise, kSpeedup}, 952.2, 31.64},
};

// From dev/results/2026-11-26-h200-attention128/, GPT-2 from 2026-11-26-h200-attention64/ and blockwise scaling from
// 2026-11-26-h200-blockwise/ (8B: the mean of two GPUs), with the present kernels.
const Words kSixteenBatches = {"--global-batch-size", "16"};
const std::vector<MeasuredStep> kPresentSteps = {
    {"8B BF16, 16 micro-batches", "llama", {kLlama8, kSixteenBatches}, 10743},
    {"8B delayed, 16 micro-batches", "llama", {kLlama8, kDelayed, kSixteenBatches}, 7140},
    {"8B tensorwise, 16 micro-batches", "llama", {kLlama8, kTensorwise, kSixteenBatches}, 7441},
    {"8B blockwise, 16 micro-batches", "llama", {kLlama8, kBlockwise, kSixteenBatches}, 7854},
    {"124M BF16", "gpt2", {kGpt2}, 798.7}, {"124M delayed", "gpt2", {kGpt2, kDelayed}, 658.6},
    {"124M blockwise", "gpt2", {kGpt2, kBlockwise}, 743.2}, {"small BF16", "llama", {kSmall}, 1096.6},
    {"small delayed", "llama", {kSmall, kDelayed}, 823.2}, {"small blockwise", "llama", {kSmall, kBlockwise}, 907.0},
};

// bench_attention at commit 3e8874e (dev/results/2026-11-21-h200-bf16.md), the kernels of kMeasuredSteps.
const std::vector<MeasuredAttention> kFirstAttention = {{Dtype::kBf16, 1, 32, 8192, 128, 1383.7, 5260.0, 0},
                                                        {Dtype::kBf16, 8, 16, 2048, 128, 390.9, 1476.2, 0}};
// dev/results/2026-11-22-h200-attention-rates.txt, the kernels of kStepsAfterRates.
const std::vector<MeasuredAttention> kSecondAttention = {{Dtype::kBf16, 1, 32, 8192, 128, 855.0, 2647.5, 693.5},
                                                         {Dtype::kBf16, 8, 16, 2048, 128, 247.9, 814.7, 212.4},
                                                         {Dtype::kBf16, 64, 12, 1024, 64, 282.1, 914.7, 318.9}};

const std::vector<MeasuredAttention> kPresentAttention = {};   // that of the rates

// The given rates, or those with other attention kernels and the custom blockwise kernel of that time: 1.04 times as
// fast as the library for forward and dgrad, where the present one is 1.11 times as fast, and none for weight
// gradients, where it is 1.07 times as fast.
Rates rates_with(const std::vector<MeasuredAttention>& attention, Rates rates) {
    if (attention.empty()) return rates;
    rates.attention = attention;
    for (GemmLayout pass : {GemmLayout::kForward, GemmLayout::kDgrad, GemmLayout::kWgrad}) {
        GemmRate& rate = rates.gemms[static_cast<size_t>(GemmMode::kFp8Block)][static_cast<size_t>(pass)];
        const double slower = pass == GemmLayout::kWgrad ? 1.07 : 1.11 / 1.04;
        rate = {rate.fixed_us * slower, rate.tflops / slower, rate.output_us * slower};
    }
    return rates;
}

}  // namespace

TEST_CASE("plan: step times that were measured are predicted within 5 %, memory within 1 %") {
    const struct {
        const std::vector<MeasuredStep>& steps;
        const std::vector<MeasuredAttention>& attention;
    } all[] = {{kMeasuredSteps, kFirstAttention}, {kStepsAfterRates, kSecondAttention},
               {kPresentSteps, kPresentAttention}};
    for (const auto& [steps, attention] : all) {
        const Rates rates = rates_with(attention, measured_rates());
        for (const MeasuredStep& step : steps) {
            const Config config = planned_config(step.family, last_words(step.words));
            const MemoryPlan plan = planned(config);
            const double ms = predict_step(config, plan, measured_gpu(), rates).total_ms();
            const double off = ms / step.ms - 1;
            CAPTURE(step.name, off);
            CHECK(std::abs(off) < step.within);
            const double gib = static_cast<double>(plan.arena_bytes) * 0x1p-30;
            if (step.gib > 0) CHECK(gib == doctest::Approx(step.gib).epsilon(0.01));
            if (std::getenv("PLAN_TABLE")) MESSAGE(strf("%-30s %8.1f %8.1f %+5.1f", step.name, step.ms, ms, 100 * off));
        }
    }
}

TEST_CASE("plan: steps of an H100 are predicted from its own rates within 5 %") {
    const Words small = {"--model", "llama3-small", "--micro-batch-size", "8", "--global-batch-size"};
    const Words gpt2 = {"--model", "gpt2-124M", "--micro-batch-size"};
    const Words layers6 = {"--model", "llama3-8B", "--num-layers", "6", "--global-batch-size", "2"};
    const Words layers14 = {"--model", "llama3-8B", "--num-layers", "14", "--global-batch-size", "4", "--grad-dtype",
                            "bf16", "--moment-dtype", "bf16"};
    const Words small16 = joined(small, {"16"}), small32 = joined(small, {"32"}),
                gpt64 = joined(gpt2, {"32", "--global-batch-size", "64"}),
                gpt256 = joined(gpt2, {"64", "--global-batch-size", "256"}), bf16 = {};
    // dev/results/2026-11-23-h100.md, which the rates are from, and its attention; then 2026-11-27-h100-lighter, with
    // the present kernels.
    const std::vector<MeasuredAttention> before = {{Dtype::kBf16, 1, 32, 8192, 128, 922.7, 3247.6, 0},
                                                   {Dtype::kBf16, 8, 16, 2048, 128, 273.9, 1058.7, 0},
                                                   {Dtype::kBf16, 32, 12, 1024, 64, 166.2, 548.3, 0}};
    const struct {
        const char* family;
        const Words& words;
        std::vector<std::pair<Words, double>> recipes;   // options, ms
        const std::vector<MeasuredAttention>& attention;
    } rows[] = {
        {"llama", layers6, {{bf16, 353.2}, {kDelayed, 273.6}, {kTensorwise, 287.2}, {kBlockwise, 297.0}}, before},
        {"llama", small16, {{bf16, 301.7}, {kDelayed, 236.2}, {kTensorwise, 249.7}, {kBlockwise, 258.9}}, before},
        {"gpt2", gpt64, {{bf16, 113.6}, {kDelayed, 95.34}, {kTensorwise, 103.7}, {kBlockwise, 108.4}}, before},
        {"llama", layers14,
         {{bf16, 1303.7}, {kDelayed, 915.8}, {kTensorwise, 952.7}, {joined(kTensorwise, kEnds), 1003.8},
          {kBlockwise, 994.0}}, kPresentAttention},
        {"llama", small32, {{bf16, 573.1}, {kDelayed, 449.4}}, kPresentAttention},
        {"gpt2", gpt256, {{bf16, 436.9}, {kDelayed, 362.6}}, kPresentAttention},
    };
    for (const auto& row : rows) {
        const Rates rates = rates_with(row.attention, *find_rates("H100 SXM"));
        for (const auto& [recipe, ms] : row.recipes) {
            const Config config = planned_config(row.family, joined(row.words, recipe));
            CAPTURE(ms);
            const double predicted = predict_step(config, planned(config), *find_gpu("H100 SXM"), rates).total_ms();
            CHECK(std::abs(predicted / ms - 1) < 0.05);
            if (std::getenv("PLAN_TABLE"))
                MESSAGE(strf("%8.1f %8.1f %+5.1f", ms, predicted, 100 * (predicted / ms - 1)));
        }
    }
}
