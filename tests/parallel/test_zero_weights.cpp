// ZeRO-3 gathers the weights of a layer before it runs. A run has the bits of ZeRO-2, in less memory, and its passes
// read no weight outside of its layer: tests fill layer buffers with NaN when a layer leaves them.
#include "tests/support/zero_test.h"

namespace {

// Five layers, so that layer buffers are used by several of them.
std::vector<TrainingCase> weight_cases() {
    std::vector<TrainingCase> cases;
    const auto shapes = fp8_shapes();
    auto add = [&](const std::string& name, size_t shape, Fp8Recipe recipe) -> Config& {
        Config config = in_small_buckets(fp8_config(shapes[shape], recipe));
        config.shape.num_layers = 5;
        config.seq_length = 16;
        config.lr = 0.03;   // every step changes every weight
        config.zero = 2;
        return cases.emplace_back(TrainingCase{name, config}).config;
    };
    add("bf16, tied", 0, Fp8Recipe::kNone);
    add("bf16, untied", 1, Fp8Recipe::kNone).recompute = Recompute::kBlock;
    add("fp32", 1, Fp8Recipe::kNone).dtype = Dtype::kFp32;
    Config& delayed = add("delayed, recompute block, head in FP8", 1, Fp8Recipe::kDelayed);
    delayed.recompute = Recompute::kBlock;
    delayed.fp8_lm_head = true;
    add("delayed, tied head in FP8", 0, Fp8Recipe::kDelayed).fp8_lm_head = true;
    Config& ends_in_bf16 = add("tensorwise, 1F1L, gradients in bf16", 2, Fp8Recipe::kTensorwise);
    ends_in_bf16.first_last_layers_bf16 = true;
    ends_in_bf16.num_layers_at_start_in_bf16 = ends_in_bf16.num_layers_at_end_in_bf16 = 1;
    ends_in_bf16.grad_dtype = ends_in_bf16.grad_comm_dtype = Dtype::kBf16;
    Config& mixed = add("tensorwise, linears of a layer in both", 4, Fp8Recipe::kTensorwise);
    mixed.bf16_linears = {"*.proj", "2.*"};
    mixed.recompute = Recompute::kNormAct;
    add("blockwise, head in FP8, gradients in FP8", 1, Fp8Recipe::kBlockwise).fp8_lm_head = true;
    cases.back().config.grad_comm_dtype = Dtype::kE4m3;
    add("INT8 forward, linears of a layer in both", 4, Fp8Recipe::kInt8Forward).bf16_linears = {"*.proj", "2.*"};
    add("INT8 forward, tied head in FP8", 0, Fp8Recipe::kInt8Forward).fp8_lm_head = true;
    return cases;
}

}  // namespace

TEST_CASE("zero weights: losses, weights and state have the bits of ZeRO-2") {
    for (const TrainingCase& c : weight_cases())
        for (int ranks : {1, 2, 3}) {
            CAPTURE(c.name, ranks);
            const Run whole = train(c.config, ranks);
            CHECK(whole.skips == std::vector<int>(3, 0));
            CHECK(whole == train(at_level(c.config, 3), ranks));
        }
}

TEST_CASE("zero weights: groups of ranks gather among themselves") {
    for (const TrainingCase& c : weight_cases()) {
        if (c.config.shape.tied_head) continue;
        CAPTURE(c.name);
        CHECK(train(at_level(c.config, 2, 2), 4, 2) == train(at_level(c.config, 3, 2), 4, 2));
    }
}

