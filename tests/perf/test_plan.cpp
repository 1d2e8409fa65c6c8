// Predictions of `plan`: memory is compared with the arena; rates scaled to other GPUs; the numbers of its JSON. Step
// times are in test_plan_steps.cpp.
#include "tests/support/plan_test.h"

#include <map>

#include <nlohmann/json.hpp>

#include "llmc/commands/plan_report.h"
#include "llmc/perf/fp8_speedup.h"
#include "llmc/train/log/run_log.h"

namespace {

constexpr Purpose kAllPurposes[] = {Purpose::kWeights,     Purpose::kGradients, Purpose::kMaster, Purpose::kMoments,
                                        Purpose::kEma,       Purpose::kOffload, Purpose::kActivations, Purpose::kFp8,
                                          Purpose::kComm, Purpose::kInputs,      Purpose::kScratch};
static_assert(std::size(kAllPurposes) == kPurposes);

}  // namespace

TEST_CASE("plan: bytes by purpose are those of the arena on the device, for every recipe and recomputation") {
    for (const ModelConfig& shape : fp8_shapes())
        for (Fp8Recipe recipe : kRecipes) {
            for (Recompute recompute : {Recompute::kNone, Recompute::kNormAct, Recompute::kBlock,
                                        Recompute::kBlockKeepAttention}) {
                Config config = fp8_config(shape, recipe);
                config.recompute = recompute;
                config.global_batch_size = 4;
                TestModel model(config);
                model.set_random_batch(4, 3);
                model.step();
                model.trainer->evaluator().evaluate(model.ctx, nullptr, 0, model.staged);
                int64_t all = 0;
                for (Purpose purpose : kAllPurposes) {
                    const int64_t bytes = model.arena.purpose_bytes(purpose);
                    CAPTURE(purpose_name(purpose));
                    CHECK(model.plan.purpose_bytes[static_cast<size_t>(purpose)] == bytes);
                    all += bytes;
                }
                CHECK(model.arena.peak_bytes() == model.plan.arena_bytes);
                CHECK(all == model.plan.arena_bytes);
            }
        }
}

TEST_CASE("plan: operations of a step, with their bytes") {
    const Config config = planned_config("llama", joined(kLlama8, kDelayed));
    const MemoryPlan plan = planned(config);
    const int64_t N = 8192, C = 4096, F = 14336, blocks = 32 * 4;
    // An activation writes two FP8 tensors and nothing else, and reads 2 F columns.
    const PlannedOp* swiglu = find_op(plan, OpKind::activation_forward);
    REQUIRE(swiglu);
    CHECK(rate_name(swiglu->kind, swiglu->activation) == "swiglu_forward");
    CHECK(swiglu->mode == OpMode::kCopies);
    CHECK(swiglu->count == blocks);
    CHECK(swiglu->bytes == 2 * 2 * N * F + 2 * N * F);
    int64_t norms = 0, adam_bytes = 0;
    for (const PlannedOp& op : plan.step_ops) {
        if (op.kind == OpKind::rmsnorm_forward) norms += op.count;
        if (op.kind == OpKind::adamw) adam_bytes += op.count * op.bytes;
    }
    CHECK(norms == 2 * blocks + 4);
    // Masters and BF16 moments read and written, BF16 gradients read; weights written where they are BF16.
    const int64_t params = make_param_table(config.shape).param_elems, in_fp8 = 32 * C * (6144 + 4096 + 2 * F + F);
    CHECK(adam_bytes == params * (2 * (4 + 2 + 2) + 2) + 2 * (params - in_fp8));
    const PlannedOp* attention = find_op(plan, OpKind::attention_backward);
    REQUIRE(attention);
    CHECK(attention->attention == PlannedAttention{.B = 1, .T = 8192, .NH = 32, .HS = 128, .backward = true});
    CHECK(attention->count == blocks);
    CHECK(find_op(plan, OpKind::bias_backward) == nullptr);
}

