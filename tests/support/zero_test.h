// Training on several ranks, which are threads of the test, and its results for bitwise comparison.
#pragma once
#include "tests/support/doctest.h"

#include <bit>
#include <map>
#include <mutex>

#include "tests/support/fp8_model_test.h"
#include "tests/support/local_ranks.h"

using Bytes = std::vector<char>;

// A number that is compared bitwise, because the norm of a skipped step is NaN on all ranks.
struct Figure {
    double value;
    bool operator==(const Figure& other) const {
        return std::bit_cast<uint64_t>(value) == std::bit_cast<uint64_t>(other.value);
    }
};

// The results of a run of some steps.
struct Run {
    std::vector<Figure> losses, norms;
    std::vector<int> skips;
    std::map<std::string, Bytes> state;     // "exp_avg 0.qkv.weight", of all ranks together
    std::map<std::string, Bytes> weights;   // every form of every weight
    std::string scales;                    // with histories

    bool operator==(const Run& other) const = default;
};

// Copies this rank's shards into the state of all ranks.
inline void add_state(TestModel& model, std::map<std::string, Bytes>& state) {
    const StateAccess access = model.trainer->state_access(model.ctx);
    for (const OptimizerState& row : kOptimizerStates) {
        const int64_t size = dtype_bytes(access.dtypes.of(row.kind));
        for (size_t i = 0; i < model.table.params.size(); i++) {
            const Param& p = model.table.params[i];
            if (!p.has(row.kind)) continue;
            Bytes& bytes = state[row.name + (" " + p.name)];
            bytes.resize(static_cast<size_t>(p.values(row, p.elems()) * size));
            for (const ElementRange& range : held_within(access, static_cast<int>(i), {0, p.elems()})) {
                const int64_t begin = p.values(row, range.begin), end = p.values(row, range.begin + range.count);
                access.read(row.kind, static_cast<int>(i), begin, end - begin, bytes.data() + begin * size);
            }
        }
    }
}

// Reads every form of the weights in the passes in which it is valid.
inline std::map<std::string, Bytes> read_weights(TestModel& model) {
    std::map<std::string, Bytes> weights;
    ParamStore& store = model.trainer->decoder().store();
    const Fp8State& fp8 = model.trainer->fp8();
    auto each_fp8 = [&](int layer, auto&& use) {
        for (const LinearPlan& plan : fp8.plan().linears)
            if (const Fp8Linear* linear = plan.layer == layer ? fp8.linear(layer, plan.kind) : nullptr)
                use(plan, *linear);
    };
    const int layers = static_cast<int>(model.config.shape.num_layers);
    for (int layer = -1; layer <= layers; layer++) {
        store.before_layer(model.ctx, layer, Pass::kForward);
        for (size_t i = 0; i < model.table.params.size(); i++) {
            const Tensor weight = model.trainer->decoder().weight(static_cast<int>(i));
            if (weight && model.table.layer_of(static_cast<int>(i)) == layer)
                weights[model.table.params[i].name] = raw(model, weight);
        }
        each_fp8(layer, [&](const LinearPlan& plan, const Fp8Linear& linear) {
            weights[plan.name + " rowwise"] = raw(model, linear.weight.data);
        });
        store.after_layer(model.ctx, layer, Pass::kForward);
    }
    store.before_layer(model.ctx, layers, Pass::kBackward);
    for (int layer = layers; layer >= 0; layer--) {   // the layer below is opened first, as in the decoder
        store.before_layer(model.ctx, layer - 1, Pass::kBackward);
        each_fp8(layer, [&](const LinearPlan& plan, const Fp8Linear& linear) {
            weights[plan.name + " transposed"] = raw(model, linear.weight_transposed.data);
        });
        store.after_layer(model.ctx, layer, Pass::kBackward);
    }
    store.after_layer(model.ctx, -1, Pass::kBackward);
    for (const LinearPlan& plan : fp8.plan().linears) {
        const Fp8Linear* linear = fp8.linear(plan.layer, plan.kind);
        if (!linear) continue;
        if (linear->weight.granularity == Granularity::kTensor) {
            const Tensor entry{fp8.weight_entry(linear->param), Dtype::kFp32, 1};
            weights[plan.name + " dequant_mul"] = raw(model, entry);
        } else {
            weights[plan.name + " grid"] = raw(model, linear->weight.scale_inv);
            weights[plan.name + " transposed grid"] = raw(model, linear->weight_transposed.scale_inv);
        }
    }
    return weights;
}

// A checkpoint stores the rounded masters as weights. Checks that the weights in memory are equal to them, for all
// weights of which a rank has a whole copy in the working type.
inline void check_weights_are_rounded_masters(TestModel& model) {
    const StateAccess access = model.trainer->state_access(model.ctx);
    model.trainer->gatherer().wait(model.ctx);
    for (size_t i = 0; i < model.table.params.size(); i++) {
        const int index = static_cast<int>(i);
        const Tensor weight = model.trainer->decoder().weight(index);   // empty if stored in FP8 only
        const ParamGroup& bucket = model.trainer->buckets().layout().group_of(index);
        if (!weight || !model.trainer->sharded_state().holds_whole(bucket)) continue;
        const Bytes bytes = raw(model, weight);
        for (const ElementRange& range : held_within(access, index, {0, model.table.params[i].elems()})) {
            std::vector<float> master(static_cast<size_t>(range.count));
            access.read(StateKind::kMaster, index, range.begin, range.count, master.data());
            const std::vector<bf16> rounded(master.begin(), master.end());
            const bool wide = weight.dtype == Dtype::kFp32;
            const void* const expected = wide ? static_cast<const void*>(master.data()) : rounded.data();
            const int64_t size = dtype_bytes(weight.dtype);
            const int64_t begin = range.begin % weight.elems;   // --expert-parallel: in this rank's part
            CHECK(std::memcmp(bytes.data() + begin * size, expected, static_cast<size_t>(range.count * size)) == 0);
        }
    }
}

