// FP8 over the steps of a run: scales follow the options, weights follow the masters, reports name the worst tensors.
#include "tests/support/doctest.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "llmc/train/log/fp8_monitor.h"
#include "tests/support/fp8_model_test.h"
#include "tests/support/quant_test.h"

namespace {

using Json = nlohmann::json;
using Report = Fp8State::TensorReport;

Json tensors_of(TestModel& model) { return Json::parse(state_text(model)).at("tensors"); }

// The scale after an update of delayed scaling, as bits; the history of `after` has the newest amax already.
uint32_t scale_after(const Config& c, const std::string& name, const Json& before, const Json& after) {
    const auto updates = before.at("updates").get<size_t>();
    if (updates % static_cast<size_t>(c.fp8_interval) != 0) return before.at("quant_mul_bits").get<uint32_t>();
    const auto ring = after.at("history_bits").get<std::vector<uint32_t>>();
    const bool newest_only = c.fp8_amax_compute_algo == AmaxAlgo::kMostRecent;
    const uint32_t amax = newest_only ? ring[updates % ring.size()] : *std::max_element(ring.begin(), ring.end());
    const float largest = name.ends_with(".dy") && c.fp8_format == Fp8Format::kHybrid ? 57344.0f : 448.0f;
    const float scale = std::ldexp(largest, -static_cast<int>(c.fp8_margin)) / std::bit_cast<float>(amax);
    return std::bit_cast<uint32_t>(scale);
}

// How many tensors have another scale than before.
int check_update(const Config& c, const Json& before, const Json& after) {
    int changed = 0;
    for (const auto& [name, now] : after.items()) {
        CAPTURE(name);
        const Json& then = before.at(name);
        CHECK(now.at("updates").get<int>() == then.at("updates").get<int>() + 1);
        const uint32_t scale = now.at("quant_mul_bits").get<uint32_t>();
        CHECK(scale == scale_after(c, name, then, now));
        changed += scale != then.at("quant_mul_bits").get<uint32_t>();
        // Only the oldest entry of the history is overwritten.
        Json kept = then.at("history_bits");
        const size_t entry = then.at("updates").get<size_t>() % kept.size();
        kept[entry] = now.at("history_bits")[entry];
        CHECK(now.at("history_bits") == kept);
    }
    return changed;
}

std::vector<float> masters_of(TestModel& model, const Fp8Linear& linear) {
    std::vector<float> masters(static_cast<size_t>(linear.in * linear.out));
    model.trainer->state_access(model.ctx).read(StateKind::kMaster, linear.param, 0, linear.in * linear.out,
                                                      masters.data());
    return masters;
}

bool same_bytes(TestModel& model, const Tensor& tensor, const op_test::HostTensor& expected) {
    const std::vector<char> bytes = raw(model, tensor);
    return bytes.empty() || std::memcmp(bytes.data(), expected.data(), bytes.size()) == 0;   // memcmp takes no null
}

// The FP8 weights of one linear, recomputed from its masters and its scale.
void check_weights(TestModel& model, const Fp8Linear& linear) {
    const std::vector<char> entry = raw(model, {model.trainer->fp8().weight_entry(linear.param), Dtype::kFp32,
                                               sizeof(ScaleEntry) / 4});
    std::vector<float> masters = masters_of(model, linear);
    op_test::QuantMemory expected({.name = "weight", .granularity = linear.weight_transposed.granularity}, linear.out,
                                  linear.in);
    std::memcpy(&expected.entry, entry.data(), sizeof(ScaleEntry));
    const ScaleEntry found = expected.entry;
    const Tensor in{masters.data(), Dtype::kFp32, linear.in * linear.out};
    Ctx ctx;
    op_test::HostTensor row_scales(Dtype::kFp32, linear.out);
    if (linear.weight.granularity == Granularity::kRow) {
        expected.rowwise = op_test::HostTensor(Dtype::kInt8, linear.out * linear.in);
        cpu::quantize_int8(ctx, {.out = expected.rowwise.view(), .scale_inv = row_scales.view(), .in = in,
                                 .N = linear.out, .C = linear.in});
        cpu::transpose_int8(ctx, {.out = expected.transposed.view(), .in = expected.rowwise.view(),
                                  .scale_inv = row_scales.view(), .entry = &expected.entry, .R = linear.out,
                                  .C = linear.in});
        CHECK(same_bytes(model, linear.weight.scale_inv, row_scales));
    } else {
        cpu::quantize(ctx, {.quant = expected.out(), .in = in, .N = linear.out, .C = linear.in});
    }
    CHECK(same_bytes(model, linear.weight.data, expected.rowwise));   // the head has none
    CHECK(same_bytes(model, linear.weight_transposed.data, expected.transposed));
    if (linear.weight_transposed.granularity == Granularity::kTensor) {
        CHECK(found.scale_inv == 1 / found.scale);
    } else {
        CHECK(same_bytes(model, linear.weight.scale_inv, expected.rowwise_scale_inv));
        CHECK(same_bytes(model, linear.weight_transposed.scale_inv, expected.transposed_scale_inv));
    }
    // AdamW recorded the amax of what it wrote.
    uint32_t amax = 0;
    for (float master : masters) amax = std::max(amax, amax_bits_of(static_cast<float>(bf16(master))));
    CHECK(std::max(found.amax_bits, found.step_amax_bits) == amax);
}

Report report(const std::string& name, const Fp8Counts& counts) {
    return {.name = name, .format = Dtype::kE4m3, .entry = {1, 1, 0, 0}, .counts = counts, .scale_bins = {}};
}

// A tensor with the given numbers of blocks for each scale 2^exponent.
Report blocks(const std::string& name, const std::map<int, uint64_t>& counts, Dtype format = Dtype::kE4m3) {
    Report r = report(name, {1000, 0, 0, 0});
    r.format = format;
    r.scale_bins.assign(kScaleBins, 0);
    for (const auto& [exponent, count] : counts) r.scale_bins[static_cast<size_t>(127 - exponent)] = count;
    return r;
}

}  // namespace

