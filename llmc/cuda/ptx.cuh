// Every inline PTX instruction of the project, except those with a CUDA intrinsic.
// Source: NVIDIA, PTX ISA 9.0, the instruction named at each wrapper.
#pragma once
#include <cstdint>

namespace cuda {

// 2^x, relative error 2^-22; results below 2^-126 are 0. The intrinsic exp2f spends three more instructions on those.
// "ex2.approx".
__device__ inline float exp2_approx(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// 1 / sqrt(x), relative error 2^-22.9; infinity for subnormal x. "rsqrt.approx".
__device__ inline float reciprocal_sqrt_approx(float x) {
    float result;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
// 1 / x, relative error 2^-23; 0 for x from 2^126 on. __fdividef spends three more instructions there. "rcp.approx".
__device__ inline float reciprocal_approx(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

namespace ptx {

// Returns the same pointer to global memory, and hides from the compiler how it was computed.
template <typename T> __device__ inline T* opaque(T* p) {
    asm("mov.b64 %0, %1;" : "=l"(p) : "l"(p));
    __builtin_assume(__isGlobal(p));
    return p;
}
// Returns the same number, computed at this place of the code and not later.
__device__ inline uint32_t opaque(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}
// x *= y; ptxas sees such products in the order of the code. "mul".
__device__ inline void multiply(float& x, float y) { asm volatile("mul.rn.f32 %0, %0, %1;" : "+f"(x) : "f"(y)); }
// The larger number, or NaN if one is; fmaxf returns the other. "max.NaN".
__device__ inline float max_or_nan(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
// The address of a shared-memory object in the 32-bit form of the instructions below.
__device__ inline uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes from global to shared memory without passing through registers; zeros if not valid (the source is
// then not read). "cp.async".
__device__ inline void cp_async_16(uint32_t shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
// As cp_async_16, for 4 bytes.
__device__ inline void cp_async_4(uint32_t shared, const void* global, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(valid ? 4 : 0)
                 : "memory");
}
// Closes a group of the copies issued since the last call.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` groups of this thread are in flight; other threads still need a barrier.
template <int pending> __device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Reads shared memory at this place of the code, not later where the value is used. "ld.shared".
__device__ inline float load_shared(uint32_t shared) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(shared) : "memory");
    return x;
}
// "ld.shared", "st.shared".
__device__ inline float4 load_shared4(uint32_t shared) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(shared)
                 : "memory");
    return x;
}
__device__ inline void store_shared(uint32_t shared, uint32_t word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}
__device__ inline void store_shared(uint32_t shared, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(a), "f"(b) : "memory");
}
// The compiler does not merge it with a store of an adjacent element. "st.volatile.shared".
__device__ inline void store_shared_alone(uint32_t shared, float x) {
    asm volatile("st.volatile.shared.f32 [%0], %1;" ::"r"(shared), "f"(x) : "memory");
}

// Loads four 8x8 matrices of 16-bit elements, matrix i from the 16-byte rows that lanes 8i..8i+7 point to. Lane l gets
// elements (l / 4, 2 (l % 4) + {0, 1}) of each matrix, or of its transpose. "ldmatrix".
__device__ inline void load_matrix_x4(uint32_t (&r)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}
__device__ inline void load_matrix_x4_transposed(uint32_t (&r)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}

// The transpose of an 8x8 matrix of 16-bit elements that is in registers as load_matrix_x4 gives it. "movmatrix".
__device__ inline uint32_t transpose_matrix(uint32_t r) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(r));
    return transposed;
}

// d(16, 8) += a(16, 16) b(16, 8), bf16 operands, fp32 sums. With g = lane / 4 and t = lane % 4:
// d = (g, 2t + {0, 1}), (g + 8, same); a = (g, 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..);
// b = (2t.., g), (2t + 8.., g). "mma.m16n8k16".
__device__ inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// blockIdx.x and threadIdx.x, read again at each call: saves registers in kernels that recompute values after their
// main loop rather than keep them. "%ctaid", "%tid".
__device__ inline uint32_t block_index() {
    uint32_t index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}
