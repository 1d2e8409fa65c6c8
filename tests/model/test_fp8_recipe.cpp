// The FP8 plan: which linears run in FP8 and why others do not, the number of matmuls, the shapes and devices that it
// requires, and the predicted speedup.
#include "tests/support/config_test.h"

#include "llmc/ops/ops.h"
#include "llmc/model/activation_buffers.h"
#include "llmc/perf/fp8_speedup.h"
#include "llmc/perf/rates.h"

namespace {

struct Planned {
    Config config;
    Fp8Plan plan;
};

Planned planned(const std::string& family, const Words& words) {
    const Config config = parse(family, joined({"--dry-run"}, words)).config;
    return {config, fp8_plan_of(config, make_param_table(config.shape))};
}

Fp8Plan tiny_plan(const Words& words) {
    return planned("gpt2", joined({"--model=gpt2-tiny", "--fp8-recipe=delayed"}, words)).plan;
}

// The message of the error (exit 2) that the plan raises; "" if there is none.
std::string plan_refusal(const std::string& family, const Words& words) {
    return refusal_of([&] { planned(family, words); });
}

std::string tiny_refusal(const Words& words) {
    return plan_refusal("gpt2", joined({"--model=gpt2-tiny", "--fp8-recipe=delayed"}, words));
}

// Names of the linear layers in BF16, without the head.
Words bf16_names(const Fp8Plan& plan) {
    Words names;
    for (const LinearPlan& linear : plan.linears)
        if (!linear.fp8 && linear.kind != LinearKind::kHead) names.push_back(linear.name);
    return names;
}

DeviceInfo h200() {
    DeviceInfo d;
    d.name = "NVIDIA H200", d.sm = 90, d.driver = "13.0", d.toolkit = "13.0", d.cublaslt_version = 130100;
    return d;
}

}  // namespace

TEST_CASE("fp8 plan: every linear with its weight, name and shape") {
    for (const char* model : {"gpt2-124M", "llama3-small"}) {
        const std::string family = std::string(model) == "gpt2-124M" ? "gpt2" : "llama";
        const auto [config, plan] = planned(family, {"--fp8-recipe", "tensorwise"});
        const ParamTable table = make_param_table(config.shape);
        CHECK(plan.linears.size() == static_cast<size_t>(config.shape.num_layers * 4 + 1));
        CHECK(plan.fp8_linears() == config.shape.num_layers * 4);
        CHECK(plan.linear(3, LinearKind::kDown).name == "3.down");
        CHECK(plan.linear(3, LinearKind::kDown).in == config.shape.ffn_hidden_size);
        CHECK(plan.linear(3, LinearKind::kDown).out == config.shape.hidden_size);
        CHECK(plan.linear(11, LinearKind::kQkv).weight == table.find("layers.11.qkv.weight"));
        CHECK(plan.linear(0, LinearKind::kProj).in == config.shape.q_width());
        CHECK(plan.linear(0, LinearKind::kUp).out == config.shape.up_width());
        const LinearPlan& head = plan.linear(static_cast<int>(config.shape.num_layers), LinearKind::kHead);
        CHECK(head.name == "head");
        CHECK(head.weight == table.head);
        CHECK(head.out == config.shape.padded_vocab());
        CHECK(!head.fp8);
        CHECK(head.reason == "no --fp8-lm-head");
    }
    const Fp8Plan off = planned("gpt2", {}).plan;
    CHECK(!off.on());
    CHECK(off.fp8_linears() == 0);
    CHECK(planned_fp8_matmuls(off, Recompute::kBlock, 4) == 0);
}

TEST_CASE("fp8 plan: fast accumulation") {
    auto fast = [](const Words& words) {
        const Fp8Plan plan = tiny_plan(words);
        return std::pair(plan.fast_fprop, plan.fast_backward);
    };
    CHECK(fast({}) == std::pair(true, false));
    CHECK(fast({"--fp8-fast-accum=fprop"}) == std::pair(true, false));
    CHECK(fast({"--fp8-fast-accum=all"}) == std::pair(true, true));
    CHECK(fast({"--fp8-fast-accum=none"}) == std::pair(false, false));
    CHECK(fast({"--fp8-recipe=blockwise"}) == std::pair(false, false));
    CHECK(fast({"--fp8-recipe=int8-forward", "--fp8-fast-accum=all"}) == std::pair(false, true));
}

