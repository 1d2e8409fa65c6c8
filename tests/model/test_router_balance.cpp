// Losses and biases of routers: what must not change them, and that they balance the experts.
#include "tests/support/doctest.h"

#include <cmath>

#include "tests/support/local_ranks.h"
#include "tests/support/model_test.h"

using Values = std::vector<double>;

namespace {

struct BalanceResult {
    double loss, router_loss, entropy, load;
    int32_t dead;
    std::vector<Values> grads;
};

// The second of two steps, without updates: it has the load of the first.
BalanceResult balance_of(TestModel& model) {
    model.set_random_batch(8, 21);
    model.gradients();
    model.gradients();
    return {model.loss(), model.result.router_loss, static_cast<double>(model.result.router_entropy),
            static_cast<double>(model.result.expert_load), model.result.dead_experts, all_grads(model)};
}

Config balance_config(int64_t micro_batch) {
    Config config = tiny_config(tiny_moe(), Dtype::kFp32, micro_batch, 9);
    config.shape.init_std = 0.3;
    config.moe_aux_loss_coeff = 0.5, config.moe_z_loss_coeff = 0.1;
    config.zero = 0;
    config.global_batch_size = 8;
    return config;
}

Config shared_config(int64_t micro_batch) {
    Config config = balance_config(micro_batch);
    config.shape.shared_experts = 2;
    config.moe_router_bias_update_rate = 0.02;
    return config;
}

void check_equal(const BalanceResult& a, const BalanceResult& b) {
    CHECK(std::fabs(a.loss - b.loss) <= 1e-6 * b.loss);
    CHECK(std::fabs(a.router_loss - b.router_loss) <= 1e-6 * b.router_loss);
    CHECK(std::fabs(a.entropy - b.entropy) <= 1e-6 * b.entropy);
    CHECK(a.load == b.load);
    CHECK(a.dead == b.dead);
    for (size_t p = 0; p < a.grads.size(); p++) CHECK(distance(a.grads[p], b.grads[p]) < 1e-5);
}

}  // namespace

TEST_CASE("losses of routers, their gradients and statistics depend on neither micro-batches nor ranks") {
    TestModel whole(balance_config(8));
    const BalanceResult expected = balance_of(whole);
    CHECK(expected.router_loss > 0);
    CHECK(expected.load > 1);
    TestModel split(balance_config(1));
    check_equal(balance_of(split), expected);
    for (int ranks : {2, 4})
        LocalRanks(ranks).run([&](Comm& comm) {
            TestModel model(balance_config(1), true, &comm);
            check_equal(balance_of(model), expected);
        });
    Config without = balance_config(8);
    without.moe_aux_loss_coeff = 0;
    TestModel other(without);
    const int router = other.table.layers[0].router_weight;
    CHECK(distance(balance_of(other).grads[static_cast<size_t>(router)], expected.grads[static_cast<size_t>(router)])
          > 1e-3);
}

// The load after 30 steps.
double load_of(const Config& config) {
    TestModel model(config);
    for (int step = 0; step < 30; step++) {
        model.set_random_batch(config.global_batch_size, 100 + static_cast<uint64_t>(step));
        model.step();
    }
    return static_cast<double>(model.result.expert_load);
}

TEST_CASE("the auxiliary loss balances the experts, and a bias does even if no weight changes") {
    Config config = balance_config(8), shared = shared_config(32);
    config.lr = 0.01, shared.lr = 0, shared.global_batch_size = 32;
    config.moe_aux_loss_coeff = config.moe_z_loss_coeff = shared.moe_router_bias_update_rate = 0;
    const double without = load_of(config), without_bias = load_of(shared);
    config.moe_aux_loss_coeff = 1, shared.moe_router_bias_update_rate = 0.005;
    CHECK(load_of(config) < 0.7 * without);
    const double with_bias = load_of(shared);
    CAPTURE(without_bias);
    CHECK(with_bias - 1 < 0.7 * (without_bias - 1));
}

// The biases of all layers after two steps, and the load of the second.
std::pair<Values, double> biases_of(TestModel& model) {
    model.set_random_batch(8, 21);
    for (int step = 0; step < 2; step++) model.step();
    model.trainer->gatherer().wait(model.ctx);
    Values biases;
    for (const LayerParams& p : model.table.layers) {
        const Values part = model.weight(p.router_bias);
        biases.insert(biases.end(), part.begin(), part.end());
    }
    return {biases, static_cast<double>(model.result.expert_load)};
}

