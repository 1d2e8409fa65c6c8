// Token and position embedding: a gather forward, a sum of scattered rows backward.
#include "llmc/cuda/common.cuh"

namespace cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kLanes * kWarps;
constexpr int kForwardRows = 4;          // rows in flight per thread of the forward

// The backward is bound by latency: a block must look up rows and tokens before it can load either matrix. On an H200,
// blocks of long runs take 40 % of its time for a tenth of the bytes (Llama-3-8B, 8192 tokens). A run is a range of
// sorted positions with equal tokens.
constexpr int kBackwardBlocksPerSm = 4;
constexpr int kLongRun = kLanes;         // runs of this length or more are summed in parallel
constexpr int kRunParts = 16;            // parts of a long run, at most
constexpr int kShortWindow = kLanes - 1; // sorted positions per block of short runs
constexpr int kShortRows = 5;            // rows in flight per thread of short runs (half as many in fp32)
constexpr int kLongSeen = 1024;          // sorted positions that a block inspects to find long runs
constexpr int kLongWindow = kLongSeen - kLongRun;   // positions in which it finds every beginning of a long run
constexpr int kTileLanes = 8;            // lanes that share a row of a long run
constexpr int kRowLanes = kLanes / kTileLanes;

// Math: out[n] = mul wte[tokens[n]] + wpe[positions[n], or n % T without positions] (period = T).
// Source: table look-up.
// Traffic: one row of wte (and wpe, from L2) read and one row of out written per token.
// Requires: kWidth > 1 needs C a multiple of it and aligned rows.
// Parallel: blockDim.x threads own kForwardRows rows at a time, with blockDim.y such groups per block; thread x owns
// the vectors x, x + blockDim.x, ... of each row.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    embedding_forward_kernel(T* out, const T* wte, const T* wpe, const int32_t* tokens, int32_t* bad_tokens,
                             const int32_t* positions, float mul, int64_t N, int64_t period, int64_t C, int64_t V) {
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
#pragma unroll
            for (int i = 0; i < kWidth; i++) value[i] *= mul;
            if (wpe) {
                float add[kWidth];
                const int64_t position = positions ? positions[n] : n % period;
                load_floats<T, kWidth>(wpe + position * C + c, add);
#pragma unroll
                for (int i = 0; i < kWidth; i++) value[i] += add[i];
            }
            store_floats<T, kWidth>(out + n * C + c, value);
        }
    }
}

// Row numbers sorted by token. token_at(p): the token at sorted position p, or -1 where it contributes nothing.
struct SortedRows {
    const int32_t *tokens, *token_order;
    int N, V;

    __device__ int token_of(int row) const {
        const int token = tokens[row];
        return token < V ? max(token, -1) : -1;
    }
    __device__ int token_at(int p) const { return p >= 0 && p < N ? token_of(token_order[p]) : -1; }
};

// Returns the end of a run, searched by a warp. same(p): whether position p is in the run; true for `inside`, false for
// `end`. Each round probes 32 positions between the last known inside and the first known outside.
template <typename Same> __device__ int run_end(int inside, int end, Same same) {
    int range = end - inside;   // the run ends in (inside, inside + range]
    while (range > 1) {
        const int step = (range + kLanes - 1) / kLanes;
        const int p = inside + static_cast<int>(threadIdx.x % kLanes + 1) * step;
        const int last = inside + range;
        inside += __popc(__ballot_sync(0xffffffffu, p < last && same(p))) * step;
        range = min(step, last - inside);
    }
    return inside + 1;
}

