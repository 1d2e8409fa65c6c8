// Training on several ranks, which are threads here: the same run whatever their number, and however they share and send.
#include "tests/doctest.h"

#include <map>

#include "tests/fp8_model_test.h"
#include "tests/local_ranks.h"

namespace {

using Bytes = std::vector<char>;

// What is left of a run of some steps.
struct Run {
    std::vector<double> losses, norms;
    std::vector<int> skips;
    std::map<std::string, Bytes> state;     // "m 0.qkv.weight", of all ranks together
    std::map<std::string, Bytes> weights;   // every form of every weight
    std::string factors;                    // with histories

    bool operator==(const Run& other) const = default;
};

// What this rank holds, into the state of all.
void add_state(TestModel& model, std::map<std::string, Bytes>& state) {
    const StateAccess access = model.trainer->optimizer().access(model.ctx);
    const std::pair<const char*, StateKind> kinds[] = {
        {"master ", StateKind::kMaster}, {"m ", StateKind::kMomentM}, {"v ", StateKind::kMomentV}};
    for (const auto& [name, kind] : kinds) {
        const int64_t size = dtype_bytes(kind == StateKind::kMaster ? Dtype::kFp32 : access.moment_dtype);
        for (size_t i = 0; i < model.table.params.size(); i++) {
            const Param& p = model.table.params[i];
            std::vector<ElementRange> ranges{{0, p.elems()}};
            if (access.held) ranges = access.held(static_cast<int>(i));
            Bytes& bytes = state[name + p.name];
            bytes.resize(static_cast<size_t>(p.elems() * size));
            for (const ElementRange& range : ranges)
                access.read(kind, static_cast<int>(i), range.begin, range.count, bytes.data() + range.begin * size);
        }
    }
}

std::map<std::string, Bytes> read_weights(TestModel& model) {
    std::map<std::string, Bytes> weights;
    for (size_t i = 0; i < model.table.params.size(); i++) {
        const Tensor weight = model.trainer->decoder().weight(static_cast<int>(i));
        if (weight) weights[model.table.params[i].name] = raw(model, weight);
    }
    const Fp8State& fp8 = model.trainer->fp8();
    for (const LinearPlan& plan : fp8.plan().linears) {
        const Fp8Linear* linear = fp8.linear(plan.layer, plan.kind);
        if (!linear) continue;
        weights[plan.name + " rowwise"] = raw(model, linear->weight.data);
        weights[plan.name + " transposed"] = raw(model, linear->weight_transposed.data);
        if (linear->weight.granularity == Granularity::kTensor) {
            const Tensor slot{fp8.weight_slot(linear->param), Dtype::kFp32, 1};
            weights[plan.name + " dequant_mul"] = raw(model, slot);
        } else {
            weights[plan.name + " grid"] = raw(model, linear->weight.grid);
            weights[plan.name + " transposed grid"] = raw(model, linear->weight_transposed.grid);
        }
    }
    return weights;
}

// What a checkpoint would have as the weights of a parameter that is in FP8 alone: its masters, rounded.
void check_collected(TestModel& model) {
    const StateAccess access = model.trainer->optimizer().access(model.ctx);
    if (!access.held) return;
    for (size_t i = 0; i < model.table.params.size(); i++) {
        const int index = static_cast<int>(i);
        access.collect_weight(index);
        std::vector<bf16> weight(static_cast<size_t>(model.table.params[i].elems()));
        if (access.weight_dtype == Dtype::kBf16)
            access.read(StateKind::kWeight, index, 0, model.table.params[i].elems(), weight.data());
        for (const ElementRange& range : access.held(index)) {
            std::vector<float> master(static_cast<size_t>(range.count));
            access.read(StateKind::kMaster, index, range.begin, range.count, master.data());
            int64_t unequal = 0;
            for (int64_t k = 0; k < range.count && access.weight_dtype == Dtype::kBf16; k++)
                unequal += weight[static_cast<size_t>(range.begin + k)].bits != bf16(master[static_cast<size_t>(k)]).bits;
            CHECK(unequal == 0);
        }
    }
}

using Action = std::function<void(TestModel&, int step)>;
struct Actions {
    Action before_step, after_step;
};

// 12 micro-batches a step.
Run train(Config config, int ranks, int steps = 3, const Actions& actions = {}) {
    config.global_batch_size = 12 * config.micro_batch_size;
    LocalRanks all(ranks);
    std::vector<Run> runs(static_cast<size_t>(ranks));
    std::mutex mutex;
    all.run([&](Comm& comm) {
        Run& run = runs[static_cast<size_t>(comm.world().rank)];
        TestModel model(config, true, &comm);
        for (int i = 0; i < steps; i++) {
            model.set_random_batch(config.global_batch_size, 100 + static_cast<uint64_t>(i));
            if (actions.before_step) actions.before_step(model, i);
            model.step();
            run.losses.push_back(model.loss());
            run.norms.push_back(static_cast<double>(model.result.grad_norm));
            run.skips.push_back(model.result.skip);
            if (actions.after_step) actions.after_step(model, i);
        }
        CHECK(model.arena.peak_bytes() == model.plan.arena_bytes);
        run.weights = read_weights(model);
        run.factors = state_text(model);
        check_collected(model);
        const std::lock_guard lock(mutex);
        add_state(model, runs[0].state);
    });
    for (Run& run : runs) {
        if (&run != &runs[0]) run.state = runs[0].state;
        CHECK(run == runs[0]);
    }
    return runs[0];
}

// Buckets of a few parameters each, which end between layers.
Config in_small_buckets(Config config) {
    config.bucket_mb = 0.03;
    config.micro_batch_size = 1;
    config.seq_length = 32;
    return config;
}

struct Case {
    std::string name;
    Config config;
};
std::vector<Case> recipes() {
    std::vector<Case> cases;
    const auto shapes = fp8_shapes();
    auto add = [&](const std::string& name, size_t shape, Fp8Recipe recipe) -> Config& {
        cases.push_back({name, in_small_buckets(fp8_config(shapes[shape], recipe))});
        return cases.back().config;
    };
    add("bf16", 0, Fp8Recipe::kNone);
    add("delayed", 1, Fp8Recipe::kDelayed).fp8_interval = 2;
    add("delayed, tied head in FP8", 0, Fp8Recipe::kDelayed).fp8_lm_head = true;
    add("tensorwise", 0, Fp8Recipe::kTensorwise);
    add("tensorwise, head in FP8", 1, Fp8Recipe::kTensorwise).fp8_lm_head = true;
    Config& one_in_bf16 = add("1F1L", 1, Fp8Recipe::kTensorwise);
    one_in_bf16.first_last_layers_bf16 = true;
    one_in_bf16.num_layers_at_start_in_bf16 = 1;
    add("blockwise", 0, Fp8Recipe::kBlockwise);
    add("blockwise, head in FP8", 1, Fp8Recipe::kBlockwise).fp8_lm_head = true;
    return cases;
}

template <typename Change> Config changed(Config config, Change&& change) {
    change(config);
    return config;
}

void check_near(const std::vector<double>& found, const std::vector<double>& expected, double tolerance) {
    REQUIRE(found.size() == expected.size());
    for (size_t i = 0; i < found.size(); i++) CHECK(found[i] == doctest::Approx(expected[i]).epsilon(tolerance));
}

}  // namespace