TEST_CASE("plan: fp8 moments take 2.0625 bytes a parameter, which the update reads and writes") {
    const Config config = planned_config("llama", {"--model", "llama3-8B", "--fp8-recipe", "delayed", "--grad-dtype",
                                                   "bf16", "--moment-dtype", "fp8", "--micro-batch-size", "1"});
    const MemoryPlan plan = planned(config);
    int64_t state = 0, adam_bytes = 0;
    for (Purpose purpose : {Purpose::kMaster, Purpose::kMoments})
        state += plan.purpose_bytes[static_cast<size_t>(purpose)];
    const double flat = static_cast<double>(plan.flat_elems);
    CHECK(static_cast<double>(state) == doctest::Approx(6.0625 * flat).epsilon(1e-6));   // the arena aligns states
    CHECK(static_cast<double>(state) <= 6.2 * flat);
    for (const PlannedOp& op : plan.step_ops)
        if (op.kind == OpKind::adamw) adam_bytes += op.count * op.bytes;
    const int64_t params = make_param_table(config.shape).param_elems, in_fp8 = 32ll * 4096 * (6144 + 4096 + 3 * 14336);
    CHECK(adam_bytes == params * 2 * 6 + params / 8 + 2 * params + 2 * (params - in_fp8));
}

TEST_CASE("plan: every further micro-batch adds the same operations and collectives, up to a million") {
    const Words model = {"--model", "llama3-8B", "--num-layers", "5", "--micro-batch-size", "1"};
    const struct {
        Words words;
        int64_t data_ranks = 1;
    } rows[] = {{{}}, {{"--fp8-recipe", "delayed"}}, {{"--fp8-recipe", "blockwise"}}, {{"--recompute", "block"}},
                {{"--offload", "activations,moments,masters"}}, {{"--ranks", "4"}, 4},
                {{"--ranks", "4", "--zero", "2"}, 4}, {{"--ranks", "4", "--zero", "3"}, 4},
                {{"--ranks", "4", "--context-parallel", "2"}, 2}};
    for (const auto& [words, data_ranks] : rows) {
        CAPTURE(words.empty() ? "BF16" : words.front() + " " + words.back());
        auto with = [&](int64_t micro_batches) {
            const std::string sequences = std::to_string(micro_batches * data_ranks);
            return planned(planned_config("llama", last_words({model, words, {"--global-batch-size", sequences}})));
        };
        // Up to four are rehearsed one by one.
        const MemoryPlan three = with(3), four = with(4), many = with(1000000);
        CHECK(many.arena_bytes == four.arena_bytes);
        auto extended = [](int64_t of_three, int64_t of_four) { return of_four + 999996 * (of_four - of_three); };
        REQUIRE(many.step_gemms.size() == four.step_gemms.size());
        for (size_t i = 0; i < four.step_gemms.size(); i++)
            CHECK(many.step_gemms[i].count == extended(three.step_gemms[i].count, four.step_gemms[i].count));
        REQUIRE(many.step_ops.size() == four.step_ops.size());
        for (size_t i = 0; i < four.step_ops.size(); i++)
            CHECK(many.step_ops[i].count == extended(three.step_ops[i].count, four.step_ops[i].count));
        REQUIRE(many.collectives.size() == four.collectives.size());
        for (size_t i = 0; i < four.collectives.size(); i++) {
            const PlannedCollective &a = three.collectives[i], &b = four.collectives[i], &c = many.collectives[i];
            CHECK(c.calls == extended(a.calls, b.calls));
            CHECK(c.bytes == extended(a.bytes, b.bytes));
            CHECK(c.sent_bytes == extended(a.sent_bytes, b.sent_bytes));
            CHECK(c.copied_bytes == extended(a.copied_bytes, b.copied_bytes));
        }
    }
}

TEST_CASE("plan: a bias gradient in BF16 costs the additional time of the kernels that sum it") {
    const int64_t layers = 12, micro_batches = 8, N = 64 * 1024;
    const MemoryPlan plan = planned(planned_config("gpt2", kGpt2));
    std::map<OpKind, int64_t> sums;
    for (const PlannedOp& op : plan.step_ops)
        if (op.mode == OpMode::kSums) sums[op.kind] += op.count;
    // dy of proj and down is written by norms, dy of up by gelu, and dy of qkv by attention, which leaves the bias
    // gradient to another pass.
    CHECK(sums[OpKind::layernorm_backward] == 2 * layers * micro_batches);
    CHECK(sums[OpKind::activation_backward] == layers * micro_batches);
    CHECK(sums.size() == 2);
    const PlannedOp* own = find_op(plan, OpKind::bias_backward);
    REQUIRE(own);
    CHECK(own->count == layers * micro_batches);
    CHECK(own->bytes == 2 * N * 3 * 768);
    // rope and qk-norm leave it to another pass, too.
    const MemoryPlan modern = planned(planned_config("gpt2", joined(kGpt2, {"--position-embedding-type", "rope"})));
    own = find_op(modern, OpKind::bias_backward);
    REQUIRE(own);
    CHECK(own->count == layers * micro_batches);
    const PlannedOp* rope = find_op(modern, OpKind::rope_backward);
    REQUIRE(rope);
    CHECK(rope->mode == OpMode::kPlain);
    // With them BF16 is slower, and FP8 gains more.
    const Words fp8 = joined(kGpt2, {"--fp8-recipe", "delayed"});
    auto speedup = [](const Words& words, size_t linear) {
        const Config config = planned_config("gpt2", words);
        const Fp8Plan recipe = fp8_plan_of(config, make_param_table(config.shape));
        return predict_speedup(config, recipe, recipe.linears[linear]);
    };
    for (size_t i = 0; i < kLinearsPerLayer; i++)
        CHECK(speedup(fp8, i) > speedup(joined(fp8, {"--disable-bias-linear"}), i));
}