TEST_CASE("the bias of a router is the same with any micro-batches and ranks, and follows the load alone") {
    TestModel whole(shared_config(8));
    const auto expected = biases_of(whole);
    int64_t moved = 0;
    for (double bias : expected.first) {
        const double steps = bias / 0.02;   // of +-1 or 0 each
        CHECK(std::fabs(steps - std::round(steps)) < 1e-5);
        moved += std::fabs(steps) > 0.5;
    }
    CHECK(moved > 0);
    TestModel split(shared_config(1));
    CHECK(biases_of(split) == expected);
    for (int zero : {0, 1, 2})
        LocalRanks(2).run([&](Comm& comm) {
            Config config = shared_config(1);
            config.zero = zero;
            TestModel model(config, true, &comm);
            CHECK(biases_of(model) == expected);
        });
}

#ifndef LLMC_CUDA
TEST_CASE("the bias of a router moves towards the mean load, and not in a skipped step") {
    for (int32_t skip : {0, 1}) {
        std::vector<double> load = {5, 3, 1, 3};   // the mean is 3
        std::vector<float> master = {0.5f, 0.5f, 0.5f}, bias(3, 9);   // of all experts but the first
        StepState state{};
        state.skip = skip;
        Ctx ctx;
        ops::router_bias(ctx, {.bias = {bias.data(), Dtype::kFp32, 3}, .master = {master.data(), Dtype::kFp32, 3},
                               .load = {load.data(), Dtype::kFp64, 4}, .state = &state, .first = 1, .rate = 0.25f});
        CHECK(master == (skip ? std::vector<float>{0.5f, 0.5f, 0.5f} : std::vector<float>{0.5f, 0.75f, 0.5f}));
        CHECK(bias == (skip ? std::vector<float>(3, 9) : master));
    }
}

TEST_CASE("experts chosen evenly: K of every token, and equal loads of experts and ranks over any tokens") {
    for (const auto& [E, K] : {std::pair<int64_t, int64_t>{1, 1}, {5, 2}, {8, 2}, {7, 3}, {12, 8}, {5, 5}, {24, 7}}) {
        const int64_t N = 2 * E + 3;
        Values logits, bias(static_cast<size_t>(E), 1), lse(static_cast<size_t>(N));
        for (uint64_t i = 0; i < static_cast<uint64_t>(N * E); i++)
            logits.push_back(static_cast<double>(rng_normal(1, i)));
        Values weights(static_cast<size_t>(N * K));
        std::vector<int32_t> experts(weights.size(), -1);
        const auto doubles = [](Values& v) {
            return Tensor{v.data(), Dtype::kFp64, static_cast<int64_t>(v.size())};
        };
        Ctx ctx;
        bias[0] = 9;
        ops::router_forward(ctx, {.probs = doubles(logits), .lse = doubles(lse),
                                  .experts = {experts.data(), Dtype::kInt32, N * K}, .weights = doubles(weights),
                                  .bias = doubles(bias), .N = N, .E = E, .K = K, .form = {.normalize = false},
                                  .chosen = false, .even = true});
        Values goes(logits.size());
        for (size_t i = 0, k = static_cast<size_t>(K); i < experts.size(); i++) {
            REQUIRE((experts[i] >= 0 && experts[i] < E && (i % k == 0 || experts[i] > experts[i - 1])));
            const size_t at = i / k * static_cast<size_t>(E) + static_cast<size_t>(experts[i]);
            CHECK(weights[i] == logits[at]);   // its probability
            goes[at] = 1;
        }
        // Of tokens [n, n + m) to experts [e, e + width), as one expert or one token has them.
        int64_t uneven = 0;
        const auto count = [&](int64_t n, int64_t m, int64_t e, int64_t width) {
            double rows = 0;
            for (int64_t i = 0; i < m * width; i++)
                rows += goes[static_cast<size_t>((n + i / width) * E + e + i % width)];
            uneven += std::fabs(rows - static_cast<double>(m * width * K) / static_cast<double>(E)) >= 1;
        };
        for (int64_t n = 0; n < N; n++)
            for (int64_t e = 0; e < E; e++) {
                for (int64_t m = 1; n + m <= N; m++) count(n, m, e, 1);
                for (int64_t width = 1; e + width <= E; width++) count(n, 1, e, width);
            }
        CHECK(uneven == 0);
    }
}
#endif
