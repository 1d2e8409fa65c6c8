// Token and position embedding: a gather forward, a sum of scattered rows backward.
#include "llmc/cuda/common.cuh"

namespace cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kLanes * kWarps;
constexpr int kForwardRows = 4;          // rows that a thread of the forward has on their way
constexpr int kLongRun = kLanes;         // rows of one token that are worth a block
constexpr int kShortWindow = kLanes;     // sorted positions of a block that adds up short runs
constexpr int kLongWindow = kThreads;    // sorted positions that a block searches for long runs
// Vectors of a row that a lane owns in short runs (one in long ones).
template <typename T> constexpr int kShortVecs = sizeof(T) == 2 ? 4 : 2;
constexpr int kShortAhead = 64;          // bytes of rows that a lane has on their way in short runs
constexpr int kLongAhead = 96;           // and in long ones

// Math: out[n] = wte[tokens[n]] + wpe[n % T] (period = T).
// Source: table look-up.
// Traffic: one row of wte (and wpe, from L2) read and one row of out written per token.
// Requires: kWidth > 1 needs C a multiple of it and aligned rows.
// Parallel: blockDim.x threads own kForwardRows rows at a time, blockDim.y such groups a block; thread x the
// vectors x, x + blockDim.x, ... of each.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    embedding_forward_kernel(T* out, const T* wte, const T* wpe, const int32_t* tokens, int32_t* bad_tokens,
                             int64_t N, int64_t period, int64_t C, int64_t V) {
    const int64_t first = (int64_t{blockIdx.x} * blockDim.y + threadIdx.y) * kForwardRows;
    const T* from[kForwardRows];
#pragma unroll
    for (int r = 0; r < kForwardRows; r++) {
        int64_t token = first + r < N ? tokens[first + r] : 0;
        if (token < 0 || token >= V) {
            if (threadIdx.x == 0) atomicAdd(bad_tokens, 1);
            token = 0;
        }
        from[r] = wte + token * C;
    }
    for (int64_t c = int64_t{threadIdx.x} * kWidth; c < C; c += int64_t{blockDim.x} * kWidth) {
        Packed<T, kWidth> raw[kForwardRows];
#pragma unroll
        for (int r = 0; r < kForwardRows; r++) {
            if (first + r < N) raw[r].load(from[r] + c);
        }
#pragma unroll
        for (int r = 0; r < kForwardRows; r++) {
            const int64_t n = first + r;
            if (n >= N) continue;
            float value[kWidth];
            raw[r].unpack_to(value);
            if (wpe) {
                float add[kWidth];
                load_floats<T, kWidth>(wpe + n % period * C + c, add);
#pragma unroll
                for (int i = 0; i < kWidth; i++) value[i] += add[i];
            }
            store_floats<T, kWidth>(out + n * C + c, value);
        }
    }
}

// Columns of one lane: kVecs vectors of kWidth columns, a warp's width apart.
template <int kWidth, int kVecs> struct LaneSum {
    float at[kVecs][kWidth] = {};
    int column, C;

    __device__ LaneSum(unsigned tile, int lane, int columns)
        : column((static_cast<int>(tile) * kVecs * kLanes + lane) * kWidth), C(columns) {}
    __device__ int column_of(int k) const { return column + k * kLanes * kWidth; }
    __device__ bool inside(int k) const { return column_of(k) < C; }

    // Adds the rows rows[0], ..., rows[count - 1] of dout in this order, kAheadBytes of them on their way.
    template <int kAheadBytes, typename T>
    __device__ void add_rows(const T* dout, const int32_t* rows, int count) {
        constexpr int kAhead = (kWidth == 1 ? kLanes / 2 : kAheadBytes / int(sizeof(T) * kWidth)) / kVecs;
        for (int first = 0; first < count; first += kAhead) {
            Packed<T, kWidth> raw[kAhead][kVecs];
#pragma unroll
            for (int r = 0; r < kAhead; r++) {
                if (first + r >= count) continue;
                const T* row = dout + int64_t{rows[first + r]} * C + column;
#pragma unroll
                for (int k = 0; k < kVecs; k++) {
                    if (inside(k)) raw[r][k].load(row + k * kLanes * kWidth);
                }
            }
#pragma unroll
            for (int r = 0; r < kAhead; r++) {
                if (first + r >= count) continue;
#pragma unroll
                for (int k = 0; k < kVecs; k++) {
                    float value[kWidth];
                    if (!inside(k)) continue;
                    raw[r][k].unpack_to(value);
#pragma unroll
                    for (int i = 0; i < kWidth; i++) at[k][i] += value[i];
                }
            }
        }
    }
};

