// --loss-chunk: head and loss in chunks of rows have the bits of all rows at once, except the sum of the head's weight
// gradient, and need less memory.
#include "tests/support/doctest.h"

#include <algorithm>
#include <cmath>

#include "tests/support/config_test.h"
#include "tests/support/fp8_model_test.h"
#include "tests/support/watched_store.h"

namespace {

std::vector<double> token_losses(TestModel& model) {
    const int64_t B = model.config.micro_batch_size, T = model.config.seq_length;
    const std::vector<int32_t> tokens(model.staged.tokens, model.staged.tokens + B * T);
    const std::vector<int32_t> targets(model.staged.targets, model.staged.targets + B * T);
    std::vector<float> losses(tokens.size());
    model.trainer->evaluator().token_losses(model.ctx, B, T, tokens.data(), targets.data(), losses.data(),
                                            model.staged);
    return {losses.begin(), losses.end()};
}

// Checks that loss, evaluation and all gradients but that of the head have equal bits.
void check_equal(TestModel& whole, TestModel& chunked) {
    CHECK(chunked.result.loss_sum == whole.result.loss_sum);
    CHECK(chunked.result.z_sum == whole.result.z_sum);
    CHECK((whole.result.z_sum > 0) == (whole.config.z_loss > 0));
    CHECK(std::isfinite(whole.loss()));
    for (size_t p = 0; p < whole.table.params.size(); p++) {
        CAPTURE(whole.table.params[p].name);
        if (static_cast<int>(p) != whole.table.head)
            CHECK(chunked.grad(static_cast<int>(p)) == whole.grad(static_cast<int>(p)));
    }
    CHECK(token_losses(chunked) == token_losses(whole));
    CHECK(chunked.arena.peak_bytes() == chunked.plan.arena_bytes);
}

// A micro-batch of which rows [end, N) are ignored.
std::vector<double> head_gradient_until(const Config& config, int64_t end, int64_t* counted) {
    TestModel model(config);
    const int64_t N = config.micro_batch_size * config.seq_length;
    std::vector<int32_t> tokens, targets;
    for (int64_t i = 0; i < N; i++) {
        const Philox4 p = philox(3, static_cast<uint64_t>(i));
        const auto V = static_cast<uint32_t>(config.shape.vocab_size);
        tokens.push_back(static_cast<int32_t>(p.word[0] % V));
        targets.push_back(i < end ? static_cast<int32_t>(p.word[1] % V) : kIgnoreIndex);
    }
    model.set_batch(tokens, targets);
    model.gradients();
    *counted = model.counted;
    return model.grad(model.table.head);
}

}  // namespace

TEST_CASE("loss chunk: any chunk has the bits of all rows at once, also in evaluation") {
    for (Dtype dtype : {Dtype::kFp32, Dtype::kBf16})
        for (const ModelConfig& shape : {tiny_gpt2(), tiny_llama()}) {
            Config config = tiny_config(shape, dtype, 3, 7);
            config.shape.init_std = 0.3;
            config.z_loss = shape.tied_head ? 0.01 : 0;
            TestModel whole(config);
            whole.set_random_batch(6, 3);
            whole.gradients();
            const std::vector<double> expected = whole.grad(whole.table.head);
            for (int64_t chunk : {1, 4, 7, 16, 20}) {
                CAPTURE(chunk);
                config.loss_chunk = chunk;
                TestModel chunked(config);
                chunked.set_random_batch(6, 3);
                chunked.gradients();
                // A weight gradient in FP32 is a sum of at most N products of FP32 or BF16 numbers, in another order:
                // its error is below N 2^-24 times the sum of their absolute values. |dlogits| <= dloss_mul, and
                // |x| <= sqrt(C) for a norm whose weights are 1.
                const auto N = static_cast<double>(6 * 7), C = static_cast<double>(shape.hidden_size);
                const double bound = 2 * N * std::ldexp(1, -24) * N / static_cast<double>(whole.counted) * std::sqrt(C);
                const std::vector<double> found = chunked.grad(chunked.table.head);
                double worst = 0;
                for (size_t i = 0; i < found.size(); i++) worst = std::max(worst, std::fabs(found[i] - expected[i]));
                CHECK(worst < bound);
                CHECK(distance(found, expected) < 1e-4);   // no chunk is missing and none is added twice
                check_equal(whole, chunked);
            }
        }
}

