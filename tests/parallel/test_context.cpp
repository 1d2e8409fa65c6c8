// Context parallelism: ranks (here threads) that share each sequence compute the same as one rank with whole
// sequences.
#include <algorithm>

#include "llmc/train/staging.h"
#include "tests/support/data_test.h"
#include "tests/support/zero_test.h"

namespace {

constexpr int64_t kSequences = 4;

Config with_ranks(Config config, int context) {
    config.context_parallel = context;
    return config;
}

// The results of a step without an update, which are equal on all ranks.
struct Result {
    double loss = 0, norm = 0;
    std::vector<std::vector<double>> grads;     // reduced, by parameter
    std::vector<std::vector<float>> token_losses;   // bits of the forward pass, by sequence
};

Result result_of(TestModel& model, const Config& config) {
    Result result;
    model.set_random_batch(kSequences, 31);
    model.gradients();
    result.loss = model.loss();
    result.norm = static_cast<double>(model.result.grad_norm);
    for (size_t i = 0; i < model.table.params.size(); i++) result.grads.push_back(model.grad(static_cast<int>(i)));
    std::vector<int32_t> tokens, targets;
    for (int64_t i = 0; i < config.micro_batch_size * config.seq_length; i++) {
        tokens.push_back(static_cast<int32_t>(i * i % config.shape.vocab_size));
        targets.push_back(i % 7 == 0 ? kIgnoreIndex : static_cast<int32_t>(i % config.shape.vocab_size));
    }
    std::vector<float>& losses = result.token_losses.emplace_back(tokens.size());
    model.trainer->evaluator().token_losses(model.ctx, config.micro_batch_size, config.seq_length, tokens.data(),
                                            targets.data(), losses.data(), model.staged);
    return result;
}

// All ranks must agree.
Result run(Config config, int ranks, int context) {
    config.context_parallel = context;
    config.global_batch_size = kSequences;
    config.zero = 0;   // every rank has all reduced gradients
    std::vector<Result> results(static_cast<size_t>(ranks));
    LocalRanks(ranks).run([&](Comm& comm) {
        TestModel model(config, true, &comm);
        results[static_cast<size_t>(comm.world().rank)] = result_of(model, config);
        CHECK(model.arena.peak_bytes() == model.plan.arena_bytes);
    });
    for (const Result& r : results) {
        CHECK(r.loss == results[0].loss);
        CHECK(r.grads == results[0].grads);
        CHECK(r.token_losses == results[0].token_losses);
    }
    return results[0];
}

ModelConfig four_heads(ModelConfig shape) {
    shape.num_attention_heads = 4;
    shape.hidden_size = 32;
    return shape;
}

std::vector<TrainingCase> cases() {
    ModelConfig gpt2 = four_heads(tiny_gpt2()), llama = tiny_llama();
    gpt2.num_query_groups = 4;
    std::vector<TrainingCase> all;
    auto add = [&](const std::string& name, const ModelConfig& shape) -> Config& {
        return all.emplace_back(TrainingCase{name, tiny_config(shape, Dtype::kFp32, 1, 16)}).config;
    };
    add("gpt2", gpt2).micro_batch_size = 2;
    add("llama", llama).micro_batch_size = 2;
    ModelConfig qk_norm = llama;
    qk_norm.qk_norm = true;
    qk_norm.linear_bias = LinearBias::kQkv;
    add("qk-norm, recompute block", qk_norm).recompute = Recompute::kBlock;
    ModelConfig window = llama;
    window.sliding_window = {5, 0}, window.local_rotary_base = 30, window.attention_sinks = true;
    add("sinks, windows by layer, recompute block but attention", window).recompute = Recompute::kBlockKeepAttention;
    add("gpt-oss, recompute block", tiny_gpt_oss()).recompute = Recompute::kBlock;
    add("documents", llama).reset_attention_mask = true;
    gpt2.attention_sinks = true;
    add("gpt2, recompute norms", gpt2).recompute = Recompute::kNormAct;
    for (const ModelConfig& shape : {gpt2, llama}) {
        Config& restarts = add("documents, positions that restart, chunks of the loss", shape);
        restarts.reset_attention_mask = restarts.reset_position_ids = true, restarts.micro_batch_size = 2;
        restarts.loss_chunk = 3;
    }
    return all;
}

// The results of one rank in the dtype of `config`, or in FP64.
Result alone(Config config, Dtype dtype) {
    config.dtype = dtype;
    config.global_batch_size = kSequences;
    TestModel model(config);
    return result_of(model, config);
}

}  // namespace

