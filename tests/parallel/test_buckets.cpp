// How flat buffers are sharded over ranks: every element has one owner, and forms are in separate buckets.
#include "tests/support/doctest.h"

#include <set>

#include "llmc/parallel/zero/buckets.h"
#include "tests/support/fp8_model_test.h"

namespace {

struct Cut {
    const ParamTable table;
    const Fp8Plan plan;
    const FlatLayout layout;
    const Buckets buckets;
    Cut(const Config& config, int ranks, int64_t bytes)
        : table(make_param_table(config.shape)), plan(make_fp8_plan(config, table)),
          layout(table, plan, bytes, Buckets::unit(ranks)), buckets(layout, ranks) {}
};

std::vector<Config> configs() {
    std::vector<Config> all;
    for (const ModelConfig& shape : fp8_shapes()) {
        for (Fp8Recipe recipe : {Fp8Recipe::kNone, Fp8Recipe::kDelayed, Fp8Recipe::kBlockwise})
            all.push_back(fp8_config(shape, recipe));
        all.push_back(fp8_config(shape, Fp8Recipe::kTensorwise));
        all.back().first_last_layers_bf16 = true;
        all.back().num_layers_at_start_in_bf16 = 1;
        all.push_back(fp8_config(shape, Fp8Recipe::kTensorwise));
        all.back().fp8_lm_head = true;
    }
    return all;
}

// Steps in BF16 continue with the masters and moments of those in FP8, and the reverse.
void check_places_in_bf16(const Cut& cut, int ranks, int64_t bytes) {
    const FlatLayout layout(cut.table, cut.plan.in_bf16(), bytes, Buckets::unit(ranks));
    CHECK(layout.fp8_elems() == 0);
    REQUIRE(layout.flat_elems() == cut.layout.flat_elems());
    for (size_t i = 0; i < cut.table.params.size(); i++) {
        const int param = static_cast<int>(i);
        CHECK(layout.offset(param) == cut.layout.offset(param));
        CHECK((layout.form(param) == ParamForm::kOther) == (cut.layout.form(param) == ParamForm::kOther));
    }
    CHECK(Buckets(layout, ranks).shard_ranges(ranks - 1) == cut.buckets.shard_ranges(ranks - 1));
}

constexpr int64_t kSizes[] = {1, 20000, int64_t{1} << 40};   // one parameter per bucket, several, all in one

void check_places(const Cut& cut, int ranks, int64_t bytes) {
    int64_t flat = 0;
    std::set<int> seen;
    int before = -2;
    for (const ParamGroup& bucket : cut.buckets.all()) {
        CHECK(bucket.begin == flat);
        CHECK(bucket.elems % (ranks * kParamAlign) == 0);
        CHECK(cut.buckets.shard_elems(bucket) * ranks == bucket.elems);
        CHECK(bucket.first_layer >= before);
        before = bucket.first_layer;
        int64_t at = bucket.begin;
        int layer = bucket.first_layer;
        for (int param : bucket.params) {
            CHECK(cut.table.layer_of(param) - layer <= 1);   // in neighbouring layers
            layer = cut.table.layer_of(param);
            const Param& p = cut.table.params[static_cast<size_t>(param)];
            CHECK(seen.insert(param).second);
            CHECK(cut.layout.offset(param) == at);
            CHECK(cut.layout.elems(param) == p.elems());
            CHECK(&cut.layout.group_of(param) == &bucket);
            CHECK(cut.table.layer_of(param) >= bucket.first_layer);
            CHECK(cut.table.layer_of(param) <= bucket.last_layer);
            at += (p.elems() + kParamAlign - 1) / kParamAlign * kParamAlign;
        }
        // A bucket ends as soon as it is long enough, and is padded no more than needed.
        if (bucket.params.size() > 1) CHECK((cut.layout.offset(bucket.params.back()) - bucket.begin) * 4 < bytes);
        CHECK(bucket.elems - (at - bucket.begin) < ranks * kParamAlign);
        flat += bucket.elems;
    }
    CHECK(seen.size() == cut.table.params.size());
    CHECK(cut.layout.flat_elems() == flat);
    CHECK(cut.buckets.shard_elems() * ranks == flat);
    CHECK(cut.layout.weight_elems() + cut.layout.fp8_elems() == flat);
}

void check_forms(const Cut& cut) {
    for (size_t i = 0; i < cut.table.params.size(); i++) {
        const int param = static_cast<int>(i);
        ParamForm form = ParamForm::kOther;
        for (const LinearPlan& linear : cut.plan.linears)
            if (linear.weight == param && param != cut.table.wte)
                form = linear.fp8_forward() ? ParamForm::kFp8Linear : ParamForm::kLinear;
        CHECK(cut.layout.form(param) == form);
    }
    // FP8 weights have a separate buffer.
    int64_t ends[2] = {};
    for (const ParamGroup& bucket : cut.buckets.all()) {
        int64_t& end = ends[bucket.form == ParamForm::kFp8Linear];
        CHECK(bucket.weight_begin == end);
        end += bucket.elems;
    }
    CHECK(ends[0] == cut.layout.weight_elems());
    CHECK(ends[1] == cut.layout.fp8_elems());
}

// Every element and every place in a shard has one owner.
void check_ranges(const Cut& cut, int ranks) {
    std::vector<std::vector<int>> owners;
    for (const Param& p : cut.table.params) owners.emplace_back(p.elems(), 0);
    int64_t not_once = 0;
    for (int rank = 0; rank < ranks; rank++) {
        std::vector<bool> used(static_cast<size_t>(cut.buckets.shard_elems()));
        int64_t before = -1;
        for (const ShardRange& range : cut.buckets.shard_ranges(rank)) {
            const ParamGroup& bucket = cut.buckets.all()[static_cast<size_t>(range.bucket)];
            const int64_t flat = cut.layout.offset(range.param) + range.begin, shard = cut.buckets.shard_elems(bucket);
            CHECK(range.begin % kParamAlign == 0);
            CHECK(flat > before);
            before = flat;
            CHECK((flat - bucket.begin) / shard == rank);
            CHECK(range.shard == bucket.begin / ranks + (flat - bucket.begin) % shard);
            for (int64_t i = 0; i < range.elems; i++) {
                owners[static_cast<size_t>(range.param)][static_cast<size_t>(range.begin + i)]++;
                not_once += used[static_cast<size_t>(range.shard + i)];
                used[static_cast<size_t>(range.shard + i)] = true;
            }
        }
    }
    for (const auto& of_param : owners)
        for (int count : of_param) not_once += count != 1;
    CHECK(not_once == 0);
}

}  // namespace