TEST_CASE("loss chunk: a head gradient in bf16 is rounded once per chunk") {
    Config config = tiny_config(tiny_llama(), Dtype::kBf16, 3, 7);
    config.shape.init_std = 0.3;
    const int64_t N = 21;
    int64_t all = 0, counted = 0;
    const std::vector<double> exact = head_gradient_until(config, N, &all);   // in FP32
    for (int64_t chunk : {4, 10}) {
        config.loss_chunk = chunk;
        config.grad_dtype = config.grad_comm_dtype = Dtype::kBf16;
        const std::vector<double> found = head_gradient_until(config, N, &counted);
        // Each += rounds the sum of the chunks so far, in FP32, by at most 2^-8 of itself; FP32 adds 2^-18 of it.
        std::vector<double> bound(exact.size(), 1e-9);
        for (int64_t end = chunk; end < N + chunk; end += chunk) {
            Config fp32 = config;
            fp32.loss_chunk = 0;
            fp32.grad_dtype = fp32.grad_comm_dtype = Dtype::kFp32;
            const std::vector<double> sum = head_gradient_until(fp32, std::min(end, N), &counted);
            const double scale = static_cast<double>(counted) / static_cast<double>(all);
            for (size_t i = 0; i < bound.size(); i++)
                bound[i] += std::fabs(sum[i]) * scale * 1.01 * (std::ldexp(1, -8) + std::ldexp(1, -18));
        }
        double worst = 0;
        for (size_t i = 0; i < found.size(); i++) worst = std::max(worst, std::fabs(found[i] - exact[i]) / bound[i]);
        CHECK(worst <= 1);
        CHECK(worst > 0.1);
    }
}

TEST_CASE("loss chunk: an FP8 head in chunks has the same bits, with scales for all rows or for blocks") {
    for (bool tied : {false, true})
        for (Fp8Recipe recipe : kFp8Recipes) {
            CAPTURE(static_cast<int>(recipe));
            Config config = fp8_config(fp8_shapes()[1], recipe);
            config.fp8_lm_head = true;
            config.shape.tied_head = tied;
            config.shape.max_positions = config.seq_length = 160;   // 320 rows: chunks of 128 leave 64
            config.fp8_stats_interval = 1;
            TestModel whole(config);
            config.loss_chunk = 128;
            TestModel chunked(config);
            const bool history = recipe_row(recipe).history;
            if (history) {
                // The first scales come from a micro-batch in current scaling, with amaxes of the chunks so far.
                for (TestModel* m : {&whole, &chunked}) m->set_random_batch(4, 8), m->gradients();
                chunked.trainer->fp8().set_histories(chunked.ctx, whole.trainer->fp8().histories(whole.ctx));
            }
            std::vector<std::vector<char>> reports;
            for (TestModel* m : {&whole, &chunked}) {
                reports.emplace_back(static_cast<size_t>(m->trainer->fp8().report_bytes()));
                m->set_random_batch(4, 3);
                m->staged.fp8_report = reports.back().data();
                m->staged.count_fp8 = true;
                const int64_t before = device::fp8_matmuls(m->ctx);
                m->gradients();
                CHECK(device::fp8_matmuls(m->ctx) - before
                      == planned_fp8_matmuls(m->trainer->fp8().plan(), Recompute::kNone,
                                             m->trainer->executed_micro_batches(), loss_chunks(m->config)));
            }
            const int head = whole.table.head;
            if (recipe == Fp8Recipe::kTensorwise) {
                // A chunk's scale is at least as large as that of all rows, so that fewer values flush to 0.
                CHECK(chunked.loss() == doctest::Approx(whole.loss()).epsilon(0.01));
                CHECK(distance(chunked.grad(head), whole.grad(head)) < 0.1);
            } else {
                check_equal(whole, chunked);
                CHECK(distance(chunked.grad(head), whole.grad(head)) < 1e-5);
                if (history) CHECK(state_text(chunked) == state_text(whole));
            }
            // Every value is cast and counted once.
            const auto expected = whole.trainer->fp8().read_report(reports[0].data());
            const auto found = chunked.trainer->fp8().read_report(reports[1].data());
            for (size_t i = 0; i < found.size(); i++) {
                CAPTURE(found[i].name);
                CHECK(found[i].counts.elems == expected[i].counts.elems);
                if (recipe == Fp8Recipe::kTensorwise && found[i].name != "head.x") continue;   // other gradients
                CHECK(std::max(found[i].entry.amax_bits, found[i].entry.step_amax_bits)
                      == std::max(expected[i].entry.amax_bits, expected[i].entry.step_amax_bits));
                if (is_blockwise(recipe)) CHECK(found[i].scale_bins == expected[i].scale_bins);
            }
            // The row of a sample lies in the second chunk.
            if (recipe != Fp8Recipe::kTensorwise) {
                const std::vector<int32_t> prompt(140, 3);
                auto text = [&](TestModel& m) {
                    return m.trainer->evaluator().generate(m.ctx, prompt, {.tokens = 3, .temperature = 0}, 1, m.staged);
                };
                CHECK(text(whole) == text(chunked));
            }
            CHECK(chunked.arena.peak_bytes() == chunked.plan.arena_bytes);
        }
}

