// Matmul on cuBLASLt, one plan per shape.
//
// cuBLASLt thinks column-major, we store row-major. A row-major (r, c) matrix is the same memory as a
// column-major (c, r) one with leading dimension c, that is, its transpose. So we ask cuBLASLt for
// D^T = op(B)^T op(A)^T: our B is its first operand, our A its second, its "m" is our N and its "n" our M:
//   layout     our A    our B    first operand, column-major     second operand, column-major
//   kForward   (M, K)   (N, K)   (K, N), transposed              (K, M)
//   kDgrad     (M, K)   (K, N)   (N, K)                          (K, M)
//   kWgrad     (K, M)   (K, N)   (N, K)                          (M, K), transposed
// A bias over our columns is then a bias over its rows, which is what its epilogue adds.
#include "llmc/cuda/gemm.h"

#include <algorithm>
#include <vector>

#include "llmc/cuda/common.cuh"

namespace {

#define CUBLAS_CHECK(call)                                                                                   \
    do {                                                                                                     \
        cublasStatus_t status_ = (call);                                                                     \
        CHECK(status_ == CUBLAS_STATUS_SUCCESS, "%s", cublasLtGetStatusName(status_));                       \
    } while (0)

// The first answers of the heuristic that a search measures. On an H200 in BF16 the best of 8 was up to
// 10 % faster than the first; later answers rarely win.
constexpr int kCandidates = 12;

// Split-K may only reduce through fp32 partial sums in the workspace, in a separate pass: in place it runs
// through counters whose order is not documented, and "output type" would round the partial sums to bf16.
constexpr uint32_t kReductionSchemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;

int pointer_alignment(const void* pointer) {
    uintptr_t address = reinterpret_cast<uintptr_t>(pointer) | 16;
    return static_cast<int>(address & (~address + 1));
}

cudaDataType_t cuda_type(Dtype dtype) {
    CHECK(dtype == Dtype::kBf16 || dtype == Dtype::kFp32, "gemm on %s", dtype_name(dtype));
    return dtype == Dtype::kBf16 ? CUDA_R_16BF : CUDA_R_32F;
}

GemmKey key_of(const GemmArgs& args) {
    return {.layout = args.layout,
            .epilogue = args.epilogue,
            .operands = args.A.dtype,
            .result = args.D.dtype,
            .bias = static_cast<bool>(args.bias),
            .pre = static_cast<bool>(args.pre),
            .accumulate = args.accumulate,
            .align_a = pointer_alignment(args.A.data),
            .align_b = pointer_alignment(args.B.data),
            .align_d = pointer_alignment(args.D.data),
            .M = args.M,
            .N = args.N,
            .K = args.K};
}

// Key and message in one place: every error about a call names the whole call.
#define CHECK_CALL(condition, what) CHECK(condition, "%s: %s", gemm_describe(key).c_str(), what)

void check_args(const GemmArgs& args, const GemmKey& key) {
    const int64_t M = args.M, N = args.N, K = args.K;
    CHECK_CALL(M > 0 && N > 0 && K > 0, "empty");
    CHECK_CALL(args.A.elems == M * K && args.B.elems == N * K && args.D.elems == M * N,
               "A, B or D has another number of elements");
    CHECK_CALL(args.A.data && args.B.data && args.D.data, "A, B or D has no memory");
    CHECK_CALL(args.A.dtype == args.B.dtype, "A and B differ in type");
    CHECK_CALL(args.A.dtype == Dtype::kBf16 || args.D.dtype == Dtype::kFp32, "fp32 operands give an fp32 D");
    CHECK_CALL(!args.bias || (args.bias.elems == N && args.bias.dtype == args.A.dtype),
               "bias needs N elements of A's type");
    CHECK_CALL(!args.bias || args.D.dtype == args.A.dtype, "cuBLASLt adds no bf16 bias into an fp32 D");
    CHECK_CALL(!args.pre || (args.pre.elems == M * N && args.pre.dtype == args.D.dtype),
               "the pre-activation needs D's shape and type");
    CHECK_CALL(!args.pre || args.epilogue == GemmEpilogue::kBiasGelu, "a pre-activation without gelu");
    CHECK_CALL(!args.pre || pointer_alignment(args.pre.data) == 16, "pre-activation not 16-byte aligned");
    CHECK_CALL(args.epilogue != GemmEpilogue::kNone || !args.bias, "a bias that no epilogue adds");
    CHECK_CALL(args.epilogue != GemmEpilogue::kBias || args.bias, "epilogue bias without a bias");
    CHECK_CALL(args.epilogue != GemmEpilogue::kBiasGelu || !args.accumulate, "gelu cannot be added to D");
}

// cuBLASLt's view of one call. The descriptors are plain structs without resources, built anew for each call.
struct Problem {
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatrixLayoutOpaque_t first, second, result;
    const void *first_data, *second_data;
    void* result_data;
    float beta;
};

template <typename T> void set(Problem& problem, cublasLtMatmulDescAttributes_t attribute, T value) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(&problem.op, attribute, &value, sizeof value));
}

