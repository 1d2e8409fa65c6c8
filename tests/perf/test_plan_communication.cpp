// What `plan` predicts of the communication that compute does not hide.
#include "llmc/commands/plan_report.h"
#include "tests/support/config_test.h"
#include "tests/support/fp8_model_test.h"

namespace {

template <typename Change> StepTime predicted(Change&& change) {
    Config config = parse("llama", {"--dry-run", "--synthetic-data", "--model", "llama3-small", "--fp8-recipe",
                                    "delayed", "--micro-batch-size", "1", "--ranks", "2", "--global-batch-size", "2",
                                    "--grad-comm-dtype", "bf16"}).config;
    change(config);
    return predict_step(config, memory_of(config, static_cast<int>(config.ranks)), measured_gpu());
}
double sent(const StepTime& time) { return time.reduce_ms + time.gather_ms; }
double exposed(const StepTime& time) { return time.ms[static_cast<size_t>(StepPart::kCommunication)]; }
double sums(const StepTime& time) { return time.ms[static_cast<size_t>(StepPart::kSums)]; }

}  // namespace

TEST_CASE("plan: what cannot be hidden of communication") {
    const StepTime off = predicted([](Config& c) { c.overlap = false; }), on = predicted([](Config&) {});
    CHECK(exposed(off) == doctest::Approx(sent(off)));
    CHECK(sent(on) == doctest::Approx(sent(off)));
    CHECK(exposed(on) < 0.5 * exposed(off));
    CHECK(exposed(on) > 0);
    CHECK(sent(predicted([](Config& c) { c.ranks = 1; })) == 0);
    // Between hosts links are slower, and groups within hosts send little there.
    const auto on_hosts = [](int64_t group) {
        return predicted([&](Config& c) { c.ranks = c.global_batch_size = 16, c.zero_group = group; });
    };
    const StepTime far = on_hosts(0), near = on_hosts(8);
    CHECK(sent(far) > 4 * sent(on));
    CHECK(sent(near) < sent(far));
    CHECK(exposed(near) < exposed(far));
}

TEST_CASE("plan: with --zero 2 every micro-batch communicates, and the backward passes hide it") {
    const auto two = [](int64_t ranks, int64_t micro_batches, bool overlap) {
        return predicted([&](Config& c) {
            c.zero = 2, c.ranks = ranks, c.global_batch_size = ranks * micro_batches, c.overlap = overlap;
        });
    };
    const StepTime one = two(2, 1, true), eight = two(2, 8, true);
    CHECK(exposed(one) == doctest::Approx(exposed(predicted([](Config&) {}))));
    CHECK(exposed(eight) == doctest::Approx(exposed(one)));   // an embedding's ends under the next forward pass
    CHECK(eight.reduce_ms == doctest::Approx(8 * one.reduce_ms).epsilon(0.01));
    CHECK(exposed(two(2, 8, false)) == doctest::Approx(sent(eight)));
    CHECK(sums(eight) > 7 * sums(one));
    // Between hosts the backward pass is too short, in every micro-batch.
    CHECK(exposed(two(16, 8, true)) > 3 * exposed(two(16, 1, true)));
}