TEST_CASE("plan: rates are scaled by peaks and bandwidths, and the text says so") {
    const Config config = planned_config("llama", kLlama8);
    const MemoryPlan plan = planned(config);
    const StepTime h200 = predict_step(config, plan, measured_gpu());
    auto ratio = [&](const StepTime& time, StepPart part) {
        return time.ms[static_cast<size_t>(part)] / h200.ms[static_cast<size_t>(part)];
    };
    const StepTime pcie = predict_step(config, plan, *find_gpu("H100 PCIe"));
    CHECK(ratio(pcie, StepPart::kMatmuls) == doctest::Approx(989.4 / 756.5));
    CHECK(ratio(pcie, StepPart::kAttention) == doctest::Approx(989.4 / 756.5));
    CHECK(ratio(pcie, StepPart::kElementwise) == doctest::Approx(4.8 / 2.0));
    CHECK(ratio(pcie, StepPart::kOptimizer) == doctest::Approx(4.8 / 2.0));
    const StepTime grace = predict_step(config, plan, *find_gpu("NVIDIA GH200 480GB"));
    CHECK(ratio(grace, StepPart::kMatmuls) == doctest::Approx(1));
    CHECK(ratio(grace, StepPart::kElementwise) == doctest::Approx(4.8 / 4.0));
    for (const Gpu& gpu : planned_gpus()) {
        CAPTURE(gpu.name);
        CHECK(gpu.peak_flops(Dtype::kE4m3) > 0);
        Config named = config;
        named.gpu = gpu.name;
        const ParamTable table = make_param_table(config.shape);
        const DeviceInfo none;
        const std::string text = plan_text({named, table, plan, none, {}});
        CHECK(contains(text, std::string("predicted for ") + gpu.name + "; "));
        CHECK(contains(text, "SCALED, not measured") == !find_rates(gpu.name));
        CHECK(text.rfind(gpu.memory_gib < 126 ? "does not fit: " : "fits: ", 0) == 0);
        CHECK(contains(text, std::string("GiB on ") + gpu.name + " (not here)\n"));
    }
}

TEST_CASE("plan: memory is that of the GPU that was found, unless another is named") {
    const Config config = planned_config("llama", kLlama8);
    const ParamTable table = make_param_table(config.shape);
    const MemoryPlan plan = planned(config);
    DeviceInfo found;
    found.name = "NVIDIA B200";   // there are no rates of it
    found.sm = 100;
    found.memory_bytes = plan.arena_bytes - 1;
    auto says = [&](const Config& c, const char* line) {
        return contains(plan_text({c, table, plan, found, {}}), line);
    };
    auto fits = [&](const Config& c) {
        const PlannedRun run{c, table, plan, found, {}};
        CHECK(plan_text(run).rfind(plan_fits(run) ? "fits: " : "does not fit: ", 0) == 0);
        return plan_fits(run);
    };
    CHECK(says(config, "GiB on NVIDIA B200\n"));
    CHECK(!fits(config));
    CHECK(says(config, "predicted for H200; "));
    found.memory_bytes++;
    CHECK(fits(config));
    Config named = config;
    named.gpu = "H100 SXM";
    CHECK(says(named, "of 79.1 GiB on H100 SXM (not here)\n"));
    CHECK(!fits(named));
    found.name = "NVIDIA H100 80GB HBM3";
    found.sm = 90;
    CHECK(says(named, "GiB on NVIDIA H100 80GB HBM3\n"));
    CHECK(fits(named));
}

