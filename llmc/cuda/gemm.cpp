// Matmul on cuBLASLt, with one algorithm per shape (GemmPlan).
//
// cuBLASLt is column-major, our tensors are row-major. A row-major (r, c) matrix is the same memory as a column-major
// (c, r) one with leading dimension c, that is, its transpose. So cuBLASLt computes D^T = op(B)^T op(A)^T: our B is its
// first operand, our A its second, its "m" is our N and its "n" our M:
//   layout     our A    our B    first operand, column-major     second operand, column-major
//   kForward   (M, K)   (N, K)   (K, N), transposed              (K, M)
//   kDgrad     (M, K)   (K, N)   (N, K)                          (K, M)
//   kWgrad     (K, M)   (K, N)   (N, K)                          (M, K), transposed
// A bias over our columns is a bias over cuBLASLt's rows, as its epilogue expects.
//
// FP8 operands have K innermost, (M, K) and (N, K), whatever the layout: Hopper multiplies them only in the form of
// kForward. The scales of our B are those of cuBLASLt's first operand. Scale layouts match cuBLASLt's modes VEC128 (our
// kBlock1x128) and BLK128x128; it does not read the padding.
//
// Accumulating into a bf16 D rounds twice, for all operand types: the product to bf16, then its sum with D (observed
// with cuBLASLt 13.1, exactly and in every shape tried). An fp32 D is rounded once.
#include "llmc/cuda/gemm.h"

#include <utility>
#include <vector>

#include "llmc/cuda/common.h"
#include "llmc/ops/gemm_fp8.h"
#include "llmc/ops/grouped_gemm.h"
#include "llmc/ops/op_cost.h"

namespace {

int pointer_alignment(const void* pointer) {
    uintptr_t address = reinterpret_cast<uintptr_t>(pointer) | 16;
    return static_cast<int>(address & (~address + 1));
}

cudaDataType_t cuda_type(Dtype dtype) {
    switch (dtype) {
        case Dtype::kBf16: return CUDA_R_16BF;
        case Dtype::kFp32: return CUDA_R_32F;
        case Dtype::kE4m3: return CUDA_R_8F_E4M3;
        case Dtype::kE5m2: return CUDA_R_8F_E5M2;
        default: FAIL(kExitBug, "gemm on %s", dtype_name(dtype));
    }
}

GemmKey key_of(const GemmArgs& args) {
    return {.layout = args.layout,
            .a = args.A.dtype,
            .b = args.B.dtype,
            .result = args.D.dtype,
            .bias = static_cast<bool>(args.bias),
            .accumulate = args.accumulate,
            .align_a = pointer_alignment(args.A.data),
            .align_b = pointer_alignment(args.B.data),
            .align_d = pointer_alignment(args.D.data),
            .M = args.M,
            .N = args.N,
            .K = args.K,
            .a_granularity = args.A_granularity,
            .b_granularity = args.B_granularity,
            .fast_accumulation = args.fast_accumulation};
}

void check_args(const GemmArgs& args, const GemmKey& key) {
    const int64_t M = args.M, N = args.N, K = args.K;
    CHECK_CALL(M > 0 && N > 0 && K > 0, "empty");
    CHECK_CALL(args.A.elems == M * K && args.B.elems == N * K && args.D.elems == M * N,
               "A, B or D has another number of elements");
    CHECK_CALL(args.A.data && args.B.data && args.D.data, "A, B or D has no memory");
    CHECK_CALL(!args.bias || args.bias.elems == N, "bias needs N elements");
    CHECK_CALL(!args.symmetric || M == N, "a symmetric D is square");
    if (fp8_operands(args) || int8_operands(args)) {
        const char* error = int8_operands(args) ? int8_gemm_error(args) : fp8_gemm_error(args);
        CHECK_CALL(!error, error);
    } else {
        CHECK_CALL(args.A.dtype == args.B.dtype, "A and B differ in type");
        CHECK_CALL(args.A.dtype == Dtype::kBf16 || args.D.dtype == Dtype::kFp32, "fp32 operands give an fp32 D");
        CHECK_CALL(!args.bias || args.bias.dtype == args.A.dtype, "bias needs A's type");
        CHECK_CALL(!args.bias || args.D.dtype == args.A.dtype, "cuBLASLt adds no bf16 bias into an fp32 D");
    }
}

template <typename T> void set(GemmProblem& problem, cublasLtMatmulDescAttributes_t attribute, T value) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(&problem.op, attribute, &value, sizeof value));
}

