// How flat buffers are cut for ranks: every element is owned once, and what travels differently is apart.
#include "tests/support/doctest.h"

#include <set>

#include "llmc/parallel/buckets.h"
#include "tests/support/fp8_model_test.h"

namespace {

struct Cut {
    ParamTable table;
    Fp8Plan plan;
    Buckets buckets;
    Cut(const Config& config, int ranks, int64_t bytes)
        : table(make_param_table(config.shape)), plan(make_fp8_plan(config, table)),
          buckets(table, plan, ranks, bytes) {}
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

constexpr int64_t kSizes[] = {1, 20000, int64_t{1} << 40};   // a parameter each, some, all in one

int layer_of(const ParamTable& table, int param) {
    if (param == table.wte || param == table.wpe) return -1;
    const int layer = table.params[static_cast<size_t>(param)].layer;
    return layer >= 0 ? layer : static_cast<int>(table.blocks.size());
}

void check_places(const Cut& cut, int ranks, int64_t bytes) {
    int64_t flat = 0;
    std::set<int> seen;
    int before = -2;
    for (const Bucket& bucket : cut.buckets.all()) {
        CHECK(bucket.begin == flat);
        CHECK(bucket.elems % (ranks * kParamAlign) == 0);
        CHECK(cut.buckets.block_elems(bucket) * ranks == bucket.elems);
        CHECK(bucket.first_layer >= before);
        before = bucket.first_layer;
        int64_t at = bucket.begin;
        int layer = bucket.first_layer;
        for (int param : bucket.params) {
            CHECK(layer_of(cut.table, param) - layer <= 1);   // they are ready one after the other
            layer = layer_of(cut.table, param);
            const Param& p = cut.table.params[static_cast<size_t>(param)];
            CHECK(seen.insert(param).second);
            CHECK(p.offset == at);
            CHECK(&cut.buckets.of_param(param) == &bucket);
            CHECK(cut.buckets.weight_offset(param) - bucket.weight_begin == p.offset - bucket.begin);
            CHECK(layer_of(cut.table, param) >= bucket.first_layer);
            CHECK(layer_of(cut.table, param) <= bucket.last_layer);
            at += (p.elems() + kParamAlign - 1) / kParamAlign * kParamAlign;
        }
        // It was closed as soon as it was long enough, and padded no more than needed.
        const Param& last = cut.table.params[static_cast<size_t>(bucket.params.back())];
        if (bucket.params.size() > 1) CHECK((last.offset - bucket.begin) * 4 < bytes);
        CHECK(bucket.elems - (at - bucket.begin) < ranks * kParamAlign);
        flat += bucket.elems;
    }
    CHECK(seen.size() == cut.table.params.size());
    CHECK(cut.table.flat_elems == flat);
    CHECK(cut.buckets.shard_elems() * ranks == flat);
    CHECK(cut.buckets.weight_elems() + cut.buckets.fp8_elems() == flat);
}

void check_kinds(const Cut& cut) {
    for (size_t i = 0; i < cut.table.params.size(); i++) {
        const int param = static_cast<int>(i);
        BucketKind kind = BucketKind::kOthers;
        for (const LinearPlan& linear : cut.plan.linears)
            if (linear.weight == param && param != cut.table.wte)
                kind = linear.fp8 ? BucketKind::kFp8Linears : BucketKind::kLinears;
        CHECK(cut.buckets.of_param(param).kind == kind);
    }
    // Each form of weights is a buffer of its own.
    int64_t ends[2] = {};
    for (const Bucket& bucket : cut.buckets.all()) {
        int64_t& end = ends[bucket.kind == BucketKind::kFp8Linears];
        CHECK(bucket.weight_begin == end);
        end += bucket.elems;
    }
    CHECK(ends[0] == cut.buckets.weight_elems());
    CHECK(ends[1] == cut.buckets.fp8_elems());
}

// Owners of every element, and of every place in their shards.
void check_pieces(const Cut& cut, int ranks) {
    std::vector<std::vector<int>> owners;
    for (const Param& p : cut.table.params) owners.emplace_back(p.elems(), 0);
    int64_t not_once = 0;
    for (int rank = 0; rank < ranks; rank++) {
        std::vector<bool> used(static_cast<size_t>(cut.buckets.shard_elems()));
        int64_t before = -1;
        for (const Piece& piece : cut.buckets.pieces(rank)) {
            const Param& p = cut.table.params[static_cast<size_t>(piece.param)];
            const Bucket& bucket = cut.buckets.all()[static_cast<size_t>(piece.bucket)];
            const int64_t flat = p.offset + piece.begin, block = cut.buckets.block_elems(bucket);
            CHECK(piece.begin % kParamAlign == 0);
            CHECK(flat > before);
            before = flat;
            CHECK((flat - bucket.begin) / block == rank);
            CHECK(piece.shard == bucket.begin / ranks + (flat - bucket.begin) % block);
            for (int64_t i = 0; i < piece.elems; i++) {
                owners[static_cast<size_t>(piece.param)][static_cast<size_t>(piece.begin + i)]++;
                not_once += used[static_cast<size_t>(piece.shard + i)];
                used[static_cast<size_t>(piece.shard + i)] = true;
            }
        }
    }
    for (const auto& of_param : owners)
        for (int count : of_param) not_once += count != 1;
    CHECK(not_once == 0);
}

}  // namespace

TEST_CASE("buckets: every parameter has one place, and every element one owner") {
    for (const Config& config : configs()) {
        for (int ranks : {1, 2, 3, 4, 8}) {
            for (int64_t bytes : kSizes) {
                CAPTURE(ranks);
                CAPTURE(bytes);
                const Cut cut(config, ranks, bytes);
                check_places(cut, ranks, bytes);
                check_kinds(cut);
                if (ranks != 4) check_pieces(cut, ranks);
            }
        }
    }
}

TEST_CASE("buckets: a rank that owns everything has the places of the flat buffers, as one rank has") {
    const Config config = fp8_config(fp8_shapes()[0], Fp8Recipe::kDelayed);
    const Cut one(config, 1, 20000), three(config, 3, 20000);
    CHECK(one.buckets.pieces(0) == one.buckets.whole_pieces());
    for (const Piece& piece : three.buckets.whole_pieces()) {
        const Param& p = three.table.params[static_cast<size_t>(piece.param)];
        CHECK(piece.begin == 0);
        CHECK(piece.elems == p.elems());
        CHECK(piece.shard == p.offset);
    }
    CHECK(three.buckets.whole_pieces().size() == three.table.params.size());
}

TEST_CASE("buckets: a large model in buckets of 256 MB") {
    Config config;
    config.shape = find_model_preset("llama3-8B")->config;
    config.seq_length = 8192;
    config.micro_batch_size = config.global_batch_size = 1;
    config.fp8_recipe = Fp8Recipe::kDelayed;
    const Cut cut(config, 8, 256'000'000);
    CHECK(cut.table.param_elems == 8030261248);
    int64_t longest_linears = 0;
    for (const Bucket& bucket : cut.buckets.all())
        if (bucket.kind != BucketKind::kOthers) longest_linears = std::max(longest_linears, bucket.elems);
    // The head, alone: 128256 x 4096.
    CHECK(longest_linears == 525336576);
    CHECK(cut.buckets.all().front().first_layer == -1);
    CHECK(cut.buckets.all().size() > 60);
    CHECK(cut.buckets.all().size() < 100);
}
