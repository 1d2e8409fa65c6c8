// --offload gives the same weights, losses and state to the bit as a run whose memory is all on the device. Events
// order the streams of the copies, and each event is needed.
#include "tests/support/zero_test.h"

#include "tests/support/checkpoint_test.h"

namespace {

struct OffloadCase {
    std::string name;
    Config config;
    int ranks;
};

// tests/composition draws --offload beside all other options. These steps change every weight and scale, and one step
// is skipped.
std::vector<OffloadCase> offload_cases() {
    std::vector<OffloadCase> offload_cases;
    auto add = [&](const std::string& name, size_t shape, Fp8Recipe recipe, int ranks) -> Config& {
        Config config = in_small_buckets(fp8_config(fp8_shapes()[shape], recipe));
        config.lr = 0.03;
        config.fp8_amax_compute_algo = AmaxAlgo::kMostRecent;
        return offload_cases.emplace_back(OffloadCase{name, config, ranks}).config;
    };
    Config& one = add("delayed, bf16 gradients and moments", 1, Fp8Recipe::kDelayed, 1);
    one.grad_dtype = one.moment_dtype = Dtype::kBf16;
    one.ema = 0.5;
    add("bf16, fp8 moments, ZeRO-1, 2 ranks", 2, Fp8Recipe::kNone, 2).moment_dtype = Dtype::kE4m3;
    add("tensorwise, tied head in FP8, 4 ranks", 0, Fp8Recipe::kTensorwise, 4).fp8_lm_head = true;
    add("blockwise, ZeRO-2, 3 ranks", 0, Fp8Recipe::kBlockwise, 3).zero = 2;
    add("INT8 forward, ZeRO-1, 3 ranks", 0, Fp8Recipe::kInt8Forward, 3);
    Config& three = add("delayed, ZeRO-3, shards of gradients in bf16, 2 ranks", 1, Fp8Recipe::kDelayed, 2);
    three.zero = 3, three.grad_shard_dtype = Dtype::kBf16, three.ema = 0.5;
    return offload_cases;
}

Config offloaded(Config config, const std::vector<std::string>& what, double fraction = 1) {
    config.offload = what;
    config.offload_fraction = fraction;
    return config;
}

// The second step is skipped.
const Actions kSkipOne{[](TestModel& model, int step) {
    if (step == 1) model.staged.inputs->dloss_mul = NAN;
}, {}};

// Three steps of one rank, with the weights recomputed from the masters after the first.
Run watch(const Config& config, bool defers_compute, int64_t* orders) {
    Run seen;
    TestModel model(config, true, nullptr, {defers_compute, orders});
    for (int i = 0; i < 3; i++) {
        model.set_random_batch(config.global_batch_size, 100 + static_cast<uint64_t>(i));
        model.step();
        seen.losses.push_back({model.loss()});
        if (i == 0) model.trainer->weights_from_masters(model.ctx, true);
    }
    seen.weights = read_weights(model);
    add_state(model, seen.state);
    return seen;
}

// Checks that a run has so many events, and needs each, in one of the extreme orders that the others allow.
template <typename F> void check_each_event(const Config& config, const Run& expected, int64_t orders, F&& needless) {
    for (bool defers_compute : {false, true}) {
        constexpr int64_t kMany = 1 << 20;
        int64_t left = kMany;
        CHECK(watch(config, defers_compute, &left) == expected);
        CHECK(kMany - left == orders);
    }
    for (int64_t n = 0; n < orders; n++) {
        if (needless(n)) continue;
        CAPTURE(n);
        int64_t missing = n;
        const bool side = !(watch(config, false, &missing) == expected);
        CHECK((side || !(watch(config, true, &(missing = n)) == expected)));
    }
}

}  // namespace