void set_bias(GemmProblem& problem, const Tensor& bias) {
    if (!bias) return;
    set(problem, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<uint32_t>(CUBLASLT_EPILOGUE_BIAS));
    set(problem, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, cuda_type(bias.dtype));
    set(problem, CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(bias.data));
}

// A scale for the whole tensor is the library's default and is not set, because headers before 12.8 do not know the
// attribute. Headers before 12.9 do not know block scales; device.cpp then reports the blockwise recipe as unsupported.
void set_scale_mode(GemmProblem& problem, bool of_library_A, Granularity granularity) {
    if (granularity == Granularity::kTensor) return;
#if CUBLAS_VERSION >= 120900
    set(problem, of_library_A ? CUBLASLT_MATMUL_DESC_A_SCALE_MODE : CUBLASLT_MATMUL_DESC_B_SCALE_MODE,
        granularity == Granularity::kBlock1x128 ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
                                                : CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F);
#else
    (void)problem, (void)of_library_A;
    FAIL(kExitBug, "this build has the headers of cuBLASLt %d, without block scales", CUBLAS_VERSION);
#endif
}

void set_scales(GemmProblem& problem, const GemmArgs& args) {
    set_scale_mode(problem, true, args.B_granularity);   // its A is our B
    set_scale_mode(problem, false, args.A_granularity);
    set(problem, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(args.B_scale_inv.data));
    set(problem, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(args.A_scale_inv.data));
    set(problem, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(args.fast_accumulation));
}

