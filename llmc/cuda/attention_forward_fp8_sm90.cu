// Attention forward on compute capability 9.0 with Q and K in INT8, P and V in E4M3, head dim 64 and 128.
// quantize_heads makes the operands.
//
// The accumulators of S start with the bits of 1.5 * 2^23 as a float. So the sums, read as floats, are that number plus
// S, exactly, because |S| <= 128 * 127^2 < 2^21, and need no conversion: the softmax subtracts the bias together with
// its reference. That rounds the difference by at most 0.75 units of S, equally for all keys of a tile. (Q and K in
// INT8 change a score of random numbers by about 100 units.)
//
// The tensor cores accumulate with 14 bits, too few for 8192 keys. So P V of each tile of keys starts from 0 and is
// added to fp32 accumulators with one fma per element while the next S is computed. The same fma rescales the
// accumulators to a new reference and to the scale of the next tile of V.
#include "llmc/cuda/attention_forward_sm90.cuh"
#include "llmc/cuda/fp8.cuh"

namespace cuda {
namespace {

template <int HS> struct ForwardTiles;
template <> struct ForwardTiles<128> {   // registers of a consumer: O 64, P V of a tile 64, S 64, P 16
    static constexpr int kHeadSize = 128, kElemBytes = 1;
    static constexpr int kConsumers = 2, kKeys = 128, kStages = 4, kProducerRegisters = 24, kConsumerRegisters = 240;
    static constexpr bool kOrdered = true;
};
template <> struct ForwardTiles<64> {   // registers of a consumer: O 32, P V of a tile 32, S 64, P 16
    static constexpr int kHeadSize = 64, kElemBytes = 1;
    static constexpr int kConsumers = 2, kKeys = 128, kStages = 6, kProducerRegisters = 24, kConsumerRegisters = 240;
    static constexpr bool kOrdered = true;
};
template <int HS> using Tiles = Forward<ForwardTiles<HS>>;

// The largest P of a row is 2^8 when its reference is set and at most 448 = 2^8.8 later; E4M3 resolves P down to 2^-9,
// which is 2^-17 of 2^8. A power of two is exact in E4M3, so a row that attends to one key yields that key's V, but for
// the rounding of the difference.
// (A template, because unused members are errors on architectures where the kernel is empty.)
template <int HS> struct Fp8Reference {
    static constexpr float kHeadroom = 8.75f, kBias = 12582912;
    __device__ static float of(float largest) { return largest - 8; }
};

struct ForwardMaps {
    CUtensorMap queries, keys, values, out;
};

template <int HS> struct ByteCopies {
    const ForwardMaps& maps;
    int NH, NKV;

    __device__ void queries(uint32_t shared, uint32_t barrier, int first, int head, int b) const {
        ptx::load_box(shared, &maps.queries, barrier, first, head, b);
    }
    __device__ void keys(uint32_t shared, uint32_t barrier, int tile, int head, int b) const {
        ptx::load_box(shared, &maps.keys, barrier, tile * Tiles<HS>::kKeys, NH + head, b);
    }
    __device__ void values(uint32_t shared, uint32_t barrier, int tile, int head, int b) const {
        ptx::load_box(shared, &maps.values, barrier, tile * HS, NH + NKV + head, b);
    }
};

// Starts sums = q k^T plus the bias.
template <int HS> __device__ void start_scores(int (&sums)[64], uint32_t queries, uint32_t keys) {
    const uint64_t q = byte_tile_descriptor<HS>(queries), k = byte_tile_descriptor<HS>(keys);
#pragma unroll
    for (int& sum : sums) sum = 0x4b400000;
    ptx::pin(sums);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < HS / 32; i++) ptx::wgmma_int8(sums, along_bytes(q, i), along_bytes(k, i));
    ptx::wgmma_commit();
}
// s = the sums, once they are complete.
template <int count> __device__ void as_scores(float (&s)[count], int (&sums)[count]) {
    ptx::pin(sums);
#pragma unroll
    for (int i = 0; i < count; i++) s[i] = __int_as_float(sums[i]);
}

// Starts o = p v.
template <int HS, int steps>
__device__ void start_sums(float (&o)[HS / 2], const uint32_t (&p)[steps][4], uint32_t values) {
    const uint64_t v = byte_tile_descriptor<32 * steps>(values);
    ptx::pin(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < steps; i++) ptx::wgmma_e4m3<HS>(o, p[i], along_bytes(v, i), i > 0);
    ptx::wgmma_commit();
}

// P as A operand in E4M3: each lane keeps its own elements, because V is stored in head_token_order.
template <int count> __device__ void as_weights(uint32_t (&p)[count / 16][4], const float (&s)[count]) {
#pragma unroll
    for (int i = 0; i < count / 16; i++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float* at = &s[16 * i + 8 * (k / 2) + 2 * (k % 2)];
            p[i][k] = to_fp8x4<Dtype::kE4m3>(at[0], at[1], at[4], at[5]);
        }
    }
}

