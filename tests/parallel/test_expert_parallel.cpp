// Expert parallelism: ranks (here threads) that share the experts compute the same as ranks that have all of them.
#include "llmc/checkpoint/load.h"
#include "tests/support/fp8_model_test.h"
#include "tests/support/zero_test.h"

namespace expert_parallel_test {
namespace {

constexpr int64_t kSequences = 4;

struct Result {
    double loss = 0;
    std::vector<double> token_losses;
    std::vector<float> short_losses;
    std::map<std::string, std::vector<double>> dense, experts;   // reduced gradients; of experts of all ranks
    std::map<std::string, Bytes> state;
    StepState step{};
    std::string evaluation_error;   // of token_losses
};

ModelConfig eight_experts() {
    ModelConfig shape = tiny_moe();
    shape.num_experts = 8;
    return shape;
}

// One step without an update, of one micro-batch for each rank. same: all tokens have the same experts, those of the
// first rank.
Result run(Config config, int ranks, int parts, bool same = false) {
    config.expert_parallel = parts;
    config.micro_batch_size = kSequences / ranks, config.global_batch_size = kSequences;
    std::vector<Result> results(static_cast<size_t>(ranks));
    LocalRanks(ranks).run([&](Comm& comm) {
        const int rank = comm.world().rank;
        Result& result = results[static_cast<size_t>(rank)];
        TestModel model(config, true, &comm);
        const StateAccess access = model.trainer->state_access(model.ctx);
        for (size_t p = 0; same && p < model.table.params.size(); p++) {
            const std::vector<float> zeros(static_cast<size_t>(model.table.params[p].elems()));
            for (const ElementRange& part : held_within(access, static_cast<int>(p), {0, ll(zeros.size())}))
                if (model.table.params[p].name.ends_with("router.weight"))
                    access.write(StateKind::kMaster, static_cast<int>(p), part.begin, part.count, zeros.data());
        }
        for (size_t p = 0; config.shape.gpt_oss() && p < model.table.params.size(); p++) {   // biases are 0
            const Param& param = model.table.params[p];
            std::vector<float> noise(static_cast<size_t>(param.elems()));
            for (size_t i = 0; i < noise.size(); i++)
                noise[i] = 0.3f * rng_normal(p, static_cast<uint64_t>(param.first_elem()) + i);
            for (const ElementRange& part : held_within(access, static_cast<int>(p), {0, param.elems()}))
                if (param.name.ends_with("bias"))
                    access.write(StateKind::kMaster, static_cast<int>(p), part.begin, part.count,
                                 noise.data() + part.begin);
        }
        model.trainer->weights_from_masters(model.ctx, true);
        model.set_random_batch(kSequences, 31);
        model.gradients();
        CHECK(model.arena.peak_bytes() == model.plan.arena_bytes);
        result.loss = model.loss(), result.step = model.result;
        for (size_t i = 0; config.zero == 0 && i < model.table.params.size(); i++) {
            const Param& p = model.table.params[i];
            (p.experts > 1 ? result.experts : result.dense)[p.name] = model.grad(static_cast<int>(i));
        }
        add_state(model, result.state);
        std::vector<int32_t> tokens;
        for (int64_t i = 0; i < config.micro_batch_size * config.seq_length; i++)
            tokens.push_back(static_cast<int32_t>((rank + 3) * i * i % config.shape.vocab_size));
        std::vector<float> losses(tokens.size());
        model.trainer->evaluator().token_losses(model.ctx, config.micro_batch_size, config.seq_length, tokens.data(),
                                                tokens.data(), losses.data(), model.staged);
        result.token_losses.assign(losses.begin(), losses.end());
        result.short_losses.resize(4);   // of a pass of fewer tokens
        model.trainer->evaluator().token_losses(model.ctx, 1, 4, tokens.data(), tokens.data(),
                                                result.short_losses.data(), model.staged);
        result.evaluation_error = model.trainer->router_balance().evaluation_error(model.ctx, comm);
    });
    Result all = results[0];
    for (size_t r = 1; r < results.size(); r++) {
        CHECK(results[r].loss == all.loss);
        CHECK(results[r].dense == all.dense);
        all.token_losses.insert(all.token_losses.end(), results[r].token_losses.begin(), results[r].token_losses.end());
        const bool again = r >= static_cast<size_t>(parts);
        for (auto& [name, part] : results[r].experts) {
            std::vector<double>& whole = all.experts[name];
            if (again) CHECK(part == results[r % static_cast<size_t>(parts)].experts[name]);
            else whole.insert(whole.end(), part.begin(), part.end());
        }
    }
    return all;
}

using ByName = std::map<std::string, std::vector<double>>;
double relative(const ByName& a, const ByName& b, double factor = 1) {
    double difference = 0, norm = 0;
    for (const auto& [name, values] : a)
        for (size_t i = 0; i < values.size(); i++) {
            const double d = factor * b.at(name).at(i) - values[i];
            difference += d * d, norm += values[i] * values[i];
        }
    return std::sqrt(difference / norm);
}

Config four_ranks(Dtype dtype) {
    Config config = tiny_config(eight_experts(), dtype, 1, 9);
    config.moe_aux_loss_coeff = 0.5, config.moe_z_loss_coeff = 0.1, config.zero = 0;
    return config;
}

}  // namespace

// Gradients of experts add the same products in another order: of all ranks of a group at once. The sums of BF16 runs
// are rounded once for each rank, as the rows that they add: to 9 bits.
TEST_CASE("expert parallel: losses and the gradients of all else have equal bits in FP32 for 1, 2 and 4 parts") {
    for (Dtype dtype : {Dtype::kFp32, Dtype::kBf16})
        for (Recompute recompute : {Recompute::kNone, Recompute::kNormAct, Recompute::kBlock})
            for (bool same : {false, true}) {
                Config config = four_ranks(dtype);
                config.recompute = recompute;
                const Result one = run(config, 4, 1, same);
                for (int parts : {2, 4}) {
                    CAPTURE(parts, same);
                    const Result r = run(config, 4, parts, same);
                    const bool exact = dtype == Dtype::kFp32;
                    const double bound = exact ? 1e-6 : 0x1p-8;
                    if (exact || same) {   // the sums of other ranks are 0 if all tokens have the same experts
                        CHECK(r.loss == one.loss);
                        CHECK(r.token_losses == one.token_losses);
                        CHECK(r.dense == one.dense);
                    }
                    CHECK(std::abs(r.loss - one.loss) < 1e-3);
                    CHECK(relative(one.dense, r.dense) < bound);
                    CHECK(relative(one.experts, r.experts) < bound);
                    CHECK(relative(one.experts, r.experts, 2) > bound);   // counted twice
                    const int64_t rows = kSequences / 4 * config.seq_length * parts * 2;   // of the tokens of a group
                    CHECK(r.step.expert_rows <= rows);
                    if (same) CHECK(r.step.expert_rows == rows);
                }
            }
}

TEST_CASE("expert parallel: gradients of experts have equal bits in FP32 if each rank has a part of the tokens") {
    for (Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
        const Result one = run(four_ranks(dtype), 1, 1);
        for (int ranks : {2, 4}) {
            CAPTURE(ranks);
            const Result r = run(four_ranks(dtype), ranks, ranks);
            if (dtype == Dtype::kFp32) CHECK(r.experts == one.experts);
            for (const auto& [a, b] : {std::pair{&one.experts, &r.experts}, {&one.dense, &r.dense}})
                CHECK(relative(*a, *b) < (dtype == Dtype::kFp32 ? 1e-5 : 0x1p-8));
        }
    }
}

TEST_CASE("expert parallel: the first layers may have no experts") {
    Config config = four_ranks(Dtype::kFp32);
    config.shape.num_layers = 3, config.shape.dense_layers = 1, config.shape.dense_ffn_size = 40;
    const Result one = run(config, 4, 1);
    CHECK(one.loss != run(four_ranks(Dtype::kFp32), 4, 1).loss);
    for (Recompute recompute : {Recompute::kNone, Recompute::kNormAct, Recompute::kBlock})
        for (int parts : {1, 4}) {
            config.recompute = recompute;
            const Result r = run(config, 4, parts);
            CHECK(r.loss == one.loss);
            CHECK(r.dense == one.dense);
            CHECK(relative(one.experts, r.experts) < 1e-6);
        }
    config.moe_capacity = 1, config.recompute = Recompute::kNone;
    CHECK(run(config, 4, 2, true).evaluation_error.find("rows in layer 1, but --moe-capacity 1") < 100);
    for (int64_t zero : {1, 2, 3}) {
        config.zero = zero, config.moe_capacity = 0;
        CHECK(run(config, 4, 2).token_losses == one.token_losses);
    }
}

TEST_CASE("expert parallel: biases of experts are those of their rank, or of all for the rank's tokens") {
    Config config = four_ranks(Dtype::kFp32);
    config.shape = tiny_gpt_oss(), config.shape.num_experts = 8;
    const Result one = run(config, 4, 1);
    for (Recompute recompute : {Recompute::kNone, Recompute::kBlock})
        for (int parts : {2, 4}) {
            config.recompute = recompute;
            const Result r = run(config, 4, parts);
            CHECK(r.loss == one.loss);
            CHECK(r.token_losses == one.token_losses);
            CHECK(r.dense == one.dense);
            for (const auto& [name, values] : one.experts) {
                CAPTURE(name);
                CHECK(relative({{name, values}}, r.experts) < 1e-6);
                CHECK(relative({{name, values}}, r.experts, 2) > 1e-6);
            }
            CHECK(one.experts.contains("layers.0.experts.up.bias"));
        }
    for (int64_t zero : {1, 2, 3}) {
        config.zero = zero;
        CHECK(run(config, 4, 2).token_losses == one.token_losses);
    }
}

TEST_CASE("expert parallel: initial values depend neither on the parts nor on the level of ZeRO") {
    Config config = four_ranks(Dtype::kFp32);
    config.lr = 0;
    std::map<std::string, Bytes> expected;
    for (int parts : {1, 2, 4})
        for (int64_t zero : {0, 1, 2, 3}) {
            config.expert_parallel = parts, config.zero = zero, config.micro_batch_size = 1;
            config.global_batch_size = kSequences;
            std::map<std::string, Bytes> state;
            std::mutex mutex;
            LocalRanks(4).run([&](Comm& comm) {
                TestModel model(config, true, &comm);
                check_weights_are_rounded_masters(model);
                model.trainer->gatherer().wait(model.ctx);
                device::synchronize(model.ctx);
                const std::lock_guard lock(mutex);
                add_state(model, state);
            });
            if (expected.empty()) expected = state;
            CHECK(state == expected);
        }
}

// Without clipping, the state of an expert after the first step depends on its own gradient alone.
TEST_CASE("expert parallel: every micro-batch counts for experts, at every level of ZeRO") {
    Config config = four_ranks(Dtype::kFp32);
    config.expert_parallel = 4, config.micro_batch_size = 1, config.global_batch_size = 8, config.clip_grad = 0;
    std::map<std::string, Bytes> expected;
    for (int64_t zero : {1, 2, 3}) {
        CAPTURE(zero);
        config.zero = zero;
        std::map<std::string, Bytes> state;
        std::mutex mutex;
        LocalRanks(4).run([&](Comm& comm) {
            TestModel model(config, true, &comm);
            model.set_random_batch(config.global_batch_size, 5);
            model.step();
            const std::lock_guard lock(mutex);
            add_state(model, state);
        });
        std::erase_if(state, [](const auto& row) { return row.first.find(".experts.") == std::string::npos; });
        CHECK(!state.empty());
        if (expected.empty()) expected = state;
        CHECK(state == expected);
    }
}

TEST_CASE("expert parallel: memory without a row is neither counted nor taken for values that are not finite") {
    for (Fp8Recipe recipe : {Fp8Recipe::kBlockwise, Fp8Recipe::kBlockwiseBf16Wgrad})
        for (int64_t experts : {4, 8}) {   // one and two a rank
            CAPTURE(experts);
            Config config = fp8_config(fp8_moe(), recipe);
            config.shape.num_experts = experts, config.expert_parallel = 4, config.seq_length = 48;
            config.micro_batch_size = 1, config.global_batch_size = 4;
            std::map<std::string, uint64_t> counted;
            std::mutex mutex;
            LocalRanks(4).run([&](Comm& comm) {
                TestModel model(config, true, &comm);
                std::vector<char> report(static_cast<size_t>(model.trainer->fp8().report_bytes()));
                model.staged.fp8_report = report.data(), model.staged.count_fp8 = true;
                model.set_random_batch(4, 20);
                model.step();
                CHECK(model.result.skip == 0);
                CHECK(model.trainer->fp8().first_nonfinite(report.data()) == "");
                const std::lock_guard lock(mutex);
                for (const auto& r : model.trainer->fp8().read_report(report.data())) counted[r.name] += r.counts.elems;
            });
            const int64_t layouts = recipe == Fp8Recipe::kBlockwise ? 2 : 1;
            const int64_t rows = 4 * config.seq_length * config.shape.experts_per_token * layouts;
            CHECK(counted["1.down.x"] == static_cast<uint64_t>(rows * config.shape.ffn_hidden_size));
            CHECK(counted["0.up.dy"] == static_cast<uint64_t>(rows * config.shape.ffn_hidden_size * 2));
        }
}

TEST_CASE("expert parallel: more rows than --moe-capacity allows skip the step, and are counted") {
    for (double capacity : {1.0, 1.5, 2.0}) {
        Config config = four_ranks(Dtype::kFp32);
        config.moe_capacity = capacity, config.expert_parallel = 2;
        const Result balanced = run(config, 4, 2), same = run(config, 4, 2, true);
        const int64_t rows = config.expert_rows_of_token() * config.seq_length;
        CHECK(rows == static_cast<int64_t>(capacity * 2) * 9);
        CHECK(same.step.expert_rows == 2 * 2 * 9);   // all rows of two ranks
        CHECK(same.step.skip == (capacity < 2 ? StepState::kNotFinite : 0));
        const std::string error =
            strf("the experts of one rank had 36 rows in layer 0, but --moe-capacity %s has memory for %lld: raise it, "
                 "or leave it out", capacity == 1 ? "1" : "1.5", ll(rows));
        CHECK(same.evaluation_error == (capacity == 2 ? "" : error));
        CHECK((balanced.step.skip != 0) == (balanced.step.expert_rows > rows));
        if (balanced.step.skip == 0) CHECK(balanced.loss == run(four_ranks(Dtype::kFp32), 4, 1).loss);
        CHECK(same.short_losses == run(four_ranks(Dtype::kFp32), 4, 2, true).short_losses);   // 16 rows, which fit
    }
}

}  // namespace expert_parallel_test
