// FP8 attention in the whole model: near BF16 but not equal, the same with recomputation, its memory in the plan.
#include "tests/support/doctest.h"

#include <cmath>

#include "tests/support/fp8_model_test.h"

namespace {

Config attention_config(ModelConfig shape, bool fp8) {
    shape.kv_channels = 64, shape.attention_sinks = shape.has_windows();
    Config config = fp8_config(shape, Fp8Recipe::kNone);
    config.fp8_attention = fp8;
    return config;
}

}  // namespace

TEST_CASE("fp8 attention: gradients stay near those of BF16") {
    for (const ModelConfig& shape : fp8_shapes()) {
        if (shape.attention_softcap > 0) continue;   // refused
        TestModel reference(attention_config(shape, false)), model(attention_config(shape, true));
        for (TestModel* m : {&reference, &model}) m->set_random_batch(4, 3), m->gradients();
        CHECK(model.loss() == doctest::Approx(reference.loss()).epsilon(0.01));
        CHECK(model.loss() != reference.loss());
        for (size_t i = 0; i < model.table.params.size(); i++) {
            const Param& p = model.table.params[i];
            const double c = cosine(model.grad(static_cast<int>(i)), reference.grad(static_cast<int>(i)));
            // E4M3 leaves about 2.5 % rms in q, k, v and the weights of a layer.
            CHECK_MESSAGE(c > (p.is_vector() ? 0.95 : 0.98), p.name, " cosine ", c);
        }
    }
}

TEST_CASE("fp8 attention: recomputation gives the same bits with any recipe") {
    for (const ModelConfig& shape : fp8_shapes()) {
        if (shape.attention_softcap > 0) continue;
        for (Fp8Recipe recipe : {Fp8Recipe::kNone, Fp8Recipe::kTensorwise}) {
            Config config = attention_config(shape, true);
            config.fp8_recipe = recipe, config.reset_attention_mask = true;
            check_recompute(config, [](TestModel& m) { m.set_random_batch(4, 3); });
        }
    }
}

TEST_CASE("fp8 attention: the plan has its quantized heads once for all layers") {
    const ModelConfig shape = fp8_shapes()[1];
    ModelConfig deep = shape;
    deep.num_layers *= 3;
    auto scratch = [](const Config& c) {
        return memory_of(c, 1).purpose_bytes[static_cast<size_t>(Purpose::kScratch)];
    };
    CHECK(scratch(attention_config(deep, true)) == scratch(attention_config(shape, true)));
    CHECK(scratch(attention_config(shape, true)) >= scratch(attention_config(shape, false)));
}
