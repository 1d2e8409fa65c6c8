// Quantizes the packed Q, K and V for FP8 attention, after applying rope.
#include "llmc/cuda/fp8.cuh"
#include "llmc/cuda/ptx.cuh"
#include "llmc/cuda/rope.cuh"

namespace cuda {
namespace {

constexpr int kBlocksPerSm = 3;

struct HeadsWork {
    bf16* qkv;
    const float* cos_sin;
    const int32_t* positions;   // (B, T), optional
    uint8_t* bytes;
    float* scales;
    uint32_t T, heads, first_value_head, blocks;   // blocks: per head
    uint32_t items;   // blocks of all heads, the head index innermost, so that heads share rows of the table
};

// A thread's 8 columns, and the 8 columns HS / 2 further, of 4 tokens that are adjacent in head_token_order.
template <int HS> struct HeadThread {
    static constexpr uint32_t kPairs = HS / 16, kThreads = 32 * kPairs;
    uint32_t column = threadIdx.x % kPairs * 8, quad = threadIdx.x / kPairs;

    __device__ uint32_t first_token() const { return quad / 4 * 16 + quad % 4 * 2; }
    // Distance of the r-th token from the first.
    __device__ static constexpr uint32_t apart(int r) { return static_cast<uint32_t>(head_token_order(r)); }
};
// Head, block of 128 tokens and sequence of an item.
struct HeadPlace {
    uint32_t head, block, b;