TEST_CASE("fp8 plan: the linear layers that stay in BF16, and the reasons") {
    CHECK(bf16_names(tiny_plan({})).empty());
    CHECK(bf16_names(tiny_plan({"--first-last-layers-bf16"}))
          == Words{"0.qkv", "0.proj", "0.up", "0.down", "3.qkv", "3.proj", "3.up", "3.down"});
    CHECK(tiny_plan({"--first-last-layers-bf16"}).linear(3, LinearKind::kUp).reason == "--first-last-layers-bf16");
    CHECK(bf16_names(tiny_plan({"--first-last-layers-bf16", "--num-layers-at-start-in-bf16=2",
                                "--num-layers-at-end-in-bf16=0"})).back() == "1.down");
    CHECK(bf16_names(tiny_plan({"--bf16-linears=3.down"})) == Words{"3.down"});
    CHECK(bf16_names(tiny_plan({"--bf16-linears=3.*"})) == Words{"3.qkv", "3.proj", "3.up", "3.down"});
    CHECK(bf16_names(tiny_plan({"--bf16-linears=*.proj"})) == Words{"0.proj", "1.proj", "2.proj", "3.proj"});
    CHECK(bf16_names(tiny_plan({"--bf16-linears=*.*o*,0.up"})).size() == 9);   // proj and down
    CHECK(bf16_names(tiny_plan({"--bf16-linears=2*n"})) == Words{"2.down"});
    const Fp8Plan both = tiny_plan({"--first-last-layers-bf16", "--bf16-linears=*.down"});
    CHECK(both.linear(0, LinearKind::kDown).reason == "--first-last-layers-bf16");   // the first reason stays
    CHECK(both.linear(1, LinearKind::kDown).reason == "--bf16-linears *.down");

    // A layer number is a whole number: 1.* is not 11.*.
    const Fp8Plan twelve = planned("gpt2", {"--fp8-recipe=blockwise", "--bf16-linears=1.*"}).plan;
    CHECK(bf16_names(twelve).size() == 4);
    CHECK(twelve.linear(11, LinearKind::kQkv).fp8);

    const Fp8Plan head = tiny_plan({"--fp8-lm-head"});
    CHECK(head.linears.back().fp8);
    CHECK(tiny_plan({"--fp8-lm-head", "--bf16-linears=*.*"}).fp8_linears() == 1);
}

TEST_CASE("fp8 plan: a pattern that changes nothing, or leaves no linear in FP8, is refused") {
    const std::string unknown = tiny_refusal({"--bf16-linears=0.up,4.down"});
    CHECK(contains(unknown, "--bf16-linears 4.down names no linear"));
    CHECK(contains(unknown, "LAYER.qkv, LAYER.proj, LAYER.up, LAYER.down with layers 0 to 3, and head"));
    CHECK(contains(tiny_refusal({"--bf16-linears=0.gate"}), "0.gate names no linear"));
    CHECK(contains(tiny_refusal({"--bf16-linears=dow"}), "names no linear"));
    CHECK(contains(tiny_refusal({"--bf16-linears=head"}), "has no effect: head is in BF16 already (no --fp8-lm-head)"));
    for (const char* pattern : {"head", "h*", "0.up,head"})
        CHECK(contains(tiny_refusal({"--fp8-lm-head", std::string("--bf16-linears=") + pattern}),
                       "--fp8-lm-head has no effect: --bf16-linears "));
    CHECK(contains(tiny_refusal({"--first-last-layers-bf16", "--bf16-linears=0.*"}),
                   "is in BF16 already (--first-last-layers-bf16)"));
    CHECK(tiny_refusal({"--bf16-linears=0.*,0.down"}) == "");   // patterns may overlap
    const std::string all = tiny_refusal({"--bf16-linears=*"});
    CHECK(contains(all, "--fp8-recipe delayed has no effect: no linear is left"));
    CHECK(contains(all, "--bf16-linears *"));
    CHECK(contains(tiny_refusal({"--first-last-layers-bf16", "--num-layers-at-start-in-bf16=3"}), "no linear is left"));
    CHECK(contains(tiny_refusal({"--fp8-min-speedup=10"}), "predicted speedup"));
}