TEST_CASE("offload: the bits are equal to those of a run whose state is on the device") {
    for (const OffloadCase& c : offload_cases()) {
        CAPTURE(c.name);
        const Run resident = train(c.config, c.ranks, 4, kSkipOne);
        REQUIRE(resident.skips == std::vector<int>{0, 1, 0, 0});
        CHECK(train(offloaded(c.config, {"moments", "masters"}), c.ranks, 4, kSkipOne) == resident);
        CHECK(train(offloaded(c.config, {"moments"}), c.ranks, 4, kSkipOne) == resident);
        CHECK(train(offloaded(c.config, {"masters"}), c.ranks, 4, kSkipOne) == resident);
        CHECK(train(offloaded(c.config, {"moments", "masters"}, 0.37), c.ranks, 4, kSkipOne) == resident);
        CHECK(train(offloaded(c.config, {"moments", "masters"}), c.ranks, 4, kSkipOne,
                    {.defers_compute = true}) == resident);
    }
}

TEST_CASE("offload: the streams may be deferred as far as the events allow, and each event is needed") {
    if (!device::device_info(-1).toolkit.empty()) return;   // the order on a GPU is not controlled
    Config config = in_small_buckets(fp8_config(fp8_shapes()[1], Fp8Recipe::kDelayed));
    config.lr = 0.03, config.fp8_amax_compute_algo = AmaxAlgo::kMostRecent, config.shape.num_layers = 1;
    config.shape.vocab_size = 120;   // no chunk has padding only
    config.seq_length = 16;
    config.micro_batch_size = config.global_batch_size = 4;
    const Run expected = watch(config, false, nullptr);
    // Each buffer has two chunks: if one had a single chunk, events of others would imply those of its own.
    const int64_t chunks = 2 * OffloadedState::kBuffers;
    const Config away = offloaded(config, {"moments", "masters"});
    // The first use of a buffer waits for nothing.
    const auto needless = [](int64_t n) { return n < 2 * OffloadedState::kBuffers && n % 2 == 0; };
    check_each_event(away, expected, chunks * (2 + 2 + 3 * 3 + 2), needless);
}

namespace {

void check_moves(Dtype moments) {
    Config config = in_small_buckets(fp8_config(fp8_shapes()[1], Fp8Recipe::kDelayed));
    config.moment_dtype = moments;
    const Config away = offloaded(config, {"moments", "masters"}, 0.6);
    TestModel from(away), to(config), back(away);
    const auto copy = [](TestModel& a, TestModel& b) {
        const StateAccess read = a.trainer->state_access(a.ctx), write = b.trainer->state_access(b.ctx);
        for (const OptimizerState& row : kOptimizerStates)
            for (size_t p = 0; p < a.table.params.size(); p++) {
                if (!a.table.params[p].has(row.kind)) continue;
                // In parts that begin and end on both sides of the border between device and host memory.
                const int64_t values = row.values(a.table.params[p].elems());
                const int64_t size = dtype_bytes(read.dtypes.of(row.kind));
                for (int64_t begin = 0; begin < values; begin += 1001) {
                    const int64_t count = std::min<int64_t>(1001, values - begin);
                    Bytes bytes(static_cast<size_t>(count * size));
                    read.read(row.kind, static_cast<int>(p), begin, count, bytes.data());
                    write.write(row.kind, static_cast<int>(p), begin, count, bytes.data());
                }
            }
        b.trainer->weights_from_masters(b.ctx, true);
    };
    for (int i = 0; i < 2; i++) {
        from.set_random_batch(config.global_batch_size, 5);
        from.step();
    }
    std::map<std::string, Bytes> expected, found;
    add_state(from, expected);
    copy(from, to);
    add_state(to, found);
    CHECK(found == expected);
    found.clear();
    copy(to, back);
    add_state(back, found);
    CHECK(found == expected);
    CHECK(read_weights(back) == read_weights(to));
}

}  // namespace

TEST_CASE("offload: a run moves from resident state to offloaded state and back by its state access") {
    for (Dtype moments : {Dtype::kFp32, Dtype::kE4m3}) check_moves(moments);
}

// ---- activations