TEST_CASE("fp8 state: margin, interval, history and algorithm decide the scales of every step") {
    Config plain = fp8_config(fp8_shapes()[1], Fp8Recipe::kDelayed);
    std::vector<Config> configs(6, plain);
    configs[1].fp8_margin = 2;
    configs[2].fp8_interval = 3;
    configs[3].fp8_amax_history_len = 1;
    configs[4].fp8_amax_compute_algo = AmaxAlgo::kMostRecent;
    configs[5].fp8_format = Fp8Format::kE4m3;
    for (const Config& config : configs) {
        CAPTURE(&config - configs.data());
        TestModel model(config);
        const Json fresh = tensors_of(model);
        CHECK(fresh.at("1.up.weight").at("updates") == 1);
        CHECK(fresh.at("1.up.x").at("updates") == 0);
        model.set_random_batch(4, 30);
        model.step();
        Json before = tensors_of(model);
        CHECK(before.at("1.up.x").at("updates") == 2);   // calibration and the step
        CHECK(before.at("1.up.dy").at("updates") == 2);
        CHECK(before.at("1.up.weight").at("updates") == 2);
        int changed = 0;
        for (uint64_t i = 1; i < 6; i++) {
            model.set_random_batch(4, 30 + i);
            model.step();
            const Json after = tensors_of(model);
            changed += check_update(config, before, after);
            before = after;
        }
        CHECK(changed > 24);   // of 24 tensors
    }
}

TEST_CASE("fp8 state: the FP8 weights are those of the masters, before and after every step") {
    for (bool tied : {false, true})
        for (Fp8Recipe recipe : kFp8Recipes) {
            CAPTURE(static_cast<int>(recipe));
            Config config = fp8_config(fp8_shapes()[1], recipe);
            config.shape.tied_head = tied, config.fp8_lm_head = true, config.lr = 0.05;
            TestModel model(config);
            const Fp8State& fp8 = model.trainer->fp8();
            for (uint64_t i = 0; i < 4; i++) {
                for (const LinearPlan& linear : fp8.plan().linears)
                    check_weights(model, *fp8.linear(linear.layer, linear.kind));
                model.set_random_batch(4, 40 + i);
                model.step();
                CHECK(model.result.skip == 0);
            }
        }
}

TEST_CASE("fp8 health: no line for healthy tensors") {
    Fp8Plan plan;
    plan.recipe = Fp8Recipe::kDelayed;
    // At the limits: a share of 1e-3 saturated, of 0.2 flushed.
    CHECK(fp8_health_line({report("0.qkv.x", {1000, 1, 200, 0}), report("0.qkv.dy", {0, 0, 0, 0})}, plan) == "");
    CHECK(fp8_health_line({}, plan) == "");
}