    __device__ HeadPlace(const HeadsWork& work, uint32_t item)
        : head(item % work.heads), block(item / work.heads % work.blocks), b(item / work.heads / work.blocks) {}
    __device__ void next(const HeadsWork& work) {
        if (++head < work.heads) return;
        head = 0;
        if (++block < work.blocks) return;
        block = 0, b++;
    }
};

// Returns the largest magnitude in a block of threads. shared: one word per warp, not the memory of the
// previous call.
template <uint32_t threads> __device__ inline uint32_t block_magnitude(uint32_t mine, uint32_t* shared) {
    const uint32_t most = __reduce_max_sync(0xffffffffu, mine);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = most;
    __syncthreads();
    uint32_t largest = 0;
#pragma unroll
    for (uint32_t w = 0; w < threads / 32; w++) largest = max(largest, shared[w]);
    return largest;
}

// Stores four tokens' bytes of the thread's columns into HS rows of 128 tokens. Groups of 16 tokens are swizzled within
// a row to avoid bank conflicts on both sides of the transpose.
template <int HS>
__device__ inline void transpose_to(uint32_t (&rows)[HS][32], const HeadThread<HS>& t, const uint2 (&bytes)[4],
                                    int half) {
#pragma unroll
    for (int word = 0; word < 2; word++) {
        uint32_t tokens[4], columns[4];
#pragma unroll
        for (int r = 0; r < 4; r++) tokens[r] = word ? bytes[r].y : bytes[r].x;
        transpose_bytes(tokens, columns);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            rows[half * (HS / 2) + t.column + 4 * word + c][t.quad ^ (t.column / 8 * 4)] = columns[c];
        }
    }
}
template <int HS> __device__ inline void store_rows(uint8_t* out, const uint32_t (&rows)[HS][32]) {
    for (uint32_t i = threadIdx.x; i < HS * 8; i += HeadThread<HS>::kThreads) {
        const uint32_t row = i / 8, chunk = i % 8, swap = row % (HS / 2) / 8;
        *reinterpret_cast<uint4*>(out + i * 16) = *reinterpret_cast<const uint4*>(&rows[row][(chunk ^ swap) * 4]);
    }
}

// head_mix of 16 columns of a token, times mul.
__device__ inline void mix(uint4& x, uint4& y, float (&v)[16], float mul) {
    head_mix(v);
    float low[8], high[8];
#pragma unroll
    for (int i = 0; i < 8; i++) low[i] = v[i] * mul, high[i] = v[i + 8] * mul;
    x = pack<bf16>(low), y = pack<bf16>(high);
}
__device__ inline void mix(uint4& x, uint4& y) {
    float low[8], high[8], v[16];
    unpack<bf16>(x, low), unpack<bf16>(y, high);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = low[i], v[i + 8] = high[i];
    mix(x, y, v, 0.25f);
}

// Rounds 8 values times scale to INT8, 0 unless `finite`; v: the integers. The sum with 1.5 * 2^23 has the integer in
// its last bits; no multiplication is fused with it, as on the CPU.
__device__ inline uint2 to_int8x8(const uint4& x, float scale, bool finite, float* v) {
    constexpr float kBias = 12582912.0f;
    float in[8];
    unpack<bf16>(x, in);
    uint32_t bits[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float biased = finite ? __fadd_rn(__fmul_rn(in[i], scale), kBias) : kBias;
        bits[i] = __float_as_uint(biased), v[i] = biased - kBias;
    }
    auto word = [&](int i) {
        return __byte_perm(__byte_perm(bits[i], bits[i + 1], 0x0040), __byte_perm(bits[i + 2], bits[i + 3], 0x0040),
                           0x5410);
    };
    return make_uint2(word(0), word(4));
}

// Math: QuantizeHeadsArgs.
// Source: ops.h.
// Traffic: qkv read and written, 1 byte per element written, once; the rope table once for all heads of 128 tokens.
// Requires: HS 64 or 128, 16-byte aligned rows.
// Parallel: a block processes a range of items, each 128 tokens of a head. Adjacent ranges run on the same
//           multiprocessor, whose L1 cache then holds their part of the rope table. A thread owns 8 pairs of 4 tokens.
template <int HS, bool kRope>
__global__ void __launch_bounds__(HeadThread<HS>::kThreads, kBlocksPerSm * 128 / HS)
    quantize_heads_kernel(const __grid_constant__ HeadsWork work) {
    constexpr uint32_t kThreads = HeadThread<HS>::kThreads, kTokens = kHeadBlock;
    __shared__ __align__(16) uint32_t rows[HS][32];
    __shared__ uint32_t shared[2][kThreads / 32];
    wait_for_previous_kernels();
    const HeadThread<HS> t;
    const uint32_t per_sm = kBlocksPerSm * 128 / HS, sms = gridDim.x / per_sm, width = work.heads * HS;
    const uint64_t range = blockIdx.x % sms * per_sm + blockIdx.x / sms;
    const auto begin = static_cast<uint32_t>(range * work.items / gridDim.x);
    const auto end = static_cast<uint32_t>((range + 1) * work.items / gridDim.x);
    HeadPlace at_work(work, begin);
    for (uint32_t item = begin; item < end; item++, at_work.next(work)) {
        const uint32_t head = at_work.head, token = at_work.block * kTokens + t.first_token();
        const bool value = head >= work.first_value_head;
        bf16* const own = work.qkv + (uint64_t{at_work.b} * work.T + token) * width + head * HS + t.column;
        const uint32_t tokens = work.T > token ? work.T - token : 0;   // from the thread's first token on
        uint4 x[4][2];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const bf16* at = own + t.apart(r) * width;
            x[r][0] = t.apart(r) < tokens ? load_vec_streaming(at) : uint4{};
            x[r][1] = t.apart(r) < tokens ? load_vec_streaming(at + HS / 2) : uint4{};
        }
        if (kRope && !value) {
            const int32_t* positions = work.positions + uint64_t{at_work.b} * work.T;
#pragma unroll
            for (int r = 0; r < 4; r++) {
                float cosine[8], sine[8];
                if (t.apart(r) < tokens) {
                    const uint32_t at = token + t.apart(r), position = work.positions ? positions[at] : at;
                    const float* angles = work.cos_sin + uint64_t{position} * HS + 2 * t.column;
                    load_angles(ptx::opaque(angles), 1.0f, cosine, sine);
                    rotate_vectors(x[r][0], x[r][1], cosine, sine);
                }
            }
        }
        if (!value) {
#pragma unroll
            for (int r = 0; r < 4; r++) mix(x[r][0], x[r][1]);
        }
        uint32_t most = 0;
#pragma unroll
        for (int r = 0; r < 4; r++) most = max_pair(most, max_pair(amax_pair(x[r][0]), amax_pair(x[r][1])));
        const uint32_t largest = block_magnitude<kThreads>(larger_of_pair(most), shared[item % 2]);
        const bool finite = largest < kInfinityMagnitude;
        const float scale = head_scale_of(largest << 16, !value), scale_inv = finite ? 1 / scale : value ? 1 : scale;

        const uint64_t place = (uint64_t{at_work.b} * work.heads + head) * work.blocks + at_work.block;
        uint8_t* const out = work.bytes + place * kTokens * HS;
        if (threadIdx.x == 0) work.scales[place] = scale_inv;
        if (!value) {
#pragma unroll
            for (int r = 0; r < 4; r++) {
                float v[16];
                uint8_t* const at = out + (t.first_token() + t.apart(r)) * HS + t.column;
                *reinterpret_cast<uint2*>(at) = to_int8x8(x[r][0], scale, finite, v);
                *reinterpret_cast<uint2*>(at + HS / 2) = to_int8x8(x[r][1], scale, finite, v + 8);
                mix(x[r][0], x[r][1], v, 0.25f * scale_inv);
                bf16* const back = own + t.apart(r) * width;
                if (t.apart(r) >= tokens) continue;
                store_vec_streaming(back, x[r][0]);
                store_vec_streaming(back + HS / 2, x[r][1]);
            }
            continue;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint2 bytes[4];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                bytes[r] = to_fp8x8<Dtype::kE4m3>(x[r][half], scale);
                bf16* at = own + t.apart(r) * width + half * (HS / 2);
                if (t.apart(r) < tokens) store_vec_streaming(at, from_e4m3x8(bytes[r], scale_inv));
            }
            transpose_to(rows, t, bytes, half);
        }
        __syncthreads();   // the barrier of the next block_magnitude protects `rows` from the next writes
        store_rows<HS>(out, rows);
    }
}

