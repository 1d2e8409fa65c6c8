// Epilogue of gemm_tile_kernel.cuh: results go through panels in shared memory to TMA stores, which write whole
// 128-byte lines while the next tile is multiplied. A panel is 64 rows x 128 bytes in the layout of the 128-byte
// swizzle; each warp stores its own 16 rows, so that warps do not wait for each other.
#pragma once
#include "llmc/cuda/gemm_tile_config.cuh"

namespace cuda::tiles {

// The functor of activation.cu, with the same bits.
__device__ inline float swiglu(float gate, float up) {
    constexpr float kLog2E = 1.4426950408889634f;
    return up * (gate * reciprocal_approx(1.0f + exp2_approx(-kLog2E * gate)));
}

// Transposes bytes among 4 lanes that differ in bits 2 and 3: lane r of the four gets byte r of all four words, in the
// order of the lanes.
__device__ inline uint32_t transpose_over_lanes(uint32_t word, int lane) {
    const bool high = lane & 8, odd = lane & 4;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, high ? word : word >> 16, 8);   // the half of the partner
    const uint32_t pair = high ? __byte_perm(other, word, 0x7610) : __byte_perm(word, other, 0x5410);
    const uint32_t next = __shfl_xor_sync(0xffffffffu, pair, 4);
    return odd ? __byte_perm(pair, next, 0x3715) : __byte_perm(pair, next, 0x6240);
}