TEST_CASE("plan: the proposals for a run that does not fit have the memory of a plan with those options") {
    const Words words = {"--model", "llama3-small", "--micro-batch-size", "2", "--global-batch-size", "64"};
    const Config config = planned_config("llama", words);
    const ParamTable table = make_param_table(config.shape);
    const MemoryPlan plan = planned(config);
    DeviceInfo found;
    found.name = "NVIDIA B200", found.sm = 100, found.memory_bytes = plan.arena_bytes / 3;
    const auto changes = nlohmann::json::parse(plan_json({config, table, plan, found, {}}))["memory"]["changes"];
    std::string all;
    for (const auto& change : changes) {
        const auto options = change["options"].get<std::string>();
        CAPTURE(options);
        all += options + "\n";
        Words other = words;
        std::istringstream stream(options);
        for (std::string word; stream >> word;) other.push_back(word);
        const int64_t bytes = change["arena_bytes"].get<int64_t>();
        CHECK(bytes == planned(planned_config("llama", other)).arena_bytes);
        CHECK(bytes < plan.arena_bytes);
        CHECK(change["fits"] == (bytes <= found.memory_bytes));
    }
    for (const char* option : {"--recompute norm-act\n", "--recompute block\n", "--grad-dtype bf16\n", "--ranks 2\n",
                               "--moment-dtype bf16\n", "--moment-dtype fp8\n", "--micro-batch-size 1\n",
                               "--loss-chunk 2048\n"})
        CHECK(contains(all, option));
    CHECK(changes.back()["fits"] == true);
}

TEST_CASE("plan: which GPU") {
    const Config config = planned_config("gpt2", {});
    DeviceInfo found;
    found.name = "CPU";
    CHECK(planned_gpu(config, found).name == std::string("H200"));
    found.name = "NVIDIA H100 PCIe";
    CHECK(planned_gpu(config, found).name == std::string("H100 PCIe"));
    CHECK(planned_gpu(planned_config("gpt2", {"--gpu", "h100 sxm"}), found).name == std::string("H100 SXM"));
    const std::string told = refusal_of([&] { planned_gpu(planned_config("gpt2", {"--gpu", "H2000"}), found); });
    CHECK(contains(told, "--gpu H2000"));
    for (const Gpu& gpu : planned_gpus()) CHECK(contains(told, gpu.name));
}

TEST_CASE("plan: JSON has the figures of the text") {
    const Config config = planned_config("llama", joined(kTwo, {"--global-batch-size", "8", "--train-iters", "1000",
                                                                "--save", "out", "--save-interval", "300"}));
    const ParamTable table = make_param_table(config.shape);
    const MemoryPlan plan = planned(config);
    const DeviceInfo none;
    const PlannedRun run{config, table, plan, none, {}};
    const nlohmann::json json = nlohmann::json::parse(plan_json(run));
    int64_t bytes = 0;
    for (const auto& purpose : json["memory"]["purpose_bytes"]) bytes += purpose.get<int64_t>();
    CHECK(bytes == plan.arena_bytes);
    CHECK(json["memory"]["arena_bytes"] == plan.arena_bytes);
    CHECK(json["memory"]["fits"] == true);
    CHECK(json["gpu"]["name"] == "H200");
    double ms = 0;
    for (const auto& part : json["time"]["parts_ms"]) ms += part.get<double>();
    CHECK(ms == doctest::Approx(json["time"]["step_ms"].get<double>()));
    CHECK(json["time"]["tokens_per_second"].get<double>() == doctest::Approx(8 * 2048 / (1e-3 * ms)));
    CHECK(json["checkpoint"]["kept"] == 4);
    CHECK(json["checkpoint"]["bytes"] == plan.host.checkpoint_bytes);
    const std::string text = plan_text(run);
    CHECK(contains(text, strf("%.3f\n", ms)));
    CHECK(contains(text, "; 4 of them at the end"));
}

TEST_CASE("plan: the prediction is compared once with the median of ten measured steps") {
    PredictedStep predicted{.ms = 90};
    StepTimeCheck check(predicted);
    for (int step = 31; step <= 60; step++)   // slow at first, and one step that waits for something
        CHECK(check.add(step, step < 41 ? 500 : step == 45 ? 1000 : 95.5 + step % 10) == (step == 50));
    CHECK(check.measured_ms() == 100.5);
    CHECK(check.text() == "predicted 90.0 ms a step, measured 100.5 ms (median of steps 41-50), -10.4 %");
    predicted.scaled_from = "H200";
    CHECK(contains(StepTimeCheck(predicted).text(), "predicted 90.0 ms a step (rates scaled from H200), measured"));
    CHECK(contains(StepTimeCheck({}).text(), "no step time is predicted for this device"));
}