TEST_CASE("fp8 health: the worst tensors come first, and the advice fits recipe and linear") {
    Fp8Plan delayed, tensorwise;
    delayed.recipe = Fp8Recipe::kDelayed;
    tensorwise.recipe = Fp8Recipe::kTensorwise;
    const std::vector<Report> saturated = {report("0.up.x", {1000, 2, 0, 0}), report("31.down.x", {1000, 40, 0, 0}),
                                           report("1.up.x", {1000, 3, 0, 0}), report("2.up.x", {1000, 4, 0, 0}),
                                           report("3.up.x", {1000, 0, 0, 0})};
    const std::string what = "saturated: 31.down.x 4%, 2.up.x 0.4%, 1.up.x 0.3% and 1 more; ";
    const std::string keep = "keep it in BF16 with --bf16-linears 31.down";
    CHECK(fp8_health_line(saturated, delayed) == what + "raise --fp8-margin, or " + keep);
    CHECK(fp8_health_line(saturated, tensorwise) == what + keep);
    CHECK(fp8_health_line({report("5.proj.dy", {1000, 0, 300, 0}), report("head.dy", {1000, 0, 500, 2})}, delayed)
          == "flushed to zero: 5.proj.dy 30%; keep it in BF16 with --bf16-linears 5.proj | not finite: head.dy 0.2%");
}

TEST_CASE("fp8 health: the distribution of block scales") {
    auto scales_of = [](const Report& r) { return *block_scales_of(r.scale_bins, r.format); };
    BlockScales s = scales_of(blocks("x", {{-3, 1}, {0, 2}, {4, 3}, {9, 2}}));
    CHECK(s.blocks == 8);
    CHECK(s.min == 0.125);
    CHECK(s.median == 16);   // the fourth of eight
    CHECK(s.max == 512);
    CHECK(s.at_ends == 0);
    CHECK(s.zeros == 0);
    Report padded = blocks("x", {{2, 1}, {4, 1}, {5, 1}});
    padded.scale_bins[kZeroBlocks] = 9;   // masked targets
    s = scales_of(padded);
    CHECK(s.blocks == 12);
    CHECK(s.zeros == 0.75);
    CHECK(s.min == 4);
    CHECK(s.median == 16);
    Report empty = blocks("x", {});
    empty.scale_bins[kZeroBlocks] = 2;
    CHECK(scales_of(empty).zeros == 1);
    CHECK(scales_of(empty).median == 1);
    CHECK(block_scales_line({empty}) == "");
    CHECK(scales_of(blocks("x", {{0, 2}, {4, 2}})).median == 1);
    CHECK(scales_of(blocks("x", {{0, 2}, {4, 3}})).median == 16);
    CHECK(scales_of(blocks("x", {{5, 1}})).median == 32);
    // The ends of the range: 2^127, and the scale for the largest amax, which depends on the format.
    CHECK(scales_of(blocks("x", {{127, 1}, {5, 2}, {-120, 1}})).at_ends == 0.5);
    CHECK(scales_of(blocks("x", {{126, 1}, {5, 2}, {-119, 1}})).at_ends == 0);
    CHECK(scales_of(blocks("x", {{-113, 1}, {5, 3}}, Dtype::kE5m2)).at_ends == 0.25);
    CHECK(scales_of(blocks("x", {{-113, 1}, {5, 3}})).at_ends == 0);
    CHECK_FALSE(block_scales_of(std::vector<uint64_t>(kScaleBins), Dtype::kE4m3));
    CHECK_FALSE(block_scales_of({}, Dtype::kE4m3));

    CHECK(block_scales_line({blocks("0.up.x", {{-2, 1}, {3, 1}}), blocks("1.up.x", {{7, 3}}),
                             blocks("1.up.weight", {{11, 1}})})
          == "x 2^-2 to 2^7, median 2^7; weights 2^11 to 2^11, median 2^11");
    CHECK(block_scales_line({report("0.up.x", {1000, 0, 0, 0})}) == "");

    Fp8Plan blockwise;
    blockwise.recipe = Fp8Recipe::kBlockwise;
    CHECK(fp8_health_line({blocks("0.up.x", {{127, 1}, {3, 999}})}, blockwise) == "");   // at the limit
    CHECK(fp8_health_line({blocks("0.up.x", {{127, 2}, {3, 998}}), blocks("3.down.dy", {{-120, 1}, {3, 9}})}, blockwise)
          == "block scales at an end of their range: 3.down.dy 10%, 0.up.x 0.2%; keep it in BF16 with --bf16-linears "
             "3.down");
}
