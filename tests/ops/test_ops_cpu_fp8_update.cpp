// Delayed scaling on the CPU: histories worked out by hand, a reference implementation, and broken variants that must
// be detected.
#include "tests/support/quant_test.h"

#include <deque>

using namespace op_test;

namespace fp8_update_test {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// The state of `count` tensors and the settings of their update.
struct Delayed {
    int64_t length, interval = 1;
    bool most_recent = false;
    std::vector<float> largest{448};
    std::vector<ScaleEntry> entries = std::vector<ScaleEntry>(largest.size(), ScaleEntry{.scale_inv = -1, .scale = 1,
                                                                              .amax_bits = 0, .step_amax_bits = 0});
    std::vector<float> history = std::vector<float>(largest.size() * static_cast<size_t>(length));
    std::vector<int32_t> updates = std::vector<int32_t>(largest.size());

    void update(const StepState* state = nullptr) {
        Ctx ctx;
        cpu::fp8_update(ctx, {.entries = entries.data(), .history = history.data(), .updates = updates.data(),
                              .largest = largest.data(), .count = static_cast<int64_t>(entries.size()),
                              .length = length, .interval = interval, .most_recent = most_recent, .state = state});
    }
    // scale after an update that recorded `amax`.
    float after(float amax, const StepState* state = nullptr) {
        entries[0].amax_bits = amax_bits_of(amax);
        update(state);
        return entries[0].scale;
    }
    std::vector<float> after_all(const std::vector<float>& amaxes) {
        std::vector<float> scales;
        for (float amax : amaxes) scales.push_back(after(amax));
        return scales;
    }
};
using Scales = std::vector<float>;

// Reference implementation in double, with a list of all amaxes.
struct Model {
    int64_t length, interval;
    bool most_recent;
    double largest, scale = 1;
    std::deque<double> seen{};
    int64_t updates = 0;

    void update(double amax, bool skip) {
        if (skip || amax == 0) return;
        seen.push_front(amax);
        if (static_cast<int64_t>(seen.size()) > length) seen.pop_back();
        double used = 0;
        for (size_t i = 0; i < (most_recent ? 1 : seen.size()); i++)
            if (!(seen[i] <= used)) used = std::isnan(used) ? used : seen[i];
        if (updates++ % interval == 0 && std::isfinite(used))
            scale = std::min(static_cast<double>(static_cast<float>(largest / used)),
                                 static_cast<double>(std::numeric_limits<float>::max()));
    }
};

// One recorded amax of a long run: mostly ordinary, sometimes none, huge, infinite or NaN.
float random_amax(uint64_t i) {
    const Philox4 random = philox(17, i);
    switch (random.word[0] % 40) {
        case 0:
        case 1: return 0;
        case 2: return 1e30f;
        case 3: return random.word[1] % 2 ? kInf : std::nanf("");
        case 4: return 1e-39f;
        default: return std::exp2f(static_cast<float>(random.word[1] % 1000) / 100 - 5);
    }
}

}  // namespace

TEST_CASE("fp8_update: a history of two") {
    Delayed d{.length = 2};
    CHECK_EQ(d.after_all({2, 4, 1, 1, 0.5f, 0.25f}), Scales{224, 112, 112, 448, 448, 896});
    CHECK_EQ(d.history, std::vector<float>{0.5f, 0.25f});
    Delayed recent{.length = 2, .most_recent = true};
    CHECK_EQ(recent.after_all({2, 4, 1, 1, 0.5f, 0.25f}), Scales{224, 112, 448, 448, 896, 1792});
}

TEST_CASE("fp8_update: an outlier leaves a history of 1024 after exactly as many updates") {
    Delayed d{.length = 1024};
    CHECK_EQ(d.after(7), 64);
    for (int i = 1; i < 1024; i++) REQUIRE_EQ(d.after(1), 64);
    CHECK_EQ(d.after(1), 448);
    CHECK_EQ(d.updates[0], 1025);
}