void set_epilogue(Problem& problem, const GemmArgs& args) {
    if (args.epilogue == GemmEpilogue::kNone) return;
    uint32_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    if (args.epilogue == GemmEpilogue::kBiasGelu) {
        if (args.bias) epilogue = args.pre ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_BIAS;
        else epilogue = args.pre ? CUBLASLT_EPILOGUE_GELU_AUX : CUBLASLT_EPILOGUE_GELU;
    }
    set(problem, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    if (args.bias) {
        set(problem, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, cuda_type(args.bias.dtype));
        set(problem, CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(args.bias.data));
    }
    if (args.pre) {
        set(problem, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, cuda_type(args.pre.dtype));
        set(problem, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, args.N);
        set(problem, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, args.pre.data);
    }
}

Problem problem_of(const GemmArgs& args) {
    Problem problem{};
    // fp32 operands run in full fp32 arithmetic: this compute type never uses TF32.
    CUBLAS_CHECK(cublasLtMatmulDescInit(&problem.op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const uint64_t M = args.M, N = args.N, K = args.K;
    const cudaDataType_t in = cuda_type(args.A.dtype), out = cuda_type(args.D.dtype);
    const bool first_transposed = args.layout == GemmLayout::kForward;
    const bool second_transposed = args.layout == GemmLayout::kWgrad;
    set(problem, CUBLASLT_MATMUL_DESC_TRANSA, first_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(problem, CUBLASLT_MATMUL_DESC_TRANSB, second_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    CUBLAS_CHECK(first_transposed ? cublasLtMatrixLayoutInit(&problem.first, in, K, N, args.K)
                                  : cublasLtMatrixLayoutInit(&problem.first, in, N, K, args.N));
    CUBLAS_CHECK(second_transposed ? cublasLtMatrixLayoutInit(&problem.second, in, M, K, args.M)
                                   : cublasLtMatrixLayoutInit(&problem.second, in, K, M, args.K));
    CUBLAS_CHECK(cublasLtMatrixLayoutInit(&problem.result, out, N, M, args.N));
    set_epilogue(problem, args);
    problem.first_data = args.B.data;
    problem.second_data = args.A.data;
    problem.result_data = args.D.data;
    problem.beta = args.accumulate ? 1.0f : 0.0f;
    return problem;
}

cublasStatus_t launch(Ctx& ctx, Problem& problem, const cublasLtMatmulAlgo_t& algo) {
    const float alpha = 1.0f;
    return cublasLtMatmul(ctx.gemm->handle, &problem.op, &alpha, problem.first_data, &problem.first,
                          problem.second_data, &problem.second, &problem.beta, problem.result_data,
                          &problem.result, problem.result_data, &problem.result, &algo, ctx.gemm->workspace,
                          kGemmWorkspaceBytes, cuda::stream_of(ctx));
}

// The heuristic's first `count` answers (at most kCandidates), best guess first.
std::vector<GemmPlan> candidates(Ctx& ctx, Problem& problem, const GemmKey& key, int count) {
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

// Saves D before a search that adds to it and puts it back afterwards. The copy lives on the device if it
// fits, else on the host, and is given back at once.
class SavedResult {
public:
    SavedResult(Ctx& ctx, const Tensor& D) : stream_(cuda::stream_of(ctx)), D_(D) {
        if (cudaMalloc(&device_, D.bytes()) != cudaSuccess) {
            (void)cudaGetLastError();
            device_ = nullptr;
            host_.resize(D.bytes());
        }
        copy(device_ ? device_ : host_.data(), D_.data);
    }
    void restore() { copy(D_.data, device_ ? device_ : host_.data()); }
    ~SavedResult() { cudaFree(device_); }
    SavedResult(const SavedResult&) = delete;
    SavedResult& operator=(const SavedResult&) = delete;

private:
    void copy(void* to, const void* from) {
        CUDA_CHECK(cudaMemcpyAsync(to, from, D_.bytes(), cudaMemcpyDefault, stream_));
        CUDA_CHECK(cudaStreamSynchronize(stream_));
    }
    cudaStream_t stream_;
    Tensor D_;
    void* device_ = nullptr;
    std::vector<char> host_;
};

struct Stopwatch {
    cudaEvent_t begin, end;
    Stopwatch() {
        CUDA_CHECK(cudaEventCreate(&begin));
        CUDA_CHECK(cudaEventCreate(&end));
    }
    ~Stopwatch() {
        cudaEventDestroy(begin);
        cudaEventDestroy(end);
    }
    // Microseconds of one launch, negative if the algorithm refuses to run.
    float time_us(Ctx& ctx, Problem& problem, const cublasLtMatmulAlgo_t& algo) {
        cudaStream_t stream = cuda::stream_of(ctx);
        CUDA_CHECK(cudaEventRecord(begin, stream));
        cublasStatus_t status = launch(ctx, problem, algo);
        CUDA_CHECK(cudaEventRecord(end, stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        float ms = 0;
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        return status == CUBLAS_STATUS_SUCCESS ? ms * 1000 : -1;
    }
};

// Times of one candidate of a search.
struct Trial {
    GemmPlan plan;
    std::vector<float> us;
    float median() {
        std::nth_element(us.begin(), us.begin() + us.size() / 2, us.end());
        return us[us.size() / 2];
    }
};

// The fastest of the heuristic's first answers by median time. Rounds go over all candidates in turn, so that
// a drifting clock meets each alike. The first round warms up (kernels are loaded lazily), the second drops
// what is far behind; the heuristic's own choice stays unless another is faster by more than the usual noise.
GemmPlan search_plan(Ctx& ctx, Problem& problem, const GemmKey& key) {
    constexpr float kFarBehind = 1.2f, kNoise = 1.01f, kBudgetUs = 50000;
    std::vector<Trial> trials;
    for (const GemmPlan& plan : candidates(ctx, problem, key, kCandidates)) trials.push_back({plan, {}});
    Stopwatch stopwatch;
    auto round = [&] {
        float total = 0;
        for (Trial& trial : trials) {
            trial.us.push_back(stopwatch.time_us(ctx, problem, trial.plan.algo));
            total += trial.us.back();
        }
        return total;
    };
    round();
    std::erase_if(trials, [](const Trial& trial) { return trial.us[0] < 0; });
    CHECK_CALL(!trials.empty(), "none of cuBLASLt's algorithms runs");
    for (Trial& trial : trials) trial.us.clear();
    round();
    float best = trials[0].us[0];
    for (Trial& trial : trials) best = std::min(best, trial.us[0]);
    std::erase_if(trials, [&](const Trial& trial) { return trial.us[0] > kFarBehind * best; });
    const int rounds = std::clamp(static_cast<int>(kBudgetUs / round()), 4, 20);
    for (int i = 0; i < rounds; i++) round();
    for (Trial& trial : trials) trial.plan.us = trial.median();
    auto faster = [](const Trial& a, const Trial& b) { return a.plan.us < b.plan.us; };
    const Trial& fastest = *std::min_element(trials.begin(), trials.end(), faster);
    const bool noise = trials[0].plan.us < kNoise * fastest.plan.us;
    return noise ? trials[0].plan : fastest.plan;
}

// An imported plan is verified on first use.
void check_plan(Ctx& ctx, Problem& problem, const GemmKey& key, GemmPlan& plan) {
    cublasLtMatmulHeuristicResult_t answer{};
    cublasStatus_t status =
        cublasLtMatmulAlgoCheck(ctx.gemm->handle, &problem.op, &problem.first, &problem.second,
                                &problem.result, &problem.result, &plan.algo, &answer);
    REQUIRE(status == CUBLAS_STATUS_SUCCESS && answer.workspaceSize <= size_t{kGemmWorkspaceBytes},
            "matmul plan for %s does not fit this library (%s): delete the plans of the checkpoint",
            gemm_describe(key).c_str(), cublasLtGetStatusName(status));
    plan.checked = true;
}

const GemmPlan& plan_for(Ctx& ctx, Problem& problem, const GemmKey& key, const GemmArgs& args) {
    GemmState& state = *ctx.gemm;
    auto at = state.plans.find(key);
    if (at == state.plans.end()) {
        GemmPlan plan;
        if (!state.search) {
            plan = candidates(ctx, problem, key, 1)[0];
        } else if (args.accumulate) {
            SavedResult saved(ctx, args.D);
            plan = search_plan(ctx, problem, key);
            saved.restore();
        } else {
            plan = search_plan(ctx, problem, key);
        }
        at = state.plans.emplace(key, plan).first;
    }
    if (!at->second.checked) check_plan(ctx, problem, key, at->second);
    return at->second;
}

}  // namespace

std::string gemm_describe(const GemmKey& key) {
    const char* layouts[] = {"forward", "dgrad", "wgrad"};
    const char* epilogues[] = {"none", "bias", "bias+gelu"};
    return strf("gemm %s M %lld N %lld K %lld, %s -> %s, epilogue %s (bias %d, pre-activation %d), "
                "accumulate %d, alignment A %d B %d D %d bytes", layouts[static_cast<int>(key.layout)],
                (long long)key.M, (long long)key.N, (long long)key.K, dtype_name(key.operands),
                dtype_name(key.result), epilogues[static_cast<int>(key.epilogue)], key.bias, key.pre,
                key.accumulate, key.align_a, key.align_b, key.align_d);
}

void gemm_state_create(Ctx& ctx) {
    auto* state = new GemmState;
    ctx.gemm = state;
    cublasStatus_t status = cublasLtCreate(&state->handle);
    REQUIRE(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt does not start: %s", cublasLtGetStatusName(status));
    CUDA_CHECK(cudaMalloc(&state->workspace, kGemmWorkspaceBytes));
    size_t version = cublasLtGetVersion();
    state->library = strf("cuBLASLt %zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, ctx.index));
    state->gpu = properties.name;
}

void gemm_state_destroy(Ctx& ctx) {
    if (!ctx.gemm) return;
    if (ctx.gemm->handle) CUBLAS_CHECK(cublasLtDestroy(ctx.gemm->handle));
    CUDA_CHECK(cudaFree(ctx.gemm->workspace));
    delete ctx.gemm;
    ctx.gemm = nullptr;
}

int64_t gemm_count(const Ctx& ctx, Dtype operands) { return ctx.gemm->matmuls[static_cast<int>(operands)]; }

namespace cuda {

void gemm(Ctx& ctx, const GemmArgs& args) {
    const GemmKey key = key_of(args);
    check_args(args, key);
    if (args.epilogue == GemmEpilogue::kBiasGelu && args.D.dtype == Dtype::kFp32) {
        // cuBLASLt fuses gelu for 16-bit results only.
        GemmArgs linear = args;
        linear.D = args.pre ? args.pre : args.D;
        linear.pre = {};
        linear.epilogue = args.bias ? GemmEpilogue::kBias : GemmEpilogue::kNone;
        gemm(ctx, linear);
        gelu_forward(ctx, {.out = args.D, .in = linear.D, .N = args.M, .F = args.N});
        return;
    }
    Problem problem = problem_of(args);
    const GemmPlan& plan = plan_for(ctx, problem, key, args);
    cublasStatus_t status = launch(ctx, problem, plan.algo);
    CHECK_CALL(status == CUBLAS_STATUS_SUCCESS, cublasLtGetStatusName(status));
    ctx.gemm->matmuls[static_cast<int>(args.A.dtype)]++;
}

}  // namespace cuda
