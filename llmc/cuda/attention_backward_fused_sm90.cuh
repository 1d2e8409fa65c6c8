// The fused attention backward of compute capability 9.0: tiles, shared memory, items and their steps.
#pragma once
#include "llmc/cuda/attention_backward_sm90.cuh"

namespace cuda {

// ---- statistics of a step. A query has a row of eight bf16: -lse / softmax_mul as the sum of the first three, -delta
// as that of the next three (24 bits each), two zeros. Products read rows of 16 columns, of which the last eight are
// the first eight again; the other operand is zero there. So S - lse / softmax_mul and dP - delta leave the tensor
// cores, and no thread loads a statistic. In the order of wgmma, each lane would need 32 of a step, and at head dim 128
// these loads took a twelfth of shared memory's bandwidth, which bounds the kernel.
inline constexpr uint32_t kStatRowBytes = 16;

// A query's row, given both statistics.
__device__ inline uint4 statistics_row(float left, float right) {
    uint32_t part[6];
#pragma unroll
    for (int k = 0; k < 3; k++) {
        part[k] = pack_bf16x2(left, 0), left -= __uint_as_float(part[k] << 16);
        part[3 + k] = pack_bf16x2(right, 0), right -= __uint_as_float(part[3 + k] << 16);
    }
    return {part[0] | part[1] << 16, part[2] | part[3] << 16, part[4] | part[5] << 16, 0};
}
// A descriptor as in wgmma.cuh, without a swizzle: rows of 16 bytes, blocks of 8 rows adjacent, and no bytes between
// the two halves of the columns.
__device__ inline uint64_t statistics_descriptor(uint32_t address) {
    return (address & 0x3ffff) >> 4 | uint64_t{8 * kStatRowBytes >> 4} << 32;
}

// What differs between head dims. A step is a tile of 64 queries of one head. S is transposed (rows are keys), so that
// its registers are already operands of dK and dV.
// Head dim 128: registers of a consumer thread are dK and dV 64 each, S 32, dP 32, P and dS as operands 16 each. dQ has
// those of S and dP.
// dim: columns that are not padding (HeadPanels).
template <int dim = 128> struct FusedTiles128 {
    static constexpr int kDim = dim, HS = 128, kKeys = 128, kItemStages = 1, kStages = 2;
    static constexpr bool kSplit = false;
    static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
    static constexpr uint32_t kResultBytes = 0;    // dK and dV leave through the dS buffers
};
// Head dim 64: dK and dV have 32 registers each, so S, dP and dQ have 32 of their own, and products of two steps
// overlap.
struct FusedTiles64 {
    static constexpr int kDim = 64, HS = 64, kKeys = 128, kItemStages = 2, kStages = 4;
    static constexpr bool kSplit = false;
    static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
    static constexpr uint32_t kResultBytes = 64 * kPanelRowBytes;   // dK or dV of a consumer
};

// Head dim 256: dK and dV of 64 keys fill the registers of a consumer each (128), beside S or dP (32). There is no room
// for dQ, and adding it to memory takes longer than all products of a step, so it has a kernel of its own (kSplit).
struct FusedTiles256 {
    static constexpr int kDim = 256, HS = 256, kKeys = 64, kItemStages = 1, kStages = 2;
    static constexpr bool kSplit = true;
    static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
    static constexpr uint32_t kResultBytes = 0;    // dK and dV leave through V and K
};

template <typename Tiles> struct Fused : Tiles {
    static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1), kWarps = 4 * kConsumers;
    static constexpr int kKeys = Tiles::kKeys, kQueries = 64, kPanels = Tiles::HS / kPanel;
    static constexpr uint32_t kKeyPanel = kKeys * kPanelRowBytes, kQueryPanel = kQueries * kPanelRowBytes;
    static constexpr uint32_t kKeyBytes = kPanels * kKeyPanel, kQueryBytes = kPanels * kQueryPanel;
    static constexpr int kStatStages = 2;
    static constexpr uint32_t kStatBytes = kQueries * kStatRowBytes;   // statistics of a step
    static constexpr uint32_t kGradBytes = kKeyPanel;   // dS of a step: rows are keys, columns are queries
    static constexpr uint32_t kSumBytes = sum_bytes(Tiles::HS);   // dQ of a step
    // Shared memory: stages of K and V | two dS buffers | dQ of each consumer (split: both are two P buffers) | stages
    // of Q and dO | dV and dK of each consumer (only head dim 64) | statistics | barriers | item numbers.
    static constexpr uint32_t kGradsAt = Tiles::kItemStages * 2 * kKeyBytes, kSumsAt = kGradsAt + 2 * kGradBytes;
    static constexpr uint32_t kStepsAt = kSumsAt + (Tiles::kSplit ? 2 * kGradBytes : kConsumers * kSumBytes);
    static constexpr uint32_t kResultsAt = kStepsAt + Tiles::kStages * 2 * kQueryBytes;
    static constexpr uint32_t kStatsAt = kResultsAt + kConsumers * 2 * Tiles::kResultBytes;
    static constexpr uint32_t kBarriers = kStatsAt + kStatStages * kStatBytes;
    // Barriers of items, dS, dQ of each consumer, steps.
    static constexpr uint32_t kGradBarriers = kBarriers + 16 * Tiles::kItemStages;
    static constexpr uint32_t kSumBarriers = kGradBarriers + 2 * 16;
    static constexpr uint32_t kStepBarriers = kSumBarriers + kConsumers * 16;
    static constexpr uint32_t kNumbersAt = kStepBarriers + 3 * 8 * Tiles::kStages;
    static constexpr int kSharedBytes = kNumbersAt + 4 * Tiles::kItemStages;
    static_assert(registers_suffice(kConsumers, Tiles::kProducerRegisters, Tiles::kConsumerRegisters));
    static_assert(kSharedBytes <= 227 * 1024 && kBarriers % 8 == 0 && kStatsAt % 16 == 0);