TEST_CASE("context: in FP32 the forward pass has the bits of one rank, and gradients its error") {
    for (const TrainingCase& c : cases()) {
        const Result one = alone(c.config, Dtype::kFp32), exact = alone(c.config, Dtype::kFp64);
        // Two ranks have one key head each, and four ranks share two (gpt2: one each); 4 / 2: two groups of two ranks.
        for (const auto& [ranks, context] : kSharing) {
            CAPTURE(c.name, ranks, context);
            const Result several = run(c.config, ranks, context);
            CHECK(several.token_losses == one.token_losses);
            CHECK(several.loss == doctest::Approx(one.loss).epsilon(1e-12));   // the same terms in another order
            CHECK(several.norm == doctest::Approx(one.norm).epsilon(1e-6));
            for (size_t p = 0; p < one.grads.size(); p++) {
                CAPTURE(p);
                // Sums over tokens are added in another order, so a very small error of one rank is a matter of
                // chance.
                const double bound = 3 * distance(one.grads[p], exact.grads[p]) + 0x1p-22;
                CHECK(distance(several.grads[p], exact.grads[p]) <= bound);
                std::vector<double> wrong = several.grads[p];
                *std::max_element(wrong.begin(), wrong.end()) *= 1.001;
                CHECK(distance(wrong, exact.grads[p]) > bound);
            }
        }
    }
}

namespace {

ModelConfig fp8_shape(size_t number) {
    ModelConfig shape = fp8_shapes()[number];
    shape.num_attention_heads = 4;
    if (shape.num_query_groups == 3) shape.num_query_groups = 4;
    shape.max_positions = 512;
    return shape;
}

std::vector<TrainingCase> fp8_cases() {
    std::vector<TrainingCase> all;
    auto add = [&](const std::string& name, size_t shape, Fp8Recipe recipe) -> Config& {
        Config config = in_small_buckets(fp8_config(fp8_shape(shape), recipe));
        config.seq_length = recipe == Fp8Recipe::kBlockwise ? 512 : 64;   // parts are multiples of 128 and 16
        return all.emplace_back(TrainingCase{name, config}).config;
    };
    add("bf16", 0, Fp8Recipe::kNone);
    Config& delayed = add("delayed, loss in chunks", 1, Fp8Recipe::kDelayed);
    delayed.recompute = Recompute::kBlockKeepAttention;
    delayed.loss_chunk = 16;
    Config& heads = add("delayed, attention in FP8, head in FP8", 1, Fp8Recipe::kDelayed);
    heads.fp8_attention = heads.fp8_lm_head = true;
    heads.shape.kv_channels = 64;
    Config& restarts = add("delayed, attention in FP8, sinks, documents, positions that restart", 1,
                           Fp8Recipe::kDelayed);
    restarts.shape.attention_sinks = true;
    restarts.fp8_attention = restarts.reset_attention_mask = restarts.reset_position_ids = true;
    restarts.shape.kv_channels = 64;
    Config& sums = add("tensorwise, biases behind qk-norm, FP8 communication", 2, Fp8Recipe::kTensorwise);
    sums.grad_comm_dtype = Dtype::kE4m3;
    add("tensorwise, biases, documents", 0, Fp8Recipe::kTensorwise).reset_attention_mask = true;
    add("blockwise", 1, Fp8Recipe::kBlockwise).recompute = Recompute::kBlock;
    add("INT8 forward, head in FP8", 1, Fp8Recipe::kInt8Forward).fp8_lm_head = true;
    return all;
}

// Of the recipe's cases.
void check_bits(Fp8Recipe recipe) {
    for (const TrainingCase& c : fp8_cases()) {
        if (c.config.fp8_recipe != recipe) continue;
        const bool blocks = c.config.fp8_recipe == Fp8Recipe::kBlockwise;
        const int steps = blocks ? 1 : 2;
        const Run one = train(c.config, 1, steps);
        for (const auto& [ranks, context] : kSharing) {
            if (blocks && ranks == 4 && context == 2) continue;
            CAPTURE(c.name, ranks, context);
            const Config config = with_ranks(c.config, context);
            const Run several = train(config, ranks, steps);
            CHECK(several.skips == std::vector<int>(static_cast<size_t>(steps), 0));
            check_near(several.losses, one.losses, 0.01);
            check_near(several.norms, one.norms, 0.05);
            CHECK(several == train(at_level(config, 0), ranks, steps));
            // Levels 2 and 3 first add the ranks of a micro-batch.
            const Run two = train(at_level(config, 2), ranks, steps);
            check_near(two.losses, several.losses, 0.01);
            CHECK(two == train(at_level(config, 3), ranks, steps));
        }
    }
}

}  // namespace