TEST_CASE("loss chunk: the plan has the memory of one chunk's logits, and as much work") {
    const auto scratch = [](const MemoryPlan& plan) {
        return plan.purpose_bytes[static_cast<size_t>(Purpose::kScratch)];
    };
    for (bool fp8 : {false, true}) {
        Config config = tiny_config(fp8_shapes()[1], Dtype::kBf16, 1, 1024);
        config.shape.max_positions = 1024;
        config.shape.vocab_size = 16000;   // so that the head needs the most scratch
        if (fp8) config.fp8_recipe = Fp8Recipe::kDelayed, config.fp8_lm_head = true;
        const MemoryPlan whole = memory_of(config, 1);
        config.loss_chunk = 384;   // 384, 384, 256
        const MemoryPlan chunked = memory_of(config, 1);
        // bf16 logits, with FP8 also their gradient in both layouts, and the x of a chunk.
        const int64_t row_bytes = config.shape.padded_vocab() * (fp8 ? 4 : 2);
        const int64_t x_bytes = fp8 ? 384 * config.shape.hidden_size : 0;
        CHECK(scratch(whole) - scratch(chunked) == (1024 - 384) * row_bytes - x_bytes);
        double flops[2] = {}, bytes[2] = {};
        for (const MemoryPlan* plan : {&whole, &chunked}) {
            const int i = plan == &chunked;
            for (const PlannedGemm& g : plan->step_gemms)
                flops[i] += static_cast<double>(g.count * g.shape.M * g.shape.N * g.shape.K);
            for (const PlannedOp& op : plan->step_ops)
                if (op.kind == OpKind::classifier) bytes[i] += static_cast<double>(op.count * op.bytes);
        }
        CHECK(flops[0] == flops[1]);
        CHECK(bytes[0] == bytes[1]);
    }
}

TEST_CASE("loss chunk: chunks that FP8 cannot take, or that do nothing, are refused") {
    const auto plan_error = [](Fp8Recipe recipe, int64_t chunk, bool head) -> std::string {
        Config config = fp8_config(fp8_shapes()[1], recipe);
        config.fp8_lm_head = head;
        config.loss_chunk = chunk;
        return refusal_of([&] { fp8_plan_of(config, make_param_table(config.shape)); });
    };
    CHECK(plan_error(Fp8Recipe::kDelayed, 40, false).empty());
    CHECK(plan_error(Fp8Recipe::kDelayed, 48, true).empty());
    CHECK(contains(plan_error(Fp8Recipe::kDelayed, 40, true), "must be a multiple of 16"));
    CHECK(contains(plan_error(Fp8Recipe::kBlockwise, 48, true), "must be a multiple of 128"));
    const Words words = {"--train-data", "t", "--train-iters", "1", "--seq-length", "64", "--micro-batch-size", "2"};
    CHECK(refusal("gpt2", joined(words, {"--loss-chunk", "127"})).empty());
    CHECK(contains(refusal("gpt2", joined(words, {"--loss-chunk", "128"})), "no more tokens than one chunk"));
}

TEST_CASE("loss chunk: chunks add up also where a weight gradient is written, not added to") {
    struct Written : WatchedStore {
        using WatchedStore::WatchedStore;
        bool accumulates(int) const override { return false; }
    };
    for (int64_t chunk : {0, 4}) {
        Config config = tiny_config(tiny_llama(), Dtype::kFp32, 3, 7);
        config.loss_chunk = chunk;
        TestModel model(config);
        model.set_random_batch(3, 3);
        model.gradients();
        const std::vector<double> expected = model.grad(model.table.head);
        Written store(model);
        model.gradients();
        CHECK(store.closed_reads == 0);
        CHECK(model.grad(model.table.head) == expected);   // a read by this test
    }
}
