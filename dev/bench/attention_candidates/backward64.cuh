// The candidate for the fused attention backward at head dim 64: shared memory of a block and its barriers. It differs
// from FusedState in that dQ of a step is computed by one consumer, in room for results of its own, and in the order of
// the statistics.
#pragma once
#include "llmc/cuda/attention_backward_fused_sm90.cuh"

namespace attention_candidates {

using namespace cuda;

// A number that is the same in all lanes. Unlike the shuffle of warp_uniform, a reduction leaves it in a uniform
// register, so ptxas computes descriptors with uniform instructions.
__device__ inline uint32_t uniform(uint32_t value) { return __reduce_or_sync(0xffffffffu, value); }

struct Tiles {
    static constexpr int HS = 64, kConsumers = 2, kProducerRegisters = 40, kConsumerRegisters = 232;
    static constexpr int kThreads = 128 * (kConsumers + 1), kWarps = 4 * kConsumers;
    static constexpr int kKeys = 64 * kConsumers, kQueries = 64;
    static constexpr int kItemStages = 2, kStages = 4, kSumStages = 1;
    static constexpr uint32_t kKeyBytes = kKeys * kPanelRowBytes, kQueryBytes = kQueries * kPanelRowBytes;
    static constexpr uint32_t kGradBytes = kKeyBytes;       // dS of a step: rows are keys, columns are queries
    static constexpr uint32_t kSumBytes = 2 * sum_bytes(HS);   // dQ of a step: two adjacent units of sums
    static constexpr uint32_t kResultBytes = 64 * kPanelRowBytes;   // dV or dK of a consumer
    // The 16 values that a lane of a warp needs of -lse (log2 units) are adjacent, then come those of the next one of
    // four lanes, without bank conflicts; -delta follows.
    static constexpr uint32_t kStatLaneFloats = 20, kStatHalfBytes = 4 * 4 * kStatLaneFloats;
    static constexpr uint32_t kStatBytes = 2 * kStatHalfBytes;
    // Shared memory: stages of K and V | two dS buffers | dQ of each consumer | stages of Q and dO | dV and dK
    // of each consumer | statistics | barriers of items, dS, dQ of each consumer, steps | item numbers.
    static constexpr uint32_t kGradsAt = kItemStages * 2 * kKeyBytes, kSumsAt = kGradsAt + 2 * kGradBytes;
    static constexpr uint32_t kStepsAt = kSumsAt + kConsumers * kSumStages * kSumBytes;
    static constexpr uint32_t kResultsAt = kStepsAt + kStages * 2 * kQueryBytes;
    static constexpr uint32_t kStatsAt = kResultsAt + kConsumers * 2 * kResultBytes;
    static constexpr uint32_t kBarriers = kStatsAt + kStages * kStatBytes;
    static constexpr uint32_t kGradBarriers = kBarriers + 16 * kItemStages;
    static constexpr uint32_t kSumBarriers = kGradBarriers + 2 * 16;
    static constexpr uint32_t kStepBarriers = kSumBarriers + kConsumers * 16 * kSumStages;
    static constexpr uint32_t kNumbersAt = kStepBarriers + 4 * 8 * kStages;
    static constexpr int kSharedBytes = kNumbersAt + 4 * kItemStages;
    static_assert(registers_suffice(kConsumers, kProducerRegisters, kConsumerRegisters));
    static_assert(kSharedBytes <= 227 * 1024 && kBarriers % 8 == 0 && kStatBytes % 16 == 0);
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900   // as in ptx.cuh
// Addresses within a block's shared memory. Steps are counted over all items, as are the dQ that a consumer computes.
struct State {
    using P = Tiles;
    uint32_t shared;

    __device__ Slots<P::kItemStages> items() const {   // K and V
        return {shared + P::kBarriers, shared + P::kBarriers + 8 * P::kItemStages};
    }
    __device__ Slots<2> grads() const { return {shared + P::kGradBarriers, shared + P::kGradBarriers + 16}; }
    __device__ Slots<P::kSumStages> sums(int consumer) const {
        const uint32_t at = shared + P::kSumBarriers + consumer * 16 * P::kSumStages;
        return {at, at + 8 * P::kSumStages};
    }
    // Q, dO and statistics arrive separately and are released together.
    __device__ Slots<P::kStages> step_part(int part) const {
        const uint32_t at = shared + P::kStepBarriers;
        return {at + part * 8 * P::kStages, at + 3 * 8 * P::kStages};
    }
    __device__ Slots<P::kStages> queries() const { return step_part(0); }
    __device__ Slots<P::kStages> douts() const { return step_part(1); }
    __device__ Slots<P::kStages> stats() const { return step_part(2); }
    __device__ void init() const {
        items().init(P::kWarps + 3, 1);   // readers: consumer warps, the statistics warp and two adding threads
        grads().init(4, P::kWarps);
        for (int consumer = 0; consumer < P::kConsumers; consumer++) sums(consumer).init(1, 4);
        queries().init(P::kWarps, 1);
        douts().init_full(1);
        stats().init_full(32);
    }
    __device__ uint32_t key_tile(uint32_t item) const { return shared + item % P::kItemStages * 2 * P::kKeyBytes; }
    // The number of an item, or schedule.items at the end; written by the loading thread before the item is full.
    __device__ static uint32_t& number(char* memory, uint32_t item) {
        return reinterpret_cast<uint32_t*>(memory + P::kNumbersAt)[item % P::kItemStages];
    }
    // Returns the number for a thread that reads nothing else of the item, and releases the item.
    __device__ uint32_t follow(char* memory, uint32_t item) const {
        items().await_full(item);
        const uint32_t number = State::number(memory, item);
        items().arrive_empty(item);
        return number;
    }
    __device__ uint32_t grad_tile(uint32_t step) const { return shared + P::kGradsAt + step % 2 * P::kGradBytes; }
    __device__ uint32_t query_tile(uint32_t step) const {
        return shared + P::kStepsAt + step % P::kStages * 2 * P::kQueryBytes;
    }
    __device__ uint32_t dout_tile(uint32_t step) const { return query_tile(step) + P::kQueryBytes; }
    __device__ static uint32_t stats_at(uint32_t step) { return P::kStatsAt + step % P::kStages * P::kStatBytes; }
    // The float of a query's -lse (-delta: kStatHalfBytes further) within the statistics of a step.
    __device__ static uint32_t stat_float(uint32_t query) {
        return query % 8 / 2 * P::kStatLaneFloats + query / 8 * 2 + query % 2;
    }
    __device__ static uint32_t sums_at(int consumer) { return P::kSumsAt + consumer * P::kSumBytes; }
    // Which consumer computes dQ of an item's step.
    __device__ static bool owns(int consumer, uint32_t step_of_item) {
        return static_cast<int>(step_of_item % 2) == consumer;
    }
};

// A tile of one panel as an operand of wgmma: as tile_descriptor, along_columns and along_rows, but with an address of
// 32 bits, so that no carry is computed.
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

#endif

}  // namespace attention_candidates