namespace {

constexpr Recompute kLevels[] = {Recompute::kNone, Recompute::kNormAct, Recompute::kBlock,
                                 Recompute::kBlockKeepAttention};

Config deep(size_t shape, Fp8Recipe recipe, Recompute recompute, int64_t layers) {
    Config config = in_small_buckets(fp8_config(fp8_shapes()[shape], recipe));
    config.shape.num_layers = layers, config.shape.init_std = 0.05, config.seq_length = 16;
    config.recompute = recompute, config.lr = 0.01;
    return config;
}

}  // namespace

TEST_CASE("offload activations: the bits are those of a run that keeps them on the device") {
    for (Recompute recompute : kLevels) {
        CAPTURE(static_cast<int>(recompute));
        std::vector<Config> configs = {deep(2, Fp8Recipe::kNone, recompute, 7),
                                       deep(1, Fp8Recipe::kDelayed, recompute, 4),
                                       deep(0, Fp8Recipe::kBlockwise, recompute, 5),
                                       deep(0, Fp8Recipe::kInt8Forward, recompute, 4),
                                       deep(1, Fp8Recipe::kTensorwise, recompute, 6)};
        configs.back().first_last_layers_bf16 = true;   // sets of buffers that layers of both precisions share
        configs.back().num_layers_at_start_in_bf16 = 2;
        configs.back().num_layers_at_end_in_bf16 = 1;
        configs.push_back(deep(1, Fp8Recipe::kNone, recompute, 6));   // two layers of experts after four others
        configs.back().shape.num_experts = 4, configs.back().shape.dense_layers = 4;
        configs.back().shape.dense_ffn_size = 48, configs.back().shape.qk_norm = true;
        for (const Config& config : configs) {
            CAPTURE(static_cast<int>(config.fp8_recipe));
            const int ranks = config.fp8_recipe == Fp8Recipe::kBlockwise ? 2 : 1;
            // An evaluation after every step; it saves no activations.
            const Actions evaluate{{}, [](TestModel& model, int) {
                model.trainer->evaluator().evaluate(model.ctx, nullptr, 0, model.staged);
                const auto T = static_cast<size_t>(model.config.seq_length);
                const std::vector<int32_t> tokens(model.staged.tokens, model.staged.tokens + T), targets(T, 3);
                std::vector<float> losses(T);
                model.trainer->evaluator().token_losses(model.ctx, 1, model.config.seq_length, tokens.data(),
                                                        targets.data(), losses.data(), model.staged);
            }};
            const Run resident = train(config, ranks, 2, evaluate);
            Config away = config;
            away.offload = {"activations"};
            CHECK(train(away, ranks, 2, evaluate) == resident);
            CHECK(train(away, ranks, 2, evaluate, {.defers_compute = true}) == resident);
        }
    }
}

TEST_CASE("offload activations: the plan has three layers on the device and the others in host memory") {
    for (Recompute recompute : kLevels) {
        CAPTURE(static_cast<int>(recompute));
        const auto activations = [&](int64_t layers, bool offload) {
            Config config = deep(1, Fp8Recipe::kDelayed, recompute, layers);
            if (offload) config.offload = {"activations"};
            const MemoryPlan plan = memory_of(config, 1);
            return std::pair(plan.purpose_bytes[static_cast<size_t>(Purpose::kActivations)],
                             plan.activation_host_bytes);
        };
        const int64_t of_a_layer = activations(5, false).first - activations(4, false).first;
        CHECK(activations(9, true) == std::pair(activations(3, false).first, 6 * of_a_layer));
        CHECK(activations(9, false).second == 0);
    }
}

TEST_CASE("offload activations: each event is needed") {
    if (!device::device_info(-1).toolkit.empty()) return;   // the order on a GPU is not controlled
    Config config = deep(1, Fp8Recipe::kTensorwise, Recompute::kNone, 8);   // without calibration: no data twice
    config.global_batch_size = 2;
    const Run expected = watch(config, false, nullptr);
    config.offload = {"activations"};
    // Five layers are copied in 3 steps of 2 micro-batches, to the host and back, with two events each.
    check_each_event(config, expected, 6 * (5 + 5 + 5 + 5), [](int64_t) { return false; });
}