template <typename T> struct Store {
    const float scale;
    const uint32_t shared, amax_at;   // panels of the warpgroup
    uint32_t amax = 0;                // SwiGLU: two magnitudes of bf16
    int lane = 0, warp = 0, group = 0;

    __device__ Store(uint32_t base, const TileProblem& p)
        : scale(p.a_scale_inv ? *p.a_scale_inv * *p.b_scale_inv : 1.0f),
          shared(base + T::kPanelsAt + threadIdx.x / 128 * T::kPanels * T::kPanelBytes), amax_at(base + T::kAmaxAt) {}

    // Read again for each tile rather than kept in registers across its main loop. warp: of the warpgroup.
    __device__ void locate() {
        const int thread = static_cast<int>(ptx::thread_index());
        lane = thread % 32, warp = thread / 32 % 4, group = thread / 128;
    }

    // The buffer of the tile's panel `number`, once earlier stores have read it. Every panel makes one group of stores,
    // possibly empty, so that groups in flight count panels.
    __device__ uint32_t buffer(int number) const {
        if (number >= T::kPanels) {
            if (lane == 0) ptx::bulk_wait_read<T::kPanels - 1>();
            __syncwarp();
        }
        return shared + number % T::kPanels * T::kPanelBytes;
    }
    // Stores the warp's 16 rows of a buffer.
    __device__ void send(const TileProblem& p, const CUtensorMap& map, uint32_t from, int column, int row,
                         bool inside) const {
        ptx::fence_async();
        __syncwarp();
        if (lane != 0) return;
        if (inside) {
            if (p.accumulate) ptx::add_matrix_box(&map, from + warp * 2048, column, row + 16 * warp);
            else ptx::store_matrix_box(&map, from + warp * 2048, column, row + 16 * warp);
        }
        ptx::bulk_commit();
    }
    // 16 columns from 16 j of 64 in the warp's 16 rows of a buffer. A register is two elements, in the order of
    // as_operand (wgmma.cuh).
    __device__ void write_bf16(uint32_t to, int j, const uint32_t (&r)[4]) const {
        const uint32_t row = 16 * warp + lane % 16;
        ptx::store_matrix_x4(to + panel_offset(row, 2 * j + lane / 16), r);
    }
    // Columns 8 j .. 8 j + 7 of 32.
    __device__ void write_fp32(uint32_t to, int j, float a, float b, float c, float d) const {
        const uint32_t row = 16 * warp + lane / 4, t = lane % 4, in_chunk = t % 2 * 8;
        ptx::store_shared(to + panel_offset(row, 2 * j + t / 2) + in_chunk, a, b);
        ptx::store_shared(to + panel_offset(row + 8, 2 * j + t / 2) + in_chunk, c, d);
    }
    __device__ void pack16(uint32_t (&r)[4], const float* d) const {
#pragma unroll
        for (int i = 0; i < 4; i++) r[i] = pack_bf16x2(d[2 * i] * scale, d[2 * i + 1] * scale);
    }

    template <int kParts, int kSums>
    __device__ void tile(const TileMaps& maps, const TileProblem& p, float (&sums)[kParts][kSums], Place at) {
        locate();
        const int row = at.row + (T::kPingPong ? 0 : group * T::kGroupRows);
        if (lane == 0) ptx::bulk_wait_read<0>();   // the last tile's stores
        __syncwarp();
        if constexpr (T::kSwiglu) swiglu_tile(maps, p, sums[0], row, at.column);
        else if (p.fp32) plain_tile<true>(maps, p, sums, row, at.column);
        else plain_tile<false>(maps, p, sums, row, at.column);
    }
    template <bool fp32, int kParts, int kSums>
    __device__ void plain_tile(const TileMaps& maps, const TileProblem& p, float (&sums)[kParts][kSums], int row,
                               int column) const {
        constexpr int kWidth = fp32 ? 32 : 64, kPanelsOfPart = T::kPartColumns / kWidth;
#pragma unroll
        for (int part = 0; part < kParts; part++)
#pragma unroll
            for (int c = 0; c < kPanelsOfPart; c++) {
                const uint32_t to = buffer(part * kPanelsOfPart + c);
                const float* d = sums[part] + c * kWidth / 2;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if constexpr (fp32) {
                        write_fp32(to, j, d[4 * j] * scale, d[4 * j + 1] * scale, d[4 * j + 2] * scale,
                                   d[4 * j + 3] * scale);
                    } else {
                        uint32_t r[4];
                        pack16(r, d + 8 * j);
                        write_bf16(to, j, r);
                    }
                }
                const int to_row = row + part / T::kColumnParts * 64;
                const int to_column = column + part % T::kColumnParts * T::kPartColumns + c * kWidth;
                send(p, maps.d, to, to_column, to_row, to_row + 16 * warp < p.M && to_column < p.N);
            }
    }

    // ---- SwiGLU: of a thread's 128 sums the first half belongs to gate, the second to up.

    // act of 2 columns from bf16 gate and up, rounded to bf16; its bytes are returned.
    __device__ uint32_t act_pair(uint32_t gate, uint32_t up, float act_scale) {
        const uint32_t act = pack_bf16x2(swiglu(bf16x2_low(gate), bf16x2_low(up)),
                                         swiglu(bf16x2_high(gate), bf16x2_high(up)));
        amax = max_pair(amax, magnitudes(act));
        return to_fp8x2<Dtype::kE4m3>(bf16x2_low(act) * act_scale, bf16x2_high(act) * act_scale);
    }
    __device__ void swiglu_tile(const TileMaps& maps, const TileProblem& p, float (&d)[128], int row, int column) {
        constexpr int kAct = 4, kTransposed = 5;   // numbers of panels, after gate and up of two times 64 columns
        const bool rows_inside = row + 16 * warp < p.M;
        const float act_scale = p.slot->scale;
        uint32_t bytes[8][2];   // of 16 columns each: 2 of the first 8, 2 of the second 8; rows lane / 4 and 8 below
        // Panels of 64 rows of other warps are overwritten below; wait until all warps' stores have read theirs.
        ptx::named_sync<128>(kGroupBarrier + group);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const uint32_t to_gate = buffer(2 * c);
            uint32_t gate[4][4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                pack16(gate[j], d + 32 * c + 8 * j);
                write_bf16(to_gate, j, gate[j]);
            }
            const bool inside = rows_inside && column + 64 * c < p.N;
            send(p, maps.d, to_gate, column + 64 * c, row, inside);
            const uint32_t to_up = buffer(2 * c + 1);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t up[4];
                pack16(up, d + 64 + 32 * c + 8 * j);
                write_bf16(to_up, j, up);
#pragma unroll
                for (int half = 0; half < 2; half++)
                    bytes[4 * c + j][half] = act_pair(gate[j][half], up[half], act_scale)
                                             | act_pair(gate[j][half + 2], up[half + 2], act_scale) << 16;
            }
            send(p, maps.d_up, to_up, column + 64 * c, row, inside);
        }
        const uint32_t to_act = buffer(kAct), t = lane % 4;
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t to = to_act + panel_offset(16 * warp + 8 * half + lane / 4, j) + 2 * t;
                ptx::store_shared_half(to, bytes[j][half]);
                ptx::store_shared_half(to + 8, bytes[j][half] >> 16);
            }
        send(p, maps.act, to_act, column, row, rows_inside && column < p.N);
        if (p.transposed) store_transposed(maps, buffer(kTransposed), bytes, row, column, p);
    }
    // 128 rows (columns of act) of 64 bytes (rows of act), in the layout of the 64-byte swizzle, stored by one thread.
    __device__ void store_transposed(const TileMaps& maps, uint32_t to, const uint32_t (&bytes)[8][2], int row,
                                     int column, const TileProblem& p) const {
        const int barrier = kGroupBarrier + group;
        ptx::named_sync<128>(barrier);   // all warps' stores have read the buffer
        const int t = lane % 4, r = lane / 4 % 4, quad = lane / 16;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const uint32_t of_act = 16 * j + 2 * t + (r < 2 ? r : r + 6);
            const uint32_t line = to + of_act * 64 + ((warp ^ (of_act / 2 % 4)) << 4);
#pragma unroll
            for (int half = 0; half < 2; half++)
                ptx::store_shared(line + 8 * half + 4 * quad, transpose_over_lanes(bytes[j][half], lane));
        }
        ptx::fence_async();
        ptx::named_sync<128>(barrier);
        if (lane == 0) {
            if (warp == 0 && row < p.M && column < p.N)
                ptx::store_matrix_box(&maps.act_transposed, to, row, column);
            ptx::bulk_commit();
        }
    }

    __device__ void finish(const TileProblem& p) {
        locate();
        if (lane == 0) ptx::bulk_wait<0>();
        __syncwarp();
        if constexpr (T::kSwiglu) {
            const uint32_t largest = __reduce_max_sync(0xffffffffu, larger_of_pair(amax)) << 16;
            if (lane == 0) ptx::max_shared(amax_at, largest);
            ptx::named_sync<128 * kConsumers>(kEndBarrier);
            if (group == 0 && warp == 0 && lane == 0)
                record_amax(&p.slot->amax_bits, __float_as_uint(ptx::load_shared(amax_at)), p.slot->amax_bits);
            if (blockIdx.x == 0 && threadIdx.x == 0) p.slot->scale_inv = 1.0f / p.slot->scale;
        }
    }
};

}  // namespace cuda::tiles
