// Histograms of exponents in training: what they count, and that they change no bit of the run.
#include "tests/support/doctest.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "llmc/base/fp8.h"
#include "tests/support/fp8_model_test.h"
#include "tests/support/local_ranks.h"

namespace {

constexpr Fp8Recipe kAll[] = {Fp8Recipe::kNone, Fp8Recipe::kDelayed, Fp8Recipe::kTensorwise, Fp8Recipe::kBlockwise};

Config collecting(const ModelConfig& shape, Fp8Recipe recipe) {
    Config config = fp8_config(shape, recipe);
    config.fp8_stats = recipe == Fp8Recipe::kNone ? Fp8Stats::kShadow : Fp8Stats::kHistograms;
    config.fp8_stats_interval = 1;
    return config;
}

using Histograms = std::map<std::string, ExponentHistogram>;

// Runs a step that collects; `report` is its report.
Histograms collect(TestModel& model, std::vector<char>& report) {
    Fp8State& fp8 = model.trainer->fp8();
    report.assign(static_cast<size_t>(fp8.report_bytes()), 0);
    model.staged.fp8_report = report.data();
    model.staged.count_fp8 = true;
    model.step();
    model.staged.fp8_report = nullptr;
    model.staged.count_fp8 = false;
    Histograms found;
    for (const ExponentHistogram& h : fp8.read_exponents(report.data())) found[h.name] = h;
    return found;
}
Histograms collect(TestModel& model) {
    std::vector<char> report;
    return collect(model, report);
}

std::vector<std::vector<double>> masters(TestModel& model) {
    std::vector<std::vector<double>> all;
    for (const ShardRange& range : model.trainer->sharded_state().ranges())
        all.push_back(model.read(model.trainer->sharded_state().master(range)));
    return all;
}

}  // namespace

TEST_CASE("exponents: collecting changes no bit of a run, with any recipe, shape and level of recomputation") {
    for (const ModelConfig& shape : fp8_shapes())
        for (Fp8Recipe recipe : kAll)
            for (Recompute level : {Recompute::kNone, Recompute::kBlock}) {
                CAPTURE(static_cast<int>(recipe));
                Config config = collecting(shape, recipe);
                config.recompute = level;
                TestModel model(config);
                config.fp8_stats = Fp8Stats::kCounts;
                TestModel plain(config);
                for (int step = 0; step < 3; step++) {
                    for (TestModel* m : {&model, &plain}) m->set_random_batch(4, 30 + static_cast<uint64_t>(step));
                    plain.step();
                    if (step == 1) model.step();   // one that does not collect
                    else CHECK(collect(model).size() == static_cast<size_t>(12 * shape.num_layers));
                    CHECK(model.result.loss_sum == plain.result.loss_sum);
                    CHECK(model.result.grad_norm == plain.result.grad_norm);
                }
                CHECK(masters(model) == masters(plain));
                CHECK(model.arena.peak_bytes() == model.plan.arena_bytes);
                CHECK(model.plan.arena_bytes > plain.plan.arena_bytes);
            }
}

TEST_CASE("exponents: every element of the last micro-batch counts once, recomputed ones do not") {
    for (const ModelConfig& shape : fp8_shapes())
        for (Fp8Recipe recipe : kAll) {
            CAPTURE(static_cast<int>(recipe));
            Config config = collecting(shape, recipe);
            config.recompute = Recompute::kNormAct;
            TestModel model(config);
            model.set_random_batch(6, 20);   // three micro-batches
            const uint64_t N = 80, C = static_cast<uint64_t>(shape.hidden_size),
                           F = static_cast<uint64_t>(shape.ffn_hidden_size);
            Histograms found = collect(model);
            for (const LinearPlan& linear : model.trainer->fp8().plan().linears) {
                if (linear.kind == LinearKind::kHead) continue;
                CAPTURE(linear.name);
                CHECK(found[linear.name + ".x"].values() == N * static_cast<uint64_t>(linear.in));
                CHECK(found[linear.name + ".dy"].values() == N * static_cast<uint64_t>(linear.out));
                CHECK(found[linear.name + ".weight"].values() == static_cast<uint64_t>(linear.out * linear.in));
            }
            CHECK(found["1.down.x"].values() == N * F);
            CHECK(found["0.qkv.x"].values() == N * C);
            // The same x as if the last micro-batch were the only one.
            TestModel last(config);
            last.set_random_batch(6, 20);
            const int64_t rows = 2 * 2 * 40;
            last.staged.tokens += rows, last.staged.targets += rows, last.staged.order += rows;
            last.staged.micro_batches = 1;
            // A calibration that differs would change the scales of later x; the first one has none behind it.
            const Histograms expected = collect(last);
            CHECK(found["0.qkv.x"].bins == expected.at("0.qkv.x").bins);
            CHECK(found["0.qkv.x"].amax_bits == expected.at("0.qkv.x").amax_bits);
            if (recipe != Fp8Recipe::kDelayed) CHECK(found["1.down.x"].bins == expected.at("1.down.x").bins);
        }
}