TEST_CASE("fp8 plan: all unsupported shapes are named at once") {
    CHECK(tiny_refusal({"--seq-length=40", "--micro-batch-size=2"}) == "");
    const Words odd = {"--seq-length=9", "--micro-batch-size=3", "--hidden-size=136", "--num-attention-heads=17",
                       "--ffn-hidden-size=360", "--fp8-lm-head", "--first-last-layers-bf16"};
    for (const char* recipe : {"delayed", "tensorwise", "blockwise", "blockwise-bf16-wgrad", "int8-forward"}) {
        const std::string text = tiny_refusal(joined(odd, {std::string("--fp8-recipe=") + recipe}));
        CAPTURE(text);
        CHECK(contains(text, std::string("--fp8-recipe ") + recipe));
        CHECK(contains(text, "tokens 3 x 9 = 27 (--micro-batch-size x --seq-length)"));
        const std::string int8 = recipe == std::string("int8-forward") ? " (in INT8: of 64)" : "";
        CHECK(contains(text, "qkv of layers 1-2: in-features 136" + int8 + " out-features 408;"));
        CHECK(contains(text, "proj of layers 1-2: in-features 136" + int8 + " out-features 136;"));
        CHECK(contains(text, "up of layers 1-2: in-features 136" + int8 + " out-features 360;"));
        CHECK(contains(text, "down of layers 1-2: in-features 360" + int8 + " out-features 136;"));
        CHECK(contains(text, "head: in-features 136 ("));
    }
    // A forward pass in INT8 turns groups of 64 columns; the head's is in BF16.
    const Words sixteen = {"--fp8-recipe=int8-forward", "--hidden-size=144", "--num-attention-heads=9",
                           "--ffn-hidden-size=192", "--fp8-lm-head"};
    CHECK(contains(tiny_refusal(sixteen), "proj of layers 0-3: in-features 144 (in INT8: of 64); up of layers"));
    CHECK(!contains(tiny_refusal(sixteen), "down of layers"));
    CHECK(tiny_refusal(joined(sixteen, {"--bf16-linears=*.qkv,*.proj,*.up"})) == "");
    // Only linears in FP8 are checked, and only the wrong dimension is named.
    const Words ffn = {"--ffn-hidden-size=360"};
    CHECK(contains(tiny_refusal(ffn), "up of layers 0-3: out-features 360; down of layers 0-3: in-features 360 ("));
    CHECK(!contains(tiny_refusal(ffn), "tokens 8"));
    CHECK(tiny_refusal(joined(ffn, {"--bf16-linears=*.up,*.down"})) == "");
    const std::string rest = tiny_refusal(joined(ffn, {"--bf16-linears=*.up,1.down"}));
    CHECK(contains(rest, "down of layers 0, 2-3: in-features 360 ("));
    // Samples are one sequence, whose rows have block scales.
    const Words six = {"--seq-length=6", "--micro-batch-size=8", "--fp8-recipe=blockwise"};
    CHECK(tiny_refusal(six) == "");
    CHECK(contains(tiny_refusal(joined(six, {"--sample-every=5"})),
                   "--fp8-recipe blockwise with --sample-every: an FP8 matmul of one sequence needs --seq-length in "
                   "multiples of 4, not 6"));
    CHECK(tiny_refusal(joined(six, {"--sample-every=5", "--seq-length=4"})) == "");
    CHECK(tiny_refusal(joined(six, {"--sample-every=5", "--fp8-recipe=tensorwise"})) == "");
    // Multiples of 16 that are not multiples of 128 are supported: GPT-2 1558M has 1600.
    CHECK(plan_refusal("gpt2", {"--model=gpt2-1558M", "--fp8-recipe=blockwise"}) == "");
}

