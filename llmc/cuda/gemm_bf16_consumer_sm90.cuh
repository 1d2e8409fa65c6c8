// BF16 matmuls of lists on compute capability 9.0: what a consumer warpgroup does.
#pragma once
#include "llmc/cuda/gemm_bf16_sm90.cuh"

namespace cuda {

// One consumer warpgroup.
template <typename Tiles, bool a_by_k, bool b_by_k> struct Bf16Consumer {
    using T = Bf16Tile;
    static constexpr bool kSymmetric = std::is_same_v<Tiles, SymmetricTiles>;
    TileState<T> state;
    const Bf16Maps& maps;
    const int consumer, warp, lane;   // warp: of the warpgroup
    uint32_t buffer;                  // of results, number 0 or 1: the one that is written next
    float sums[128];
    uint32_t parity = 1 - consumer;   // of `free`

    __device__ bool first_thread() const { return warp == 0 && lane == 0; }
    __device__ void sync() const { ptx::named_sync<128>(T::kStoreBarrier + consumer); }

    // Starts sums (+)= the product of the stage.
    template <int columns> __device__ void multiply(bool add) {
        const uint64_t a = tile_descriptor(state.rows() + consumer * T::kBoxBytes, T::kBoxBytes);
        const uint64_t b = tile_descriptor(state.columns(), T::kBoxBytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < T::kDepth / 16; i++)
            ptx::wgmma<columns, a_by_k, b_by_k>(reinterpret_cast<float (&)[columns / 2]>(sums),
                                                a_by_k ? along_rows(a, i) : along_columns(a, i, T::kBoxBytes),
                                                b_by_k ? along_rows(b, i) : along_columns(b, i, T::kBoxBytes),
                                                i > 0 || add);
        ptx::wgmma_commit();
    }
    // Frees a stage in both blocks, since each may load a part of it into both.
    __device__ void release(uint32_t stage) const {
        if (lane < T::kCluster) ptx::barrier_arrive_in_block(ptx::address_in_block(state.ring.empty + 8 * stage, lane));
    }
    // Sets the elements of the stage from k on to zero: they are rows of the next expert or of none. Each consumer
    // clears all that it reads, so that they need not wait for each other.
    __device__ void clear_from(int k) const {
        for (int at = k * kPanelRowBytes + 8 * (32 * warp + lane); at < T::kBoxBytes; at += 8 * 128) {
            ptx::store_shared(state.rows() + consumer * T::kBoxBytes + at, 0.0f, 0.0f);
#pragma unroll
            for (int i = 0; i < T::kColumns / T::kBox; i++)
                ptx::store_shared(state.columns() + i * T::kBoxBytes + at, 0.0f, 0.0f);
        }
        ptx::fence_async();
        sync();
    }
    // Calls meanwhile() while products run, if there are any. Experts: without has_rows only passes the stages on.
    template <int columns, typename Meanwhile>
    __device__ void compute(int depth, bool has_rows, Meanwhile meanwhile) {
        const int steps = bf16_steps(depth);
        // If the steps were fewer than the stages, consumer 0 could signal again before consumer 1 has waited.
        const bool in_turn = kSymmetric && steps >= T::kStages;
        if (in_turn && consumer == 1) ptx::named_sync<128 * T::kConsumers>(T::kLeadBarrier);
        if (!kSymmetric && consumer == 1 && !has_rows) {
#pragma unroll 1
            for (int step = 0; step < steps; step++, state.ring.next()) {
                state.ring.wait();
                if (step == 0) meanwhile();
                release(state.ring.stage);
            }
            return;
        }
        uint32_t before = 0;
        constexpr bool kMayBeEmpty = std::is_same_v<Tiles, ExpertSums>;
        if constexpr (kMayBeEmpty) {
#pragma unroll
            for (float& sum : sums) sum = 0;
        }
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            state.ring.wait();
            if (kMayBeEmpty && depth - step * T::kDepth < T::kDepth)
                clear_from(depth - step * T::kDepth);
            multiply<columns>(kMayBeEmpty || step > 0);
            if (in_turn && consumer == 0 && step + 1 == T::kLead)
                ptx::named_arrive<128 * T::kConsumers>(T::kLeadBarrier);
            if (step == min(1, steps - 1)) meanwhile();
            if (step > 0) {
                ptx::wgmma_wait<1>();
                release(before);
            }
            before = state.ring.stage;
            state.ring.next();
        }
        ptx::wgmma_wait<0>();
        ptx::pin(sums);
        if (steps > 0) release(before);
    }

