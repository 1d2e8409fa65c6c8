// Matmul of blockwise FP8 operands on compute capability 9.0: what a consumer warpgroup does.
#pragma once
#include "llmc/cuda/gemm_fp8_blockwise_sm90.cuh"

namespace cuda {

// One consumer warpgroup.
template <bool vectors, typename Tiles> struct BlocksConsumer {
    using B = Blocks;
    static constexpr bool kExpertRows = std::is_same_v<Tiles, ExpertRows>, kSums = std::is_same_v<Tiles, ExpertSums>;
    static constexpr bool kExperts = kExpertRows || kSums;
    BlocksState state;
    const int consumer, warp, lane;   // warp: of the warpgroup
    // The `empty` barrier of the stage before, in the one block of the cluster that this lane signals. It is advanced
    // just before its use: an arrival in another block reads its address late, and a change would wait for that.
    uint32_t empty_there;
    float sums[B::kHalves][64], part[64];
    float of_row[B::kHalves][2];       // A's scales of the step
    // B's scales of the step: one for all columns, or four for each j, those of the odd, even, odd and even columns of
    // registers 8 j .. 8 j + 7.
    float columns[vectors ? 32 : 1];
    // ExpertRows: of the item, and the first of the consumer's scales of rows, in floats.
    bool wide = false;
    int row_scales = 0;

    // part = the product of 64 rows over 128 of K; calls meanwhile() while it runs.
    template <typename Meanwhile> __device__ void multiply(int half, Meanwhile meanwhile) {
        uint32_t rows = state.rows() + (consumer * B::kHalves + half) * B::kHalfBytes, of_b = state.columns();
        if constexpr (kExpertRows) {
            const uint32_t own = rows - half * B::kHalfBytes, of_both = of_b;
            if (wide) rows = of_both + half * B::kHalfBytes, of_b = own;
        }
        const uint64_t a = byte_tile_descriptor<B::kDepth>(rows);
        const uint64_t b = byte_tile_descriptor<B::kDepth>(of_b);
        ptx::pin(part);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < B::kDepth / 32; i++)
            ptx::wgmma_e4m3<B::kColumns>(part, along_bytes(a, i), along_bytes(b, i), i > 0);
        ptx::wgmma_commit();
        meanwhile();
        ptx::wgmma_wait<0>();
        ptx::pin(part);
    }
    // Waits until a stage and its scales are there.
    __device__ void wait(const BlocksState& of) const {
        of.ring.wait();
        if constexpr (vectors) ptx::barrier_wait(of.ordered_barrier(), of.ring.parity);
    }
    // The warp has read the stage; goes on to the next one. Loads from the stage must have completed, since neither an
    // arrival at a barrier nor TMA is ordered with them. They complete in order, so it suffices that the one that began
    // last has been used: B's scale of the block, or row 1 of half 0, both in the first half's promotion.
    __device__ void release(bool now = true) {
        __syncwarp();
        empty_there += state.ring.stage == 0 ? -8 * (B::kStages - 1) : 8;
        if (now && lane < B::kCluster) ptx::barrier_arrive_in_block(empty_there);
        state.ring.next();
    }

