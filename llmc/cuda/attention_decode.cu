// Attention of one new token per text over the cached keys and values of its text (Flash-Decoding: the keys are split
// over blocks, and the parts combined), and the kernel that fills the cache.
#include "llmc/cuda/attention.cuh"

namespace cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kKeysAtOnce = 4;     // loads in flight per warp
constexpr int kCopyThreads = 256;

// KvCache as a kernel takes it.
template <typename T> struct CacheView {
    T* rows;
    const int32_t *slots, *positions;
    int64_t capacity, width;   // width: elements of a position

    __device__ T* at(int64_t n, int64_t position) const { return rows + (slots[n] * capacity + position) * width; }
};
template <typename T> CacheView<T> view_of(const KvCache& cache, int64_t NKV, int64_t HS) {
    return {cache.rows.as<T>(), cache.slots, cache.positions, cache.capacity, 2 * NKV * HS};
}

struct DecodeShape {
    int NH, NKV, HS, splits;
    int window;   // 0: all keys
    float softmax_mul;

    // The first key that a query attends to.
    __device__ int first_key(int position) const { return window > 0 ? max(0, position + 1 - window) : 0; }
};

template <typename T> __device__ float2 load_pair(const T* p) {
    if constexpr (std::is_same_v<T, bf16>) {
        const uint32_t raw = *reinterpret_cast<const uint32_t*>(p);
        return make_float2(bf16x2_low(raw), bf16x2_high(raw));
    } else {
        return *reinterpret_cast<const float2*>(p);
    }
}

// Math: cache[slot][position] = keys and values of the row of qkv; nothing for padding.
// Source: a copy.
// Traffic: key and value heads read and written once.
// Requires: kWidth > 1 needs rows of a multiple of it and 16-byte alignment.
// Parallel: a block owns a row.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kCopyThreads)
    cache_append_kernel(const CacheView<T> cache, const T* qkv, int64_t row_elems) {
    const int64_t n = blockIdx.x;
    const int position = cache.positions[n];
    if (position < 0) return;
    const T* from = qkv + (n + 1) * row_elems - cache.width;
    T* to = cache.at(n, position);
    for (int64_t i = int64_t{threadIdx.x} * kWidth; i < cache.width; i += kCopyThreads * kWidth) {
        Packed<T, kWidth> raw;
        raw.load(from + i);
        *reinterpret_cast<typename Packed<T, kWidth>::Raw*>(to + i) = raw.raw;
    }
}

