// Matmul plans as JSON, stored in checkpoints so that a resumed run uses the same algorithms.
#include <nlohmann/json.hpp>

#include "llmc/base/fp8.h"
#include "llmc/cuda/gemm.h"

namespace {

using nlohmann::json;

constexpr Dtype kDtypes[] = {Dtype::kFp32, Dtype::kBf16, Dtype::kE4m3, Dtype::kE5m2};

template <size_t kCount> int index_in(const char* const (&names)[kCount], const std::string& name) {
    for (size_t i = 0; i < kCount; i++) {
        if (name == names[i]) return static_cast<int>(i);
    }
    FAIL(kExitBadInput, "matmul plans: unknown name \"%s\"", name.c_str());
}

Dtype dtype_from(const std::string& name) {
    for (Dtype dtype : kDtypes) {
        if (name == dtype_name(dtype)) return dtype;
    }
    FAIL(kExitBadInput, "matmul plans: unknown dtype \"%s\"", name.c_str());
}

json to_json(const GemmKey& key, const GemmPlan& plan) {
    json algo = json::array();
    for (uint64_t word : plan.algo.data) algo.push_back(word);
    json row = {{"layout", kLayoutNames[static_cast<int>(key.layout)]},
                {"operands", dtype_name(key.a)}, {"result", dtype_name(key.result)},
                {"bias", key.bias}, {"accumulate", key.accumulate},
                {"align", {key.align_a, key.align_b, key.align_d}},
                {"M", key.M}, {"N", key.N}, {"K", key.K}, {"algo", algo}, {"us", plan.us}};
    // Only with FP8: rows of other matmuls keep the form they had before FP8 was supported.
    if (is_fp8(key.a)) {
        row["operand_b"] = dtype_name(key.b);
        row["factors"] = {kGranularityNames[static_cast<int>(key.a_granularity)],
                          kGranularityNames[static_cast<int>(key.b_granularity)]};
        row["fast_accumulation"] = key.fast_accumulation;
        row["own_kernel"] = plan.custom;
    }
    return row;
}

// Reads the fields that only rows of FP8 matmuls have.
void read_fp8_fields(GemmKey& key, GemmPlan& plan, const json& row) {
    if (!is_fp8(key.a)) return;
    const json& scales = row.at("factors");
    auto granularity = [&](size_t i) {
        return static_cast<Granularity>(index_in(kGranularityNames, scales.at(i).get<std::string>()));
    };
    key.b = dtype_from(row.at("operand_b").get<std::string>());
    key.a_granularity = granularity(0);
    key.b_granularity = granularity(1);
    key.fast_accumulation = row.at("fast_accumulation").get<bool>();
    plan.custom = row.at("own_kernel").get<bool>();
}

std::pair<GemmKey, GemmPlan> from_json(const json& row) {
    const json& align = row.at("align");
    const json& words = row.at("algo");
    GemmPlan plan{};
    REQUIRE(align.size() == 3 && words.size() == std::size(plan.algo.data),
            "matmul plans: %zu alignments and %zu algorithm words, expected 3 and %zu", align.size(),
            words.size(), std::size(plan.algo.data));
    for (size_t i = 0; i < words.size(); i++) plan.algo.data[i] = words.at(i).get<uint64_t>();
    plan.us = row.at("us").get<float>();
    const int layout = index_in(kLayoutNames, row.at("layout").get<std::string>());
    GemmKey key{.layout = static_cast<GemmLayout>(layout),
                .a = dtype_from(row.at("operands").get<std::string>()),
                .b = dtype_from(row.at("operands").get<std::string>()),
                .result = dtype_from(row.at("result").get<std::string>()),
                .bias = row.at("bias").get<bool>(),
                .accumulate = row.at("accumulate").get<bool>(), .align_a = align.at(0).get<int>(),
                .align_b = align.at(1).get<int>(), .align_d = align.at(2).get<int>(),
                .M = row.at("M").get<int64_t>(), .N = row.at("N").get<int64_t>(),
                .K = row.at("K").get<int64_t>()};
    read_fp8_fields(key, plan, row);
    return {key, plan};
}

}  // namespace

namespace cuda {

void gemm_set_search(Ctx& ctx, bool search) { ctx.gemm->search = search; }

int64_t fp8_matmuls(const Ctx& ctx) { return ctx.fp8_matmuls; }

std::string gemm_export_plans(Ctx& ctx) {
    json plans = json::array();
    for (const auto& [key, plan] : ctx.gemm->plans) plans.push_back(to_json(key, plan));
    return json{{"library", ctx.gemm->library}, {"gpu", ctx.gemm->gpu}, {"plans", plans}}.dump();
}

std::string gemm_import_plans(Ctx& ctx, const std::string& text) {
    std::map<GemmKey, GemmPlan> plans;
    std::string library, gpu;
    try {
        const json root = json::parse(text);
        library = root.at("library").get<std::string>();
        gpu = root.value("gpu", "");   // plans of the CPU have none
        for (const json& row : root.at("plans")) plans.insert(from_json(row));
    } catch (const json::exception&) {
        FAIL(kExitNoCheckpoint, "matmul plans (\"gemm_plans\" of state.json): a field is missing or of another type");
    }
    GemmState& state = *ctx.gemm;
    if (library != state.library || gpu != state.gpu) {
        return strf("matmul plans were made by %s on %s, this is %s on %s: algorithms are chosen anew",
                    library.c_str(), gpu.c_str(), state.library.c_str(), state.gpu.c_str());
    }
    for (const auto& [key, plan] : plans)
        if (plan.custom && !gemm_fp8_blockwise_available(ctx))
            return "matmul plans name the custom kernel, which this build does not have (make ARCH=90a): algorithms "
                   "are chosen anew";
    for (const auto& [key, plan] : plans) state.plans.insert_or_assign(key, plan);
    return "";
}

}  // namespace cuda