// Length of the run of `token` that begins at sorted position `begin`, found by the whole block: 256 probes,
// then 256 between the last that is inside and the first that is not, until they are neighbours.
__device__ inline int64_t run_length(const int32_t* tokens, const int32_t* token_order, int64_t N,
                                     int64_t begin, int token) {
    int64_t inside = begin, range = N - begin;   // the run ends in (inside, inside + range]
    while (range > 1) {
        const int64_t step = (range + kThreads - 1) / kThreads, p = inside + (threadIdx.x + 1) * step;
        const bool same = p < inside + range && tokens[token_order[p]] == token;
        const int64_t steps_inside = __syncthreads_count(same);
        const int64_t last = inside + range;
        inside += steps_inside * step;
        range = min(step, last - inside);
    }
    return inside + 1 - begin;
}

// A block that searches sorted positions [first, first + kLongWindow) for the beginnings of long runs, and
// adds up each that it finds in columns [32 tile, 32 tile + 32) * kWidth: of every 256 rows a warp takes 32,
// then the 8 sums are added in order.
template <typename T, typename Grad, int kWidth>
__device__ void add_long_runs(Grad* dwte, const T* dout, const int32_t* tokens, const int32_t* token_order,
                              int64_t N, int C, int V, int64_t first, unsigned tile) {
    __shared__ int begins[kLongWindow / kLongRun + 2], found;   // positions within the window, in any order
    __shared__ int32_t rows[kThreads];
    __shared__ float sums[kWarps][kWidth][kLanes];
    const int thread = threadIdx.x, lane = thread % kLanes, warp = thread / kLanes;
    if (thread == 0) found = 0;
    __syncthreads();
    const int64_t p = first + thread;
    if (p + kLongRun <= N) {
        const int token = tokens[token_order[p]];
        const int before = p > 0 ? tokens[token_order[p - 1]] : -1;
        const int last_of_long = tokens[token_order[p + kLongRun - 1]];
        if (token >= 0 && token < V && before != token && last_of_long == token) {
            begins[atomicAdd(&found, 1)] = thread;
        }
    }
    __syncthreads();
    for (int run = 0; run < found; run++) {
        const int64_t begin = first + begins[run];
        const int token = tokens[token_order[begin]];
        const int64_t end = begin + run_length(tokens, token_order, N, begin, token);
        LaneSum<kWidth, 1> sum(tile, lane, C);
        int32_t next_row = begin + thread < end ? token_order[begin + thread] : 0;
        for (int64_t base = begin; base < end; base += kThreads) {
            rows[thread] = next_row;
            __syncthreads();
            next_row = base + kThreads + thread < end ? token_order[base + kThreads + thread] : 0;
            const int64_t left = end - base - warp * kLanes;
            sum.template add_rows<kLongAhead>(dout, rows + warp * kLanes,
                                              static_cast<int>(min(left, int64_t{kLanes})));
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < kWidth; i++) sums[warp][i][lane] = sum.at[0][i];
        __syncthreads();
        if (warp < kWidth && sum.inside(0)) {   // warp i takes element i of each vector (kWidth <= kWarps)
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < kWarps; w++) total += sums[w][warp][lane];
            Grad* to = dwte + int64_t{token} * C + sum.column + warp;
            *to = from_float<Grad>(to_float(*to) + total);
        }
        __syncthreads();
    }
}

