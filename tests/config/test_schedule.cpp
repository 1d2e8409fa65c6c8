// Learning rate and batch size at the borders of every phase, against values worked out by hand.
#include "tests/support/doctest.h"

#include <cmath>

#include "llmc/base/check.h"
#include "llmc/config/schedule.h"

namespace {

Config schedule(LrDecay style, int64_t iters, int64_t warmup, int64_t wsd_decay = 0) {
    Config c;
    c.lr = 1e-3, c.min_lr = 1e-4, c.lr_decay_style = style, c.train_iters = iters, c.lr_warmup_iters = warmup;
    c.lr_wsd_decay_iters = wsd_decay;
    return c;
}

// Two roundings of a sum and a product away from the exact value at most.
bool near(double x, double expected) { return std::fabs(x - expected) <= 4e-16 * std::fabs(expected); }

}  // namespace

TEST_CASE("schedule: warm-up is linear from lr/warmup to exactly lr") {
    for (LrDecay style : {LrDecay::kCosine, LrDecay::kLinear, LrDecay::kConstant, LrDecay::kWsd}) {
        Config c = schedule(style, 100, 4);
        CHECK(near(learning_rate(c, 0), 2.5e-4));
        CHECK(near(learning_rate(c, 1), 5e-4));
        CHECK(near(learning_rate(c, 2), 7.5e-4));
        CHECK(learning_rate(c, 3) == 1e-3);
        CHECK(learning_rate(c, 4) == 1e-3);
        CHECK(learning_rate(schedule(style, 100, 0), 0) == 1e-3);
        c.lr_warmup_iters = 3;   // thirds are not exact, the peak is
        CHECK(learning_rate(c, 2) == 1e-3);
    }
}

TEST_CASE("schedule: cosine and linear end exactly at min_lr on the last step") {
    Config cosine = schedule(LrDecay::kCosine, 105, 4);   // steps 4 .. 104: progress 0 .. 1
    CHECK(near(learning_rate(cosine, 54), 5.5e-4));       // half way
    CHECK(near(learning_rate(cosine, 29), 1e-4 + 9e-4 * 0.5 * (1 + std::sqrt(0.5))));
    CHECK(learning_rate(cosine, 103) > 1e-4);
    CHECK(learning_rate(cosine, 104) == 1e-4);
    Config linear = schedule(LrDecay::kLinear, 105, 4);
    CHECK(near(learning_rate(linear, 5), 1e-3 - 9e-6));
    CHECK(near(learning_rate(linear, 54), 5.5e-4));
    CHECK(near(learning_rate(linear, 103), 1e-4 + 9e-6));
    CHECK(learning_rate(linear, 104) == 1e-4);
    for (const Config& c : {cosine, linear}) {
        CHECK(learning_rate(c, 105) == 1e-4);   // beyond the run
        CHECK(learning_rate(c, 1 << 30) == 1e-4);
        for (int64_t step = 5; step < 105; step++) CHECK(learning_rate(c, step) < learning_rate(c, step - 1));
    }
    Config constant = schedule(LrDecay::kConstant, 105, 4);
    for (int64_t step : {3, 4, 54, 104, 200}) CHECK(learning_rate(constant, step) == 1e-3);
}

TEST_CASE("schedule: wsd holds lr, then decays over exactly its last steps") {
    Config c = schedule(LrDecay::kWsd, 100, 10, 3);
    for (int64_t step : {9, 10, 50, 96}) CHECK(learning_rate(c, step) == 1e-3);
    CHECK(near(learning_rate(c, 97), 7e-4));
    CHECK(near(learning_rate(c, 98), 4e-4));
    CHECK(learning_rate(c, 99) == 1e-4);
    CHECK(learning_rate(c, 100) == 1e-4);
    c.lr_wsd_decay_iters = 0;   // a tenth of the run
    CHECK(learning_rate(c, 89) == 1e-3);
    CHECK(near(learning_rate(c, 90), 9.1e-4));
    CHECK(learning_rate(c, 99) == 1e-4);
    c.lr_wsd_decay_iters = 90;   // no plateau
    CHECK(learning_rate(c, 9) == 1e-3);
    CHECK(near(learning_rate(c, 10), 9.9e-4));
    c = schedule(LrDecay::kWsd, 5, 0);   // a tenth of 5 is less than one step
    CHECK(learning_rate(c, 3) == 1e-3);
    CHECK(learning_rate(c, 4) == 1e-4);
}