    // Whether a consumer computes dQ of an item's step. Consumers take turns and compute all columns, so that dS is
    // read from shared memory once.
    __device__ static bool owns(int consumer, uint32_t step_of_item) {
        return static_cast<int>(step_of_item % 2) == consumer;
    }
};

// Addresses within a block's shared memory. Steps are counted over all items, as are the dQ that a consumer computes.
template <typename Tiles> struct FusedState {
    using P = Fused<Tiles>;
    uint32_t shared;

    __device__ Slots<P::kItemStages> items() const {   // K and V
        return {shared + P::kBarriers, shared + P::kBarriers + 8 * P::kItemStages};
    }
    __device__ Slots<2> grads() const { return {shared + P::kGradBarriers, shared + P::kGradBarriers + 16}; }
    __device__ Slots<1> sums(int consumer) const {
        const uint32_t at = shared + P::kSumBarriers + consumer * 16;
        return {at, at + 8};
    }
    // Q and the statistics arrive together, dO separately; all are released together.
    __device__ Slots<P::kStages> step_part(int part) const {
        const uint32_t at = shared + P::kStepBarriers;
        return {at + part * 8 * P::kStages, at + 2 * 8 * P::kStages};
    }
    __device__ Slots<P::kStages> queries() const { return step_part(0); }
    __device__ Slots<P::kStages> douts() const { return step_part(1); }
    __device__ void init() const {
        items().init(P::kWarps + (P::kSplit ? 1 : 3), 1);   // consumer warps, statistics warp, (two) adding threads
        grads().init(4, P::kSplit ? 4 : P::kWarps);   // readers: the warps that compute dQ (split: dS)
        for (int consumer = 0; consumer < P::kConsumers; consumer++) sums(consumer).init(1, 4);
        queries().init(P::kWarps, 1 + 32);   // the loading thread and the statistics warp
        douts().init_full(1);
    }
    __device__ uint32_t key_tile(uint32_t item) const { return shared + item % P::kItemStages * 2 * P::kKeyBytes; }
    // The number of an item, or schedule.items at the end; written by the loading thread before the item is full.
    __device__ static uint32_t& number(char* memory, uint32_t item) {
        return reinterpret_cast<uint32_t*>(memory + P::kNumbersAt)[item % P::kItemStages];
    }
    // Returns the number for a thread that reads nothing else of the item, and releases the item.
    __device__ uint32_t follow(char* memory, uint32_t item) const {
        items().await_full(item);
        const uint32_t number = FusedState::number(memory, item);
        items().arrive_empty(item);
        return number;
    }
    __device__ uint32_t grad_tile(uint32_t step) const { return shared + P::kGradsAt + step % 2 * P::kGradBytes; }
    __device__ uint32_t prob_tile(uint32_t step) const { return shared + P::kSumsAt + step % 2 * P::kGradBytes; }
    __device__ uint32_t query_tile(uint32_t step) const {
        return shared + P::kStepsAt + step % P::kStages * 2 * P::kQueryBytes;
    }
    __device__ uint32_t dout_tile(uint32_t step) const { return query_tile(step) + P::kQueryBytes; }
    __device__ static uint32_t stats_at(uint32_t step) { return P::kStatsAt + step % P::kStatStages * P::kStatBytes; }
    // Waits until the statistics' buffer of a step is free: until the step kStatStages before it is released.
    __device__ void await_stats_empty(uint32_t step) const {
        queries().await_empty(step + P::kStages - P::kStatStages);
    }
    __device__ static uint32_t sums_at(int consumer) { return P::kSumsAt + consumer * P::kSumBytes; }
};