// Cases of their own, since each takes minutes under the sanitizers.
TEST_CASE("context: in BF16 levels 0 and 1, and levels 2 and 3, have the same bits") { check_bits(Fp8Recipe::kNone); }

TEST_CASE("context: with delayed scaling levels 0 and 1, and levels 2 and 3, have the same bits") {
    check_bits(Fp8Recipe::kDelayed);
}

TEST_CASE("context: with tensorwise scaling levels 0 and 1, and levels 2 and 3, have the same bits") {
    check_bits(Fp8Recipe::kTensorwise);
}

TEST_CASE("context: with blockwise scaling levels 0 and 1, and levels 2 and 3, have the same bits") {
    check_bits(Fp8Recipe::kBlockwise);
}

TEST_CASE("context: with a forward pass in INT8 levels 0 and 1, and levels 2 and 3, have the same bits") {
    check_bits(Fp8Recipe::kInt8Forward);
}

TEST_CASE("context: the forward pass has the bits of one rank with FP8 attention and positions that restart") {
    Config config = fp8_config(fp8_shape(1), Fp8Recipe::kNone);
    config.seq_length = config.shape.max_positions = 64, config.shape.kv_channels = 64, config.micro_batch_size = 2;
    config.fp8_attention = config.reset_attention_mask = config.reset_position_ids = true;
    const Result one = alone(config, Dtype::kBf16);
    for (int context : {2, 4}) CHECK(run(config, 4, context).loss == doctest::Approx(one.loss).epsilon(1e-12));
    config.reset_position_ids = false;   // other roundings of Q and K, which the comparison sees
    CHECK(alone(config, Dtype::kBf16).loss != doctest::Approx(one.loss).epsilon(1e-9));
}

TEST_CASE("context: delayed scaling calibrates on one micro-batch, though a rank's part of it has no target") {
    Config config = fp8_config(fp8_shape(1), Fp8Recipe::kDelayed);
    config.micro_batch_size = 1, config.seq_length = 64, config.context_parallel = 2, config.global_batch_size = 2;
    const int64_t T = config.seq_length;
    std::vector<std::string> scales;
    for (const bool swapped : {false, true}) {
        LocalRanks(2).run([&](Comm& comm) {
            TestModel model(config, true, &comm);
            // Only one half of the first sequence has targets.
            std::vector<int32_t> tokens, targets;
            for (int64_t i = 0; i < 2 * T; i++) {
                tokens.push_back(static_cast<int32_t>(i * 5 % config.shape.vocab_size));
                const bool ignored = i < T && (i < T / 2) == swapped;
                targets.push_back(ignored ? kIgnoreIndex : static_cast<int32_t>(i * 3 % config.shape.vocab_size));
            }
            model.set_batch(tokens, targets);
            CHECK(model.staged.calibration_micro_batch == 0);
            model.step();
            CHECK(model.result.skip == 0);
            if (comm.root()) scales.push_back(state_text(model));
        });
    }
    CHECK(scales.size() == 2);
}

TEST_CASE("context: the ranks of a group stage their parts of the same sequences and calibrate on the same one") {
    const data_test::TempDir dir;
    const int64_t T = 16, sequences = 4;
    data_test::spill(dir / "a.bin", data_test::llmc_v1(data_test::counting(0, sequences * T + 1)));
    // No target of the first sequence counts, and in the second only those of the last quarter do.
    std::vector<uint8_t> flags(sequences * T + 1, 1);
    std::fill_n(flags.begin(), T + 3 * T / 4 + 1, 0);
    data_test::spill(dir / "a.mask", data_test::mask_bytes(flags));
    Config config = cases()[1].config;
    config.shape.vocab_size = 100, config.micro_batch_size = 1, config.global_batch_size = sequences;
    config.seq_length = T;
    for (const auto& [ranks, context] : std::vector<std::pair<int, int>>{{1, 1}, {2, 2}, {4, 2}, {4, 4}}) {
        CAPTURE(ranks, context);
        const Config own = with_ranks(config, context);
        DataConfig in_order = data_test::config_of({dir / "a.bin"}, T);
        in_order.shuffle = false;
        const DataLoader data(in_order);
        int64_t counted = 0;
        std::mutex mutex;
        LocalRanks(ranks).run([&](Comm& comm) {
            TestModel model(own, true, &comm);
            const Groups groups(comm, group_sizes(own, ranks));
            Staging staging(own, groups, *model.trainer);
            const StagedStep& staged = staging.read(data, 0, 0, sequences).staged;
            const int64_t part = T / context, first = comm.world().rank % context * part;
            CHECK(staged.micro_batches == sequences / groups.data_ranks);
            // The second sequence is the second micro-batch, or the first of the second group.
            CHECK(staged.calibration_micro_batch == (groups.data_ranks == 1 || groups.data_rank == 0 ? 1 : 0));
            for (int64_t i = 0; i < staged.micro_batches * part; i++) {
                const int64_t sequence = i / part * groups.data_ranks + groups.data_rank;
                const int64_t at = sequence * T + first + i % part;
                CHECK(staged.tokens[i] == at);
                CHECK(staged.targets[i] == (flags[static_cast<size_t>(at) + 1] ? at + 1 : kIgnoreIndex));
            }
            const std::lock_guard lock(mutex);
            counted += staged.counted_tokens;
        });
        CHECK(counted == std::count(flags.begin(), flags.end(), 1));
    }
}