TEST_CASE("fp8 plan: number of matmuls") {
    const Fp8Plan plan = tiny_plan({});
    CHECK(planned_fp8_matmuls(plan, Recompute::kNone, 1) == 12 * 4);
    CHECK(planned_fp8_matmuls(plan, Recompute::kNormAct, 5) == 12 * 4 * 5);
    CHECK(planned_fp8_matmuls(plan, Recompute::kBlock, 5) == (12 + 3) * 4 * 5);
    CHECK(planned_fp8_matmuls(plan, Recompute::kBlockKeepAttention, 5) == (12 + 3) * 4 * 5);
    CHECK(planned_fp8_matmuls(tiny_plan({"--fp8-lm-head"}), Recompute::kBlock, 2) == (15 * 4 + 2) * 2);
    CHECK(planned_fp8_matmuls(tiny_plan({"--bf16-linears=0.down"}), Recompute::kBlock, 1) == 15 * 4 - 3);
    CHECK(planned_fp8_matmuls(tiny_plan({"--bf16-linears=0.up"}), Recompute::kBlock, 1) == 15 * 4 - 4);
    CHECK(planned_fp8_matmuls(tiny_plan({"--first-last-layers-bf16"}), Recompute::kNone, 3) == 12 * 2 * 3);
}

TEST_CASE("fp8 device: the error has the versions needed and found") {
    auto error = [](const char* recipe, int sm, int64_t cublaslt, const char* driver, bool sm90a = true) {
        DeviceInfo d = h200();
        d.sm = sm, d.cublaslt_version = cublaslt, d.driver = driver, d.sm90a_code = sm90a;
        return fp8_device_error(planned("llama", {"--fp8-recipe", recipe}).plan, d);
    };
    for (const char* recipe : {"delayed", "tensorwise", "blockwise", "blockwise-bf16-wgrad", "int8-forward"}) {
        CHECK(error(recipe, 90, 130100, "13.0") == "");
        CHECK(contains(error(recipe, 80, 130100, "13.0"), std::string("--fp8-recipe ") + recipe + " on NVIDIA H200: "));
        CHECK(contains(error(recipe, 80, 130100, "13.0"), "found 8.0"));
        CHECK(contains(error(recipe, 90, 130100, "12.8"), "driver for CUDA 13.0 or newer, found one for 12.8"));
        CHECK(contains(error(recipe, 90, 110803, "13.0"), "found 11.8.3"));
        CHECK(error(recipe, 0, 0, "") == "");   // the CPU, or no GPU
    }
    CHECK(error("delayed", 89, 120103, "13.0") == "");
    CHECK(error("tensorwise", 100, 130100, "13.0") == "");
    CHECK(contains(error("delayed", 89, 120102, "13.0"), "needs cuBLASLt 12.1.3 or newer, found 12.1.2"));
    CHECK(contains(error("blockwise", 89, 130100, "13.0"), "needs compute capability 9.0, found 8.9"));
    CHECK(contains(error("blockwise", 100, 130100, "13.0"), "needs compute capability 9.0, found 10.0"));
    CHECK(contains(error("int8-forward", 100, 130100, "13.0"), "needs compute capability 9.0, found 10.0"));
    CHECK(error("blockwise", 90, 120900, "13.0", false) == "");
    CHECK(contains(error("int8-forward", 90, 130100, "13.0", false), "this build has no code for sm_90a"));
    CHECK(contains(error("blockwise", 90, 120803, "13.0"), "needs cuBLASLt 12.9.0 or newer, found 12.8.3"));
    const std::string all = error("blockwise", 80, 120000, "11.4");
    CHECK(contains(all, "found 8.0; "));
    CHECK(contains(all, "found 12.0.0; "));
    CHECK(contains(all, "found one for 11.4"));
    DeviceInfo old = h200();
    old.sm = 70;
    CHECK(fp8_device_error(planned("llama", {}).plan, old) == "");
}