// The steps of an item: query tiles from the last one that attends to its keys down to the first, each over all heads
// of the group. No query after the last one of the last key attends to the other keys.
struct Steps {
    Schedule::Place at;
    int first, end;        // tiles
    uint32_t first_head;   // of the group's query heads, counted over the batch

    template <bool kBorders, int kKeys>
    __device__ static Steps of(const AttentionShape& shape, const Schedule& schedule, uint32_t item) {
        const Schedule::Place at = schedule.place(item);
        constexpr int kQueries = 64;
        const int T = static_cast<int>(ptx::opaque(static_cast<uint32_t>(shape.T)));
        const int past = kBorders ? shape.end_query(at.b, min(T, (at.tile + 1) * kKeys) - 1) : T;
        return {at, at.tile * kKeys / kQueries, (past - 1) / kQueries + 1,
                at.b * static_cast<uint32_t>(shape.NH) + at.head * schedule.group};
    }
};

// Until take(0), take(1), ... return no more items: calls item(steps, index of the item), then visit(steps, tile, head
// within the group, index of the step) for each of its steps. Producers use it and have 24 registers, so `opaque` keeps
// ptxas from holding values derived from kernel arguments in registers across items.
template <bool kBorders, int kKeys, typename Take, typename Item, typename Visit>
__device__ void for_steps(const AttentionShape& shape, const Schedule& schedule, Take take, Item item, Visit visit) {
    uint32_t step = 0;
    for (uint32_t round = 0;; round++) {
        const uint32_t number = take(round);
        if (number >= schedule.items) return;
        Schedule anew = schedule;
        anew.section = ptx::opaque(anew.section), anew.sections = ptx::opaque(anew.sections);
        const Steps steps = Steps::of<kBorders, kKeys>(shape, anew, number);
        item(steps, round);
#pragma unroll 1
        for (int tile = steps.end - 1; tile >= steps.first; tile--) {
#pragma unroll 1
            for (int i = 0; i < schedule.group; i++) visit(steps, tile, i, step++);
        }
    }
}

__device__ inline void no_item(const Steps&, uint32_t) {}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900   // as in ptx.cuh

// A number that is the same in all lanes. Unlike the shuffle of warp_uniform, a reduction leaves it in a uniform
// register, so ptxas computes descriptors with uniform instructions.
__device__ inline uint32_t uniform(uint32_t value) { return __reduce_or_sync(0xffffffffu, value); }