// A block that adds up the short runs that begin in sorted positions [first, first + kShortWindow), a warp a
// run, in columns [32 tile, 32 tile + 32) * kVecs * kWidth.
template <typename T, typename Grad, int kWidth>
__device__ void add_short_runs(Grad* dwte, const T* dout, const int32_t* tokens, const int32_t* token_order,
                               int64_t N, int C, int V, int64_t first, unsigned tile) {
    constexpr int kVecs = kShortVecs<T>;
    constexpr int kSeen = 1 + kShortWindow + kLongRun;   // a position before the window, a long run after it
    __shared__ int32_t rows[kSeen], token_at[kSeen];
    __shared__ int begins[kShortWindow], found;          // positions within `rows`, in order
    const int thread = threadIdx.x, lane = thread % kLanes, warp = thread / kLanes;
    if (thread < kSeen) {
        const int64_t p = first - 1 + thread;
        const bool exists = p >= 0 && p < N;
        rows[thread] = exists ? token_order[p] : 0;
        token_at[thread] = exists ? tokens[rows[thread]] : -1;
    }
    __syncthreads();
    if (warp == 0) {   // a lane looks at one position of the window
        const int i = 1 + lane, token = token_at[i];
        const bool is_long = token_at[i + kLongRun - 1] == token;
        const bool begin = token >= 0 && token < V && token_at[i - 1] != token && !is_long;
        const unsigned all = __ballot_sync(0xffffffffu, begin);
        if (begin) begins[__popc(all & ((1u << lane) - 1))] = i;
        if (lane == 0) found = __popc(all);
    }
    __syncthreads();
    for (int run = warp; run < found; run += kWarps) {
        const int i = begins[run], token = token_at[i];
        const int count = __popc(__ballot_sync(0xffffffffu, token_at[i + lane] == token));
        LaneSum<kWidth, kVecs> sum(tile, lane, C);
        Grad* to = dwte + int64_t{token} * C;
        Packed<Grad, kWidth> old[kVecs];
        // Most runs are one row: it and the gradient are on their way together.
        Packed<T, kWidth> first_row[kVecs];
        const T* from = dout + int64_t{rows[i]} * C;
#pragma unroll
        for (int k = 0; k < kVecs; k++) {
            if (sum.inside(k)) first_row[k].load(from + sum.column_of(k));
        }
#pragma unroll
        for (int k = 0; k < kVecs; k++) {
            if (sum.inside(k)) old[k].load(to + sum.column_of(k));
        }
#pragma unroll
        for (int k = 0; k < kVecs; k++) {
            if (sum.inside(k)) first_row[k].unpack_to(sum.at[k]);
        }
        sum.template add_rows<kShortAhead>(dout, rows + i + 1, count - 1);
#pragma unroll
        for (int k = 0; k < kVecs; k++) {
            if (!sum.inside(k)) continue;
            float value[kWidth];
            old[k].unpack_to(value);
#pragma unroll
            for (int j = 0; j < kWidth; j++) value[j] += sum.at[k][j];
            store_floats<Grad, kWidth>(to + sum.column_of(k), value);
        }
    }
}

// Math: dwte[v] += sum of dout[n] over the rows n with tokens[n] == v.
// Source: transpose of the gather; the rows come sorted by token, so that a sum is a run of positions.
// Traffic: dout read once, each touched row of dwte read and written once.
// Requires: token_order sorted by token; C and V below 2^30; kWidth = 4 needs C a multiple of it and rows
// aligned to 4 elements.
// Parallel: the first long_blocks blocks look for long runs, which take longest, the others for short ones:
// see the two functions above. Blocks of consecutive numbers own consecutive columns.
template <typename T, typename Grad, int kWidth>
__global__ void __launch_bounds__(kThreads, 3)
    embedding_backward_tokens_kernel(Grad* dwte, const T* dout, const int32_t* tokens,
                                     const int32_t* token_order, int64_t N, int C, int V,
                                     unsigned long_blocks, unsigned long_tiles, unsigned short_tiles) {
    if (blockIdx.x < long_blocks) {
        const int64_t first = int64_t{blockIdx.x / long_tiles} * kLongWindow;
        add_long_runs<T, Grad, kWidth>(dwte, dout, tokens, token_order, N, C, V, first,
                                       blockIdx.x % long_tiles);
    } else {
        const unsigned block = blockIdx.x - long_blocks;
        const int64_t first = int64_t{block / short_tiles} * kShortWindow;
        add_short_runs<T, Grad, kWidth>(dwte, dout, tokens, token_order, N, C, V, first, block % short_tiles);
    }
}

// Math: dwpe[t] += sum of dout[n] over n = t, t + period, t + 2 period, ... (period = T).
// Source: plain column sum.
// Traffic: dout read once, dwpe read and written once.
// Requires: kWidth > 1 needs C a multiple of it and aligned rows.
// Parallel: a thread owns kWidth columns of one position.
template <typename T, typename Grad, int kWidth>
__global__ void __launch_bounds__(kThreads)
    embedding_backward_positions_kernel(Grad* dwpe, const T* dout, int64_t N, int64_t period, int64_t C,
                                        unsigned tiles) {
    const int64_t t = int64_t{blockIdx.x / tiles} * kWarps + threadIdx.x / kLanes;
    const int64_t column = (int64_t{blockIdx.x % tiles} * kLanes + threadIdx.x % kLanes) * kWidth;
    if (t >= period || t >= N || column >= C) return;
    float sum[kWidth] = {}, old[kWidth];
    load_floats<Grad, kWidth>(dwpe + t * C + column, old);
#pragma unroll 8
    for (int64_t n = t; n < N; n += period) {
        float value[kWidth];
        load_floats<T, kWidth>(dout + n * C + column, value);
#pragma unroll
        for (int i = 0; i < kWidth; i++) sum[i] += value[i];
    }
#pragma unroll
    for (int i = 0; i < kWidth; i++) sum[i] += old[i];
    store_floats<Grad, kWidth>(dwpe + t * C + column, sum);
}