__device__ inline uint32_t thread_index() {
    uint32_t index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Barriers in shared memory. A phase completes after the expected arrivals and bytes; phases have parity 0, 1, 0, ...
// "mbarrier".
__device__ inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes this thread's barrier initialisations visible to the whole cluster after the next cluster barrier.
__device__ inline void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives, and makes the current phase wait for `bytes` more bytes.
__device__ inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits for the end of the phase of this parity; data that other blocks sent for it is visible then.
__device__ inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
    uint32_t done = 0;
    while (!done) {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
    }
}
// The address of the same variable in block `rank` of the cluster. "mapa".
__device__ inline uint32_t address_in_block(uint32_t shared, uint32_t rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
    return address;
}
__device__ inline uint32_t address_in_block(const void* shared, uint32_t rank) {
    return address_in_block(shared_address(shared), rank);
}
// Arrives at a barrier of any block of the cluster (address_in_block). Orders only this thread's reads: publishing
// writes to another block would need a release at cluster scope, which costs memory barriers.
__device__ inline void barrier_arrive_in_block(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Stores two floats in another block's shared memory and counts their 8 bytes at its barrier; unlike a store and a
// cluster barrier, it waits for no other store of the thread. "st.async".
__device__ inline void send_to_block(uint32_t address, float a, float b, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                     address),
                 "f"(a), "f"(b), "r"(barrier)
                 : "memory");
}

// ---- TMA: copies a box of a four-dimensional tensor between global and shared memory, issued by one thread. Elements
// outside the tensor are read as zero and not written. `map` is a CUtensorMap among the kernel's __grid_constant__
// parameters, with the dimensions (elements of a panel, row, panel, batch) of tensor_map.h.

// Loads into this block's shared memory; the bytes of the whole box count at the barrier. "cp.async.bulk.tensor".
__device__ inline void load_box(uint32_t shared, const void* map, uint32_t barrier, int row, int panel, int batch,
                                int column = 0) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
                 "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(panel), "r"(batch)
                 : "memory");
}
// As load_box for a matrix (matrix_map in tensor_map.h), from any column on; `matrix`: of several (box_map).
__device__ inline void load_matrix_box(uint32_t shared, const void* map, uint32_t barrier, int column, int row,
                                       int matrix = 0) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4, %6, %5}], [%2];" ::"r"(shared),
                 "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(0), "r"(matrix)
                 : "memory");
}
// As load_matrix_box into each block of the cluster whose bit is set in `blocks`, at the same shared address and
// counted at the same barrier there.
__device__ inline void load_matrix_box_to_blocks(uint32_t shared, const void* map, uint32_t barrier, int column,
                                                 int row, uint16_t blocks, int matrix = 0) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4, %7, %5}], [%2], %6;" ::"r"(shared),
                 "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(0), "h"(blocks), "r"(matrix)
                 : "memory");
}
// Copies global memory into this block's shared memory; addresses and bytes: multiples of 16. "cp.async.bulk".
__device__ inline void bulk_load(uint32_t shared, const float* global, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared),
                 "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(barrier)
                 : "memory");
}
// Stores from shared memory, as part of the thread's open group of bulk copies.
__device__ inline void store_box(const void* map, uint32_t shared, int row, int panel, int batch, int column = 0) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(shared), "r"(column), "r"(row), "r"(panel), "r"(batch)
                 : "memory");
}
// As store_box for a matrix (box_map in tensor_map.h).
__device__ inline void store_matrix_box(const void* map, uint32_t shared, int column, int row, int matrix = 0) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %5, %4}], [%1];" ::"l"(map),
                 "r"(shared), "r"(column), "r"(row), "r"(0), "r"(matrix)
                 : "memory");
}
// Adds a box in shared memory to a matrix, as store_matrix_box; bf16 is rounded after the addition.
// "cp.reduce.async.bulk.tensor".
__device__ inline void add_matrix_box(const void* map, uint32_t shared, int column, int row, int matrix = 0) {
    asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %5, %4}], "
                 "[%1];" ::"l"(map),
                 "r"(shared), "r"(column), "r"(row), "r"(0), "r"(matrix)
                 : "memory");
}
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the sources of all but the last `pending` groups of this thread have been read.
template <int pending> __device__ inline void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
// Waits until all but the last `pending` groups are complete and visible to this thread.
template <int pending> __device__ inline void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}
// Copy shared memory to global memory (store), or add it to fp32 there (add); addresses and bytes: multiples of 16.
// Part of the thread's open group. "cp.async.bulk", "cp.reduce.async.bulk".
__device__ inline void bulk_store(float* global, uint32_t shared, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
                 "r"(shared), "r"(bytes)
                 : "memory");
}
__device__ inline void bulk_add(float* global, uint32_t shared, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(global)),
                 "r"(shared), "r"(bytes)
                 : "memory");
}
__device__ inline void prefetch_map(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// Makes this thread's writes to shared memory visible to TMA and the tensor cores.
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Orders accesses to global memory between TMA and ordinary instructions of this thread, in both directions.
__device__ inline void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- flags in global memory that order data between blocks. "ld.acquire", "st.release".
__device__ inline uint32_t load_acquire(const uint32_t* global) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                 : "=r"(value)
                 : "l"(__cvta_generic_to_global(global))
                 : "memory");
    return value;
}
__device__ inline void store_release(uint32_t* global, uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(global)), "r"(value) : "memory");
}