// One lane's sum over a long run, of kWidth columns from `column` on. kRowLanes lanes of a warp share these columns.
template <typename T, int kWidth> struct LongSum {
    float at[kWidth] = {};

    // Adds the rows at the kLanes positions from begin on, from begin + step on, ... up to `end`; then sums over the
    // lanes with the same columns, so that each of them has the result.
    template <typename RowAt>
    __device__ void add(const T* dout, RowAt row_at, int begin, int end, int step, int C, int column) {
        const int lane = threadIdx.x % kLanes, row_lane = lane / kTileLanes;
        constexpr int kAhead = sizeof(T) == 2 ? 8 : 4;
        int next_row = begin + lane < end ? row_at(begin + lane) : 0;
        for (int p = begin; p < end; p += step) {
            const int count = column < C ? min(end - p, kLanes) : 0, these_rows = next_row;
            next_row = p + step + lane < end ? row_at(p + step + lane) : 0;
#pragma unroll
            for (int r0 = 0; r0 < kLanes; r0 += kAhead * kRowLanes) {
                Packed<T, kWidth> raw[kAhead];
#pragma unroll
                for (int r = 0; r < kAhead; r++) {
                    const int i = r0 + r * kRowLanes + row_lane;
                    const int row = __shfl_sync(0xffffffffu, these_rows, i);
                    if (i < count) raw[r].load(dout + int64_t{row} * C + column);
                }
#pragma unroll
                for (int r = 0; r < kAhead; r++) {
                    float value[kWidth];
                    if (r0 + r * kRowLanes + row_lane >= count) continue;
                    raw[r].unpack_to(value);
#pragma unroll
                    for (int i = 0; i < kWidth; i++) at[i] += value[i];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kWidth; i++) {
#pragma unroll
            for (int offset = kTileLanes; offset < kLanes; offset *= 2) {
                at[i] += __shfl_xor_sync(0xffffffffu, at[i], offset);
            }
        }
    }
};

// Finds the long runs that begin in sorted positions [first, first + kLongWindow) and sums them in columns
// [kTileLanes tile, kTileLanes (tile + 1)) * kWidth. The block's warps share the parts of all runs: with p parts, each
// sums every p-th chunk of kLanes rows; then the parts of a run are added in order.
template <typename T, typename Grad, int kWidth>
__device__ void add_long_runs(Grad* dwte, const T* dout, const SortedRows& sorted, float mul, int C, int first,
                              unsigned tile) {
    constexpr int kMaxRuns = kLongWindow / kLongRun + 1;
    constexpr int kMaxParts = kLongWindow / kLanes + kMaxRuns + kRunParts;
    constexpr int kColumns = kTileLanes * kWidth;
    struct Run {
        int begin, end, token, first_part, parts;
    };
    __shared__ int32_t token_at[kLongSeen], row_at[kLongSeen];   // of position first - 1 + i
    __shared__ int begins[kMaxRuns], found, parts_found;   // indices of token_at, in any order
    __shared__ Run runs[kMaxRuns];
    __shared__ int run_of[kMaxParts];
    __shared__ float sums[kMaxParts][kColumns];
    const int thread = threadIdx.x, lane = thread % kLanes, warp = thread / kLanes;
    const int threads = blockDim.x, warps = threads / kLanes;
    const int first_column = static_cast<int>(tile) * kColumns;
    const int column = first_column + lane % kTileLanes * kWidth;
    if (thread == 0) found = 0, parts_found = 0;
#pragma unroll 4
    for (int i = thread; i < kLongSeen; i += threads) {
        // Without branches, so that several loads are in flight at a time.
        const int p = first - 1 + i, row = sorted.token_order[min(max(p, 0), sorted.N - 1)];
        const int token = sorted.token_of(row);
        row_at[i] = row;
        token_at[i] = p >= 0 && p < sorted.N ? token : -1;
    }
    __syncthreads();
    for (int i = 1 + thread; i <= kLongWindow; i += threads) {
        if (token_at[i] >= 0 && token_at[i - 1] != token_at[i] && token_at[i + kLongRun - 1] == token_at[i]) {
            begins[atomicAdd(&found, 1)] = i;
        }
    }
    __syncthreads();
    const int seen_end = min(sorted.N, first - 1 + kLongSeen);
    for (int r = warp; r < found; r += warps) {
        const int begin = first - 1 + begins[r], token = token_at[begins[r]];
        int end = run_end(begin + kLongRun - 1, seen_end, [&](int p) { return token_at[p - (first - 1)] == token; });
        if (end == seen_end) {
            end = run_end(end - 1, sorted.N, [&](int p) { return sorted.token_at(p) == token; });
        }
        if (lane == 0) {
            const int parts = min(kRunParts, (end - begin + kLanes - 1) / kLanes);
            const int first_part = atomicAdd(&parts_found, parts);
            runs[r] = {begin, end, token, first_part, parts};
            for (int i = 0; i < parts; i++) run_of[first_part + i] = r;
        }
    }
    __syncthreads();
    for (int part = warp; part < parts_found; part += warps) {
        const Run run = runs[run_of[part]];
        LongSum<T, kWidth> sum;
        auto row_of = [&](int p) { return p < seen_end ? row_at[p - (first - 1)] : sorted.token_order[p]; };
        sum.add(dout, row_of, run.begin + (part - run.first_part) * kLanes, run.end, run.parts * kLanes, C, column);
        if (lane < kTileLanes) {
#pragma unroll
            for (int i = 0; i < kWidth; i++) sums[part][lane * kWidth + i] = sum.at[i];
        }
    }
    __syncthreads();
    for (int i = thread; i < found * kColumns; i += threads) {
        const Run run = runs[i / kColumns];
        const int c = i % kColumns;
        if (first_column + c >= C) continue;
        Grad* to = dwte + int64_t{run.token} * C + first_column + c;
        const float old = to_float(*to);
        float total = 0.0f;
        for (int k = 0; k < run.parts; k++) total += sums[run.first_part + k][c];
        *to = from_float<Grad>(fmaf(mul, total, old));
    }
}

// Sums the short runs that begin in sorted positions [first, first + kShortWindow), kWidth columns per thread, row
// after row. At the end of a run its sum is added to the gradient, which was loaded together with the rows.
template <typename T, typename Grad, int kWidth>
__device__ void add_short_runs(Grad* dwte, const T* dout, const SortedRows& sorted, float mul, int C, int first,
                               unsigned tile) {
    constexpr int kRows = sizeof(T) == 2 ? kShortRows : (kShortRows + 1) / 2;
    constexpr unsigned kAll = 0xffffffffu;
    __shared__ int2 rows[kShortWindow + kLongRun + kRows];   // row; token if it is the last of a run, or -1
    __shared__ int found;
    if (threadIdx.x < kLanes) {
        // Lane i holds position first - 1 + i, and later position first - 1 + 32 + i.
        const int lane = threadIdx.x;
        auto row_at = [&](int p) { return p >= 0 && p < sorted.N ? sorted.token_order[p] : -1; };
        auto token_of = [&](int row) { return row >= 0 ? sorted.token_of(row) : -1; };
        const int row = row_at(first - 1 + lane), token = token_of(row);
        const int token_before = __shfl_up_sync(kAll, token, 1);
        const unsigned begins = __ballot_sync(
            kAll, token != token_before && token >= 0 && lane >= 1 && lane <= kShortWindow);
        const int first_begin = begins ? __ffs(begins) - 1 : 0;
        const int last_begin = begins ? kLanes - 1 - __clz(begins) : 0;
        const int last_token = __shfl_sync(kAll, token, last_begin);
        int count = __popc(__ballot_sync(kAll, token == last_token)), later_row = -1;   // of the last run
        if (begins && last_begin + count == kLanes) {
            later_row = row_at(first - 1 + kLanes + lane);
            count += __popc(__ballot_sync(kAll, token_of(later_row) == last_token));
        }
        const int end = count < kLongRun ? last_begin + count : last_begin;
        if (lane >= first_begin && lane < end) {
            const bool last = lane + 1 == end || (lane + 1 < kLanes && (begins >> (lane + 1) & 1));
            rows[lane - first_begin] = make_int2(row, last ? token : -1);
        }
        if (kLanes + lane < end) {
            const bool last = kLanes + lane + 1 == end;
            rows[kLanes + lane - first_begin] = make_int2(later_row, last ? last_token : -1);
        }
        // Pads to whole rounds with a row that is added to nothing.
        const int any_row = __shfl_sync(kAll, row, last_begin);
        if (begins && lane < kRows) rows[end - first_begin + lane] = make_int2(any_row, -1);
        if (lane == 0) found = begins ? end - first_begin : 0;
    }
    __syncthreads();
    const int count = found, column = static_cast<int>(tile * blockDim.x + threadIdx.x) * kWidth;
    if (column >= C) return;
    dwte += column;
    dout += column;
    float sum[kWidth] = {};
    for (int i0 = 0; i0 < count; i0 += kRows) {
        Packed<T, kWidth> raw[kRows];
        Packed<Grad, kWidth> old[kRows];
        int to[kRows];
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            const int2 row = rows[i0 + r];
            to[r] = row.y;
            raw[r].load(dout + int64_t{row.x} * C);
            if (row.y >= 0) old[r].load(dwte + int64_t{row.y} * C);
        }
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            float value[kWidth];
            raw[r].unpack_to(value);
#pragma unroll
            for (int j = 0; j < kWidth; j++) sum[j] += value[j];
            if (to[r] < 0) continue;
            old[r].unpack_to(value);
#pragma unroll
            for (int j = 0; j < kWidth; j++) value[j] = fmaf(mul, sum[j], value[j]), sum[j] = 0.0f;
            store_floats<Grad, kWidth>(dwte + int64_t{to[r]} * C, value);
        }
    }
}

