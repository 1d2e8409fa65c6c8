// The choice of an algorithm for a shape: the heuristic's first answer, or the fastest in a measurement.
#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "llmc/cuda/common.h"
#include "llmc/cuda/gemm.h"
#include "llmc/ops/owned.h"

namespace {

// Answers of the heuristic that a search measures. On an H200 in BF16 the best of 8 was up to 10 % faster than the
// first; later answers rarely win.
constexpr int kCandidates = 12;

// Split-K may only reduce through fp32 partial sums in the workspace, in a separate pass: in-place reduction uses
// counters in an undocumented order, and "output type" would round the partial sums to bf16.
constexpr uint32_t kReductionSchemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;

// Returns the heuristic's first `count` answers (at most kCandidates), best guess first.
std::vector<GemmPlan> candidates(Ctx& ctx, GemmProblem& problem, const GemmKey& key, int count) {
    cublasLtMatmulPreferenceOpaque_t preference{};
    CUBLAS_CHECK(cublasLtMatmulPreferenceInit(&preference));
    auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kGemmWorkspaceBytes));
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, kReductionSchemes);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(key.align_b));  // its A is our B
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(key.align_a));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(key.align_d));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(key.align_d));
    cublasLtMatmulHeuristicResult_t found[kCandidates];
    int returned = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        ctx.gemm->handle, &problem.op, &problem.first, &problem.second, &problem.result, &problem.result,
        &preference, count, found, &returned);
    std::vector<GemmPlan> plans;
    for (int i = 0; i < returned; i++) {
        if (found[i].state != CUBLAS_STATUS_SUCCESS) continue;
        plans.push_back({.algo = found[i].algo, .checked = true});
    }
    CHECK(!plans.empty(), "cuBLASLt has no algorithm for %s: %s", gemm_describe(key).c_str(),
          cublasLtGetStatusName(status));
    return plans;
}

// Returns the microseconds of one launch, negative if the algorithm refuses to run.
float time_us(Ctx& ctx, GemmProblem& problem, const GemmPlan& plan, const GemmArgs& args) {
    const OwnedEvent begin = OwnedEvent::create(), end = OwnedEvent::create();
    cuda::event_record(ctx, begin);
    const cublasStatus_t status = gemm_launch(ctx, problem, plan, args);
    cuda::event_record(ctx, end);
    cuda::event_wait(end);
    return status == CUBLAS_STATUS_SUCCESS ? cuda::event_elapsed_ms(begin, end) * 1000 : -1;
}

constexpr float kNoise = 1.01f;      // what a candidate must gain to be chosen
constexpr float kBudgetUs = 50000;   // of the rounds that count
constexpr float kLongUs = 100000;    // a round of the candidates in which the time to load their kernels is small

// Times of one candidate of a search.
struct Trial {
    GemmPlan plan;
    std::vector<float> us;
    float median() {
        std::nth_element(us.begin(), us.begin() + us.size() / 2, us.end());
        return us[us.size() / 2];
    }
};

// Returns the fastest plan by median time among the heuristic's first answers and, where supported, the custom kernel.
// Rounds alternate between all candidates, so that clock drift affects them alike. The first round warms up (kernels
// are loaded lazily), the second drops slow candidates; of a long matmul, the first does both. The heuristic's first
// answer stays unless another is faster by more than the usual noise.
GemmPlan search_plan(Ctx& ctx, GemmProblem& problem, const GemmKey& key, const GemmArgs& args) {
    std::vector<Trial> trials;
    for (const GemmPlan& plan : candidates(ctx, problem, key, kCandidates)) trials.push_back({plan, {}});
    if (ctx.gemm->search_custom && cuda::gemm_fp8_blockwise_supports(ctx, args))
        trials.push_back({{.algo = {}, .custom = true, .checked = true}, {}});
    auto round = [&] {
        float total = 0;
        for (Trial& trial : trials) {
            trial.us.push_back(time_us(ctx, problem, trial.plan, args));
            total += trial.us.back();
        }
        return total;
    };
    const auto forget = [&] {
        for (Trial& trial : trials) trial.us.clear();
    };
    const bool is_long = round() > kLongUs;
    std::erase_if(trials, [](const Trial& trial) { return trial.us[0] < 0; });
    CHECK_CALL(!trials.empty(), "none of cuBLASLt's algorithms runs");
    if (!is_long) {
        forget();
        round();
    }
    float best = trials[0].us[0];
    for (Trial& trial : trials) best = std::min(best, trial.us[0]);
    std::erase_if(trials, [&](const Trial& trial) { return trial.us[0] > (is_long ? 1.1f : 1.2f) * best; });
    forget();
    const int rounds = std::clamp(static_cast<int>(kBudgetUs / round()), 2, 20);
    for (int i = 0; i < rounds; i++) round();
    for (Trial& trial : trials) trial.plan.us = trial.median();
    auto faster = [](const Trial& a, const Trial& b) { return a.plan.us < b.plan.us; };
    const Trial& fastest = *std::min_element(trials.begin(), trials.end(), faster);
    const bool noise = trials[0].plan.us < kNoise * fastest.plan.us;
    return noise ? trials[0].plan : fastest.plan;
}

// Verifies an imported plan on its first use.
void check_plan(Ctx& ctx, GemmProblem& problem, const GemmKey& key, GemmPlan& plan, const GemmArgs& args) {
    if (plan.custom) {
        REQUIRE(cuda::gemm_fp8_blockwise_supports(ctx, args),
                "matmul plan for %s names the custom kernel, which does not support it: begin from the "
                "checkpoint's weights with --load", gemm_describe(key).c_str());
        plan.checked = true;
        return;
    }
    cublasLtMatmulHeuristicResult_t answer{};
    cublasStatus_t status =
        cublasLtMatmulAlgoCheck(ctx.gemm->handle, &problem.op, &problem.first, &problem.second,
                                &problem.result, &problem.result, &plan.algo, &answer);
    REQUIRE(status == CUBLAS_STATUS_SUCCESS && answer.workspaceSize <= size_t{kGemmWorkspaceBytes},
            "matmul plan for %s does not fit this library (%s): begin from the checkpoint's weights with --load",
            gemm_describe(key).c_str(), cublasLtGetStatusName(status));
    plan.checked = true;
}

}  // namespace

const GemmPlan& gemm_plan_for(Ctx& ctx, GemmProblem& problem, const GemmKey& key, const GemmArgs& args) {
    GemmState& state = *ctx.gemm;
    auto at = state.plans.find(key);
    if (at == state.plans.end()) {
        GemmPlan plan;
        if (!state.search) {
            plan = candidates(ctx, problem, key, 1)[0];
        } else {
            cuda::synchronize(ctx);   // the clock counts only the search
            const auto begin = std::chrono::steady_clock::now();
            // A search that accumulates changes D.
            const int64_t bytes = args.accumulate ? args.D.bytes() : 0;
            const auto saved = std::make_unique_for_overwrite<char[]>(static_cast<size_t>(bytes));
            cuda::copy_to_host(ctx, saved.get(), args.D.data, bytes);
            cuda::synchronize(ctx);
            plan = search_plan(ctx, problem, key, args);
            cuda::copy_to_device(ctx, args.D.data, saved.get(), bytes);
            cuda::synchronize(ctx);
            state.search_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        }
        at = state.plans.emplace(key, plan).first;
    }
    if (!at->second.checked) check_plan(ctx, problem, key, at->second, args);
    return at->second;
}