template <typename T, typename Grad, int kWidth>
void launch_embedding_backward(Ctx& ctx, const EmbeddingBackwardArgs& args) {
    const int64_t N = args.N, C = args.C;
    const T* dout = args.dout.as<T>();
    Grad *dwte = args.dwte.as<Grad>(), *dwpe = args.dwpe.as<Grad>();
    const int64_t tiles = ceil_div(C, kLanes * kWidth), short_tiles = ceil_div(tiles, kShortVecs<T>);
    const int64_t long_blocks = N < kLongRun ? 0 : ceil_div(N, kLongWindow) * tiles;
    const int64_t blocks = long_blocks + ceil_div(N, kShortWindow) * short_tiles;
    embedding_backward_tokens_kernel<T, Grad, kWidth><<<grid_size(blocks), kThreads, 0, stream_of(ctx)>>>(
        dwte, dout, args.tokens, args.token_order, N, static_cast<int>(C), static_cast<int>(args.V),
        static_cast<unsigned>(long_blocks), static_cast<unsigned>(tiles), static_cast<unsigned>(short_tiles));
    CHECK_LAUNCH("embedding_backward_tokens_kernel");
    if (!dwpe) return;
    embedding_backward_positions_kernel<T, Grad, kWidth>
        <<<grid_size(ceil_div(args.T, kWarps) * tiles), kThreads, 0, stream_of(ctx)>>>(
            dwpe, dout, N, args.T, C, static_cast<unsigned>(tiles));
    CHECK_LAUNCH("embedding_backward_positions_kernel");
}

}  // namespace

void embedding_forward(Ctx& ctx, const EmbeddingForwardArgs& args) {
    const int64_t N = args.N, C = args.C;
    const Dtype dtype = args.out.dtype;
    expect(args.out, dtype, N * C, "embedding_forward: out");
    expect_at_least(args.wte, dtype, args.V * C, "embedding_forward: wte");
    if (args.wpe) expect_at_least(args.wpe, dtype, std::min(args.T, N) * C, "embedding_forward: wpe");
    CHECK(args.tokens && args.bad_tokens, "embedding_forward without tokens or bad_tokens");
    dispatch(dtype, "embedding_forward", [&](auto type) {
        using T = decltype(type);
        T *out = args.out.as<T>(), *wte = args.wte.as<T>(), *wpe = args.wpe.as<T>();
        with_width<T>(vectorizable<T>(C, {out, wte, wpe}), [&](auto width) {
            constexpr int kWidth = decltype(width)::value;
            const int64_t lanes = ceil_div(C, kLanes * kWidth) * kLanes;
            const unsigned x = static_cast<unsigned>(std::min<int64_t>(kThreads, lanes));
            const dim3 block(x, kThreads / x);
            embedding_forward_kernel<T, kWidth>
                <<<grid_size(ceil_div(N, kForwardRows * block.y)), block, 0, stream_of(ctx)>>>(
                    out, wte, wpe, args.tokens, args.bad_tokens, N, args.T, C, args.V);
            CHECK_LAUNCH("embedding_forward_kernel");
        });
    });
}

void embedding_backward(Ctx& ctx, const EmbeddingBackwardArgs& args) {
    const int64_t N = args.N, C = args.C;
    const Dtype grad = args.dwte.dtype;
    expect(args.dout, args.dout.dtype, N * C, "embedding_backward: dout");
    expect_at_least(args.dwte, grad, args.V * C, "embedding_backward: dwte");
    if (args.dwpe) expect_at_least(args.dwpe, grad, std::min(args.T, N) * C, "embedding_backward: dwpe");
    constexpr int64_t kMax = int64_t{1} << 30;
    CHECK(C < kMax && args.V < kMax, "embedding_backward: %lld columns, %lld tokens", (long long)C,
          (long long)args.V);
    CHECK(args.tokens && args.token_order, "embedding_backward without tokens or token_order");
    dispatch(args.dout.dtype, "embedding_backward", [&](auto type) {
        using T = decltype(type);
        dispatch(grad, "embedding_backward: dwte", [&](auto grad_type) {
            using Grad = decltype(grad_type);
            // Four columns a lane: 16 bytes of fp32, 8 of bf16, a warp's accesses contiguous in both.
            constexpr int kWidth = 4;
            const bool vector = C % kWidth == 0 && aligned(args.dout, kWidth) && aligned(args.dwte, kWidth) &&
                                aligned(args.dwpe, kWidth);
            if (vector) launch_embedding_backward<T, Grad, kWidth>(ctx, args);
            else launch_embedding_backward<T, Grad, 1>(ctx, args);
        });
    });
}

}  // namespace cuda