// Math: over the kDecodeSplit keys of a split: s_j = softmax_mul q . k_j; m = max s_j; l = sum_j exp(s_j - m);
//       part = sum_j exp(s_j - m) v_j
// Source: Dao et al., Flash-Decoding, 2023; Dao, FlashAttention-2, arXiv 2307.08691, algorithm 1.
// Traffic: cached keys and values read once for every kHeads query heads that share them; HS + 2 floats per split and
//          query head written.
// Requires: HS even, at most 64 * kPairs; rows aligned to pairs of elements.
// Parallel: a block owns a split of up to kHeads query heads of one key head, a warp every kWarps-th group of keys, a
//           lane pairs of head elements.
template <typename T, int kPairs, int kHeads>
__global__ void __launch_bounds__(kThreads)
    attention_decode_kernel(float* splits, const T* qkv, const CacheView<T> cache, const DecodeShape shape) {
    __shared__ float parts[kWarps][kHeads][64 * kPairs], largest[kWarps][kHeads], weights[kWarps][kHeads];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, HS = shape.HS, group = shape.NH / shape.NKV;
    const int chunks = (group + kHeads - 1) / kHeads;
    const int64_t n = blockIdx.x / (shape.NKV * chunks);
    const int kv = blockIdx.x / chunks % shape.NKV, in_group = static_cast<int>(blockIdx.x % chunks) * kHeads;
    const int heads = min(kHeads, group - in_group), first_head = kv * group + in_group;
    const int split = static_cast<int>(blockIdx.y) * static_cast<int>(kDecodeSplit), position = cache.positions[n];
    const int first = max(split, shape.first_key(position));
    const int end = min(split + static_cast<int>(kDecodeSplit), position + 1);
    if (first >= end) return;

    float2 q[kHeads][kPairs], sum[kHeads][kPairs];
    float most[kHeads], weight_sum[kHeads];
    const T* row = qkv + n * (shape.NH + 2 * shape.NKV) * HS + first_head * HS;
#pragma unroll
    for (int h = 0; h < kHeads; h++) {
        most[h] = -INFINITY, weight_sum[h] = 0;
#pragma unroll
        for (int i = 0; i < kPairs; i++) {
            const int at = 2 * lane + 64 * i;
            q[h][i] = h < heads && at < HS ? load_pair(row + h * HS + at) : make_float2(0, 0);
            sum[h][i] = make_float2(0, 0);
        }
    }
    for (int key = first + warp * kKeysAtOnce; key < end; key += kWarps * kKeysAtOnce) {
        float2 k[kKeysAtOnce][kPairs], v[kKeysAtOnce][kPairs];
#pragma unroll
        for (int j = 0; j < kKeysAtOnce; j++) {
            const T* from = cache.at(n, min(key + j, end - 1)) + kv * HS;
#pragma unroll
            for (int i = 0; i < kPairs; i++) {
                const int at = 2 * lane + 64 * i;
                k[j][i] = at < HS ? load_pair(from + at) : make_float2(0, 0);
                v[j][i] = at < HS ? load_pair(from + shape.NKV * HS + at) : make_float2(0, 0);
            }
        }
#pragma unroll
        for (int h = 0; h < kHeads; h++) {
            float score[kKeysAtOnce], next = most[h];
#pragma unroll
            for (int j = 0; j < kKeysAtOnce; j++) {
                float dot = 0;
#pragma unroll
                for (int i = 0; i < kPairs; i++)
                    dot = fmaf(q[h][i].y, k[j][i].y, fmaf(q[h][i].x, k[j][i].x, dot));
                dot = warp_sum(dot);
                score[j] = key + j < end ? dot * shape.softmax_mul : -INFINITY;
                next = fmaxf(next, score[j]);
            }
            const float correction = expf(most[h] - next);   // `next` is finite, because key is valid
            most[h] = next;
            weight_sum[h] *= correction;
#pragma unroll
            for (int i = 0; i < kPairs; i++) sum[h][i].x *= correction, sum[h][i].y *= correction;
#pragma unroll
            for (int j = 0; j < kKeysAtOnce; j++) {
                const float weight = expf(score[j] - next);
                weight_sum[h] += weight;
#pragma unroll
                for (int i = 0; i < kPairs; i++) {
                    sum[h][i].x = fmaf(weight, v[j][i].x, sum[h][i].x);
                    sum[h][i].y = fmaf(weight, v[j][i].y, sum[h][i].y);
                }
            }
        }
    }
#pragma unroll
    for (int h = 0; h < kHeads; h++) {
        if (lane == 0) largest[warp][h] = most[h], weights[warp][h] = weight_sum[h];
#pragma unroll
        for (int i = 0; i < kPairs; i++) {
            parts[warp][h][2 * lane + 64 * i] = sum[h][i].x;
            parts[warp][h][2 * lane + 64 * i + 1] = sum[h][i].y;
        }
    }
    __syncthreads();
    // Element HS is the largest score, which is finite, because warp 0 has a key. Element HS + 1 is the sum of exp.
    for (int at = threadIdx.x; at < heads * (HS + 2); at += kThreads) {
        const int h = at / (HS + 2), i = at % (HS + 2);
        float all = largest[0][h], total = 0;
        for (int w = 1; w < kWarps; w++) all = fmaxf(all, largest[w][h]);
        for (int w = 0; w < kWarps; w++) {
            const float part = i < HS ? parts[w][h][i] : weights[w][h];
            total = fmaf(expf(largest[w][h] - all), part, total);
        }
        float* to = splits + ((n * shape.NH + first_head + h) * shape.splits + blockIdx.y) * (HS + 2);
        to[i] = i == HS ? all : total;
    }
}

// Math: out = sum of w part / sum of w l over the splits, with w = exp(m - largest m); 0 for padding
// Source: as attention_decode_kernel.
// Traffic: the parts of the splits read once, out written once.
// Requires: nothing.
// Parallel: a block owns a query head of a row, a thread elements of it.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    attention_combine_kernel(T* out, const float* splits, const int32_t* positions, const DecodeShape shape) {
    const int64_t row = blockIdx.x;   // n * NH + head
    const int HS = shape.HS, position = positions[row / shape.NH];
    const int begin = shape.first_key(position) / static_cast<int>(kDecodeSplit);
    const int end = position < 0 ? 0 : position / static_cast<int>(kDecodeSplit) + 1;
    const float* from = splits + row * shape.splits * (HS + 2);
    float largest = -INFINITY;
    for (int s = begin; s < end; s++) largest = fmaxf(largest, from[s * (HS + 2) + HS]);
    for (int i = threadIdx.x; i < HS; i += kThreads) {
        float sum = 0, weight_sum = 0;
        for (int s = begin; s < end; s++) {
            const float* part = from + s * (HS + 2);
            const float correction = expf(part[HS] - largest);
            sum = fmaf(correction, part[i], sum);
            weight_sum = fmaf(correction, part[HS + 1], weight_sum);
        }
        out[row * HS + i] = from_float<T>(end > 0 ? sum / weight_sum : 0.0f);
    }
}