// Math: dwte[v] += mul (sum of dout[n] over the rows n with tokens[n] == v); the same for dwpe and positions.
// Source: transpose of the gather; rows are sorted by token, so that a sum covers a run of positions.
// Traffic: dout read once, each touched row of dwte read and written once.
// Requires: token_order sorted by token; N, C and V below 2^30; kWidth = 4 needs C a multiple of it and rows
// aligned to 4 elements.
// Parallel: long_blocks blocks run add_long_runs, the others add_short_runs; the two kinds alternate as long as both
// remain. Blocks with consecutive numbers own consecutive columns.
template <typename T, typename Grad, int kWidth>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? kBackwardBlocksPerSm : 3)
    embedding_backward_tokens_kernel(Grad* dwte, const T* dout, const int32_t* tokens,
                                     const int32_t* token_order, float mul, int N, int C, int V,
                                     unsigned long_blocks, unsigned long_tiles, unsigned short_tiles) {
    wait_for_previous_kernels();
    const SortedRows sorted = {tokens, token_order, N, V};
    const unsigned both = min(long_blocks, gridDim.x - long_blocks), block = blockIdx.x;
    const bool is_long = block < 2 * both ? block % 2 == 0 : long_blocks > both;
    const unsigned item = block < 2 * both ? block / 2 : block - both;
    if (is_long) {
        const int first = static_cast<int>(item / long_tiles) * kLongWindow;
        add_long_runs<T, Grad, kWidth>(dwte, dout, sorted, mul, C, first, item % long_tiles);
    } else {
        const int first = static_cast<int>(item / short_tiles) * kShortWindow;
        add_short_runs<T, Grad, kWidth>(dwte, dout, sorted, mul, C, first, item % short_tiles);
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
    wait_for_previous_kernels();
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
    // As few blocks per row as possible, equally large and of whole warps.
    const int64_t vectors = ceil_div(C, kWidth), short_tiles = ceil_div(vectors, kThreads);
    const int64_t threads = ceil_div(ceil_div(vectors, short_tiles), kLanes) * kLanes;
    const int64_t long_tiles = ceil_div(C, kTileLanes * kWidth), tiles = ceil_div(vectors, kLanes);
    const int64_t long_blocks = N < kLongRun ? 0 : ceil_div(N, kLongWindow) * long_tiles;
    const int64_t blocks = long_blocks + ceil_div(N, kShortWindow) * short_tiles;
    const auto launch_sorted = [&](Grad* table, const int32_t* keys, const int32_t* order, float mul, int64_t rows) {
        launch_early(ctx, embedding_backward_tokens_kernel<T, Grad, kWidth>, grid_size(blocks),
                     static_cast<unsigned>(threads), 0, table, dout, keys, order, mul, N, C, rows, long_blocks,
                     long_tiles, short_tiles);
    };
    launch_sorted(dwte, args.tokens, args.token_order, args.mul, args.V);
    if (!dwpe) return;
    if (args.positions) return launch_sorted(dwpe, args.positions, args.position_order, 1.0f, args.T);
    launch_early(ctx, embedding_backward_positions_kernel<T, Grad, kWidth>,
                 grid_size(ceil_div(args.T, kWarps) * tiles), kThreads, 0, dwpe, dout, N, args.T, C, tiles);
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
            launch_kernel(ctx, embedding_forward_kernel<T, kWidth>, grid_size(ceil_div(N, kForwardRows * block.y)),
                          block, out, wte, wpe, args.tokens, args.bad_tokens, args.positions, args.mul, N, args.T, C,
                          args.V);
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
    CHECK(N < kMax && C < kMax && args.V < kMax, "embedding_backward: %lld rows of %lld columns, %lld tokens",
          (long long)N, (long long)C, (long long)args.V);
    CHECK(args.tokens && args.token_order, "embedding_backward without tokens or token_order");
    CHECK(!args.positions == !args.position_order && (args.dwpe || !args.positions),
          "embedding_backward: positions, position_order and dwpe come together");
    dispatch(args.dout.dtype, "embedding_backward", [&](auto type) {
        using T = decltype(type);
        dispatch(grad, "embedding_backward: dwte", [&](auto grad_type) {
            using Grad = decltype(grad_type);
            // Four columns per lane: 16 bytes of fp32, 8 of bf16; a warp's accesses are contiguous in both.
            constexpr int kWidth = 4;
            const bool vector = C % kWidth == 0 && aligned(args.dout, kWidth) && aligned(args.dwte, kWidth) &&
                                aligned(args.dwpe, kWidth);
            if (vector) launch_embedding_backward<T, Grad, kWidth>(ctx, args);
            else launch_embedding_backward<T, Grad, 1>(ctx, args);
        });
    });
}

}  // namespace cuda