// O over the tiles of an item, relative to a softmax reference and to the scale of the V tile that was added last.
template <int HS> struct Sums {
    float all[HS / 2], tile[HS / 2];
    float growth[2] = {1, 1}, next_growth[2] = {1, 1};   // rescaling of `all` at this addition and at the next one

    __device__ Sums() {
#pragma unroll
        for (int i = 0; i < HS / 2; i++) all[i] = tile[i] = 0;
    }
    __device__ void add_tile() {
#pragma unroll
        for (int i = 0; i < HS / 2; i++) all[i] = fmaf(all[i], growth[half_of(i)], tile[i]);
        growth[0] = next_growth[0], growth[1] = next_growth[1];
    }
};

// One consumer warpgroup.
template <int HS, bool kBorders, bool kLogits>
__device__ void consume(ForwardState<Tiles<HS>> state, int group_of_warps, const CUtensorMap& out_map, float* lse,
                        const float* scales, float* max_logits, const AttentionShape& shape, const Schedule& schedule) {
    using P = Tiles<HS>;
    const int warp = warp_uniform(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x) % 32;
    const int T = static_cast<int>(shape.T);
    const uint32_t own_out = state.shared + P::kOut + warp * P::kOutBytes;
    const int my_turn = 1 + group_of_warps, next_turn = 1 + (group_of_warps + 1) % P::kConsumers;
    if (P::kOrdered && group_of_warps == P::kConsumers - 1) ptx::named_arrive<256>(next_turn);

    for (uint32_t round = 0;; round++) {
        const uint32_t item = schedule.item(round, blockIdx.x, gridDim.x);
        if (item >= schedule.items) break;
        const Schedule::Place at = schedule.place(item);
        const int first = at.tile * P::kQueries + group_of_warps * 64, row = first + warp % 4 * 16;
        int tile = P::last_tile(at.tile * P::kQueries, T);
        const int begin = P::template first_tile<kBorders>(shape, at.b, at.tile * P::kQueries);
        const std::conditional_t<kBorders, FirstKeys, NoBorders> borders(shape, at.b, row, lane);
        state.queries.wait();
        const uint32_t queries = state.query_tile() + group_of_warps * 64 * HS;
        if (!P::kOrdered) {   // skips tiles that only later warpgroups attend to; all tiles if these rows do not exist
            for (const int own = first < T ? first / P::kKeys : begin - 1; tile > own; tile--) state.skip_tile(lane);
        }
        if (tile < begin) {
            state.queries.release(lane), state.queries.next();
            continue;
        }

        const int blocks = static_cast<int>(head_blocks(T)), NKV = static_cast<int>(shape.NKV);
        const int64_t first_head = at.b * (shape.NH + 2 * shape.NKV);
        const float* key_scales = scales + (first_head + shape.NH + at.head / schedule.group) * blocks;
        const float mul = shape.softmax_mul * kLog2e
                          * __ldg(scales + (first_head + at.head) * blocks + first / static_cast<int>(kHeadBlock));
        float value_scale = __ldg(key_scales + NKV * blocks + tile), s[P::kKeys / 2];
        int scores[P::kKeys / 2];
        uint32_t p[P::kKeys / 32][4];
        Sums<HS> o;
        RowSoftmaxWith<Fp8Reference<HS>, kLogits> softmax;
        float key_mul = mul * __ldg(key_scales + tile);
        state.keys.wait();
        start_scores<HS>(scores, queries, state.key_tile());
        ptx::wgmma_wait<0>();
        as_scores(s, scores);
        state.keys.release(lane), state.keys.next();
        mask_future(s, row - tile * P::kKeys, lane);   // every row attends at least to itself
        borders.mask(s, row - tile * P::kKeys, lane);
        softmax.grow(s, key_mul);
        softmax.exponentials(s, key_mul);
        as_weights(p, s);
        for (; tile > begin; tile--) {
            const float next_value_scale = __ldg(key_scales + NKV * blocks + tile - 1);
            key_mul = mul * __ldg(key_scales + tile - 1);
            state.keys.wait();
            if (P::kOrdered) ptx::named_sync<256>(my_turn);
            start_scores<HS>(scores, queries, state.key_tile());
            o.add_tile();   // of the previous iteration, while S is computed
            state.values.wait();
            start_sums<HS>(o.tile, p, state.value_tile());
            if (P::kOrdered) ptx::named_arrive<256>(next_turn);
            ptx::wgmma_wait<1>();
            as_scores(s, scores);
            state.keys.release(lane), state.keys.next();
            borders.mask(s, row - (tile - 1) * P::kKeys, lane);
            const bool grown = softmax.grow(s, key_mul);
            softmax.exponentials(s, key_mul);
            softmax.evaluate();   // while the products run
            const float change = __fdividef(value_scale, next_value_scale);
#pragma unroll
            for (int half = 0; half < 2; half++)
                o.next_growth[half] = grown ? change * softmax.correction[half] : change;
            value_scale = next_value_scale;
            ptx::wgmma_wait<0>();
            ptx::pin(o.tile);
            state.values.release(lane), state.values.next();
            as_weights(p, s);
        }
        state.queries.release(lane), state.queries.next();
        o.add_tile();
        state.values.wait();
        start_sums<HS>(o.tile, p, state.value_tile());
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // The sum is at least 2^8, the largest P of a row.
            const RowEnd end(value_scale, softmax.reference[half], warp_sum<4>(softmax.sum[half]),
                             shape.sink<bf16>(at.head));
            softmax.correction[half] = end.mul;
            const int query = row + 8 * half + lane / 4;
            if (lane % 4 == 0 && query < T) lse[shape.stat(at.b, query, at.head)] = end.lse;
        }
        if (kLogits) record_logit(max_logits + at.head, softmax.largest_score);
        ptx::wgmma_wait<0>();
        ptx::pin(o.tile);
        state.values.release(lane), state.values.next();
        o.add_tile();
        softmax.correct(o.all);
        send_rows<HS>(out_map, own_out, o.all, row, at.head, at.b, lane);
    }
    if (lane == 0) ptx::bulk_wait_read<0>();   // shared memory must outlive the copies
    if (P::kOrdered && group_of_warps == 0) ptx::named_sync<256>(my_turn);   // consumes the last arrival
}