TEST_CASE("fp8_update: a skipped step drops its amax and keeps the rest") {
    StepState state{};
    Delayed d{.length = 2};
    CHECK_EQ(d.after(2, &state), 224);
    const Delayed before = d;
    state.skip = 1;
    CHECK_EQ(d.after(1000, &state), 224);
    CHECK_EQ(d.history, before.history);
    CHECK_EQ(d.updates, before.updates);
    CHECK_EQ(d.entries[0].amax_bits, 0);
    CHECK_EQ(d.entries[0].step_amax_bits, amax_bits_of(1000));   // reports include it
    state.skip = 0;
    CHECK_EQ(d.after(1, &state), 224);
    CHECK_EQ(d.after(1, &state), 448);
}

TEST_CASE("fp8_update: amax_bits moves to step_amax_bits, scale_inv stays") {
    Delayed d{.length = 1, .largest = {448, 448}};
    d.entries[0] = {0.125f, 8, amax_bits_of(2), amax_bits_of(1)};
    d.entries[1] = {0.5f, 2, 0, amax_bits_of(3)};
    d.update();
    CHECK_EQ(d.entries[0].step_amax_bits, amax_bits_of(2));
    CHECK_EQ(d.entries[1].step_amax_bits, amax_bits_of(3));
    CHECK_EQ(d.entries[0].amax_bits, 0);
    CHECK_EQ(d.entries[0].scale, 224);
    CHECK_EQ(d.entries[0].scale_inv, 0.125f);
    CHECK_EQ(d.entries[1].scale, 2);
    CHECK_THROWS_AS((Delayed{.length = 0}.update()), Error);
    CHECK_THROWS_AS((Delayed{.length = 1, .interval = 0}.update()), Error);
}

TEST_CASE("fp8_clear: the step's amax survives the clearing of one micro-batch, not that of a step") {
    Ctx ctx;
    StepState state{};
    for (uint32_t amax : {5u, 9u})
        for (bool step : {false, true})
            for (int32_t skip : {0, 1}) {
                std::vector<ScaleEntry> entries(3, {3, 4, amax, 6});
                state.skip = skip;
                cpu::fp8_clear(ctx, {.entries = entries.data(), .count = 2, .step = step, .state = &state});
                for (size_t i = 0; i < 3; i++) {
                    const bool cleared = i < 2 && !skip;
                    CHECK_EQ(entries[i].amax_bits, cleared ? 0 : amax);
                    CHECK_EQ(entries[i].step_amax_bits, !cleared ? 6 : step ? 0 : std::max(amax, 6u));
                    CHECK_EQ(entries[i].scale_inv, 3);
                    CHECK_EQ(entries[i].scale, 4);
                }
            }
}

TEST_CASE("fp8_update: long random runs follow the rule; a run that misses one update does not") {
    for (int64_t length : {1, 2, 5, 1024})
        for (int64_t interval : {1, 3})
            for (bool most_recent : {false, true}) {
                INFO("length " << length << ", interval " << interval << ", most_recent " << most_recent);
                Delayed d{.length = length, .interval = interval, .most_recent = most_recent, .largest = {448, 28}};
                Delayed broken = d;
                Model model{length, interval, most_recent, 448}, small{length, interval, most_recent, 28};
                int wrong = 0, different = 0;
                StepState state{};
                for (uint64_t i = 0; i < 3000; i++) {
                    const float a = random_amax(2 * i), b = random_amax(2 * i + 1);
                    state.skip = philox(18, i).word[0] % 20 == 0;
                    d.entries[0].amax_bits = broken.entries[0].amax_bits = amax_bits_of(a);
                    d.entries[1].amax_bits = broken.entries[1].amax_bits = amax_bits_of(b);
                    d.update(&state);
                    if (i != 1500) broken.update(&state);
                    model.update(static_cast<double>(a), state.skip);
                    small.update(static_cast<double>(b), state.skip);
                    wrong += static_cast<double>(d.entries[0].scale) != model.scale;
                    wrong += static_cast<double>(d.entries[1].scale) != small.scale;
                    different += std::memcmp(&d.entries[0], &broken.entries[0], sizeof(ScaleEntry)) != 0;
                }
                CHECK_EQ(wrong, 0);
                CHECK_GT(different, 0);
            }
}

}  // namespace fp8_update_test
