// Predictions of `plan` for exposed communication.
#include "llmc/commands/plan_report.h"
#include "tests/support/plan_test.h"

namespace {

template <typename Change> StepTime predicted(Change&& change) {
    Config config = parse("llama", {"--dry-run", "--synthetic-data", "--model", "llama3-small", "--fp8-recipe",
                                    "delayed", "--micro-batch-size", "1", "--ranks", "2", "--global-batch-size", "2",
                                    "--grad-comm-dtype", "bf16"}).config;
    change(config);
    return predict_step(config, memory_of(config, static_cast<int>(config.ranks)), measured_gpu());
}
Config planned_config(const Words& words) {
    return parse("llama", joined({"--dry-run", "--synthetic-data"}, words)).config;
}
double sent(const StepTime& time) { return time.reduce_ms + time.gather_ms; }
double exposed(const StepTime& time) { return time.ms[static_cast<size_t>(StepPart::kCommunication)]; }
double sums(const StepTime& time) { return time.ms[static_cast<size_t>(StepPart::kSums)]; }

}  // namespace

TEST_CASE("plan: exposed communication") {
    const StepTime off = predicted([](Config& c) { c.overlap = false; }), on = predicted([](Config&) {});
    CHECK(exposed(off) == doctest::Approx(sent(off)));
    CHECK(sent(on) == doctest::Approx(sent(off)));
    CHECK(exposed(on) < 0.5 * exposed(off));
    CHECK(exposed(on) > 0);
    CHECK(sent(predicted([](Config& c) { c.ranks = 1; })) == 0);
    // Between hosts links are slower, and groups within hosts send little there.
    const auto on_hosts = [](int64_t group) {
        return predicted([&](Config& c) { c.ranks = c.global_batch_size = 16, c.zero_group = group; });
    };
    const StepTime far = on_hosts(0), near = on_hosts(8);
    CHECK(sent(far) > 4 * sent(on));
    CHECK(sent(near) < sent(far));
    CHECK(exposed(near) < exposed(far));
}

TEST_CASE("plan: with --zero 2 every micro-batch communicates, and the backward passes hide it") {
    const auto two = [](int64_t ranks, int64_t micro_batches, bool overlap) {
        return predicted([&](Config& c) {
            c.zero = 2, c.ranks = ranks, c.global_batch_size = ranks * micro_batches, c.overlap = overlap;
        });
    };
    const StepTime one = two(2, 1, true), eight = two(2, 8, true);
    CHECK(exposed(one) == doctest::Approx(exposed(predicted([](Config&) {}))));
    CHECK(exposed(eight) == doctest::Approx(exposed(one)));   // that of an embedding ends during the next forward pass
    CHECK(eight.reduce_ms == doctest::Approx(8 * one.reduce_ms).epsilon(0.01));
    CHECK(exposed(two(2, 8, false)) == doctest::Approx(sent(eight)));
    CHECK(sums(eight) > 7 * sums(one));
    // Between hosts the backward pass is too short, in every micro-batch.
    CHECK(exposed(two(16, 8, true)) > 3 * exposed(two(16, 1, true)));
}

TEST_CASE("plan: Newton-Schulz steps hide that Muon's matrices are sent, except the first and the last") {
    const auto muon = [](bool overlap) {
        return predicted([&](Config& c) {
            c.optimizer = OptimizerKind::kMuon, c.overlap = overlap;
            c.ranks = c.global_batch_size = 4;
        });
    };
    const StepTime off = muon(false), on = muon(true);
    CHECK(on.matrices_ms > 0);
    CHECK(off.matrices_ms == on.matrices_ms);
    CHECK(exposed(off) == doctest::Approx(sent(off) + off.matrices_ms));
    CHECK(on.update_matmuls_ms > on.matrices_ms);
    const StepTime adamw = predicted([](Config& c) { c.ranks = c.global_batch_size = 4; });
    CHECK(adamw.update_matmuls_ms == 0);
    CHECK(exposed(on) - exposed(adamw) > 0);
    CHECK(exposed(on) - exposed(adamw) < 0.1 * on.matrices_ms);
}