using Action = std::function<void(TestModel&, int step)>;
struct Actions {
    Action before_step, after_step;
};

inline Run train(Config config, int ranks, int steps = 3, const Actions& actions = {}, const Streams& streams = {},
                 int64_t micro_batches = 12) {
    config.global_batch_size = micro_batches * config.micro_batch_size;
    LocalRanks all(ranks);
    std::vector<Run> runs(static_cast<size_t>(ranks));
    std::mutex mutex;
    all.run([&](Comm& comm) {
        Run& run = runs[static_cast<size_t>(comm.world().rank)];
        TestModel model(config, true, &comm, streams);
        for (int i = 0; i < steps; i++) {
            model.set_random_batch(config.global_batch_size, 100 + static_cast<uint64_t>(i));
            if (actions.before_step) actions.before_step(model, i);
            model.step();
            run.losses.push_back({model.loss()});
            run.norms.push_back({static_cast<double>(model.result.grad_norm)});
            run.skips.push_back(model.result.skip);
            if (actions.after_step) actions.after_step(model, i);
        }
        CHECK(model.arena.peak_bytes() == model.plan.arena_bytes);
        run.weights = read_weights(model);
        run.scales = state_text(model);
        check_weights_are_rounded_masters(model);
        const std::lock_guard lock(mutex);
        add_state(model, runs[0].state);
    });
    for (Run& run : runs) {
        if (&run != &runs[0]) run.state = runs[0].state;
        CHECK(run == runs[0]);
    }
    return runs[0];
}

// Buckets so small that they end between layers.
inline Config in_small_buckets(Config config) {
    config.bucket_mb = 0.03, config.micro_batch_size = 1, config.seq_length = 32;
    return config;
}

template <typename Change> Config changed(Config config, Change&& change) {
    change(config);
    return config;
}
inline Config at_level(Config config, int64_t zero, int64_t group = 0) {
    config.zero = zero;
    config.zero_group = group;
    return config;
}

// Ranks, and how many share a sequence: one group of two, two groups of two, one of four.
inline constexpr std::pair<int, int> kSharing[] = {{2, 2}, {4, 2}, {4, 4}};

struct TrainingCase {
    std::string name;
    Config config;
};

inline void check_near(const std::vector<Figure>& found, const std::vector<Figure>& expected, double tolerance) {
    REQUIRE(found.size() == expected.size());
    for (size_t i = 0; i < found.size(); i++)
        CHECK(found[i].value == doctest::Approx(expected[i].value).epsilon(tolerance));
}

// Bytes of a planned collective, or 0.
inline int64_t bytes_of(const MemoryPlan& plan, const std::string& name, Dtype dtype) {
    for (const PlannedCollective& c : plan.collectives)
        if (c.name == name && c.dtype == dtype) return c.bytes;
    return 0;
}

// Of a rank that has all of them.
inline std::vector<double> masters(TestModel& model, int param) {
    std::vector<float> values(static_cast<size_t>(model.table.params[static_cast<size_t>(param)].elems()));
    model.trainer->state_access(model.ctx).read(StateKind::kMaster, param, 0, static_cast<int64_t>(values.size()),
                                                values.data());
    return {values.begin(), values.end()};
}

// Gives `to` the weights of `from`.
inline void copy_masters(TestModel& from, TestModel& to) {
    const StateAccess read = from.trainer->state_access(from.ctx), write = to.trainer->state_access(to.ctx);
    for (size_t p = 0; p < from.table.params.size(); p++) {
        std::vector<float> values(static_cast<size_t>(from.table.params[p].elems()));
        const auto count = static_cast<int64_t>(values.size());
        read.read(StateKind::kMaster, static_cast<int>(p), 0, count, values.data());
        write.write(StateKind::kMaster, static_cast<int>(p), 0, count, values.data());
    }
    to.trainer->weights_from_masters(to.ctx, true);
}

// Three steps in which one rank alone has counted targets, all on the same tokens, so that sums over ranks add zeros
// and largest values are equal. What remains of all ranks together is compared.
inline Run train_alike(const Config& base, int ranks) {
    Config config = base;
    config.global_batch_size = ranks * config.micro_batch_size;
    LocalRanks all(ranks);
    Run run;
    std::mutex mutex;
    all.run([&](Comm& comm) {
        TestModel model(config, true, &comm);
        const int64_t n = config.micro_batch_size * config.seq_length;
        for (uint64_t step = 0; step < 3; step++) {
            std::vector<int32_t> tokens, targets;
            for (int64_t i = 0; i < ranks * n; i++) {
                const Philox4 p = philox(70 + step, static_cast<uint64_t>(i % n));
                const auto of = [&](uint32_t word) {
                    return static_cast<int32_t>(word % static_cast<uint32_t>(config.shape.vocab_size));
                };
                tokens.push_back(of(p.word[0]));
                targets.push_back(i < n ? of(p.word[1]) : kIgnoreIndex);
            }
            model.set_batch(tokens, targets);
            model.step();
        }
        CHECK(model.arena.peak_bytes() == model.plan.arena_bytes);
        const auto weights = read_weights(model);
        const std::lock_guard lock(mutex);
        add_state(model, run.state);
        if (comm.root()) run.weights = weights;
    });
    return run;
}