TEST_CASE("buckets: every parameter has one offset, and every element one owner") {
    for (const Config& config : configs())
        for (int ranks : {1, 2, 3, 4, 8})
            for (int64_t bytes : kSizes) {
                CAPTURE(ranks, bytes);
                const Cut cut(config, ranks, bytes);
                check_places(cut, ranks, bytes);
                check_places_in_bf16(cut, ranks, bytes);
                check_forms(cut);
                if (ranks != 4) check_ranges(cut, ranks);
            }
}

TEST_CASE("buckets: a layout that is not divisible by the ranks is refused") {
    const Cut two(fp8_config(fp8_shapes()[0], Fp8Recipe::kDelayed), 2, 20000);
    CHECK_NOTHROW(Buckets(two.layout, 1));
    CHECK_THROWS_AS(Buckets(two.layout, 7), Error);
}

TEST_CASE("buckets: 256 MB, or with --zero 3 and several ranks whole layers, unless --bucket-mb says another size") {
    Config config;
    config.zero = 2;
    CHECK(bucket_bytes(config, 2) == 256'000'000);
    config.zero = 3;
    CHECK(bucket_bytes(config, 1) == 256'000'000);
    CHECK(bucket_bytes(config, 2) == INT64_MAX);
    config.bucket_mb = 0.5;
    CHECK(bucket_bytes(config, 2) == 500'000);
}

TEST_CASE("buckets: a large model in buckets of 256 MB") {
    Config config;
    config.shape = find_model_preset("llama3-8B")->config, config.seq_length = 8192;
    config.micro_batch_size = config.global_batch_size = 1, config.fp8_recipe = Fp8Recipe::kDelayed;
    const Cut cut(config, 8, 256'000'000);
    CHECK(cut.table.param_elems == 8030261248);
    int64_t longest_linears = 0;
    for (const ParamGroup& bucket : cut.buckets.all())
        if (bucket.form != ParamForm::kOther) longest_linears = std::max(longest_linears, bucket.elems);
    // Only the head: 128256 x 4096.
    CHECK(longest_linears == 525336576);
    CHECK(cut.buckets.all().front().first_layer == -1);
    CHECK(cut.buckets.all().size() > 60);
    CHECK(cut.buckets.all().size() < 100);
}