// Math: as attention_forward_sm90_kernel on the dequantized operands; each P = exp(s_j - r), r the row's reference, is
//       rounded to E4M3 before the product with v_j, but not in the sum of P.
// Source: as there, and its section 3.3; PTX ISA 9.0, wgmma of .s8 and of .e4m3.
// Traffic: as there with half the bytes of q, k and v.
// Requires: sm_90a; operands from quantize_heads, HS 64 or 128, out 16-byte aligned, softmax_mul > 0.
// Parallel: a block processes tiles of 128 queries of one head (Schedule); its last warpgroup issues TMA loads, each
//           other one owns 64 queries and loops over 128 keys at a time.
template <int HS, bool kBorders, bool kLogits>
__global__ void __launch_bounds__(Tiles<HS>::kThreads, 1)
attention_forward_fp8_sm90_kernel(const __grid_constant__ ForwardMaps maps, float* lse, const float* scales,
                                  float* max_logits, AttentionShape shape, Schedule schedule) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using P = Tiles<HS>;
    extern __shared__ __align__(1024) char memory[];
    const ForwardState<P> state(ptx::shared_address(memory));
    const int group_of_warps = warp_uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        state.init();
        ptx::prefetch_map(&maps.queries);
        ptx::prefetch_map(&maps.keys);
        ptx::prefetch_map(&maps.values);
        ptx::prefetch_map(&maps.out);
    }
    __syncthreads();
    if (group_of_warps == P::kConsumers) {
        ptx::registers_shrink<P::kProducerRegisters>();
        const ByteCopies<HS> copies{maps, static_cast<int>(shape.NH), static_cast<int>(shape.NKV)};
        if (threadIdx.x == 128 * P::kConsumers) produce<P, kBorders>(state, copies, shape, schedule);
    } else {
        ptx::registers_grow<P::kConsumerRegisters>();
        consume<HS, kBorders, kLogits>(state, group_of_warps, maps.out, lse, scales, max_logits, shape, schedule);
    }
#endif
}

template <int HS, bool kBorders>
void launch(Ctx& ctx, const AttentionForwardArgs& args, const AttentionShape& shape) {
    using P = Tiles<HS>;
    static_assert(P::kKeys == kHeadBlock && kHeadBlock % 64 == 0, "one scale for a consumer's queries and a tile");
    const int64_t heads = shape.NH + 2 * shape.NKV, blocks = head_blocks(shape.T);
    const void* bytes = args.heads.bytes.data;
    const ForwardMaps maps{byte_map(bytes, shape.B, heads, blocks * kHeadBlock, HS, P::kQueries),
                           byte_map(bytes, shape.B, heads, blocks * kHeadBlock, HS, P::kKeys),
                           byte_map(bytes, shape.B, heads, blocks * HS, static_cast<int>(kHeadBlock), HS),
                           panel_map(args.out.data, shape.B, shape.T, shape.NH * HS, 16, P::kOutPanels)};
    auto* const kernel = args.max_logits ? attention_forward_fp8_sm90_kernel<HS, kBorders, true>
                                         : attention_forward_fp8_sm90_kernel<HS, kBorders, false>;
    launch_forward(ctx, kernel, P::kThreads, P::kSharedBytes,
                   make_schedule(shape, shape.NH, P::kQueries, true, ctx.sm_count), maps, args.lse.as<float>(),
                   args.heads.scales.as<const float>(), args.max_logits, shape);
    CHECK_LAUNCH("attention_forward_fp8_sm90_kernel");
}

}  // namespace

void attention_forward_fp8_sm90(Ctx& ctx, const AttentionForwardArgs& args, const AttentionShape& shape) {
    auto* const with_borders = shape.HS == 64 ? launch<64, true> : launch<128, true>;
    auto* const without = shape.HS == 64 ? launch<64, false> : launch<128, false>;
    (shape.has_borders() ? with_borders : without)(ctx, args, shape);
}

}  // namespace cuda
