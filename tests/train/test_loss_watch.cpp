// A loss far above its start causes a warning, or ends the run.
#include "tests/support/doctest.h"

#include <string>
#include <vector>

#include "llmc/train/log/loss_watch.h"

namespace {

using Verdict = LossWatch::Verdict;

Config config_with(double stop) {
    Config config;
    config.stop_on_divergence = stop;
    config.lr = 0.02;
    return config;
}

// "." for a loss without consequence, "w" for a warning, "s" for a stop.
std::string verdicts(LossWatch& watch, const Config& config, const std::vector<double>& losses) {
    std::string text;
    for (double loss : losses) text += ".ws"[static_cast<int>(watch.add(config, loss))];
    return text;
}

std::string verdicts(const Config& config, const std::vector<double>& losses) {
    LossWatch watch;
    return verdicts(watch, config, losses);
}

}  // namespace

TEST_CASE("loss watch: one warning each time the median of three losses rises above the limit") {
    const Config config = config_with(0);
    CHECK(verdicts(config, {10, 9, 8, 7, 6, 5, 4}) == ".......");
    // One high loss is no divergence, two of three are.
    CHECK(verdicts(config, {10, 9, 90, 8, 8, 90, 8, 8}) == "........");
    CHECK(verdicts(config, {10, 9, 9, 9, 90, 8, 90, 8, 8}) == "......w..");
    // No second warning until the loss is back at the start, even if it falls below the limit.
    CHECK(verdicts(config, {10, 10, 10, 16, 16, 14, 14, 16, 16, 10, 10, 16, 16}) == "....w.......w");
    CHECK(verdicts(config, {10, 10, 10, 15, 15, 15}) == "......");   // 1.5 times is not above
    // Divergence from the second step on, which the median of the first losses would hide.
    CHECK(verdicts(config, {10, 40, 100, 300, 900}) == "..w..");
    // A low first loss lowers the start, but a low one among the next four does not.
    LossWatch hard;
    verdicts(hard, config, {3, 1, 3.1, 2.9, 3});
    CHECK(hard.start() == 3);
    LossWatch easy;
    verdicts(easy, config, {2.5, 3, 3.1, 2.9, 3});
    CHECK(easy.start() == 2.5);
    CHECK(verdicts(config, {0, 0, 0}) == "...");   // 0 / 0 is not above
}

TEST_CASE("loss watch: a stop, and its line") {
    Config config = config_with(3);
    config.clip_grad = 1;
    LossWatch watch;
    CHECK(verdicts(watch, config, {10, 10, 10, 20, 20, 31, 31}) == "....w.s");
    CHECK(watch.text(config, 7, Verdict::kStop)
          == "step 7: loss 31 (median of 3 steps) is 3.10 times its start of 10 (--stop-on-divergence 3); what usually "
             "helps: a lower --lr (now 0.02), a longer --lr-warmup-iters (now 0)");
    config.clip_grad = 0;
    const std::string warning = watch.text(config, 5, Verdict::kWarn);
    CHECK(warning.find("its start of 10; what") != std::string::npos);
    CHECK(warning.ends_with(", --clip-grad 1 (now 0)"));
}

TEST_CASE("loss watch: a resumed run has the same start, and does not repeat the warning") {
    const Config config = config_with(0);
    const std::vector<double> losses = {10.123456789012345, 9, 9.5, 9, 20, 21, 22, 9, 8, 21, 22};
    const std::string all = verdicts(config, losses);
    CHECK(all == ".....w....w");
    for (size_t cut = 0; cut <= losses.size(); cut++) {
        const auto at = losses.begin() + static_cast<std::ptrdiff_t>(cut);
        LossWatch before, after;
        const std::string first = verdicts(before, config, {losses.begin(), at});
        after.restore(before.state_json());
        CHECK(after == before);
        CHECK(first + verdicts(after, config, {at, losses.end()}) == all);
    }
}
