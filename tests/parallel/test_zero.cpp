// Training on several ranks, here threads: the run does not depend on their number or on --zero.
#include "tests/support/zero_test.h"

namespace {

struct Case {
    std::string name;
    Config config;
};
std::vector<Case> recipes() {
    std::vector<Case> cases;
    const auto shapes = fp8_shapes();
    auto add = [&](const std::string& name, size_t shape, Fp8Recipe recipe) -> Config& {
        cases.push_back({name, in_small_buckets(fp8_config(shapes[shape], recipe))});
        return cases.back().config;
    };
    add("bf16", 0, Fp8Recipe::kNone);
    add("delayed", 1, Fp8Recipe::kDelayed).fp8_interval = 2;
    add("delayed, tied head in FP8", 0, Fp8Recipe::kDelayed).fp8_lm_head = true;
    add("tensorwise", 0, Fp8Recipe::kTensorwise);
    add("tensorwise, head in FP8", 1, Fp8Recipe::kTensorwise).fp8_lm_head = true;
    Config& one_in_bf16 = add("1F1L", 1, Fp8Recipe::kTensorwise);
    one_in_bf16.first_last_layers_bf16 = true;
    one_in_bf16.num_layers_at_start_in_bf16 = 1;
    add("blockwise", 0, Fp8Recipe::kBlockwise);
    add("blockwise, head in FP8", 1, Fp8Recipe::kBlockwise).fp8_lm_head = true;
    return cases;
}

}  // namespace

TEST_CASE("zero: in FP32 losses and norms do not depend on the number of ranks") {
    for (const ModelConfig& shape : {tiny_gpt2(), tiny_llama()}) {
        for (double bucket_mb : {1e-6, 0.03, 256.0}) {
            Config config = tiny_config(shape, Dtype::kFp32, 1, 13);
            config.bucket_mb = bucket_mb;
            const Run one = train(config, 1);
            for (int ranks : {2, 3, 4}) {
                CAPTURE(ranks);
                const Run several = train(config, ranks);
                check_near(several.losses, one.losses, 1e-6);
                check_near(several.norms, one.norms, 1e-6);
            }
        }
    }
}

TEST_CASE("zero: bits do not depend on overlap, --zero or --param-comm-dtype") {
    for (const Case& recipe : recipes()) {
        const Run one = train(recipe.config, 1);
        for (int ranks : {2, 3, 4}) {
            CAPTURE(recipe.name);
            CAPTURE(ranks);
            const Run sharded = train(recipe.config, ranks);
            CHECK(sharded.skips == std::vector<int>(3, 0));
            check_near(sharded.losses, one.losses, 0.01);
            CHECK(sharded == train(recipe.config, ranks, 3, {}, {.defers_compute = true}));
            // One number of ranks is enough, since deferring either stream gave the same bits.
            const auto alone = [](Config& c) { c.overlap = false; };
            if (ranks == 3) CHECK(sharded == train(changed(recipe.config, alone), ranks));
            CHECK(sharded == train(changed(recipe.config, [](Config& c) { c.zero = 0; }), ranks));
            if (recipe.config.fp8_recipe == Fp8Recipe::kNone) continue;
            const auto in_fp8 = [](Config& c) { c.param_comm_dtype = Dtype::kE4m3; };
            CHECK(sharded == train(changed(recipe.config, in_fp8), ranks));
        }
    }
}
