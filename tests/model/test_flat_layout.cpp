// The layout of parameters in the flat buffers, and their state states. tests/parallel/test_buckets.cpp tests offsets
// and sharding.
#include "tests/support/doctest.h"

#include "llmc/model/parameters/flat_layout.h"
#include "tests/support/fp8_model_test.h"

namespace {

std::vector<std::vector<int>> params_of(const FlatLayout& layout) {
    std::vector<std::vector<int>> params;
    for (const ParamGroup& group : layout.groups()) params.push_back(group.params);
    return params;
}

}  // namespace

TEST_CASE("flat layout: the unit only pads groups") {
    for (const ModelConfig& shape : fp8_shapes()) {
        const Config config = fp8_config(shape, Fp8Recipe::kDelayed);
        const ParamTable table = make_param_table(shape);
        const Fp8Plan plan = make_fp8_plan(config, table);
        const FlatLayout one(table, plan, 20000);
        for (int64_t unit : {2 * kParamAlign, 3 * kParamAlign, 8 * kParamAlign}) {
            const FlatLayout layout(table, plan, 20000, unit);
            REQUIRE(params_of(layout) == params_of(one));
            for (size_t g = 0; g < layout.groups().size(); g++) {
                const ParamGroup &group = layout.groups()[g], &alone = one.groups()[g];
                CHECK(group.form == alone.form);
                CHECK(group.elems == (alone.elems + unit - 1) / unit * unit);
                for (int param : group.params)
                    CHECK(layout.offset(param) - group.begin == one.offset(param) - alone.begin);
            }
        }
    }
}

TEST_CASE("flat layout: a view is the parameter's part of a flat buffer, and FP8 weights have a separate buffer") {
    const ParamTable table = make_param_table(tiny_llama());
    const FlatLayout bf16_only(table, {}, INT64_MAX);
    CHECK(bf16_only.fp8_elems() == 0);
    CHECK(bf16_only.groups().size() == 1);   // no layer is far from the one before
    std::vector<float> flat(static_cast<size_t>(bf16_only.flat_elems()));
    for (size_t i = 0; i < table.params.size(); i++) {
        const int param = static_cast<int>(i);
        const Tensor view = bf16_only.view({flat.data(), Dtype::kFp32, bf16_only.flat_elems()}, param);
        CHECK(view.data == flat.data() + bf16_only.offset(param));
        CHECK(view.elems == table.params[i].elems());
        CHECK(bf16_only.group_of(param).weight_begin == bf16_only.group_of(param).begin);
        CHECK(bf16_only.offset(param) % kParamAlign == 0);
    }
}

TEST_CASE("state states: moments are in --moment-dtype and masters in FP32; with FP64 all are in FP64") {
    const StateDtypes bf16_moments{.weight = Dtype::kBf16, .moment = Dtype::kBf16};
    CHECK(bf16_moments.of(StateKind::kMaster) == Dtype::kFp32);
    CHECK(bf16_moments.of(StateKind::kExpAvg) == Dtype::kBf16);
    CHECK(bf16_moments.of(StateKind::kExpAvgSq) == Dtype::kBf16);
    for (StateKind kind : {StateKind::kMaster, StateKind::kExpAvg})
        CHECK(StateDtypes{.weight = Dtype::kFp64}.of(kind) == Dtype::kFp64);
    const StateDtypes fp8{.weight = Dtype::kBf16, .moment = Dtype::kE4m3};
    CHECK(fp8.of(StateKind::kMaster) == Dtype::kFp32);
    CHECK(fp8.of(StateKind::kExpAvg) == Dtype::kE4m3);
    CHECK(fp8.of(StateKind::kExpAvgSq) == Dtype::kUe5m3);
    CHECK(fp8.of(StateKind::kExpAvgSqScale) == Dtype::kFp32);
    CHECK(fp8.of(StateKind::kEma) == Dtype::kFp32);
    CHECK(state_row(StateKind::kExpAvg).values(257) == 257);
    CHECK(state_row(StateKind::kExpAvgScale).values(257) == 3);
}