TEST_CASE("plan: rates are of operations, and replace those that were not measured") {
    std::vector<std::string> names;
#define OP(name, Args) \
    for (const ActivationFunction& function : kActivations) names.push_back(rate_name(OpKind::name, function.kind));
#include "llmc/ops/ops.inl"
#undef OP
    for (const Gpu& gpu : planned_gpus())
        if (const Rates* rates = find_rates(gpu.name))
            for (const auto& [name, shares] : rates->ops) CHECK(std::count(names.begin(), names.end(), name) > 0);
    Rates rates = measured_rates();
    rates.copy_rate = 1e12;
    rates.ops = {{"amax", {0.5}}, {"adamw", {0, 0.5}}};
    const auto us = [&](OpKind kind, OpMode mode) {
        return rates.op_us({.kind = kind, .mode = mode, .bytes = 100000000, .attention = {}});
    };
    CHECK(us(OpKind::amax, OpMode::kPlain) == doctest::Approx(3 + 200));
    CHECK(us(OpKind::amax, OpMode::kBlocks) == doctest::Approx(3 + 200));
    CHECK(us(OpKind::adamw, OpMode::kSums) == doctest::Approx(3 + 200));
    CHECK(us(OpKind::adamw, OpMode::kPlain) == doctest::Approx(3 + 100));
    CHECK(us(OpKind::cast, OpMode::kPlain) == doctest::Approx(3 + 100));
}

TEST_CASE("plan: attention takes the time of the nearest shape for its work") {
    Rates rates = measured_rates();
    rates.attention = {{Dtype::kBf16, 1, 32, 8192, 128, 1000, 3000, 0}, {Dtype::kBf16, 1, 32, 1024, 64, 10, 30, 5}};
    const auto us = [&](const PlannedAttention& shape) {
        return rates.op_us({.kind = OpKind::attention_forward, .attention = shape});
    };
    CHECK(us({.B = 1, .T = 8192, .NH = 32, .HS = 128}) == doctest::Approx(1000));
    CHECK(us({.B = 1, .T = 8192, .NH = 32, .HS = 128, .backward = true}) == doctest::Approx(3000));
    CHECK(us({.B = 1, .T = 1024, .NH = 32, .HS = 64, .fp8 = true}) == doctest::Approx(5));
    // Four times the tokens of a sequence are 16 times the work, and fill the GPU better: 4 x 2048 tiles and 2048.
    const double fuller = (1 + 150.0 / 8192) / (1 + 150.0 / 2048);
    CHECK(us({.B = 1, .T = 32768, .NH = 32, .HS = 128}) == doctest::Approx(16000 * fuller));
    // A window of 1024 - 128 tokens reaches an eighth of the sequence with the tile that it cuts.
    CHECK(us({.B = 1, .T = 8192, .NH = 32, .HS = 128, .window = 896}) == doctest::Approx(1000 * (1 - 49.0 / 64)));
    CHECK(us({.B = 1, .T = 8192, .NH = 32, .HS = 128, .window = 8192}) == doctest::Approx(1000));
}

// Pairs counted one by one; a layer of every kind.
TEST_CASE("plan: FLOPs of attention are those of each layer's window") {
    const auto flops = [](const char* window) {
        const Config c = planned_config("llama", {"--model", "llama-tiny", "--num-layers", "4", "--seq-length", "96",
                                                  "--sliding-window", window});
        return model_flops_per_token(c, make_param_table(c.shape));
    };
    const auto per_layer = [](double window) {   // 12 per pair and element of Q, pairs without half of the diagonal
        double pairs = 0;
        for (int t = 0; t < 96; t++) pairs += std::fmin(t + 0.5, window);
        return 12 * 128 * pairs / 96;
    };
    const double dense = flops("0") - 4 * 12 * 128 * 48;
    for (double window : {1, 40})
        CHECK(flops(window == 1 ? "1" : "40") == doctest::Approx(dense + 4 * per_layer(window)).epsilon(0.01));
    CHECK(flops("40,1,0") == doctest::Approx((2 * flops("40") + flops("1") + flops("0")) / 4));
    const PlannedAttention shape{.T = 100, .window = 30};
    CHECK(shape.share() == doctest::Approx(1 - 0.49));
    CHECK(PlannedAttention{.T = 100}.share() == 1);
}