GemmProblem problem_of(const GemmArgs& args) {
    GemmProblem problem{};
    // fp32 operands are multiplied in full fp32: this compute type never uses TF32.
    CUBLAS_CHECK(cublasLtMatmulDescInit(&problem.op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const uint64_t M = args.M, N = args.N, K = args.K;
    const cudaDataType_t first = cuda_type(args.B.dtype), second = cuda_type(args.A.dtype);
    const bool fp8 = fp8_operands(args);
    const bool first_transposed = fp8 || args.layout == GemmLayout::kForward;
    const bool second_transposed = !fp8 && args.layout == GemmLayout::kWgrad;
    set(problem, CUBLASLT_MATMUL_DESC_TRANSA, first_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(problem, CUBLASLT_MATMUL_DESC_TRANSB, second_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    CUBLAS_CHECK(first_transposed ? cublasLtMatrixLayoutInit(&problem.first, first, K, N, args.K)
                                  : cublasLtMatrixLayoutInit(&problem.first, first, N, K, args.N));
    CUBLAS_CHECK(second_transposed ? cublasLtMatrixLayoutInit(&problem.second, second, M, K, args.M)
                                   : cublasLtMatrixLayoutInit(&problem.second, second, K, M, args.K));
    CUBLAS_CHECK(cublasLtMatrixLayoutInit(&problem.result, cuda_type(args.D.dtype), N, M, args.N));
    if (fp8) set_scales(problem, args);
    set_bias(problem, args.bias);
    problem.first_data = args.B.data;
    problem.second_data = args.A.data;
    problem.result_data = args.D.data;
    problem.beta = args.accumulate ? 1.0f : 0.0f;
    return problem;
}

// Whether an operand was declared to cuBLASLt as FP8, the evidence that an FP8 matmul ran.
bool is_fp8(cublasLtMatrixLayoutOpaque_t& layout) {
    uint32_t type = 0;
    size_t written = 0;
    CUBLAS_CHECK(
        cublasLtMatrixLayoutGetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_TYPE, &type, sizeof type, &written));
    return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
}

}  // namespace

cublasStatus_t gemm_launch(Ctx& ctx, GemmProblem& problem, const GemmPlan& plan, const GemmArgs& args) {
    if (plan.custom) {
        cuda::gemm_fp8_blockwise(ctx, args);
        return CUBLAS_STATUS_SUCCESS;
    }
    const float alpha = 1.0f;
    return cublasLtMatmul(ctx.gemm->handle, &problem.op, &alpha, problem.first_data, &problem.first,
                          problem.second_data, &problem.second, &problem.beta, problem.result_data,
                          &problem.result, problem.result_data, &problem.result, &plan.algo, ctx.gemm->workspace,
                          kGemmWorkspaceBytes, cuda::stream_of(ctx));
}

std::string gemm_describe(const GemmKey& key) {
    std::string operands = dtype_name(key.a);
    if (key.b != key.a) operands += strf(" x %s", dtype_name(key.b));
    constexpr const char* kGranularities[] = {"tensor", "1x128", "128x128"};
    std::string scales;
    if (is_fp8(key.a))
        scales = strf(", scales %s x %s, fast accumulation %d", kGranularities[static_cast<int>(key.a_granularity)],
                      kGranularities[static_cast<int>(key.b_granularity)], key.fast_accumulation);
    return strf("gemm %s M %lld N %lld K %lld, %s -> %s%s, bias %d, accumulate %d, "
                "alignment A %d B %d D %d bytes", layout_name(key.layout),
                (long long)key.M, (long long)key.N, (long long)key.K, operands.c_str(), dtype_name(key.result),
                scales.c_str(), key.bias, key.accumulate, key.align_a, key.align_b, key.align_d);
}

void gemm_state_create(Ctx& ctx, const DeviceInfo& info) {
    auto* state = new GemmState;
    ctx.gemm = state;
    cublasStatus_t status = cublasLtCreate(&state->handle);
    REQUIRE(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt does not start: %s", cublasLtGetStatusName(status));
    CUDA_CHECK(cudaMalloc(&state->workspace, kGemmWorkspaceBytes));
    state->library = info.matmul_library;
    state->gpu = info.name;
}

void gemm_state_destroy(Ctx& ctx) {
    if (!ctx.gemm) return;
    if (ctx.gemm->handle) cublasLtDestroy(ctx.gemm->handle);   // perhaps after an error of the device
    cuda::device_free(ctx.gemm->workspace);
    delete ctx.gemm;
    ctx.gemm = nullptr;
}

namespace cuda {

void gemm(Ctx& ctx, const GemmArgs& args) {
    if (args.matrices > 0) {
        check_gemm_matrices(args);
        if (args.symmetric && gemm_symmetric_supports(ctx, args)) return gemm_symmetric(ctx, args);
        if (gemm_matrices_supports(ctx, args)) return gemm_matrices(ctx, args);
        return for_matrices(args, [&](const GemmArgs& one) { gemm(ctx, one); });
    }
    const GemmKey key = key_of(args);
    check_args(args, key);
    if (int8_operands(args)) {
        CHECK_CALL(gemm_int8_available(ctx), "INT8 matmuls need compute capability 9.0 and a build with ARCH=90a");
        gemm_int8(ctx, args);
        ctx.fp8_matmuls++;
        return;
    }
    if (args.symmetric && args.N >= GemmArgs::kLeastSymmetric && gemm_symmetric_supports(ctx, args))
        return gemm_symmetric(ctx, args);
    GemmProblem problem = problem_of(args);
    const GemmPlan& plan = gemm_plan_for(ctx, problem, key, args);
    cublasStatus_t status = gemm_launch(ctx, problem, plan, args);
    CHECK_CALL(status == CUBLAS_STATUS_SUCCESS, cublasLtGetStatusName(status));
    // The custom kernel has checked that both are E4M3.
    ctx.fp8_matmuls += plan.custom || (is_fp8(problem.first) && is_fp8(problem.second));
}

const char* experts_kernel(const Ctx& ctx, Dtype dtype) {
    if (kSm90aCode && ctx.sm == 90 && dtype == Dtype::kBf16) return "all in one kernel (wgmma)";
    return "one matmul after another, and the host waits for their numbers of rows: slow; BF16 on compute capability "
           "9.0 has one kernel for all";
}

// Without the custom kernel it waits until the sizes are known on the host, and takes the library's first answer for
// each expert.
void grouped_gemm(Ctx& ctx, const GroupedGemmArgs& args) {
    check_grouped_gemm(args);
    if (is_fp8(args.A.dtype)) {
        grouped_gemm_fp8(ctx, args);
        ctx.fp8_matmuls++;
        return;
    }
    if (grouped_gemm_supports(ctx, args)) return grouped_gemm_sm90(ctx, args);
    std::vector<int32_t> offsets(static_cast<size_t>(args.E + 1));
    copy_to_host(ctx, offsets.data(), args.offsets.data, args.offsets.bytes());
    synchronize(ctx);
    const bool search = std::exchange(ctx.gemm->search, false);
    for_experts(args, offsets.data(), [&](const GemmArgs& expert) { gemm(ctx, expert); },
                [&](const Tensor& weights) { fill_bytes(ctx, weights.data, 0, weights.bytes()); });
    ctx.gemm->search = search;
}

}  // namespace cuda