TEST_CASE("context: evaluation, HellaSwag's losses and samples are those of one rank") {
    const data_test::TempDir dir;
    data_test::spill(dir / "valid.bin", data_test::llmc_v1(data_test::counting(0, 400)));
    Config config = cases()[1].config;
    config.shape.vocab_size = 500, config.shape.max_positions = 64, config.seq_length = 32;
    const DataLoader data(data_test::config_of({dir / "valid.bin"}, config.seq_length));
    struct Seen {
        double loss;
        int64_t counted;
        std::vector<int32_t> text;
    };
    const auto look = [&](Comm* comm, const Config& c) {
        TestModel model(c, true, comm);
        model.set_random_batch(c.global_batch_size, 1);
        const Evaluator::Result e = model.trainer->evaluator().evaluate(model.ctx, &data, 3, model.staged);
        const std::vector<int32_t> text =
            model.trainer->evaluator().generate(model.ctx, {3, 1, 4, 1, 5},
                                                {.tokens = 20, .temperature = 1.5, .seed = 7}, 2, model.staged);
        return Seen{e.loss_sum, e.counted_tokens, text};
    };
    config.global_batch_size = kSequences;
    const Seen one = look(nullptr, config);
    CHECK(one.text.size() == 25);
    for (const auto& [ranks, context] : kSharing) {
        LocalRanks(ranks).run([&](Comm& comm) {
            const Seen seen = look(&comm, with_ranks(config, context));
            CHECK(seen.loss == doctest::Approx(one.loss).epsilon(1e-12));
            CHECK(seen.counted == one.counted);
            CHECK(seen.text == one.text);
        });
    }
}

TEST_CASE("context: the plan counts the exchanges of a step, and its memory follows from the parts") {
    Config config = cases()[1].config;   // llama, 2 layers, 4 heads over 2, head dim 8
    config.micro_batch_size = 2;
    config.global_batch_size = 8;
    const int64_t B = config.micro_batch_size, T = config.seq_length, HS = 8, layers = 2;
    const auto exchanges = [&](int ranks, int context, Recompute level) {
        Config c = with_ranks(config, context);
        c.recompute = level;
        PlannedCollective sum{.name = "all-to-all", .dtype = Dtype::kFp32};
        for (const PlannedCollective& p : memory_of(c, ranks).collectives)
            if (p.exchange) {
                CHECK(p.ranks == context);
                sum.calls += p.calls, sum.bytes += p.bytes, sum.sent_bytes += p.sent_bytes;
            }
        return sum;
    };
    for (const auto& [ranks, context] : kSharing) {
        const int64_t micro_batches = config.global_batch_size / (B * ranks / context), tokens = B * T / context;
        const int64_t kv = std::max(2, context);   // key heads of all ranks together
        const int64_t qkv = 4 * tokens * (4 + 2 * kv) * HS, out = 4 * tokens * 4 * HS;
        const PlannedCollective plain = exchanges(ranks, context, Recompute::kNone);
        CHECK(plain.calls == micro_batches * layers * B * 4);   // Q K V, O and their gradients, sequence by sequence
        CHECK(plain.bytes == micro_batches * layers * 2 * (qkv + out));
        CHECK(plain.sent_bytes == plain.bytes / context * (context - 1));
        for (Recompute level : {Recompute::kBlock, Recompute::kBlockKeepAttention}) {
            const PlannedCollective again = exchanges(ranks, context, level);
            CHECK(again.calls == plain.calls / 4 * 6);
            CHECK(again.bytes == plain.bytes / 2 * 3);
        }
    }
    CHECK(exchanges(4, 1, Recompute::kNone).calls == 0);
}