    // ---- loads of a stage's scales, one step ahead, so that no wgmma waits for them
    __device__ float load_row(const BlocksState& of, int half, int row) const {
        const int first = (kExpertRows ? row_scales : consumer * 64 * B::kHalves) + 16 * warp + lane / 4;
        return ptx::load_shared(of.scales() + 4 * (first + 64 * half + 8 * row));
    }
    __device__ float load_block(const BlocksState& of, int number) const {
        const int first = !kExpertRows ? B::kRows : B::kExpertBlocksAt + (wide ? 4 * consumer : 0);
        return ptx::load_shared(of.scales() + 4 * (first + number % 4));
    }
    // Scales of the columns of registers 8 j .. 8 j + 7. They arrive in four aligned registers, those of odd columns in
    // even ones, so that the two factors of a product are never in the same bank.
    __device__ void load_columns(uint32_t ordered, int j) {
        uint32_t four[4];
        ptx::load_matrix_x4(four, ordered + 64 * j + lane / 16 * 32 + (lane / 8 % 2 ? 0 : 16));
#pragma unroll
        for (int i = 0; i < 4; i++) columns[4 * j + i] = __uint_as_float(four[i]);
    }
    // Waits for the first step of a tile and loads its scales.
    __device__ void first_scales() {
        wait(state);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (!vectors || i != 1) of_row[i / 2][i % 2] = load_row(state, i / 2, i % 2);   // see step_of_vectors
        if constexpr (vectors) {
#pragma unroll
            for (int j = 0; j < 8; j++) load_columns(state.ordered(), j);
        } else {
            columns[0] = load_block(state, 0);   // the last: see release
        }
    }

    // ---- a step with 128x128 scales of B
    __device__ void promote(int half) {
        const float both[2] = {of_row[half][0] * columns[0], of_row[half][1] * columns[0]};
#pragma unroll
        for (int i = 0; i < 64; i++) sums[half][i] = fmaf(part[i], both[half_of(i)], sums[half][i]);
    }
    __device__ void step_of_blocks(int number, bool last) {
        float next[B::kHalves][2] = {}, next_block = 0;
        multiply(0, [] {});
        promote(0);
        multiply(1, [&] {
            if (last) return;
            BlocksState ahead = state;
            ahead.ring.next();
            wait(ahead);
#pragma unroll
            for (int i = 0; i < 4; i++) next[i / 2][i % 2] = load_row(ahead, i / 2, i % 2);
            next_block = load_block(ahead, number + 1);   // the last: see release
        });
        release(!kExperts || !last);
        promote(1);
#pragma unroll
        for (int i = 0; i < 4; i++) of_row[i / 2][i % 2] = next[i / 2][i % 2];
        columns[0] = next_block;
    }