template <int HS, bool kRope> void launch(Ctx& ctx, const HeadsWork& work) {
    const unsigned grid = static_cast<unsigned>(ctx.sm_count) * (kBlocksPerSm * 128 / HS);
    launch_early(ctx, quantize_heads_kernel<HS, kRope>, grid, HeadThread<HS>::kThreads, 0, work);
}

}  // namespace

void quantize_heads(Ctx& ctx, const QuantizeHeadsArgs& args) {
    const int64_t heads = args.NH + 2 * args.NKV, blocks = head_blocks(args.T), HS = args.HS;
    CHECK(HS == 64 || HS == 128, "quantize_heads: head dim %lld", (long long)HS);
    CHECK(args.T < (int64_t{1} << 31) - 256 && args.B * blocks * heads < (int64_t{1} << 31),
          "quantize_heads: B %lld T %lld, %lld heads", (long long)args.B, (long long)args.T, (long long)heads);
    expect(args.qkv, Dtype::kBf16, args.B * args.T * heads * HS, "quantize_heads: qkv");
    expect(args.heads.bytes, Dtype::kE4m3, args.B * heads * blocks * kHeadBlock * HS, "quantize_heads: bytes");
    expect(args.heads.scales, Dtype::kFp32, args.B * heads * blocks, "quantize_heads: scales");
    if (args.cos_sin) expect_at_least(args.cos_sin, Dtype::kFp32, args.T * HS, "quantize_heads: cos_sin");
    CHECK(vectorizable<bf16>(HS, {args.qkv.data, args.heads.bytes.data, args.cos_sin.data}),
          "quantize_heads: not 16-byte aligned");
    const HeadsWork work{.qkv = args.qkv.as<bf16>(), .cos_sin = args.cos_sin ? args.cos_sin.as<const float>() : nullptr,
                         .positions = args.positions, .bytes = static_cast<uint8_t*>(args.heads.bytes.data),
                         .scales = args.heads.scales.as<float>(), .T = static_cast<uint32_t>(args.T),
                         .heads = static_cast<uint32_t>(heads),
                         .first_value_head = static_cast<uint32_t>(args.NH + args.NKV),
                         .blocks = static_cast<uint32_t>(blocks),
                         .items = static_cast<uint32_t>(args.B * blocks * heads)};
    if (HS == 64) args.cos_sin ? launch<64, true>(ctx, work) : launch<64, false>(ctx, work);
    else args.cos_sin ? launch<128, true>(ctx, work) : launch<128, false>(ctx, work);
}

}  // namespace cuda