// ---- barriers in this block's shared memory (in another block's: barrier_arrive_in_block)
__device__ inline void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done = 0;
    while (!done) {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    }
}

// Named barrier `id` of the block (0 is that of __syncthreads) for `threads` threads: arrives and waits, or only
// arrives.
template <int threads> __device__ inline void named_sync(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(threads) : "memory");
}
template <int threads> __device__ inline void named_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(threads) : "memory");
}

// Sets the registers per thread of this warpgroup; every warp of it must call this. "setmaxnreg".
template <int registers> __device__ inline void registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers> __device__ inline void registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// The inverse of load_matrix_x4. "stmatrix".
__device__ inline void store_matrix_x4(uint32_t shared, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
// The inverse of load_matrix_x4_transposed.
__device__ inline void store_matrix_x4_transposed(uint32_t shared, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// ---- tensor cores of a warpgroup (sm_90a). A product of 64 rows runs asynchronously: fence before the first (orders
// it after earlier uses of its registers), commit after the last, wait before its registers are accessed.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `pending` groups are in flight.
template <int pending> __device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// Keeps the compiler from moving uses of these registers across this place.
template <int count> __device__ inline void pin(float (&x)[count]) {
#pragma unroll
    for (int i = 0; i < count; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int count> __device__ inline void pin(int (&x)[count]) {
#pragma unroll
    for (int i = 0; i < count; i++) asm volatile("" : "+r"(x[i])::"memory");
}

// Operand lists of 32 to 128 registers: "+f" of d[0..], and "%0, %1, ...".
#define LLMC_F8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                      "+f"(d[i + 6]), "+f"(d[i + 7])
#define LLMC_F16(d, i) LLMC_F8(d, i), LLMC_F8(d, i + 8)
#define LLMC_F32(d, i) LLMC_F16(d, i), LLMC_F16(d, i + 16)
#define LLMC_N10(t) "%" t "0, %" t "1, %" t "2, %" t "3, %" t "4, %" t "5, %" t "6, %" t "7, %" t "8, %" t "9, "
#define LLMC_N32 LLMC_N10("") LLMC_N10("1") LLMC_N10("2") "%30, %31"
#define LLMC_N40 LLMC_N10("") LLMC_N10("1") LLMC_N10("2") "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
#define LLMC_N64 LLMC_N10("") LLMC_N10("1") LLMC_N10("2") LLMC_N10("3") LLMC_N10("4") LLMC_N10("5") \
                 "%60, %61, %62, %63"
#define LLMC_N128 LLMC_N10("") LLMC_N10("1") LLMC_N10("2") LLMC_N10("3") LLMC_N10("4") LLMC_N10("5") LLMC_N10("6") \
                  LLMC_N10("7") LLMC_N10("8") LLMC_N10("9") LLMC_N10("10") LLMC_N10("11") "%120, %121, %122, %123, " \
                  "%124, %125, %126, %127"

#define LLMC_F40(d) LLMC_F32(d, 0), LLMC_F8(d, 32)
#define LLMC_F64(d, i) LLMC_F32(d, i), LLMC_F32(d, i + 32)
#define LLMC_F128(d) LLMC_F64(d, 0), LLMC_F64(d, 64)
#define LLMC_MEMORY "l"(a), "l"(b), "r"(static_cast<int>(add))
#define LLMC_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add))
// A product with the sums `d`, which are the operands `sums`; ab, flag and more: those of A and B, add, and layouts.
#define LLMC_WGMMA(types, sums, ab, flag, more, d, ...)                                               \
    asm volatile("{.reg .pred add; setp.ne.b32 add, " flag ", 0; wgmma.mma_async.sync.aligned." types \
                 " {" sums "}, " ab ", add, 1, 1" more ";}" : d : __VA_ARGS__)

// d(64, N) (+)= A(64, 16) B(16, N), bf16 operands, fp32 sums; without `add` the old d is ignored. Warp w of the
// warpgroup holds rows 16 w .. 16 w + 15, with d[4 j + ..] as mma_bf16 for block j of 8 columns. a, b: descriptors
// (wgmma.cuh). a_rows, b_rows: the operand is contiguous along M or N, not along K. "wgmma.mma_async".
template <int N, bool a_rows, bool b_rows>
__device__ inline void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, bool add) {
    static_assert(N == 64 || N == 80 || N == 128 || N == 256);
    if constexpr (N == 64)
        LLMC_WGMMA("m64n64k16.f32.bf16.bf16", LLMC_N32, "%32, %33", "%34", ", %35, %36", LLMC_F32(d, 0), LLMC_MEMORY,
                   "n"(a_rows), "n"(b_rows));
    else if constexpr (N == 80)
        LLMC_WGMMA("m64n80k16.f32.bf16.bf16", LLMC_N40, "%40, %41", "%42", ", %43, %44", LLMC_F40(d), LLMC_MEMORY,
                   "n"(a_rows), "n"(b_rows));
    else if constexpr (N == 128)
        LLMC_WGMMA("m64n128k16.f32.bf16.bf16", LLMC_N64, "%64, %65", "%66", ", %67, %68", LLMC_F64(d, 0), LLMC_MEMORY,
                   "n"(a_rows), "n"(b_rows));
    else
        LLMC_WGMMA("m64n256k16.f32.bf16.bf16", LLMC_N128, "%128, %129", "%130", ", %131, %132", LLMC_F128(d),
                   LLMC_MEMORY, "n"(a_rows), "n"(b_rows));
}
// As above with A in registers: each warp holds its 16 rows as in mma_bf16.
template <int N, bool b_rows>
__device__ inline void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add) {
    static_assert(N == 64 || N == 128 || N == 256);
    if constexpr (N == 64)
        LLMC_WGMMA("m64n64k16.f32.bf16.bf16", LLMC_N32, "{%32, %33, %34, %35}, %36", "%37", ", %38", LLMC_F32(d, 0),
                   LLMC_REGISTERS, "n"(b_rows));
    else if constexpr (N == 128)
        LLMC_WGMMA("m64n128k16.f32.bf16.bf16", LLMC_N64, "{%64, %65, %66, %67}, %68", "%69", ", %70", LLMC_F64(d, 0),
                   LLMC_REGISTERS, "n"(b_rows));
    else
        LLMC_WGMMA("m64n256k16.f32.bf16.bf16", LLMC_N128, "{%128, %129, %130, %131}, %132", "%133", ", %134",
                   LLMC_F128(d), LLMC_REGISTERS, "n"(b_rows));
}
// d(64, N) (+)= A(64, 32) B(32, N), E4M3 operands, both contiguous along K; d as above. The tensor cores keep 14 bits
// of a sum in progress: what lies more than 2^-13 below the largest of its terms and d is dropped. a in registers: with
// g = lane / 4 and t = lane % 4 four elements each (g, 4t..), (g + 8, 4t..), (g, 4t + 16..), (g + 8, 4t + 16..).
// "wgmma.mma_async".
template <int N> __device__ inline void wgmma_e4m3(float (&d)[N / 2], uint64_t a, uint64_t b, bool add) {
    static_assert(N == 64 || N == 128);
    if constexpr (N == 64)
        LLMC_WGMMA("m64n64k32.f32.e4m3.e4m3", LLMC_N32, "%32, %33", "%34", "", LLMC_F32(d, 0), LLMC_MEMORY);
    else LLMC_WGMMA("m64n128k32.f32.e4m3.e4m3", LLMC_N64, "%64, %65", "%66", "", LLMC_F64(d, 0), LLMC_MEMORY);
}
template <int N> __device__ inline void wgmma_e4m3(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add) {
    static_assert(N == 64 || N == 128);
    if constexpr (N == 64)
        LLMC_WGMMA("m64n64k32.f32.e4m3.e4m3", LLMC_N32, "{%32, %33, %34, %35}, %36", "%37", "", LLMC_F32(d, 0),
                   LLMC_REGISTERS);
    else
        LLMC_WGMMA("m64n128k32.f32.e4m3.e4m3", LLMC_N64, "{%64, %65, %66, %67}, %68", "%69", "", LLMC_F64(d, 0),
                   LLMC_REGISTERS);
}
// d(64, 128) += A(64, 32) B(32, 128), INT8 operands, both contiguous along K, INT32 sums; otherwise as above.
#define LLMC_R8(d, i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), \
                      "+r"(d[i + 6]), "+r"(d[i + 7])
#define LLMC_R32(d, i) LLMC_R8(d, i), LLMC_R8(d, i + 8), LLMC_R8(d, i + 16), LLMC_R8(d, i + 24)
__device__ inline void wgmma_int8(int (&d)[64], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" LLMC_N64 "}, %64, %65, 1;"
                 : LLMC_R32(d, 0), LLMC_R32(d, 32)
                 : "l"(a), "l"(b));
}
// d(64, 256) (+)= A(64, 32) B(32, 256); without `add` the old d is ignored.
__device__ inline void wgmma_int8(int (&d)[128], uint64_t a, uint64_t b, bool add) {
    asm volatile("{.reg .pred add; setp.ne.b32 add, %130, 0; "
                 "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {" LLMC_N128 "}, %128, %129, add;}"
                 : LLMC_R32(d, 0), LLMC_R32(d, 32), LLMC_R32(d, 64), LLMC_R32(d, 96)
                 : LLMC_MEMORY);
}
#undef LLMC_R8
#undef LLMC_R32
#undef LLMC_F8
#undef LLMC_F16
#undef LLMC_F32
#undef LLMC_F40
#undef LLMC_F64
#undef LLMC_F128
#undef LLMC_MEMORY
#undef LLMC_REGISTERS
#undef LLMC_WGMMA
#undef LLMC_N10
#undef LLMC_N32
#undef LLMC_N40
#undef LLMC_N64
#undef LLMC_N128
#endif

}  // namespace ptx
}  // namespace cuda