    // ---- a step with 1x128 scales of B. Promotions have twice the instructions and take about as long as products, so
    // the consumers take turns: a consumer begins to promote only when the other has passed the turn during its own
    // promotion. Without turns they tend to promote together, while the tensor cores wait.
    // The numbers of the barriers are constants in both branches, so that they need no register.
    __device__ void wait_turn() const {
        if (consumer == 0) ptx::named_sync<128 * B::kConsumers>(B::kTurnBarrier);
        else ptx::named_sync<128 * B::kConsumers>(B::kTurnBarrier + 1);
    }
    __device__ void pass_turn() const {
        if (consumer == 0) ptx::named_arrive<128 * B::kConsumers>(B::kTurnBarrier + 1);
        else ptx::named_arrive<128 * B::kConsumers>(B::kTurnBarrier);
    }
    // part *= scales of columns; calls used(j) when those of registers 8 j .. 8 j + 7 have been used.
    template <typename Used> __device__ void scale_columns(Used used) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll
            for (int i = 0; i < 8; i++) {   // in an order in which each scale is used twice
                const int of = 8 * j + i / 4 * 4 + i / 2 % 2 + 2 * (i % 2);
                ptx::multiply(part[of], columns[4 * j + i / 4 * 2 + (of % 2 ? 0 : 1)]);
            }
            used(j);
        }
    }
    // Adds the part of the thread's first or second row.
    __device__ void add_row(int half, int row, float scale) {
#pragma unroll
        for (int i = 2 * row; i < 64; i += 4)
            for (int k = i; k < i + 2; k++) sums[half][k] = fmaf(part[k], scale, sums[half][k]);
    }
    __device__ void step_of_vectors(bool last) {
        float next[2] = {};
        BlocksState ahead = state;
        ahead.ring.next();
        multiply(0, [&] { wait_turn(); });
        scale_columns([](int) {});
        add_row(0, 0, of_row[0][0]);
        // The turn is passed when this promotion begins: the compiler moves the load behind it, which half of the sums
        // need, to the front, and the arrival with it. Alone it would move to the end, which is 12 % slower.
        pass_turn();
        add_row(0, 1, load_row(state, 0, 1));
        multiply(1, [&] {
            if (!last) {
                wait(ahead);
                of_row[0][0] = load_row(ahead, 0, 0);
                next[0] = load_row(ahead, 1, 0), next[1] = load_row(ahead, 1, 1);
            }
            wait_turn();
        });
        const uint32_t ordered = ahead.ordered();
        scale_columns([&](int j) {
            if (j == 6) pass_turn();   // in the middle, where the compiler leaves it between two loads
            // After the last step the values are not used; they may be those of the next tile, half written.
            load_columns(ordered, j);
        });
        add_row(1, 0, of_row[1][0]), add_row(1, 1, of_row[1][1]);
        release(!kExperts || !last);
        of_row[1][0] = next[0], of_row[1][1] = next[1];
    }
    // Recomputes its indices rather than keep them in registers across the steps of a tile.
    __device__ void store(const BlocksMaps& maps, const BlocksProblem& p, const BlocksItems<Tiles>& items) {
        const BlocksPlace at = items.place_again(p);
        const int thread = static_cast<int>(ptx::thread_index()), of_group = thread % 128, lane = thread % 32;
        const int row = at.row + thread / 128 * 64 * B::kHalves + of_group / 32 * 16;
        const uint32_t buffer = state.shared + B::kResultsAt + thread / 32 * B::kWarpBytes;
        const int column = at.column + static_cast<int>(BlockPairs::rank()) * B::kColumns;
#pragma unroll
        for (int half = 0; half < B::kHalves; half++) {
            const auto store_as = [&](auto fp32) {
                store_boxes<fp32.value>(sums[half], maps.d, p, at, buffer, row + 64 * half, column, lane);
            };
            if (p.bias) add_bias(sums[half], p, column, lane);
            if (p.fp32) store_as(std::true_type{});
            else store_as(std::false_type{});
        }
        __syncwarp();
    }
    // ---- of experts: results leave through the warp's own buffer and through the consumer's rows of the last stage,
    // which is released only then, so that most of them are written without a wait for a copy.

    // Calls meanwhile() before the last boxes. Like store(), it computes indices again.
    template <bool fp32, typename Meanwhile>
    __device__ void store_through_stage(const BlocksMaps& maps, const BlocksProblem& p, const Tiles& tiles,
                                        const BlocksPlace& at, Meanwhile meanwhile) {
        constexpr int kWidth = fp32 ? 32 : 64, kOfHalf = B::kColumns / kWidth, kBuffers = 1 + B::kHalves;
        const bool staged = at.steps > 0;
        const int block = static_cast<int>(BlockPairs::rank()), matrix = kSums ? at.expert : 0;
        const int thread = static_cast<int>(ptx::thread_index()), of = thread / 128, lane = thread % 32;   // consumer
        const int warp_in_block = thread / 32;
        const int first_row = at.row + (at.wide ? 0 : of * 64 * B::kHalves) + warp_in_block % 4 * 16;
        const int first_column = at.column + (at.wide ? 2 * block + of : block) * B::kColumns;
        const uint32_t own = state.shared + B::kResultsAt + warp_in_block * B::kWarpBytes;
        const uint32_t last = (state.ring.stage + B::kStages - 1) % B::kStages;   // stage
        const uint32_t stage = state.shared + last * B::kRowBytes + of * B::kHalves * B::kHalfBytes
                               + warp_in_block % 4 * B::kWarpBytes;
#pragma unroll
        for (int b = 0; b < B::kHalves * kOfHalf; b++) {
            const int half = b / kOfHalf, c = b % kOfHalf, row = first_row + 64 * half;
            const int column = first_column + kWidth * c, slot = b % kBuffers;
            if (b == 1) ptx::named_sync<128>(B::kStoreBarrier + of);   // all warps have read the last stage
            if (b == kBuffers) meanwhile();
            if (lane == 0) {
                if (b == 0 || !staged) ptx::bulk_wait_read<0>();
                else if (b >= kBuffers) ptx::bulk_wait_read<kBuffers - 1>();
            }
            __syncwarp();
            const uint32_t buffer = slot == 0 || !staged ? own : stage + (slot - 1) * B::kHalfBytes;
            write_panel<fp32>(sums[half], c, buffer, lane);
            ptx::fence_async();
            __syncwarp();
            const bool partial = kExpertRows && row < at.end_row && row + 16 > at.end_row;
            if constexpr (kExpertRows)
                if (partial) store_rows(tiles.results, p.N, at.end_row - row, buffer, row, column, lane);
            if (lane != 0) continue;
            if (!partial && row < at.end_row && column < p.N) {
                if (p.accumulate) ptx::add_matrix_box(&maps.d, buffer, column, row, matrix);
                else ptx::store_matrix_box(&maps.d, buffer, column, row, matrix);
            }
            ptx::bulk_commit();   // also an empty group, because the wait counts groups
        }
        if (!staged) return;
        // The last box is in the stage or, in bf16, in the warp's own buffer.
        if (lane == 0) ptx::bulk_wait_read<B::kHalves * kOfHalf % kBuffers == 1 ? 1 : 0>();
        __syncwarp();
        if (lane < B::kCluster) ptx::barrier_arrive_in_block(empty_there);
    }
    __device__ void clear() {
#pragma unroll
        for (int half = 0; half < B::kHalves; half++)
#pragma unroll
            for (int i = 0; i < 64; i++) sums[half][i] = 0;
    }
    // The next item is found during the end of the one before.
    __device__ void run_experts(const BlocksMaps& maps, const BlocksProblem& p, const Tiles& tiles) {
        if (vectors && consumer == 1) pass_turn();
        BlocksItems<Tiles> items(tiles);
        const auto have_more = [&] {
            if constexpr (kSums) return items.more_sums();
            else return items.more();
        };
        BlocksPlace at = items.place(p);
        for (bool more = have_more(); more;) {
            clear();
            if constexpr (kSums) {
                if (at.steps > 0) first_scales();
#pragma unroll 1
                for (items.count(at.steps); items.left() > 0; items.count(-1)) step_of_vectors(items.left() == 1);
                at = items.place_again(p);
            } else {
                wide = at.wide;
                row_scales = at.row % 4 + (wide ? 0 : 64 * B::kHalves * consumer);
                first_scales();
#pragma unroll 1
                for (int number = 0; number < p.steps; number++) step_of_blocks(number, number + 1 == p.steps);
            }
            const BlocksPlace of = at;
            const auto find_next = [&] {
                items.next();
                more = have_more();
                if (more) at = items.place(p);
            };
            const bool stays = kSums && p.accumulate && of.steps == 0;
            if (stays) find_next();
            else if (!kExpertRows && p.fp32) store_through_stage<true>(maps, p, tiles, of, find_next);
            else store_through_stage<false>(maps, p, tiles, of, find_next);
        }
        if (vectors && consumer == 0) wait_turn();   // the last that was passed
        if (lane == 0) ptx::bulk_wait_read<0>();   // shared memory must outlive the copies
    }
    __device__ void run(const BlocksMaps& maps, const BlocksProblem& p, const BlockPairs& tiles) {
        if (vectors && consumer == 1) pass_turn();
        for (BlocksItems<Tiles> items(tiles); items.more(); items.next()) {
            clear();
            first_scales();
#pragma unroll 1
            for (int number = 0; number < p.steps; number++) {
                if constexpr (vectors) step_of_vectors(number + 1 == p.steps);
                else step_of_blocks(number, number + 1 == p.steps);
            }
            store(maps, p, items);
        }
        if (vectors && consumer == 0) wait_turn();   // the last that was passed
        if (lane == 0) ptx::bulk_wait_read<0>();   // shared memory must outlive the copies
    }
};

}  // namespace cuda
