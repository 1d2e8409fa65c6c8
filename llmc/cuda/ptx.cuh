// Every inline PTX instruction of the project. What a CUDA intrinsic offers is not here.
// Source: NVIDIA, PTX ISA 9.0, the instruction named at each wrapper.
#pragma once
#include <cstdint>

namespace cuda {

// 2^x, relative error 2^-22; results below 2^-126 are 0. The intrinsic exp2f spends three more instructions
// on those. "ex2.approx".
__device__ inline float exp2_approx(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// 1 / x, relative error 2^-23; 0 for x from 2^126 on. __fdividef spends three more instructions there. "rcp.approx".
__device__ inline float reciprocal_approx(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

namespace ptx {

// The same pointer to global memory, but the compiler does not know how it came about.
template <typename T> __device__ inline T* opaque(T* p) {
    asm("mov.b64 %0, %1;" : "=l"(p) : "l"(p));
    __builtin_assume(__isGlobal(p));
    return p;
}
// The same number at this place of the code: it is not worked out later.
__device__ inline uint32_t opaque(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}
// Address of a shared-memory object as the 32-bit instructions below want it.
__device__ inline uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copy 16 bytes from global to shared memory without passing through registers; zeros if not valid (the
// source is then not read). "cp.async".
__device__ inline void cp_async_16(uint32_t shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
// The same for 4 bytes.
__device__ inline void cp_async_4(uint32_t shared, const void* global, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(valid ? 4 : 0)
                 : "memory");
}
// Close a group of the copies issued since the last one.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most `pending` groups of this thread are under way; other threads still need a barrier.
template <int pending> __device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Four 8x8 matrices of 16-bit elements, matrix i from the 16-byte rows that lanes 8i..8i+7 point to. Lane l
// gets elements (l / 4, 2 (l % 4) + {0, 1}) of each, or of its transpose. "ldmatrix".
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

// d(16, 8) += a(16, 16) b(16, 8), bf16 operands, fp32 sums. With g = lane / 4 and t = lane % 4:
// d = (g, 2t + {0, 1}), (g + 8, same); a = (g, 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..);
// b = (2t.., g), (2t + 8.., g). "mma.m16n8k16".
__device__ inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// blockIdx.x and threadIdx.x, read anew at each call: a kernel short of registers works out a second time what
// it would otherwise keep across its main loop. "%ctaid", "%tid".
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
// A barrier in shared memory that one arrival and a number of received bytes complete, again and again; its
// phases have parity 0, 1, 0, ... "mbarrier".
__device__ inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
                 : "memory");
}
// What this thread has initialised is seen by the whole cluster after the next cluster barrier.
__device__ inline void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrive, and let the present phase wait for so many bytes more.
__device__ inline void barrier_arrive_expecting(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
// Wait for the end of the phase of this parity; what other blocks sent for it is visible then.
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
__device__ inline uint32_t address_in_block(const void* shared, uint32_t rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
    return address;
}
// Store two floats in another block's shared memory and count their 8 bytes at its barrier; unlike an
// ordinary store and a cluster barrier this waits for nothing else that the thread has stored. "st.async".
__device__ inline void send_to_block(uint32_t address, float a, float b, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                     address),
                 "f"(a), "f"(b), "r"(barrier)
                 : "memory");
}
#endif

}  // namespace ptx
}  // namespace cuda