TEST_CASE("zero: in FP32 any number of ranks has the losses and norms of one") {
    for (const ModelConfig& shape : {tiny_gpt2(), tiny_llama()}) {
        for (double bucket_mb : {1e-6, 0.03, 256.0}) {
            Config config = tiny_config(shape, Dtype::kFp32, 1, 13);
            config.bucket_mb = bucket_mb;
            const Run one = train(config, 1);
            for (int ranks : {2, 3, 4}) {
                CAPTURE(ranks);
                const Run several = train(config, ranks);
                check_near(several.losses, one.losses, 1e-6);
                check_near(several.norms, one.norms, 1e-6);
            }
        }
    }
}

TEST_CASE("zero: bits depend neither on overlap, nor on who owns what, nor on the form of gathered weights") {
    for (const Case& recipe : recipes()) {
        const Run one = train(recipe.config, 1);
        for (int ranks : {2, 3, 4}) {
            CAPTURE(recipe.name);
            CAPTURE(ranks);
            const Run sharded = train(recipe.config, ranks);
            CHECK(sharded.skips == std::vector<int>(3, 0));
            check_near(sharded.losses, one.losses, 0.01);
            CHECK(sharded == train(recipe.config, ranks));
            CHECK(sharded == train(changed(recipe.config, [](Config& c) { c.overlap = false; }), ranks));
            CHECK(sharded == train(changed(recipe.config, [](Config& c) { c.zero = 0; }), ranks));
            if (recipe.config.fp8_recipe == Fp8Recipe::kNone) continue;
            const auto in_fp8 = [](Config& c) { c.param_comm_dtype = Dtype::kE4m3; };
            CHECK(sharded == train(changed(recipe.config, in_fp8), ranks));
        }
    }
}