TEST_CASE("exponents: fused and separate casts see the values of a BF16 run, whose amaxes are those of the scales") {
    for (const ModelConfig& shape : fp8_shapes()) {
        TestModel bf16_run(collecting(shape, Fp8Recipe::kNone));
        bf16_run.set_random_batch(2, 20);
        const Histograms expected = collect(bf16_run);
        for (Fp8Recipe recipe : kFp8Recipes) {
            CAPTURE(static_cast<int>(recipe));
            TestModel model(collecting(shape, recipe));
            model.set_random_batch(2, 20);
            std::vector<char> report;
            const Histograms found = collect(model, report);
            CHECK(found.at("0.qkv.x").bins == expected.at("0.qkv.x").bins);   // before any cast
            for (const auto& r : model.trainer->fp8().read_report(report.data())) {
                CAPTURE(r.name);
                const ExponentHistogram& histogram = found.at(r.name);
                CHECK(histogram.amax_bits == std::max(r.slot.amax_bits, r.slot.step_amax_bits));
                // The highest bin is that of the amax.
                const size_t top = histogram.amax_bits >> 23;
                CHECK(histogram.bins[top] > 0);
                CHECK(std::all_of(histogram.bins.begin() + static_cast<std::ptrdiff_t>(top) + 1, histogram.bins.end(),
                                  [](uint64_t count) { return count == 0; }));
            }
        }
    }
}

TEST_CASE("exponents: two reports of ranks are added, and the histograms of two ranks are those of one") {
    for (Fp8Recipe recipe : {Fp8Recipe::kNone, Fp8Recipe::kTensorwise}) {
        for (int zero : {0, 1, 3}) {
            CAPTURE(zero);
            Config config = collecting(fp8_shapes()[1], recipe);
            config.lr = 0;   // the same weights, whatever the order in which gradients are added
            config.zero = zero;
            config.param_comm_dtype = recipe == Fp8Recipe::kNone ? Dtype::kBf16 : Dtype::kE4m3;
            config.global_batch_size = 4;
            config.micro_batch_size = 4;
            TestModel alone(config);
            alone.set_random_batch(4, 20);
            Histograms expected = collect(alone);
            config.micro_batch_size = 2;
            LocalRanks(2).run([&](Comm& comm) {
                TestModel model(config, true, &comm);
                model.set_random_batch(4, 20);
                std::vector<char> report;
                collect(model, report);
                const std::vector<std::string> all = comm.gather(std::string(report.data(), report.size()));
                if (comm.world().rank != 0) return;
                std::vector<char> merged(all[0].begin(), all[0].end());
                const Fp8State& fp8 = model.trainer->fp8();
                fp8.merge_report(merged.data(), all[1].data());
                for (const ExponentHistogram& h : fp8.read_exponents(merged.data())) {
                    CAPTURE(h.name);
                    CHECK(h.values() == expected[h.name].values());
                    // Casts with one scale depend on the micro-batch, except in a BF16 run.
                    const bool same = recipe == Fp8Recipe::kNone || h.role == Fp8Role::kWeight || h.name == "0.qkv.x";
                    if (same) CHECK(h.bins == expected[h.name].bins);
                    if (same) CHECK(h.amax_bits == expected[h.name].amax_bits);
                }
                // A value that one rank missed would show.
                fp8.merge_report(merged.data(), all[1].data());
                CHECK(fp8.read_exponents(merged.data())[0].bins != expected["0.qkv.x"].bins);
            });
        }
    }
}

TEST_CASE("exponents: only what is asked for is allocated and collected") {
    Config config = collecting(fp8_shapes()[1], Fp8Recipe::kDelayed);
    config.bf16_linears = {"0.*"};
    TestModel model(config);
    model.set_random_batch(2, 20);
    const Histograms found = collect(model);
    CHECK(found.size() == 12);
    CHECK(found.count("0.up.x") == 0);
    CHECK(found.count("1.up.x") == 1);
    for (Fp8Recipe recipe : {Fp8Recipe::kNone, Fp8Recipe::kDelayed}) {
        config = collecting(fp8_shapes()[1], recipe);
        config.fp8_stats_interval = 0;
        TestModel none(config);
        CHECK(!none.trainer->fp8().exponents().on());
        config.fp8_stats = Fp8Stats::kCounts;
        TestModel plain(config);
        CHECK(none.plan.arena_bytes == plain.plan.arena_bytes);
        CHECK((recipe == Fp8Recipe::kNone) == (none.trainer->fp8().report_bytes() == 0));
    }
}
