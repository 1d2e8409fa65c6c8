// Memory that buckets of gradients share: buckets that exist at the same time never overlap.
#include "tests/support/doctest.h"

#include <set>

#include "llmc/parallel/zero/grad_placement.h"
#include "tests/support/fp8_model_test.h"

namespace {

struct Placed {
    const ParamTable table;
    const Fp8Plan plan;
    const FlatLayout layout;
    const Buckets buckets;
    const std::vector<bool> alone;
    const GradPlacement placement;
    // every_third: of the buckets is alone.
    Placed(const Config& config, int ranks, int64_t bytes, bool every_third = false)
        : table(make_param_table(config.shape)), plan(make_fp8_plan(config, table)),
          layout(table, plan, bytes, Buckets::unit(ranks)), buckets(layout, ranks),
          alone(some(buckets.all().size(), every_third)),
          placement(shared_placement(buckets, table, config.overlap, alone)) {}
    static std::vector<bool> some(size_t count, bool every_third) {
        std::vector<bool> is(count, false);
        for (size_t b = 0; every_third && b < count; b += 3) is[b] = true;
        return is;
    }
    const ParamGroup& bucket(size_t b) const { return buckets.all()[b]; }
    int head() const { return static_cast<int>(table.layers.size()); }
};

// The layers whose backward writes a gradient of the bucket, the last of which completes it.
std::set<int> writers(const Placed& placed, const ParamGroup& bucket) {
    std::set<int> layers;
    for (int param : bucket.params) {
        const int layer = placed.table.layer_of(param);
        layers.insert(layer);
        if (param == placed.table.head) layers.insert(placed.head());
        // The biases of a layer's last linear, which the norm of the layer above writes.
        if (bucket.form == ParamForm::kOther && layer >= 0 && layer < placed.head()) layers.insert(layer + 1);
    }
    return layers;
}

bool overlap(const Placed& placed, size_t a, size_t b) {
    const int64_t begin_a = placed.placement.offsets[a], begin_b = placed.placement.offsets[b];
    return begin_a < begin_b + placed.bucket(b).elems && begin_b < begin_a + placed.bucket(a).elems;
}

void check(const Placed& placed, bool overlaps) {
    const size_t count = placed.buckets.all().size();
    int64_t end = 0;
    for (size_t a = 0; a < count; a++) {
        const std::set<int> by = writers(placed, placed.bucket(a));
        // Stages count layers downward.
        const int stage = placed.placement.first_stage[a], first = placed.head() - *by.rbegin();
        CHECK((stage == -1) == placed.alone[a]);
        CHECK(stage >= -1);
        CHECK((placed.placement.offsets[a] >= placed.placement.shared) == placed.alone[a]);
        CHECK(stage <= first);
        end = std::max(end, placed.placement.offsets[a] + placed.bucket(a).elems);
        CHECK(placed.placement.offsets[a] % kParamAlign == 0);
        const std::vector<int>& overlapping = placed.placement.overlapping[a];
        for (size_t b = 0; b < count; b++) {
            const bool shares = std::count(overlapping.begin(), overlapping.end(), static_cast<int>(b)) > 0;
            CHECK(shares == (overlap(placed, a, b) && !placed.alone[a]));
            if (overlap(placed, a, b) && a != b) CHECK_FALSE(placed.alone[a]);
            if (a == b || !shares) continue;
            // One bucket is complete before the other begins; with overlap, the backward pass of a whole layer lies
            // between them.
            const int done_a = placed.head() - *by.begin();
            const int done_b = placed.head() - *writers(placed, placed.bucket(b)).begin();
            const int apart = overlaps ? 1 : 0;
            const std::vector<int>& first_stage = placed.placement.first_stage;
            CHECK((done_a + apart < first_stage[b] || done_b + apart < first_stage[a]));
        }
    }
    CHECK(end == placed.placement.elems);
}

}  // namespace

TEST_CASE("grad placement: buckets that exist at the same time have separate memory, and lone ones their own") {
    for (const ModelConfig& small : fp8_shapes()) {
        ModelConfig shape = small;
        shape.num_layers = 7;
        for (Fp8Recipe recipe : {Fp8Recipe::kNone, Fp8Recipe::kTensorwise})
            for (int64_t bytes : {int64_t{1}, int64_t{20000}, int64_t{200000}, int64_t{1} << 40})
                for (bool overlaps : {true, false}) {
                    CAPTURE(bytes);
                    Config config = fp8_config(shape, recipe);
                    config.overlap = overlaps;
                    if (recipe == Fp8Recipe::kTensorwise) config.bf16_linears = {"3.*", "4.up"};
                    for (bool every_third : {false, true}) {
                        const Placed placed(config, 3, bytes, every_third);
                        check(placed, overlaps);
                        CHECK(placed.placement.elems <= placed.layout.flat_elems());
                        CHECK((placed.placement.elems > placed.placement.shared) == every_third);
                    }
                }
    }
}

TEST_CASE("grad placement: whole gradients have the offsets of the flat buffers and share no memory") {
    const Placed placed(fp8_config(fp8_shapes()[0], Fp8Recipe::kDelayed), 2, 20000);
    const GradPlacement whole = whole_placement(placed.buckets);
    CHECK(whole.elems == placed.layout.flat_elems());
    CHECK(whole.first_stage.empty());
    for (size_t b = 0; b < whole.offsets.size(); b++) CHECK(whole.offsets[b] == placed.bucket(b).begin);
}

TEST_CASE("grad placement: a large model needs the memory of a few layers") {
    Config config;
    config.shape = find_model_preset("llama3-8B")->config, config.seq_length = 8192;
    config.micro_batch_size = config.global_batch_size = 1, config.fp8_recipe = Fp8Recipe::kDelayed;
    const Placed placed(config, 8, 256'000'000);
    int64_t longest = 0, layer = 0;
    for (const ParamGroup& bucket : placed.buckets.all()) longest = std::max(longest, bucket.elems);
    for (const Param& param : placed.table.params) layer += param.layer == 5 ? param.elems() : 0;
    CHECK(longest == 525336576);   // the head and the embedding, whose gradients never exist together
    CHECK(placed.placement.elems >= longest);
    CHECK(placed.placement.elems <= longest + 2 * layer);
    config.overlap = false;   // then only the norms of all layers exist together with the head
    CHECK(Placed(config, 8, 256'000'000).placement.elems <= longest + layer / 100);
}
