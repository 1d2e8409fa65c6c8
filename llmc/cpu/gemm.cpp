// Matmul. CPU.
#include <nlohmann/json.hpp>

#include "llmc/cpu/gemm_tiles.h"
#include "llmc/ops/gemm_fp8.h"
#include "llmc/ops/grouped_gemm.h"

namespace cpu {
namespace {

template <typename T> struct Operands {
    Operand<T> a, b;
};
template <typename T> Operands<T> operands(const GemmArgs& args) {
    const T *a = args.A.as<T>(), *b = args.B.as<T>();
    bool wgrad = args.layout == GemmLayout::kWgrad, forward = args.layout == GemmLayout::kForward;
    return {{a, wgrad ? args.M : args.K, wgrad, args.M}, {b, forward ? args.K : args.N, !forward, args.N}};
}

template <typename T, typename D> void run_gemm(const GemmArgs& args) {
    const Operands<T> in = operands<T>(args);
    run_tiles<Acc<T>>(args, in.a, in.b, kDepth,
                      [](const Tile<Acc<T>>& tile, int64_t k, auto&& product) { product(tile.sums, k > 0); },
                      [&](const Tile<Acc<T>>& tile) { finish_tile<T, D>(args, tile); });
}

void check_gemm(const GemmArgs& args) {
    const bool codes = fp8_operands(args) || int8_operands(args);
    const Dtype T = args.A.dtype, of_bias = codes ? Dtype::kBf16 : T;
    CHECK(args.M > 0 && args.N > 0 && args.K > 0, "gemm of %lld x %lld x %lld", (long long)args.M,
          (long long)args.N, (long long)args.K);
    check_tensor("gemm", "A", args.A, T, args.M * args.K);
    check_tensor("gemm", "B", args.B, codes ? args.B.dtype : T, args.N * args.K);
    check_tensor("gemm", "D", args.D, args.D.dtype, args.M * args.N);
    check_optional("gemm", "bias", args.bias, of_bias, args.N);
    CHECK(!args.accumulate || !args.bias, "gemm: a bias on top of D");
    CHECK(!args.symmetric || args.M == args.N, "gemm: a symmetric D is square");
}

}  // namespace

void gemm(Ctx& ctx, const GemmArgs& args) {
    if (args.matrices > 0) {
        check_gemm_matrices(args);
        return for_matrices(args, [&](const GemmArgs& one) { gemm(ctx, one); });
    }
    check_gemm(args);
    if (fp8_operands(args) || int8_operands(args)) {
        int8_operands(args) ? gemm_int8(args) : gemm_fp8(args);
        ctx.fp8_matmuls++;
        return;
    }
    Dtype T = args.A.dtype, D = args.D.dtype;
    if (T == Dtype::kFp32 && D == Dtype::kFp32) run_gemm<float, float>(args);
    else if (T == Dtype::kBf16 && D == Dtype::kBf16) run_gemm<bf16, bf16>(args);
    else if (T == Dtype::kBf16 && D == Dtype::kFp32) run_gemm<bf16, float>(args);
    else if (T == Dtype::kFp64 && D == Dtype::kFp64) run_gemm<double, double>(args);
    else FAIL(kExitBug, "gemm: no CPU operation for %s operands and %s D", dtype_name(T), dtype_name(D));
}

void gemm_set_search(Ctx&, bool) {}
double gemm_search_seconds(const Ctx&) { return 0; }

int64_t fp8_matmuls(const Ctx& ctx) { return ctx.fp8_matmuls; }

std::string gemm_export_plans(Ctx&) { return R"({"library":"cpu","plans":[]})"; }

std::string gemm_import_plans(Ctx&, const std::string& json) {
    nlohmann::json plans = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
    bool sound = plans.is_object() && plans.contains("library") && plans["library"].is_string()
                 && plans.contains("plans") && plans["plans"].is_array();
    REQUIRE(sound, "matmul plans are not of the form {\"library\": text, \"plans\": [...]}: \"%.60s\"",
            json.c_str());
    const std::string library = plans["library"].get<std::string>();
    if (library == "cpu") return "";
    return strf("the matmul plans were made by %s and this run uses the CPU's own matmul", library.c_str());
}

}  // namespace cpu