TEST_CASE("fp8 attention: refused if the device or the build lacks its kernels") {
    DeviceInfo d = h200();
    CHECK(contains(fp8_attention_error(d), "on NVIDIA H200: this build has no code for sm_90a"));
    CHECK(contains(fp8_attention_error(d), "make ARCH=90a"));
    d.sm90a_code = true;
    CHECK(fp8_attention_error(d) == "");
    for (const int sm : {89, 100}) {
        d.sm = sm;
        CHECK(contains(fp8_attention_error(d), strf("found %d.%d", sm / 10, sm % 10).c_str()));
    }
    CHECK(fp8_attention_error({}) == "");   // the CPU
}

TEST_CASE("fp8 plan: the banner's text") {
    auto text = [](const Words& words) {
        const auto [config, plan] = planned("gpt2", joined({"--model=gpt2-tiny"}, words));
        return fp8_plan_text(plan, config);
    };
    CHECK(text({}) == "");
    CHECK(contains(text({"--fp8-recipe=delayed", "--fp8-lm-head"}),
                   "  head            backward in FP8 | forward in BF16\n"));
    CHECK(text({"--fp8-recipe=delayed", "--first-last-layers-bf16", "--bf16-linears=2.down,*.proj", "--fp8-margin=2"})
          == "FP8               delayed: one scale per tensor, from the largest amax of the last 16 optimizer steps "
             "(the history counts steps, not micro-batches), margin 2, new scales every step\n"
             "  fprop           x E4M3 by w E4M3, fast accumulation\n"
             "  dgrad           dy E5M2 by w E4M3, precise accumulation\n"
             "  wgrad           dy E5M2 by x E4M3, precise accumulation\n"
             "  layers 0, 3     qkv proj up down in BF16 (--first-last-layers-bf16)\n"
             "  layer 1         qkv up down in FP8 | proj in BF16 (--bf16-linears *.proj)\n"
             "  layer 2         qkv up in FP8 | proj in BF16 (--bf16-linears *.proj) | down in BF16 (--bf16-linears "
             "2.down)\n"
             "  head            BF16 (no --fp8-lm-head)\n"
             "  always BF16     embedding, norms, residual stream, attention, softmax and loss\n");
    const char* const advice = "  with --load     SmolLM2-135M lost a fifth as much with --fp8-recipe int8-forward";
    const std::string int8 = text({"--fp8-recipe=int8-forward"});
    CHECK(!contains(text({"--load=x", "--fp8-recipe=int8-forward"}), advice));
    CHECK(contains(text({"--load=x", "--fp8-recipe=blockwise"}), advice));
    CHECK(!contains(text({"--load=x", "--fp8-recipe=blockwise", "--ffn-hidden-size=352"}), advice));
    CHECK(contains(int8, "  fprop           x INT8 by w INT8, turned in groups of 64, a scale per row\n"
                         "  dgrad           dy E5M2 by w E4M3, precise accumulation\n"));
}

TEST_CASE("speedup: times of matmuls are between the peak and a launch with 50 TFLOP/s") {
    // Once a time exceeds that of a launch, it grows with every size.
    const double peak[] = {989e6, 1979e6, 1979e6, 1979e6};   // FLOP a microsecond
    for (GemmLayout pass : {GemmLayout::kForward, GemmLayout::kDgrad, GemmLayout::kWgrad})
        for (int mode = 0; mode < kGemmModes; mode++)
            for (int64_t size = 128; size <= 65536; size *= 2) {
                const GemmMode m = static_cast<GemmMode>(mode);
                const double us = measured_rates().gemm_us(m, pass, size, size, size);
                CHECK(us > 2.0 * static_cast<double>(size * size * size) / peak[mode]);
                CHECK(us < 12 + 2.0 * static_cast<double>(size * size * size) / 50e6);
                if (size < 512) continue;
                CHECK(measured_rates().gemm_us(m, pass, size * 2, size, size) > us);
                CHECK(measured_rates().gemm_us(m, pass, size, size * 2, size) > us);
                CHECK(measured_rates().gemm_us(m, pass, size, size, size * 2) > us);
            }
}

