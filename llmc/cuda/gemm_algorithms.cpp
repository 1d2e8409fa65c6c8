// Matmul plans as JSON, stored in checkpoints so that a resumed run uses the same algorithms.
#include <nlohmann/json.hpp>

#include "llmc/cuda/gemm.h"

// Enumerators are saved as their numbers.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GemmKey, layout, a, b, result, bias, accumulate, align_a, align_b, align_d, M, N, K,
                                   a_granularity, b_granularity, fast_accumulation)

namespace {

using nlohmann::json;

json to_json(const GemmKey& key, const GemmPlan& plan) {
    json row = key;
    row["algo"] = plan.algo.data;
    row["custom"] = plan.custom;
    row["us"] = plan.us;
    return row;
}

std::pair<GemmKey, GemmPlan> from_json(const json& row) {
    GemmPlan plan{};
    row.at("algo").get_to(plan.algo.data);
    row.at("custom").get_to(plan.custom);
    row.at("us").get_to(plan.us);
    return {row.get<GemmKey>(), plan};
}

}  // namespace

namespace cuda {

void gemm_set_search(Ctx& ctx, bool search) { ctx.gemm->search = search; }
double gemm_search_seconds(const Ctx& ctx) { return ctx.gemm->search_seconds; }

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