    // ---- results. All threads of the warpgroup store a box of 64 x 64 (32 in fp32) together: write(buffer) puts it
    // into shared memory, copy(buffer) from there to D, by TMA if possible, in the first thread.
    template <typename Write, typename Copy> __device__ void store_box(Write write, Copy copy) {
        const uint32_t to = state.shared + T::kResultsAt + (consumer * T::kBuffers + buffer) * T::kBoxBytes;
        if (first_thread()) ptx::bulk_wait_read<T::kBuffers - 1>();   // the copy before the last has been read
        sync();
        write(to);
        ptx::fence_async();
        sync();
        copy(to);
        if (first_thread()) ptx::bulk_commit();   // also an empty group, because the wait counts groups
        buffer ^= 1;
    }
    // Columns 16 j .. 16 j + 15 of box c, or of its transpose the rows.
    __device__ void write_part(uint32_t to, const uint32_t (&part)[4], int j, bool transposed) const {
        if (transposed)
            ptx::store_matrix_x4_transposed(
                to + panel_offset(16 * j + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2), part);
        else ptx::store_matrix_x4(to + panel_offset(16 * warp + lane % 16, 2 * j + lane / 16), part);
    }
    __device__ void write_box(uint32_t to, int c, bool transposed) const {
#pragma unroll
        for (int j = 0; j < T::kBox / 16; j++) {
            uint32_t part[4];
            as_operand(part, sums, T::kBox / 16 * c + j);
            write_part(to, part, j, transposed);
        }
    }
    // The lower triangle of 8 x 8 results, and its transpose above.
    __device__ uint32_t mirrored(uint32_t part) const {
        const int row = lane / 4, column = lane % 4 * 2;
        const uint32_t lower = (column <= row ? 0xffffu : 0u) | (column < row ? 0xffff0000u : 0u);
        return (part & lower) | (ptx::transpose_matrix(part) & ~lower);
    }
    // The lower triangle of a box c on the diagonal, and its transpose above.
    __device__ void write_diagonal_box(uint32_t to, int c) const {
#pragma unroll
        for (int j = 0; j < T::kBox / 16; j++) {
            if (j > warp) continue;
            uint32_t part[4];
            as_operand(part, sums, T::kBox / 16 * c + j);
            if (j == warp) part[0] = mirrored(part[0]), part[2] = ptx::transpose_matrix(part[1]),
                           part[3] = mirrored(part[3]);
            write_part(to, part, j, false);
            if (j < warp) write_part(to, part, j, true);
        }
    }
    // Stores each box below the diagonal twice.
    __device__ void store(const SymmetricTiles& tiles, const Bf16Place& at) {
        const int row = at.row + T::kBox * consumer;
#pragma unroll
        for (int c = 0; c < T::kColumns / T::kBox; c++) {
            const int column = at.column + T::kBox * c;
            if (T::kBox * c >= at.columns || column > row || row >= tiles.n) continue;
            const auto copy_to = [&](int x, int y) {
                return [&, x, y](uint32_t from) {
                    if (first_thread()) ptx::store_matrix_box(&maps.d, from, x, y, at.matrix);
                };
            };
            if (column == row) {
                store_box([&](uint32_t to) { write_diagonal_box(to, c); }, copy_to(column, row));
                continue;
            }
            store_box([&](uint32_t to) { write_box(to, c, false); }, copy_to(column, row));
            store_box([&](uint32_t to) { write_box(to, c, true); }, copy_to(row, column));
        }
    }
    // ---- results in turns. The warps of a consumer do not wait for each other: another thread stores what all have
    // written, and then the boxes are the other consumer's.
    template <typename Write> __device__ void write_boxes(Write write) {
#pragma unroll
        for (int c = 0; c < T::kResultBoxes; c++) {
            ptx::barrier_wait(state.shared + T::kFree + 8 * (T::kResultBoxes * consumer + c), parity);
            write(state.shared + T::kResultsAt + c * T::kBoxBytes, c);
        }
        ptx::fence_async();
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(state.shared + T::kWritten);
        parity ^= 1;
    }
    // Of the last box of an expert only its own rows, by the warps that wrote them.
    __device__ void store(const ExpertRows& tiles, const Bf16Place& at) {
        const int row = at.row + T::kBox * consumer, rows = at.end_row - row;
        write_boxes([&](uint32_t to, int c) {
            if (rows <= 0) return;
            write_box(to, c, false);
            if (rows >= T::kBox) return;
            __syncwarp();
            const int chunk = lane % 8, column = at.column + T::kBox * c + 8 * chunk;
            for (int i = 16 * warp + lane / 8; i < min(16 * warp + 16, rows); i += 4)
                if (column < tiles.n)
                    *reinterpret_cast<float4*>(tiles.results + int64_t{row + i} * tiles.n + column) =
                        ptx::load_shared4(to + panel_offset(i, chunk));
        });
    }
    __device__ void store(const MatrixTiles& tiles, const Bf16Place& at) {
        const int row = at.row + T::kBox * consumer;
        write_boxes([&](uint32_t to, int c) {
            if (row < tiles.m) write_box(to, c, false);
        });
    }
    // Columns 32 h .. 32 h + 31 in fp32.
    __device__ void write_fp32_box(uint32_t to, int h) const {
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
            const uint32_t at = panel_offset(16 * warp + lane / 4 + 8 * half_of(i), 2 * (i / 4) + lane % 4 / 2);
            ptx::store_shared(to + at + lane % 2 * 8, sums[16 * h + i], sums[16 * h + i + 1]);
        }
    }
    __device__ void store(const ExpertSums& tiles, const Bf16Place& at) {
        const int row = at.row + T::kBox * consumer;
        if (tiles.in_turns())
            return write_boxes([&](uint32_t to, int c) {
                if (row < tiles.m) write_box(to, c, false);
            });
        if (row >= tiles.m || (tiles.accumulate && at.depth == 0)) return;
        const auto copy_to = [&](int column) {
            return [&, column](uint32_t from) {
                if (!first_thread()) return;
                if (tiles.accumulate) ptx::add_matrix_box(&maps.d, from, column, row, at.matrix);
                else ptx::store_matrix_box(&maps.d, from, column, row, at.matrix);
            };
        };
#pragma unroll
        for (int h = 0; h < T::kColumns / 32; h++) {
            const int column = at.column + 32 * h;
            if (column >= tiles.n || (!tiles.fp32 && h % 2 == 1)) continue;
            if (tiles.fp32) store_box([&](uint32_t to) { write_fp32_box(to, h); }, copy_to(column));
            else store_box([&](uint32_t to) { write_box(to, h / 2, false); }, copy_to(column));
        }
    }
    __device__ void run(Tiles tiles) {
        const int rank = static_cast<int>(BlockPairs::rank());
        Bf16Place next;
        bool more = tiles.find(item_of(0), rank, next);
        for (uint32_t round = 1; more; round++) {
            const Bf16Place at = next;
            const auto find_next = [&] { more = tiles.find(item_of(round), rank, next); };
            const auto meanwhile = [&] {
                if constexpr (!kSymmetric) find_next();
            };
            const bool has_rows = at.row + T::kBox * consumer < at.end_row;   // of experts
            if (kSymmetric || at.depth == 0) find_next();
            if (!kSymmetric || at.columns == T::kColumns)
                compute<T::kColumns>(at.depth, has_rows, meanwhile);
            else compute<T::kColumns / 2>(at.depth, has_rows, meanwhile);
            store(tiles, at);
        }
        if (first_thread()) ptx::bulk_wait_read<0>();   // shared memory must outlive the copies
    }
};

}  // namespace cuda