TEST_CASE("speedup: predictions") {
    auto speedup = [](const Words& words, LinearKind kind) {
        const auto [config, plan] = planned("llama", joined({"--fp8-lm-head"}, words));
        return predict_speedup(config, plan, plan.linear(kind == LinearKind::kHead
                                                      ? static_cast<int>(config.shape.num_layers) : 0, kind));
    };
    const Words big = {"--model=llama3-8B"}, tiny = {"--model=llama-tiny"};
    const Words delayed = {"--fp8-recipe=delayed"}, tensorwise = {"--fp8-recipe=tensorwise"};
    const Words blockwise = {"--fp8-recipe=blockwise"};
    for (LinearKind kind : {LinearKind::kQkv, LinearKind::kProj, LinearKind::kUp, LinearKind::kDown,
                            LinearKind::kHead}) {
        CAPTURE(std::string(linear_kind_name(kind)));
        const double most = speedup(joined(big, joined(delayed, {"--fp8-fast-accum=all"})), kind);
        const double usual = speedup(joined(big, delayed), kind);
        CHECK(most > usual);
        const double precise = speedup(joined(big, joined(delayed, {"--fp8-fast-accum=none"})), kind);
        if (kind == LinearKind::kHead) CHECK(usual == precise);   // its forward is in BF16
        else CHECK(usual > precise);
        CHECK(usual > speedup(joined(big, tensorwise), kind));
        CHECK(usual > speedup(joined(big, blockwise), kind));
        CHECK(usual > 1.2);
        CHECK(usual < 2.0);
        // More micro-batches share one quantisation of the weights.
        CHECK(speedup(joined(big, joined(delayed, {"--global-batch-size=16"})), kind) > usual);
        CHECK(speedup(joined(tiny, tensorwise), kind) < usual);
        // The optimizer takes as long with either, but for weights that are not written in BF16.
        for (const Words& states : {Words{"--ema=0.99"}, Words{"--optimizer=muon", "--muon-beta2=0.95"},
                                    Words{"--moment-dtype=fp8", "--ema=0.99"}})
            CHECK(speedup(joined(big, joined(delayed, states)), kind) == doctest::Approx(usual).epsilon(0.01));
    }
    CHECK(speedup(joined(tiny, tensorwise), LinearKind::kProj) < 1);

    // Exactly the linears with a lower prediction stay in BF16.
    const Words run = {"--fp8-recipe=tensorwise", "--fp8-lm-head", "--num-layers=2"};
    const auto [config, plan] = planned("gpt2", run);
    double low = 1e9, high = 0;
    for (const LinearPlan& linear : plan.linears) {
        low = std::min(low, predict_speedup(config, plan, linear));
        high = std::max(high, predict_speedup(config, plan, linear));
    }
    const double middle = (low + high) / 2;
    const Fp8Plan kept = planned("gpt2", joined(run, {strf("--fp8-min-speedup=%.6f", middle)})).plan;
    for (size_t i = 0; i < plan.linears.size(); i++) {
        const double predicted = predict_speedup(config, plan, plan.linears[i]);
        CHECK(kept.linears[i].fp8 == (predicted >= middle));
        if (!kept.linears[i].fp8)
            CHECK(kept.linears[i].reason == strf("predicted speedup %.2f < --fp8-min-speedup %g", predicted,
                                                 std::stod(strf("%.6f", middle))));
    }
}

TEST_CASE("speedup: the text of --dry-run") {
    const Config config = parse("llama", {"--dry-run", "--model=llama3-8B", "--fp8-recipe=delayed",
                                          "--first-last-layers-bf16"}).config;
    DeviceInfo old = h200();
    old.sm = 80;
    const std::string text = fp8_speedup_text(config, make_param_table(config.shape), old);
    CHECK(contains(text, "  qkv           6144       4096  30 of 32 "));
    CHECK(contains(text, "NOT SUPPORTED HERE: --fp8-recipe delayed on NVIDIA H200: needs compute capability 8.9"));
}