TEST_CASE("plan: matmuls of experts hide that tokens return in the backward pass, and shared experts in both") {
    struct Predicted {
        StepTime time;
        std::map<std::string, const StepRecorder*> exchanges;
        MemoryPlan plan;
    };
    const auto experts = [](const Words& words) {
        Predicted p{};
        const Config config = planned_config(last_words(
            {{"--model", "qwen3-30B-A3B", "--num-layers", "4", "--micro-batch-size", "2", "--global-batch-size", "16",
              "--seq-length", "4096", "--ranks", "4", "--expert-parallel", "4", "--fp8-recipe", "blockwise"}, words}));
        p.plan = memory_of(config, 4);
        p.time = predict_step(config, p.plan, measured_gpu());
        for (const StepRecorder& e : p.plan.exchanges) p.exchanges[e.purpose] = &e;
        return p;
    };
    const Predicted on = experts({}), off = experts({"--overlap", "off"});
    const StepTime &hidden = on.time, &alone = off.time;
    CHECK(hidden.tokens_ms == alone.tokens_ms);
    CHECK(alone.exposed_tokens_ms == alone.tokens_ms);
    // In both passes of 2 micro-batches and 4 layers each of 8,192 tokens goes to 3 ranks: as codes with scales, and
    // returns in BF16.
    const double returned = 1e3 * 2 * 4 * 3 * 8192 * 2048 * 2 / kLinkRate, sent = returned / 2 * (1 + 4.0 / 128);
    CHECK(hidden.tokens_ms == doctest::Approx(2 * returned + 3 * sent).epsilon(0.01));
    CHECK(hidden.exposed_tokens_ms < returned + 2 * sent);   // forward, and the gradients before the experts
    CHECK(hidden.exposed_tokens_ms > returned);
    CHECK(exposed(alone) - exposed(hidden) > 0.9 * (alone.exposed_tokens_ms - hidden.exposed_tokens_ms));
    const StepRecorder& sums = *on.exchanges.at("sums of gradients of tokens of layers.");
    CHECK(sums.sent_bytes == int64_t{2} * 4 * 3 * 8192 * 2048 * 2);
    int64_t wgrads = 0;
    for (const PlannedGemm& g : sums.gemms) wgrads += g.shape.layout == GemmLayout::kWgrad ? g.count : 0;
    CHECK(wgrads == 3 * 2 * 4);   // up, down and the router
    CHECK(on.exchanges.at("sums of experts of layers.")->gemms.empty());
    const Predicted shared = experts({"--moe-shared-experts", "1", "--moe-router-bias-update-rate", "0.001"});
    CHECK(shared.exchanges.at("sums of experts of layers.")->gemms.size() == 2);
    CHECK(shared.time.exposed_tokens_ms < hidden.exposed_tokens_ms);
}

TEST_CASE("plan: context parallelism divides tokens and heads, and nothing hides its exchanges") {
    const Words words = {"--model", "llama3-8B", "--fp8-recipe", "delayed", "--seq-length", "131072",
                         "--max-position-embeddings", "131072", "--micro-batch-size", "1", "--global-batch-size", "1",
                         "--recompute", "block-keep-attention", "--ranks", "8", "--context-parallel", "8"};
    const Config config = planned_config(words);
    const MemoryPlan plan = memory_of(config, 8);
    const int64_t T = 131072, part = T / 8, layers = 32;
    const PlannedOp* attention = find_op(plan, OpKind::attention_backward);
    REQUIRE(attention);
    CHECK(attention->attention == PlannedAttention{.B = 1, .T = T, .NH = 4, .HS = 128, .backward = true});
    const PlannedOp* norm = find_op(plan, OpKind::rmsnorm_backward);
    REQUIRE(norm);
    CHECK(norm->bytes % part == 0);
    // Q, K, V and the output in the forward pass, again when it is recomputed, and their gradients; 7 of 8 parts are
    // sent to other ranks.
    const int64_t exchanged = layers * 3 * 2 * part * (48 + 32) * 128;
    const StepTime time = predict_step(config, plan, measured_gpu());
    CHECK(time.exchange_ms == doctest::Approx(1e3 * static_cast<double>(exchanged) * 7 / 8 / kLinkRate));
    CHECK(time.ms[static_cast<size_t>(StepPart::kCommunication)] > time.exchange_ms);
    CHECK(time.exchange_ms < 0.1 * time.total_ms());
    const PlannedOp* split = find_op(plan, OpKind::split_heads);
    REQUIRE(split);
    CHECK(split->bytes == 2 * 2 * part * 48 * 128);
    CHECK(split->count == 2 * layers);
    // A rank has 16384 tokens, so it needs nearly as much memory as a rank with sequences of that length.
    const Config alone = planned_config(last_words({words, {"--seq-length", "16384", "--global-batch-size", "8",
                                                      "--context-parallel", "1"}}));
    const double ratio = static_cast<double>(plan.arena_bytes) / static_cast<double>(memory_of(alone, 8).arena_bytes);
    CHECK(ratio > 1);
    CHECK(ratio < 1.02);
    CHECK(contains(plan_text({config, make_param_table(config.shape), plan, DeviceInfo{}, {}}),
                   "1 micro-batch of 1 x 16384 tokens per step and rank; 8 ranks share each sequence of 131072 "
                   "tokens"));
}
