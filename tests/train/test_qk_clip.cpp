// --qk-clip: the masters against a plain implementation, the logits that follow, and equal bits on any number of ranks.
#include "tests/support/zero_test.h"

#include <algorithm>

namespace {

// The largest logits of the last step: of each layer, of each head.
std::vector<double> largest_logits(TestModel& model) { return model.read(model.trainer->qk_clip().max_logits()); }

// A limit that about half of the heads exceed at first.
double middle_logit(Config config) {
    config.qk_clip = 1e6;
    TestModel model(config);
    model.set_random_batch(config.global_batch_size, 40);
    model.step();
    CHECK(model.result.clipped_heads == 0);
    std::vector<double> logits = largest_logits(model);
    std::sort(logits.begin(), logits.end());
    return (logits[logits.size() / 2 - 1] + logits[logits.size() / 2]) / 2;
}

Config clip_config(const ModelConfig& shape, OptimizerKind optimizer) {
    Config config = tiny_config(shape, Dtype::kFp32, 4, 12);
    config.shape.init_std = 0.5, config.optimizer = optimizer, config.qk_clip = middle_logit(config);
    return config;
}

double factor_of(const Config& c, const std::vector<double>& logits, int64_t layer, int64_t head) {
    const int64_t NH = c.shape.num_attention_heads, group = NH / c.shape.num_query_groups;
    const auto clip = [&](int64_t h) { return std::min(1.0, c.qk_clip / logits[static_cast<size_t>(layer * NH + h)]); };
    const int64_t first = (head < NH ? head / group : head - NH) * group;
    double most = 1;
    for (int64_t h = first; h < first + group; h++) most = std::min(most, clip(h));
    return head < NH ? clip(head) / std::sqrt(most) : std::sqrt(most);
}

}  // namespace

TEST_CASE("qk-clip: 20 steps scale the masters as a plain implementation does, and no others") {
    for (const ModelConfig& shape : {tiny_gpt2(), tiny_llama()})
        for (OptimizerKind optimizer : {OptimizerKind::kAdamW, OptimizerKind::kMuon}) {
            const Config config = clip_config(shape, optimizer);
            Config plain = config;
            plain.qk_clip = 0;
            TestModel model(config), twin(plain);
            const int64_t heads = config.shape.num_attention_heads + config.shape.num_query_groups;
            int64_t clipped = 0;
            for (uint64_t step = 0; step < 20; step++) {
                copy_masters(model, twin);
                for (TestModel* one : {&model, &twin}) {
                    one->set_random_batch(config.global_batch_size, 40 + step);
                    one->step();
                }
                const std::vector<double> logits = largest_logits(model);
                const auto above = std::count_if(logits.begin(), logits.end(), [&](double s) {
                    return s > static_cast<double>(static_cast<float>(config.qk_clip));
                });
                CHECK(model.result.clipped_heads == above);
                CHECK(static_cast<double>(model.result.max_logit) == *std::max_element(logits.begin(), logits.end()));
                CHECK(twin.result.max_logit == 0);
                clipped += above;
                for (size_t p = 0; p < model.table.params.size(); p++) {
                    const Param& param = model.table.params[p];
                    const bool scaled = param.name.find(".qkv.") != std::string::npos;
                    const std::vector<double> got = masters(model, static_cast<int>(p));
                    const std::vector<double> before = masters(twin, static_cast<int>(p));
                    double farthest = 0;
                    for (size_t i = 0; i < got.size(); i++) {
                        const int64_t head = static_cast<int64_t>(i) / param.cols / config.shape.kv_channels;
                        const double by = scaled && head < heads ? factor_of(config, logits, param.layer, head) : 1;
                        const double want = by * before[i];
                        farthest = std::max(farthest, std::fabs(got[i] - want) - 0x1p-21 * std::fabs(want));
                    }
                    CAPTURE(param.name);
                    CHECK(farthest <= 0);
                }
            }
            check_weights_are_rounded_masters(model);
            CHECK(clipped > 8);   // once within the limit, a head exceeds it by one step
        }
}

TEST_CASE("qk-clip: a clipped head's largest logit becomes the limit, others stay, a skipped step scales nothing") {
    for (ModelConfig shape : {tiny_gpt2(), tiny_llama()}) {
        shape.num_layers = 1;   // whose inputs stay as they are
        const Config config = clip_config(shape, OptimizerKind::kAdamW);
        TestModel model(config);
        const int qkv = model.table.layers[0].qkv_weight;
        const std::vector<double> before = masters(model, qkv);
        for (bool skip : {true, false}) {
            model.set_random_batch(config.global_batch_size, 40);
            if (skip) model.staged.inputs->dloss_mul = NAN;
            model.gradients();   // a learning rate of 0
            CHECK((model.result.clipped_heads == 0) == skip);
            CHECK((masters(model, qkv) == before) == skip);
        }
        const std::vector<double> logits = largest_logits(model);
        model.set_random_batch(config.global_batch_size, 40);
        model.gradients();
        const std::vector<double> after = largest_logits(model);
        for (size_t h = 0; h < logits.size(); h++)
            CHECK(after[h] == doctest::Approx(std::min(logits[h], config.qk_clip)).epsilon(1e-5));
    }
}

TEST_CASE("qk-clip: bits depend neither on the number of ranks nor on the level of ZeRO") {
    for (size_t shape : {0, 1})
        for (bool fp8_attention : {false, true}) {
            Config config = in_small_buckets(fp8_config(fp8_shapes()[shape], Fp8Recipe::kDelayed));
            if (fp8_attention) config.shape.kv_channels = 64, config.fp8_attention = true;
            config.optimizer = shape == 1 ? OptimizerKind::kMuon : OptimizerKind::kAdamW;
            config.clip_grad = 0;   // the norm is a sum whose order depends on the ranks
            config.qk_clip = 0.01;
            const Run one = train_alike(config, 1);
            for (int ranks : {2, 4})
                for (int64_t zero : {0, 1, 2, 3}) {
                    CAPTURE(ranks, zero);
                    CHECK(train_alike(at_level(config, zero), ranks) == one);
                }
            config.qk_clip = 0;
            CHECK(!(train_alike(config, 1) == one));
        }
}

TEST_CASE("qk-clip: ranks of one sequence find the largest logits of their own heads") {
    Config config = tiny_config(tiny_llama(), Dtype::kFp32, 2, 12);
    config.shape.init_std = 0.5;
    config.qk_clip = 1e6;
    const auto logits_of = [](const Config& c, int ranks) {
        LocalRanks all(ranks);
        std::vector<std::vector<double>> found(static_cast<size_t>(ranks));
        all.run([&](Comm& comm) {
            TestModel model(c, true, &comm);
            model.set_random_batch(c.global_batch_size, 40);
            model.step();
            found[static_cast<size_t>(comm.world().rank)] = largest_logits(model);
        });
        for (const auto& other : found) CHECK(other == found[0]);
        return found[0];
    };
    const std::vector<double> whole = logits_of(config, 1);
    config.context_parallel = 2;
    const std::vector<double> parts = logits_of(config, 2);
    for (size_t h = 0; h < whole.size(); h++) CHECK(parts[h] == doctest::Approx(whole[h]).epsilon(1e-4));
}
