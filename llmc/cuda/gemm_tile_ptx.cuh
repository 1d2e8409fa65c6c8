// Inline PTX of gemm_tile_kernel.cuh beside ptx.cuh: wgmma over up to 256 columns, stores of matrix boxes. Source:
// NVIDIA, PTX ISA 9.0, the instruction named at each wrapper.
#pragma once
#include "llmc/cuda/gemm_tile.h"
#include "llmc/cuda/ptx.cuh"

namespace cuda::tiles::ptx {

using namespace cuda::ptx;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// "st.shared".
__device__ inline void store_shared_half(uint32_t shared, uint32_t low) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(shared), "h"(static_cast<uint16_t>(low)) : "memory");
}
// *shared = max(*shared, value). "red.shared".
__device__ inline void max_shared(uint32_t shared, uint32_t value) {
    asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(shared), "r"(value) : "memory");
}

// Operand lists of 64, 96 and 128 registers: "+f" of d[0..], and "%0, %1, ...".
#define LLMC_F8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                      "+f"(d[i + 6]), "+f"(d[i + 7])
#define LLMC_F32(d, i) LLMC_F8(d, i), LLMC_F8(d, i + 8), LLMC_F8(d, i + 16), LLMC_F8(d, i + 24)
#define LLMC_F64(d) LLMC_F32(d, 0), LLMC_F32(d, 32)
#define LLMC_F96(d) LLMC_F64(d), LLMC_F32(d, 64)
#define LLMC_F128(d) LLMC_F64(d), LLMC_F32(d, 64), LLMC_F32(d, 96)
#define LLMC_N10(t) "%" t "0, %" t "1, %" t "2, %" t "3, %" t "4, %" t "5, %" t "6, %" t "7, %" t "8, %" t "9, "
#define LLMC_N64 LLMC_N10("") LLMC_N10("1") LLMC_N10("2") LLMC_N10("3") LLMC_N10("4") LLMC_N10("5") \
    "%60, %61, %62, %63"
#define LLMC_N96 LLMC_N10("") LLMC_N10("1") LLMC_N10("2") LLMC_N10("3") LLMC_N10("4") LLMC_N10("5") \
    LLMC_N10("6") LLMC_N10("7") LLMC_N10("8") "%90, %91, %92, %93, %94, %95"
#define LLMC_N128 LLMC_N10("") LLMC_N10("1") LLMC_N10("2") LLMC_N10("3") LLMC_N10("4") LLMC_N10("5") \
    LLMC_N10("6") LLMC_N10("7") LLMC_N10("8") LLMC_N10("9") LLMC_N10("10") LLMC_N10("11") \
    "%120, %121, %122, %123, %124, %125, %126, %127"

// N columns, LIST and OUT of N / 2 registers; P0, P1, P2: the operands after them.
#define LLMC_WGMMA(N, LIST, OUT, P0, P1, P2, TYPES, TAIL)                                                          \
    asm volatile("{.reg .pred add; setp.ne.b32 add, %" P2 ", 0; wgmma.mma_async.sync.aligned.m64n" N TYPES " {" LIST \
                 "}, %" P0 ", %" P1 ", add, 1, 1" TAIL ";}"                                                        \
                 : OUT                                                                                             \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)))
#define LLMC_WGMMA_OF_TYPES(TYPES, TAIL)                                                                          \
    if constexpr (N == 128) LLMC_WGMMA("128", LLMC_N64, LLMC_F64(d), "64", "65", "66", TYPES, TAIL);              \
    else if constexpr (N == 192) LLMC_WGMMA("192", LLMC_N96, LLMC_F96(d), "96", "97", "98", TYPES, TAIL);         \
    else LLMC_WGMMA("256", LLMC_N128, LLMC_F128(d), "128", "129", "130", TYPES, TAIL)

// d(64, N) (+)= A(64, 32 bytes) B(32 bytes, N), both contiguous along K; without `add` the old d is ignored. Layouts as
// in cuda::ptx::wgmma. "wgmma.mma_async".
template <Operands operands, int N>
__device__ inline void wgmma_tile(float (&d)[N / 2], uint64_t a, uint64_t b, bool add) {
    static_assert(N == 128 || N == 192 || N == 256);
    if constexpr (operands == Operands::kE4m3) {
        LLMC_WGMMA_OF_TYPES("k32.f32.e4m3.e4m3", "");
    } else if constexpr (operands == Operands::kE5m2E4m3) {
        LLMC_WGMMA_OF_TYPES("k32.f32.e5m2.e4m3", "");
    } else {
        LLMC_WGMMA_OF_TYPES("k16.f32.bf16.bf16", ", 0, 0");
    }
}
#undef LLMC_WGMMA_OF_TYPES
#undef LLMC_WGMMA
#undef LLMC_F8
#undef LLMC_F32
#undef LLMC_F64
#undef LLMC_F96
#undef LLMC_F128
#undef LLMC_N10
#undef LLMC_N64
#undef LLMC_N96
#undef LLMC_N128
#endif

}  // namespace cuda::tiles::ptx
