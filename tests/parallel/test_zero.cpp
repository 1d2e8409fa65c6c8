// Training on several ranks, here threads: the run does not depend on their number or on --zero.
#include "tests/support/zero_test.h"

namespace {

std::vector<TrainingCase> recipes() {
    std::vector<TrainingCase> cases;
    const auto shapes = fp8_shapes();
    auto add = [&](const std::string& name, size_t shape, Fp8Recipe recipe) -> Config& {
        return cases.emplace_back(TrainingCase{name, in_small_buckets(fp8_config(shapes[shape], recipe))}).config;
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
    Config& experts = add("experts in blockwise", 1, Fp8Recipe::kBlockwise);   // experts cross shards and blocks
    experts.shape.num_experts = 3, experts.shape.ffn_hidden_size = 80;
    add("blockwise, BF16 weight gradients", 1, Fp8Recipe::kBlockwiseBf16Wgrad);
    add("INT8 forward", 0, Fp8Recipe::kInt8Forward);
    add("INT8 forward, head in FP8", 1, Fp8Recipe::kInt8Forward).fp8_lm_head = true;
    return cases;
}

}  // namespace

TEST_CASE("zero: levels 0 and 1 give the same bits, and with one micro-batch a rank all levels do") {
    for (const TrainingCase& recipe : recipes())
        for (int ranks : {2, 3, 8}) {
            CAPTURE(recipe.name, ranks);
            CHECK(train(recipe.config, ranks, 2) == train(at_level(recipe.config, 0), ranks, 2));
            const Run one = train(recipe.config, ranks, 2, {}, {}, ranks);
            CHECK(one == train(at_level(recipe.config, 0), ranks, 2, {}, {}, ranks));
            CHECK(one == train(at_level(recipe.config, 2), ranks, 2, {}, {}, ranks));
            if (ranks != 8) continue;
            for (int64_t size : {2, 4})
                CHECK(train(at_level(recipe.config, 1, size), 8, 2, {}, {}, 8)
                      == train(at_level(recipe.config, 2, size), 8, 2, {}, {}, 8));
        }
}

TEST_CASE("zero: the gradients of a deep model need the memory of a few layers, with equal bits") {
    ModelConfig shape = fp8_shapes()[2];
    shape.num_layers = 6;
    for (double bucket_mb : {1e-6, 0.03}) {
        Config config = in_small_buckets(fp8_config(shape, Fp8Recipe::kDelayed));
        config.bucket_mb = bucket_mb;
        config.global_batch_size = 6;
        const Config two = at_level(config, 2);
        CHECK(train(config, 2, 2, {}, {}, 2) == train(two, 2, 2, {}, {}, 2));

        const auto gradients = [](const MemoryPlan& plan) {
            return plan.purpose_bytes[static_cast<size_t>(Purpose::kGradients)];
        };
        const MemoryPlan whole = memory_of(config, 2), shared = memory_of(two, 2);
        const int64_t sums = whole.flat_elems / 2 * 4;
        CHECK(gradients(whole) == whole.flat_elems * 4);
        CHECK(gradients(shared) > sums);
        CHECK(gradients(shared) < sums + whole.flat_elems * 4 / 2);
        const MemoryPlan in_bf16 = memory_of(changed(two, [](Config& c) { c.grad_dtype = Dtype::kBf16; }), 2);
        CHECK(gradients(in_bf16) - sums == (gradients(shared) - sums) / 2);
        // Four ranks in two groups have the memory of two ranks.
        CHECK(memory_of(at_level(config, 2, 2), 4).purpose_bytes == shared.purpose_bytes);
    }
}

TEST_CASE("zero: NaN in the gradients of one rank skips the step on all ranks, at every level, and changes no state") {
    for (int64_t zero : {0, 1, 2})
        for (int64_t group : {0, 2}) {
            if (zero == 0 && group > 0) continue;
            CAPTURE(zero, group);
            const Config config = at_level(recipes()[1].config, zero, group);
            const Actions corrupt{[](TestModel& model, int step) {
                if (step == 1 && model.comm.world().rank == 3) model.staged.inputs->dloss_mul = NAN;
            }, {}};
            const Run one = train(config, 4, 1), skipped = train(config, 4, 2, corrupt);
            const Run on = train(config, 4, 3, corrupt);
            CHECK(skipped.skips == std::vector<int>{0, 1});
            CHECK(skipped.state == one.state);
            CHECK(on.skips == std::vector<int>{0, 1, 0});
            CHECK(on.state != one.state);
        }
}