TEST_CASE("zero weights: a rank holds its shards, the layer buffers, and norms and biases whole") {
    for (const TrainingCase& c : weight_cases()) {
        CAPTURE(c.name);
        const int ranks = 3;
        const Config config = at_level(changed(c.config, [](Config& c) { c.global_batch_size = 2 * ranks; }), 3);
        const MemoryPlan plan = memory_of(config, ranks);
        const ParamTable table = make_param_table(config.shape);
        const Fp8Plan fp8 = fp8_plan_of(config, table);
        const FlatLayout layout(table, fp8, bucket_bytes(config, ranks), Buckets::unit(ranks), true);
        int64_t permanent = 0;
        std::map<int, int64_t> whole, transposed;   // by layer
        for (const ParamGroup& group : layout.groups()) {
            const bool in_fp8 = group.form == ParamForm::kFp8Linear;
            const int64_t bytes = group.elems * (in_fp8 ? 1 : dtype_bytes(config.dtype));
            const bool gathered = in_fp8 || group.form == ParamForm::kLinear || group.first_layer < 0;
            CHECK((!gathered || group.first_layer == group.last_layer));
            permanent += gathered ? bytes / ranks : bytes;
            if (gathered) whole[group.first_layer] += bytes;
            if (in_fp8) transposed[group.first_layer] += bytes;
        }
        // Scales of blocks and rows, and the quantized weight of the head, which is in no group.
        int64_t scales = 0;
        for (const LinearPlan& linear : fp8.linears) {
            if (!linear.fp8) continue;
            for (Fp8Layout side : {Fp8Layout::kRowwise, Fp8Layout::kTransposed}) {
                const bool across = side == Fp8Layout::kTransposed;
                const Granularity granularity = fp8.granularity(Fp8Role::kWeight, side);
                if (granularity == Granularity::kTensor || (!across && !linear.fp8_forward())) continue;
                const int64_t elems = across ? scale_inv_elems(granularity, linear.in, linear.out)
                                             : scale_inv_elems(granularity, linear.out, linear.in);
                scales += (4 * elems + 255) / 256 * 256;
            }
            if (!linear.fp8_forward()) scales += linear.out * linear.in;
        }
        CHECK(plan.purpose_bytes[static_cast<size_t>(Purpose::kWeights)] == permanent + scales);

        int64_t buffer = 0, back = 0;
        for (int l = 0; l < 5; l++) buffer = std::max(buffer, whole[l]), back = std::max(back, transposed[l]);
        const int64_t buffers = 2 * buffer + 2 * back + std::max(whole[-1], whole[5]);
        Config one = config;   // the same gradients, communicated in the same buckets
        one.zero = 2;
        const auto comm = static_cast<size_t>(Purpose::kComm);
        CHECK(plan.purpose_bytes[comm] - buffers <= memory_of(one, ranks).purpose_bytes[comm]);
    }
}

TEST_CASE("zero weights: a pass gathers the layers that no buffer holds, FP8 linear layers as bytes") {
    const auto shape = fp8_shapes()[1];
    for (const bool fp8 : {false, true}) {
        Config config = at_level(in_small_buckets(fp8_config(shape, fp8 ? Fp8Recipe::kDelayed : Fp8Recipe::kNone)), 3);
        config.shape.num_layers = 7;
        config.bucket_mb = 256;
        const ParamTable table = make_param_table(config.shape);
        const FlatLayout layout(table, fp8_plan_of(config, table), 256000000, Buckets::unit(2), true);
        int64_t layer = 0, ends = 0, norms = 0;   // elements
        for (const ParamGroup& group : layout.groups()) {
            if (group.form == ParamForm::kOther && group.first_layer >= 0) norms += group.elems;
            else if (group.first_layer == 3) layer += group.elems;
            else if (group.first_layer < 0 || group.first_layer == 7) ends += group.elems;
        }
        const Dtype linear = fp8 ? Dtype::kE4m3 : Dtype::kBf16;
        for (int64_t micro_batches : {1, 3}) {
            config.global_batch_size = 2 * micro_batches;
            CAPTURE(fp8, micro_batches);
            const MemoryPlan plan = memory_of(config, 2);
            // The forward pass of the first micro-batch finds the first two layers in buffers, because the last step
            // has gathered them; each later pass finds two layers of the pass before it.
            const int64_t layers = 2 + micro_batches * (7 - 2) * 2;
            const int64_t others = ends * micro_batches + norms;
            if (fp8) CHECK(bytes_of(plan, "all-gather", linear) == layers * layer);
            CHECK(bytes_of(plan, "all-gather", Dtype::kBf16) == 2 * (others + (fp8 ? 0 : layers * layer)));
        }
    }
}
