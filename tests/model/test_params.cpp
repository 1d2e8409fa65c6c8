// --mup-base-width: what width must not change, parameter by parameter.
#include "tests/support/doctest.h"

#include <cmath>

#include "llmc/train/muon.h"
#include "tests/support/model_test.h"

namespace {

Config of_width(int64_t times, MuonScale scale, OptimizerKind optimizer) {
    Config config;
    config.shape = tiny_llama();
    for (int64_t* size : {&config.shape.hidden_size, &config.shape.ffn_hidden_size, &config.shape.num_attention_heads,
                          &config.shape.num_query_groups})
        *size *= times;
    config.optimizer = optimizer, config.muon_scale = scale, config.weight_decay = 0.1;
    config.mup_base_width = tiny_llama().hidden_size;
    return config;
}

// The entries of W x at the start, those of its update with a rate of 1, and the decay of a step, where x has entries
// of 1. An update is aligned with x, and so is the head after the first steps: the sum over n entries grows with n.
// Initial values of layers are independent of x: it grows with sqrt(n).
std::array<double, 3> scales_of(const Config& config, const Param& p) {
    const bool head = p.lr_group == LrGroup::kHead;
    const double n = p.layer >= 0 || head ? static_cast<double>(p.cols) : 1, rate = lr_scale_of(config, p);
    double update = rate * n;   // Adam's entries are of 1
    if (p.optimizer == OptimizerKind::kMuon)   // singular values of 1
        update = rate * muon_scale(config.muon_scale, p.stacked[0], p.cols)
                 * std::sqrt(n / static_cast<double>(p.stacked[0]));
    return {p.init_std * (head ? n : std::sqrt(n)), update, rate * weight_decay_of(config, p)};
}

}  // namespace

TEST_CASE("params: with --mup-base-width outputs, their updates and weight decay are those of the base width") {
    for (OptimizerKind optimizer : {OptimizerKind::kAdamW, OptimizerKind::kMuon})
        for (MuonScale scale : {MuonScale::kMatchRms, MuonScale::kSpectral}) {
            const Config base = of_width(1, scale, optimizer), wide = of_width(3, scale, optimizer);
            const std::vector<Param> small = make_param_table(base).params, large = make_param_table(wide).params;
            REQUIRE(small.size() == large.size());
            for (size_t i = 0; i < small.size(); i++) {
                CAPTURE(small[i].name);
                CHECK(small[i].mup_lr_scale == 1);
                for (size_t what = 0; what < 3; what++)
                    CHECK(scales_of(wide, large[i])[what]
                          == doctest::Approx(scales_of(base, small[i])[what]).epsilon(1e-12));
            }
        }
}

// The coordinate check of arXiv 2203.03466, appendix D.1: what steps change of the logits, at first and four times the
// width. Their initial values become smaller.
TEST_CASE("params: with --mup-base-width steps change the logits alike at any width") {
    const auto change_of = [](int64_t times, int64_t base) {
        const Config wide = of_width(times, MuonScale::kMatchRms, OptimizerKind::kAdamW);
        Config config = tiny_config(wide.shape, Dtype::kFp32, 4, 16);
        config.mup_base_width = base, config.lr = 4e-3, config.clip_grad = 0;
        TestModel model(config);
        model.set_random_batch(4, 5, false);
        std::vector<double> change;
        for (int step = 0; step <= 8; step++) {
            model.step();   // whose forward pass has the weights of the step before
            for (int64_t row = 0; row < 32 && step % 8 == 0; row++)
                for (double logit : model.logits(row)) change.push_back(step == 0 ? -logit : logit);
        }
        const size_t half = change.size() / 2;
        for (size_t i = 0; i < half; i++) change[i] += change[half + i];
        change.resize(half);
        return norm_of(change) / std::sqrt(static_cast<double>(half));
    };
    const int64_t base = tiny_llama().hidden_size;
    const double small = change_of(1, base);
    CHECK(change_of(4, base) == doctest::Approx(small).epsilon(0.2));   // of three seeds 12 % less
    CHECK(change_of(4, 0) > 2 * small);
}
