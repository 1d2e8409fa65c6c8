#include "dev/bench/gemm_tiles/gemm_tiles.h"

#include "llmc/cuda/gemm.h"

namespace gemm_tiles {

std::vector<Variant> variants(const Ctx& ctx) {
    std::vector<Variant> all;
    if (!cuda::gemm_fp8_blockwise_available(ctx)) return all;
    for (const std::vector<Variant>& part : {fast_variants(), precise_variants(), bf16_variants()})
        all.insert(all.end(), part.begin(), part.end());
    all.push_back({.name = "swiglu 128x256 s4 p2 B2 g8", .operands = Operands::kE4m3, .rows = 128, .columns = 256,
                   .promote = 0, .swiglu = true, .group = cuda::tiles::kSwigluGroup,
                   .launch = cuda::tiles::launch_swiglu});
    return all;
}

const char* call_error(const Variant& variant, const Call& call) {
    const bool fp8 = variant.operands != Operands::kBf16;
    const auto aligned = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0; };
    const auto is = [](const Tensor& t, Dtype dtype, int64_t elems) {
        return t.data && t.dtype == dtype && t.elems == elems;
    };
    if (call.M <= 0 || call.N <= 0 || call.K <= 0) return "empty";
    if (!is(call.A, type_of_a(variant.operands), call.M * call.K)) return "A has another type or size";
    if (!is(call.B, type_of_b(variant.operands), call.N * call.K)) return "B has another type or size";
    if (call.D.dtype != Dtype::kBf16 && call.D.dtype != Dtype::kFp32) return "D is bf16 or fp32";
    if (!is(call.D, call.D.dtype, call.M * call.N)) return "D has another size";
    if (call.K * dtype_bytes(call.B.dtype) % 16 != 0) return "rows of A and B need whole 16 bytes";
    if (call.N * dtype_bytes(call.D.dtype) % 16 != 0) return "rows of D need whole 16 bytes";
    if (!aligned(call.A) || !aligned(call.B) || !aligned(call.D)) return "A, B or D not 16-byte aligned";
    if (fp8 != is(call.a_scale_inv, Dtype::kFp32, 1) || fp8 != is(call.b_scale_inv, Dtype::kFp32, 1))
        return "FP8 operands need two fp32 scales, others none";
    if (variant.swiglu != static_cast<bool>(call.act)) return "SwiGLU variants need act, others take none";
    if (!variant.swiglu) return nullptr;
    const int64_t F = call.N / 2;
    if (call.N % 32 != 0 || call.D.dtype != Dtype::kBf16 || call.accumulate || !call.slot)
        return "SwiGLU needs N in multiples of 32, a bf16 D without accumulation, and a slot";
    if (!is(call.act, Dtype::kE4m3, call.M * F) || !aligned(call.act)) return "act has another type, size or alignment";
    if (!call.act_transposed) return nullptr;
    if (call.M % 16 != 0 || !is(call.act_transposed, Dtype::kE4m3, call.M * F) || !aligned(call.act_transposed))
        return "act_transposed needs M in multiples of 16, E4M3, M F elements and 16-byte alignment";
    return nullptr;
}

}  // namespace gemm_tiles
