// Delayed scaling on the CPU against a reference implementation, and a broken variant that must be detected.
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
};

// Reference implementation in double, with a list of all amaxes.
struct Model {
    int64_t length, interval;
    bool most_recent;
    double largest, scale = 1;
    std::deque<double> seen{};
    int64_t updates = 0;

    void update(float amax, bool skip) {
        if (skip || amax == 0) return;
        seen.push_front(static_cast<double>(amax));
        if (static_cast<int64_t>(seen.size()) > length) seen.pop_back();
        double used = 0;
        for (size_t i = 0; i < (most_recent ? 1 : seen.size()); i++)
            if (!(seen[i] <= used)) used = std::isnan(used) ? used : seen[i];
        if (updates++ % interval == 0 && std::isfinite(used))
            scale = std::min(static_cast<double>(static_cast<float>(largest / used)),
                             static_cast<double>(std::numeric_limits<float>::max()));
    }
    // reported: the largest amax of the step, even if it is skipped.
    bool has_set(const ScaleEntry& e, uint32_t reported) const {
        return static_cast<double>(e.scale) == scale && e.step_amax_bits == reported && e.amax_bits == 0
               && e.scale_inv == -1;
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

TEST_CASE("fp8_update: long random runs follow the rule; a run that misses updates does not") {
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
                    const uint32_t first = amax_bits_of(a), second = amax_bits_of(b), earlier = i % 2 * amax_bits_of(2);
                    d.entries[0].amax_bits = broken.entries[0].amax_bits = first;
                    d.entries[1].amax_bits = broken.entries[1].amax_bits = second;
                    for (ScaleEntry& entry : d.entries) entry.step_amax_bits = earlier;   // of another micro-batch
                    d.update(&state);
                    if (i % 3 != 0) broken.update(&state);
                    model.update(a, state.skip), small.update(b, state.skip);
                    wrong += !model.has_set(d.entries[0], std::max(earlier, first));
                    wrong += !small.has_set(d.entries[1], std::max(earlier, second));
                    different += d.entries[0].scale != broken.entries[0].scale;
                }
                CHECK_EQ(wrong, 0);
                CHECK_GT(different, 0);
            }
    CHECK_THROWS_AS((Delayed{.length = 0}.update()), Error);
    CHECK_THROWS_AS((Delayed{.length = 1, .interval = 0}.update()), Error);
}

}  // namespace fp8_update_test