// A tile as an operand of wgmma: as tile_descriptor, along_columns and along_rows, but with an address of 32 bits, so
// that no carry is computed. columns(): of one panel.
struct Operand {
    uint32_t low;

    __device__ explicit Operand(uint32_t address, uint32_t panel_bytes)
        : low((address & 0x3ffff) >> 4 | (panel_bytes >> 4) << 16) {}
    __device__ uint64_t at(uint32_t bytes) const {
        constexpr uint64_t kHigh = (kSwizzleRowsBytes >> 4) | uint64_t{1} << 30;
        return (low + (bytes >> 4)) | kHigh << 32;
    }
    __device__ uint64_t columns(int k) const { return at(k * 32); }
    __device__ uint64_t rows(int k) const { return at(k * 16 * kPanelRowBytes); }
};

// What the consumer warpgroups of 64 keys have in common at all head dims.
template <typename Tiles> struct FusedConsumer {
    using P = Fused<Tiles>;
    const FusedState<Tiles> state;
    char* const memory;
    const int consumer, warp, lane;   // warp: within the block
    const float mul;                  // log2(e) softmax_mul

    // Sets s = a statistic of each query of a step, in all rows: -lse / softmax_mul (kDelta: -delta), as the first
    // product of S (or dP). Its operand in registers has ones in the columns of that statistic's parts.
    template <bool kDelta> __device__ void start_with_statistic(float (&s)[32], uint32_t step) const {
        constexpr uint32_t kOnes = 0x3f803f80, kLeft = 0x3f80, kRight = 0x3f800000;   // columns 2 pair and next
        const uint32_t pair = ptx::opaque(static_cast<uint32_t>(lane)) % 4;
        const uint32_t ones = kDelta ? (pair == 1 ? kRight : pair == 2 ? kOnes : 0)
                                     : (pair == 0 ? kOnes : pair == 1 ? kLeft : 0);
        const uint32_t a[4] = {ones, ones, 0, 0};
        ptx::wgmma<64, false>(s, a, statistics_descriptor(state.shared + state.stats_at(step)), false);
    }
    // Shared address of this warp's 16 keys in a step's dS buffer. Must not shuffle: single lanes call it.
    __device__ uint32_t own_ds(uint32_t of_step) const {
        return state.grad_tile(of_step) + (consumer * 64 + warp % 4 * 16) * kPanelRowBytes;
    }
    // Stores a step's dS to shared memory, for both consumers.
    __device__ void store_ds(const uint32_t (&part)[4][4], uint32_t of_step) const {
        state.grads().await_empty(of_step);
        const uint32_t to = own_ds(of_step) + panel_offset(lane & 15, lane >> 4);
#pragma unroll
        for (int j = 0; j < 4; j++) ptx::store_matrix_x4(to ^ (2 * j << 4), part[j]);   // chunks 2 j and 2 j + 1
        ptx::fence_async();
        __syncwarp();
        if (lane == 0) state.grads().arrive_full(of_step);
    }
    __device__ void release_step(uint32_t of_step) const {
        if (lane == 0) state.queries().arrive_empty(of_step);
    }
    // Stores the completed dQ of a step, this consumer's number n, to shared memory: each four registers of a thread as
    // one float4. publish_dq() hands it to the adding thread; what runs between hides the time of the stores.
    template <int count> __device__ void store_dq(float (&dq)[count], uint32_t of_step, uint32_t n) const {
        ptx::pin(dq);
        if (lane == 0) state.grads().arrive_empty(of_step);
        state.sums(consumer).await_empty(n);
        auto* const to = reinterpret_cast<float4*>(memory + state.sums_at(consumer)) + threadIdx.x % 128;
#pragma unroll
        for (int i = 0; i < count / 4; i++)
            to[128 * i] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
    __device__ void publish_dq(uint32_t n) const {
        ptx::fence_async();
        __syncwarp();
        if (lane == 0) state.sums(consumer).arrive_full(n);
    }
};

#endif

}  // namespace cuda