void expect_cache(const KvCache& cache, Dtype dtype, int64_t N, int64_t NH, int64_t NKV, int64_t HS, const char* op) {
    CHECK(N > 0 && NKV > 0 && NH > 0 && NH % NKV == 0 && HS > 0 && HS % 2 == 0 && HS <= 256,
          "%s: %lld rows, %lld query heads over %lld, head dim %lld", op, (long long)N, (long long)NH, (long long)NKV,
          (long long)HS);
    CHECK(cache.slots && cache.positions && cache.capacity > 0 && cache.capacity < (int64_t{1} << 31) - kDecodeSplit,
          "%s: a cache of %lld positions", op, (long long)cache.capacity);
    CHECK(cache.rows.elems % (cache.capacity * 2 * NKV * HS) == 0, "%s: a cache of %lld elements", op,
          (long long)cache.rows.elems);
    expect(cache.rows, dtype, cache.rows.elems, op);
    expect_aligned(cache.rows, op);
}

template <typename T, int kPairs, int kHeads> void launch_decode(Ctx& ctx, const AttentionDecodeArgs& args,
                                                                const DecodeShape& shape) {
    const dim3 grid(grid_size(args.N * args.NKV * ceil_div(args.NH / args.NKV, kHeads)), shape.splits);
    attention_decode_kernel<T, kPairs, kHeads><<<grid, kThreads, 0, stream_of(ctx)>>>(
        args.splits.as<float>(), args.qkv.as<T>(), view_of<T>(args.cache, args.NKV, args.HS), shape);
    CHECK_LAUNCH("attention_decode_kernel");
}

}  // namespace

void cache_append(Ctx& ctx, const CacheAppendArgs& args) {
    const char* op = "cache_append";
    const int64_t row_elems = (args.NH + 2 * args.NKV) * args.HS, width = 2 * args.NKV * args.HS;
    expect_cache(args.cache, args.qkv.dtype, args.N, args.NH, args.NKV, args.HS, op);
    expect(args.qkv, args.qkv.dtype, args.N * row_elems, op);
    dispatch(args.qkv.dtype, op, [&](auto type) {
        using T = decltype(type);
        const bool vector =
            vectorizable<T>(row_elems, {args.qkv.data}) && vectorizable<T>(width, {args.cache.rows.data});
        with_width<T>(vector, [&](auto kWidth) {
            cache_append_kernel<T, kWidth.value><<<grid_size(args.N), kCopyThreads, 0, stream_of(ctx)>>>(
                view_of<T>(args.cache, args.NKV, args.HS), args.qkv.as<T>(), row_elems);
            CHECK_LAUNCH("cache_append_kernel");
        });
    });
}

void attention_decode(Ctx& ctx, const AttentionDecodeArgs& args) {
    const char* op = "attention_decode";
    const int64_t NH = args.NH, NKV = args.NKV, HS = args.HS, splits = decode_splits(args.longest);
    expect_cache(args.cache, args.qkv.dtype, args.N, NH, NKV, HS, op);
    expect(args.qkv, args.qkv.dtype, args.N * (NH + 2 * NKV) * HS, "attention_decode: qkv");
    expect_aligned(args.qkv, "attention_decode: qkv");
    expect(args.out, args.qkv.dtype, args.N * NH * HS, "attention_decode: out");
    expect(args.splits, Dtype::kFp32, decode_split_elems(args.N, NH, HS, args.longest), "attention_decode: splits");
    CHECK(args.longest > 0 && args.longest <= args.cache.capacity && splits < 65536 && args.softmax_mul > 0,
          "attention_decode: %lld keys, softmax_mul %g", (long long)args.longest, args.softmax_mul);
    CHECK(args.window >= 0, "attention_decode: a window of %lld tokens", (long long)args.window);
    const DecodeShape shape{static_cast<int>(NH), static_cast<int>(NKV), static_cast<int>(HS), static_cast<int>(splits),
                            static_cast<int>(std::min(args.window, args.cache.capacity)), args.softmax_mul};
    dispatch(args.qkv.dtype, op, [&](auto type) {
        using T = decltype(type);
        const bool grouped = NH > NKV;
        if (HS <= 64 && grouped) launch_decode<T, 1, 4>(ctx, args, shape);
        else if (HS <= 64) launch_decode<T, 1, 1>(ctx, args, shape);
        else if (HS <= 128 && grouped) launch_decode<T, 2, 4>(ctx, args, shape);
        else if (HS <= 128) launch_decode<T, 2, 1>(ctx, args, shape);
        else launch_decode<T, 4, 1>(ctx, args, shape);
        attention_combine_kernel<T><<<grid_size(args.N * NH), kThreads, 0, stream_of(ctx)>>>(
            args.out.as<T>(), args.splits.as<float>(), args.cache.positions, shape);
        CHECK_LAUNCH("attention_combine_kernel");
    });
    if (args.quant) quantize(ctx, {.quant = args.quant, .in = args.out, .N = args.N, .C = NH * HS});
}

}  // namespace cuda