TEST_CASE("schedule: steps in BF16 before and after those in FP8") {
    const auto steps = [](double first, double final, int64_t iters) {
        Config c = schedule(LrDecay::kCosine, iters, 0);
        c.fp8_first_bf16 = first;
        c.fp8_final_bf16 = final;
        const Fp8Steps fp8 = fp8_steps(c);
        return strf("%lld %lld|", ll(fp8.begin), fp8.end < INT64_MAX ? ll(fp8.end) : -1) + bf16_steps_text(c);
    };
    CHECK(steps(0, 0, 10) == "0 -1|");
    CHECK(steps(3, 0, 10) == "3 -1|BF16 in steps 1-3");
    CHECK(steps(0, 1, 10) == "0 9|BF16 in step 10");
    CHECK(steps(1, 0.1, 10) == "1 9|BF16 in steps 1 and 10");
    CHECK(steps(0.07, 0.07, 100) == "7 93|BF16 in steps 1-7 and 94-100");   // 0.07 * 100 is above 7
    CHECK(steps(0.001, 0.06, 10) == "1 9|BF16 in steps 1 and 10");          // at least one
    CHECK(steps(2, 0.5, 0) == "2 -1|BF16 in steps 1-2");                    // of unknown length
    CHECK(steps(0.5, 2, 0) == "0 -1|");
    Config c = schedule(LrDecay::kCosine, 100, 0);
    c.fp8_first_bf16 = 20;
    c.fp8_final_bf16 = 0.1;
    CHECK(all_steps_ms(c, 3, 5) == 70 * 3 + 30 * 5);
    const Fp8Steps fp8 = fp8_steps(c);
    CHECK((!fp8.has(19) && fp8.has(20) && fp8.has(89) && !fp8.has(90)));
    // The switch to another precision is the beginning of the next step.
    CHECK((fp8.switches_after(0) && fp8.switches_after(20) && fp8.switches_after(90) && !fp8.switches_after(91)));
}

TEST_CASE("schedule: short runs") {
    for (LrDecay style : {LrDecay::kCosine, LrDecay::kLinear, LrDecay::kConstant}) {
        CHECK(learning_rate(schedule(style, 1, 0), 0) == 1e-3);
        CHECK(learning_rate(schedule(style, 5, 4), 4) == 1e-3);             // ends right after its warm-up
        CHECK(near(learning_rate(schedule(style, 3, 100), 2), 3e-5));       // ends within it
    }
    CHECK(learning_rate(schedule(LrDecay::kLinear, 2, 0), 1) == 1e-4);
    CHECK_THROWS_AS(learning_rate(schedule(LrDecay::kCosine, 0, 0), 0), Error);   // length not known yet
    CHECK_THROWS_AS(learning_rate(schedule(LrDecay::kCosine, 5, 0), -1), Error);
}

TEST_CASE("schedule: the number of samples after some steps, and vice versa") {
    Config c;
    c.global_batch_size = 32;
    CHECK(samples_after(c, 0) == 0);
    CHECK(samples_after(c, 1000000000) == 32000000000);
    CHECK(steps_for_samples(c, 31) == 0);
    CHECK(steps_for_samples(c, 64) == 2);
    c.rampup_start = 8, c.rampup_increment = 8, c.rampup_samples = 300;
    int64_t samples = 0;
    for (int64_t steps = 0; steps < 60; steps++) {
        CHECK(samples_after(c, steps) == samples);
        CHECK(steps_for_samples(c, samples) == steps);
        CHECK(steps_for_samples(c, samples - 1) == std::max<int64_t>(steps - 1, 0));
        samples += batch_size_at(c, samples);
    }
}

TEST_CASE("schedule: the batch grows in equal shares of the ramp-up samples") {
    Config c;
    c.global_batch_size = 32;
    CHECK(batch_size_at(c, 0) == 32);
    c.rampup_start = 8, c.rampup_increment = 8, c.rampup_samples = 300;   // 8, 16, 24 for 100 samples each
    CHECK(batch_size_at(c, 0) == 8);
    CHECK(batch_size_at(c, 99) == 8);
    CHECK(batch_size_at(c, 100) == 16);
    CHECK(batch_size_at(c, 199) == 16);
    CHECK(batch_size_at(c, 200) == 24);
    CHECK(batch_size_at(c, 299) == 24);
    CHECK(batch_size_at(c, 300) == 32);
    CHECK(batch_size_at(c, int64_t{1} << 60) == 32);
    c.rampup_samples = 100;   // shares of 33 1/3 samples
    CHECK(batch_size_at(c, 33) == 8);
    CHECK(batch_size_at(c, 34) == 16);
    CHECK(batch_size_at(c, 66) == 16);
    CHECK(batch_size_at(c, 67) == 24);
    CHECK(batch_size_at(c, 99) == 24);
    CHECK(batch_size_at(c, 100) == 32);
    CHECK(batch_size_at(c, 134) == 32);   // one more share must not be added
    c.rampup_samples = int64_t{1} << 62;   // samples x increments does not fit 64 bits
    CHECK(batch_size_at(c, (int64_t{1} << 62) - 1) == 24);
    CHECK(batch_size_at(c, int64_t{1} << 61) == 16);
}
