// Pipelines of compute capability 9.0: warpgroups that pass buffers from a producer to its consumers.
#pragma once
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/ptx.cuh"

namespace cuda {

// A value that is the same in all lanes; the shuffle makes this known to the compiler.
__device__ inline int warp_uniform(uint32_t value) {
    return __shfl_sync(0xffffffffu, static_cast<int>(value), 0);
}

// ---- ring of buffers with two barriers each. `full` counts the arrivals of the producer (for TMA one arrival, and the
// bytes), `empty` one arrival per consumer warp. Both sides use the buffers in the same order and track the phase.
template <int stages> struct Ring {
    uint32_t full, empty;   // addresses of the barriers of buffer 0; 8 bytes each
    uint32_t stage = 0, parity = 0;

    __device__ void init(uint32_t consumer_warps, uint32_t arrivals = 1) const {
        for (uint32_t i = 0; i < stages; i++) {
            ptx::barrier_init(full + 8 * i, arrivals);
            ptx::barrier_init(empty + 8 * i, consumer_warps);
        }
    }
    __device__ void next() {
        stage = stage + 1 == stages ? 0 : stage + 1;
        parity ^= stage == 0;
    }
    // Producer: waits for a free buffer, announces `bytes` and returns the barrier that the copies must signal.
    __device__ uint32_t claim(uint32_t bytes) const {
        ptx::barrier_wait(empty + 8 * stage, parity ^ 1);
        ptx::barrier_expect(full + 8 * stage, bytes);
        return full + 8 * stage;
    }
    // Consumer.
    __device__ void wait() const { ptx::barrier_wait(full + 8 * stage, parity); }
    __device__ void release(int lane) const {
        if (lane == 0) ptx::barrier_arrive(empty + 8 * stage);
    }
};

// ---- registers of a warpgroup (setmaxnreg). The registers that the block starts with, a multiple of 8 per thread, are
// redistributed; a request for more than are free waits for ever.
__host__ __device__ constexpr bool registers_suffice(int consumers, int producer_registers, int consumer_registers) {
    const int warpgroups = consumers + 1, at_start = 65536 / (128 * warpgroups) / 8 * 8;
    return producer_registers + consumers * consumer_registers <= warpgroups * at_start;
}

}  // namespace cuda
