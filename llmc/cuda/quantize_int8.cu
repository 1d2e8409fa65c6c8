// INT8 matrices with a scale per row, and their transposes in FP8. Sums and products are those of ops_int8.h, so that
// the results are the CPU's.
#include <cuda_pipeline_primitives.h>

#include "llmc/cuda/fp8.cuh"
#include "llmc/cuda/ptx.cuh"
#include "llmc/cuda/transpose_tile.cuh"

namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowThreads = 512;   // maximum per row
constexpr int kLanes = 32, kWarpRows = 8;
constexpr int kPiece = 16;         // columns of a lane: a group of 64 is in four adjacent lanes

// ---- turns

// Lane q of a group has columns 8 q to 8 q + 7, and those 32 further: a piece. Four lanes access 64 contiguous bytes of
// bf16, and 32 of int8. Returns the first column of a piece of a row.
__device__ inline int column_of_piece(int piece) { return piece / 4 * 64 + piece % 4 * 8; }

__device__ inline void butterfly(float& a, float& b) {
    const float sum = __fadd_rn(a, b);
    b = __fsub_rn(a, b);
    a = sum;
}
// x = 8 x' of the columns of each lane. Called by all lanes of a warp.
__device__ inline void turn(float (&x)[kPiece]) {
#pragma unroll
    for (int d = 1; d < 8; d *= 2) {
#pragma unroll
        for (int i = 0; i < kPiece; i++) {
            if ((i & d) == 0) butterfly(x[i], x[i + d]);
        }
    }
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {   // distances 8 and 16; the product is exact
        const float sign = (threadIdx.x & lanes) != 0 ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < kPiece; i++) x[i] = __fmaf_rn(sign, x[i], __shfl_xor_sync(0xffffffffu, x[i], lanes));
    }
#pragma unroll
    for (int i = 0; i < 8; i++) butterfly(x[i], x[i + 8]);
}

// The largest |x|, as bits; a NaN wins.
__device__ inline uint32_t amax_of(const float (&x)[kPiece]) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kPiece; i++) amax = ptx::max_or_nan(amax, fabsf(x[i]));
    return amax_bits_of(amax);
}
// The bits of the amax of x', of 8 x'.
__device__ inline uint32_t amax_of_turned(uint32_t bits) {
    return bits < kInfinityBits ? __float_as_uint(__fmul_rn(__uint_as_float(bits), 0.125f)) : kInfinityBits;
}
// The scale of the codes of 8 x'; the product is exact.
__device__ inline float scale_of_turned(uint32_t amax_bits) {
    return __fmul_rn(int8_row_scale(amax_bits).scale, 0.125f);
}
// Four codes. The sum rounds to an integer, which its last byte is; a row that is not finite has the scale 0.
__device__ inline uint32_t codes_of(const float* x, float scale) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) word[i] = __float_as_uint(__fadd_rn(__fmul_rn(x[i], scale), 0x1.8p23f));
    const uint32_t low = __byte_perm(word[0], word[1], 0x0040), high = __byte_perm(word[2], word[3], 0x0040);
    return scale != 0.0f ? __byte_perm(low, high, 0x5410) : 0;
}
// Stores the codes of a piece; out: its first column.
__device__ inline void store_codes(int8_t* out, const float (&x)[kPiece], float scale) {
    *reinterpret_cast<uint2*>(out) = make_uint2(codes_of(x, scale), codes_of(x + 4, scale));
    *reinterpret_cast<uint2*>(out + 32) = make_uint2(codes_of(x + 8, scale), codes_of(x + 12, scale));
}

// A lane's columns of a group, not converted.
template <typename T> struct Piece {
    static constexpr int kVectors = kPiece / kVec<T>;
    uint4 raw[kVectors];

    // Where vector v is, from the first column on.
    __device__ static int column(int v) { return v * kVec<T> % 8 + v * kVec<T> / 8 * 32; }
    __device__ void load(const T* p) {
#pragma unroll
        for (int v = 0; v < kVectors; v++) raw[v] = load_vec(p + column(v));
    }
    // The values, rounded to bf16.
    __device__ void unpack_to(float (&x)[kPiece]) const {
#pragma unroll
        for (int v = 0; v < kVectors; v++) {
            float part[kVec<T>];
            unpack<T>(raw[v], part);
#pragma unroll
            for (int i = 0; i < kVec<T>; i++) {
                x[v * kVec<T> + i] = std::is_same_v<T, bf16> ? part[i] : rounded<bf16>(part[i]);
            }
        }
    }
};

// ---- rows

// Math: QuantizeInt8Args.
// Source: ops_int8.h; the next row is copied to shared memory while a row is in registers.
// Traffic: in read once, 1 byte per element and 4 per row written.
// Requires: C a multiple of 64, at most 16 kPieces blockDim.x; rows aligned to 16 bytes.
// Parallel: blockDim.x threads own a row, a warp if kWarpPerRow; a thread 16 columns of kPieces groups, which it copies
// itself. A block loops over rows.
template <typename T, int kPieces, bool kWarpPerRow>
__global__ void __launch_bounds__(kWarpPerRow ? kLanes * kWarpRows : kRowThreads, kPieces > 2 ? 1 : 2)
    quantize_int8_kernel(int8_t* out, float* scale_inv, const T* in, int64_t N, int C, const StepState* state) {
    extern __shared__ uint4 next[];
    __shared__ uint32_t shared[2][kRowThreads / kLanes];
    wait_for_previous_kernels();
    if (state != nullptr && state->skip) return;
    const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
    const int64_t step = int64_t{gridDim.x} * blockDim.y;
    auto column = [&](int k) { return column_of_piece(static_cast<int>(threadIdx.x + k * blockDim.x)); };
    auto slot = [&](int k, int v) { return next + (k * Piece<T>::kVectors + v) * threads + thread; };
    auto prefetch = [&](int64_t row) {
#pragma unroll
        for (int k = 0; k < kPieces; k++) {
            if (row >= N || column(k) >= C) continue;
#pragma unroll
            for (int v = 0; v < Piece<T>::kVectors; v++) {
                __pipeline_memcpy_async(slot(k, v), in + row * C + column(k) + Piece<T>::column(v), 16);
            }
        }
        __pipeline_commit();
    };
    int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    prefetch(row);
    int buffer = 0;
    for (; row - threadIdx.y < N; row += step) {
        float x[kPieces][kPiece];
        __pipeline_wait_prior(0);
#pragma unroll
        for (int k = 0; k < kPieces; k++) {
            Piece<T> piece = {};
#pragma unroll
            for (int v = 0; v < Piece<T>::kVectors; v++) {
                if (row < N && column(k) < C) piece.raw[v] = *slot(k, v);
            }
            piece.unpack_to(x[k]);
        }
        prefetch(row + step);
        uint32_t amax = 0;
#pragma unroll
        for (int k = 0; k < kPieces; k++) {
            turn(x[k]);
            amax = max(amax, amax_of(x[k]));
        }
        amax = __reduce_max_sync(0xffffffffu, amax);
        if constexpr (!kWarpPerRow) {
            if (threadIdx.x % kLanes == 0) shared[buffer][threadIdx.x / kLanes] = amax;
            __syncthreads();
            const unsigned lane = threadIdx.x % kLanes;
            amax = __reduce_max_sync(0xffffffffu, lane < blockDim.x / kLanes ? shared[buffer][lane] : 0);
            buffer ^= 1;   // written again after the next barrier
        }
        amax = amax_of_turned(amax);
        const float scale = scale_of_turned(amax);
        if (row >= N) continue;
        if (threadIdx.x == 0) scale_inv[row] = int8_row_scale(amax).scale_inv;
#pragma unroll
        for (int k = 0; k < kPieces; k++) {
            if (column(k) < C) store_codes(out + row * C + column(k), x[k], scale);
        }
    }
}

// ---- shard ranges

// The pieces of a shard range of a matrix with row_groups groups in a row.
struct PieceRange {
    uint32_t first_group, row_groups;
    int64_t pieces;

    PieceRange(const char* op, const Tensor& in, int64_t begin, int64_t R, int64_t C)
        : first_group(static_cast<uint32_t>(begin / kTurnedColumns)),
          row_groups(static_cast<uint32_t>(C / kTurnedColumns)), pieces(in.elems / kPiece) {
        expect(in, in.dtype, in.elems, op);
        expect_aligned(in, op);
        const bool groups = begin % kTurnedColumns == 0 && in.elems % kTurnedColumns == 0 && C % kTurnedColumns == 0;
        CHECK(begin >= 0 && begin + in.elems <= R * C && groups, "%s: elements [%lld, +%lld) of %lld x %lld", op,
              ll(begin), ll(in.elems), ll(R), ll(C));
        CHECK(R * C / kTurnedColumns < (int64_t{1} << 32), "%s: a matrix of %lld x %lld", op, ll(R), ll(C));
    }
    __device__ int64_t begin(int64_t piece) const { return piece / 4 * 64 + piece % 4 * 8; }
    __device__ uint32_t row(int64_t piece) const {
        return (first_group + static_cast<uint32_t>(min(piece, pieces - 1) / 4)) / row_groups;
    }
};
template <typename T> inline constexpr int kBatch = 8 / Piece<T>::kVectors;   // pieces in flight per thread

// Calls body(piece, x) for the pieces of a thread, x = 8 x'; also, with zeros, for pieces beyond the range's end.
template <typename T, typename Body>
__device__ inline void for_turned_pieces(const PieceRange& range, const T* in, Body&& body) {
    const int64_t first = int64_t{blockIdx.x} * kThreads * kBatch<T> + threadIdx.x;
    Piece<T> raw[kBatch<T>] = {};
#pragma unroll
    for (int j = 0; j < kBatch<T>; j++) {
        const int64_t piece = first + j * kThreads;
        if (piece < range.pieces) raw[j].load(in + range.begin(piece));
    }
#pragma unroll
    for (int j = 0; j < kBatch<T>; j++) {
        float x[kPiece];
        raw[j].unpack_to(x);
        turn(x);
        body(first + j * kThreads, x);
    }
}

// Math: RowAmaxArgs.
// Source: ops_int8.h.
// Traffic: in read once.
// Requires: begin, elems and C multiples of 64, in aligned to 16 bytes.
// Parallel: a thread owns 16 columns of kBatch groups; at most one atomic per warp and batch, or per group where a warp
// has several rows.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    row_amax_kernel(uint32_t* amaxes, const T* in, const __grid_constant__ PieceRange range) {
    wait_for_previous_kernels();
    for_turned_pieces(range, in, [&](int64_t piece, const float (&x)[kPiece]) {
        const uint32_t row = range.row(piece);
        uint32_t amax = amax_of(x);
        const bool one_row = __all_sync(0xffffffffu, row == __shfl_sync(0xffffffffu, row, 0));
        if (one_row) {
            amax = __reduce_max_sync(0xffffffffu, amax);
        } else {
            amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
            amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
        }
        if (threadIdx.x % (one_row ? kLanes : 4) == 0) record_amax(&amaxes[row], amax_of_turned(amax), amaxes[row]);
    });
}

// Math: QuantizeInt8RunArgs.
// Source: ops_int8.h.
// Traffic: in read, 1 byte per element written, once.
// Requires: as row_amax_kernel; out aligned to 8 bytes.
// Parallel: a thread owns 16 columns of kBatch groups.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    quantize_int8_run_kernel(int8_t* out, const T* in, const uint32_t* amaxes,
                             const __grid_constant__ PieceRange range) {
    wait_for_previous_kernels();
    for_turned_pieces(range, in, [&](int64_t piece, const float (&x)[kPiece]) {
        const float scale = scale_of_turned(amaxes[range.row(piece)]);
        if (piece < range.pieces) store_codes(out + range.begin(piece), x, scale);
    });
}

// Math: RowScalesArgs.
// Source: ops_int8.h.
// Traffic: the amaxes read, scale_inv written.
// Requires: nothing.
// Parallel: a thread owns a row.
__global__ void __launch_bounds__(kThreads) row_scales_kernel(float* scale_inv, const uint32_t* amaxes, int64_t R) {
    wait_for_previous_kernels();
    const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (row < R) scale_inv[row] = int8_row_scale(amaxes[row]).scale_inv;
}

// ---- the transpose

// Two sums of codes in the halves of a word: high * 65536 + low. Sums of such words are the sums of both, modulo 2^32.
__device__ inline void butterfly(uint32_t& a, uint32_t& b) {
    const uint32_t sum = a + b;
    b = a - b;
    a = sum;
}
// Turns two rows of 16 adjacent columns of each lane, four lanes of a group. Called by all lanes of a warp.
__device__ inline void turn_codes(uint32_t (&x)[kPiece]) {
#pragma unroll
    for (int d = 1; d < kPiece; d *= 2) {
#pragma unroll
        for (int i = 0; i < kPiece; i++) {
            if ((i & d) == 0) butterfly(x[i], x[i + d]);
        }
    }
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
        const uint32_t sign = (threadIdx.x & lanes) != 0 ? ~0u : 1u;
#pragma unroll
        for (int i = 0; i < kPiece; i++) x[i] = sign * x[i] + __shfl_xor_sync(0xffffffffu, x[i], lanes);
    }
}
// Codes + 128 of 16 columns of two rows. The turn of 128 is 8192 in a group's first column and 0 in others.
__device__ inline void pair_codes(const uint4& low, const uint4& high, uint32_t (&x)[kPiece]) {
    const uint32_t a[4] = {low.x, low.y, low.z, low.w}, b[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < kPiece; i++) {
        x[i] = (__byte_perm(a[i / 4], b[i / 4], 0x4400 + 0x1111 * (i % 4)) & 0x00ff00ffu) ^ 0x00800080u;
    }
}
// The sums in a word's halves, of which `bias` makes the sums + 2^15: the last bits of 2^23 + 2^15 + sum.
__device__ inline float2 sums_of(uint32_t word, uint32_t bias) {
    word += bias;
    const uint32_t low = __byte_perm(word, 0x4b000000u, 0x7610), high = __byte_perm(word, 0x4b000000u, 0x7632);
    return make_float2(__uint_as_float(low) - 8421376.0f, __uint_as_float(high) - 8421376.0f);
}

// Math: TransposeInt8Args.
// Source: ops_int8.h; sums of two rows are in a word, exactly.
// Traffic: in read, out written, once.
// Requires: R a multiple of 16, C of 64, tensors aligned to 16 bytes.
// Parallel: a block owns a tile of 128 x 128; a thread 16 columns of 4 rows, then 16 rows of 4 columns.
template <Dtype kFormat, bool kCount>
__global__ void __launch_bounds__(TransposeTile::kThreads, kCount ? 3 : 4)
    transpose_int8_kernel(uint8_t* out, const int8_t* in, const float* scale_inv, int64_t R, int64_t C,
                          ScaleEntry* entry, Fp8Counts* counts) {
    __shared__ __align__(16) uint32_t words[TransposeTile::kWords];
    wait_for_previous_kernels();
    const TransposeTile tile(R, C);
    if (tile.rows == 0) return;
    const float scale = entry->scale;
    if (blockIdx.x + blockIdx.y + blockIdx.z + threadIdx.x == 0) {
        entry->scale_inv = 1.0f / scale;
        if (kCount) atomicAdd(&counts->elems, static_cast<unsigned long long>(R * C));
    }
    const int column = static_cast<int>(threadIdx.x % 8) * 16, w = static_cast<int>(threadIdx.x / 8);
    const bool valid = column < tile.columns && w * 4 < tile.rows;
    uint4 row[4] = {};
    float4 row_scale = {};
    if (valid) {
        const int8_t* from = in + (tile.first_row + w * 4) * C + tile.first_column + column;
#pragma unroll
        for (int r = 0; r < 4; r++) row[r] = load_vec(from + r * C);
        row_scale = *reinterpret_cast<const float4*>(scale_inv + tile.first_row + w * 4);
    }
    uint32_t sum[2][kPiece];
    pair_codes(row[0], row[1], sum[0]);
    pair_codes(row[2], row[3], sum[1]);
    turn_codes(sum[0]);
    turn_codes(sum[1]);
    const float unit[4] = {row_scale.x * 0.125f, row_scale.y * 0.125f, row_scale.z * 0.125f, row_scale.w * 0.125f};
    CastTally tally;
#pragma unroll
    for (int i = 0; i < kPiece; i++) {
        const uint32_t bias = i == 0 && threadIdx.x % 4 == 0 ? 0x60006000u : 0x80008000u;
        const float2 first = sums_of(sum[0][i], bias), second = sums_of(sum[1][i], bias);
        float x[4] = {first.x, first.y, second.x, second.y};
#pragma unroll
        for (int r = 0; r < 4; r++) {
            x[r] = __fmul_rn(x[r], unit[r]);
            if constexpr (kCount) tally.add<kFormat>(x[r], scale);
            x[r] = __fmul_rn(x[r], scale);
        }
        if (valid) words[tile.word(column, w) + i * 32] = to_fp8x4<kFormat>(x[0], x[1], x[2], x[3]);
    }
    if constexpr (kCount) tally.flush_to(counts);
    __syncthreads();
    tile.store(out, words, R);
}

// Calls f(pieces, warp_per_row) with the pieces of a thread as a compile-time constant, for rows of so many pieces.
template <typename F> void with_pieces(int64_t row_pieces, F&& f) {
    const std::false_type block;
    const std::true_type warp;
    if (row_pieces <= kLanes) f(std::integral_constant<int, 1>{}, warp);
    else if (row_pieces <= 2 * kLanes) f(std::integral_constant<int, 2>{}, warp);
    else if (row_pieces <= 4 * kLanes) f(std::integral_constant<int, 4>{}, warp);
    else if (row_pieces <= 2 * kRowThreads) f(std::integral_constant<int, 2>{}, block);
    else f(std::integral_constant<int, 4>{}, block);
}

}  // namespace

void quantize_int8(Ctx& ctx, const QuantizeInt8Args& args) {
    const int64_t N = args.N, C = args.C, row_pieces = C / kPiece;
    CHECK(C % kTurnedColumns == 0 && row_pieces <= 4 * kRowThreads, "quantize_int8: rows of %lld columns", ll(C));
    expect(args.in, args.in.dtype, N * C, "quantize_int8: in");
    expect(args.out, Dtype::kInt8, N * C, "quantize_int8: out");
    expect(args.scale_inv, Dtype::kFp32, N, "quantize_int8: scale_inv");
    expect_aligned(args.in, "quantize_int8: in");
    expect_aligned(args.out, "quantize_int8: out");
    dispatch(args.in.dtype, "quantize_int8: in", [&](auto type) {
        using T = decltype(type);
        with_pieces(row_pieces, [&](auto pieces, auto warp) {
            constexpr int kPieces = decltype(pieces)::value;
            constexpr bool kWarp = decltype(warp)::value;
            auto kernel = quantize_int8_kernel<T, kPieces, kWarp>;
            const int64_t threads = kWarp ? kLanes : round_up(ceil_div(row_pieces, kPieces), kLanes);
            const dim3 block(static_cast<unsigned>(threads), kWarp ? kWarpRows : 1);
            const size_t shared_bytes = sizeof(T) * kPiece * kPieces * block.x * block.y;
            allow_shared_memory(kernel, shared_bytes);
            int resident = 0;
            CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                &resident, kernel, static_cast<int>(block.x * block.y), shared_bytes));
            const int64_t blocks = std::min(ceil_div(N, block.y), int64_t{std::max(resident, 1)} * ctx.sm_count);
            launch_early(ctx, kernel, grid_size(blocks), block, shared_bytes, args.out.as<int8_t>(),
                         args.scale_inv.as<float>(), args.in.as<T>(), N, C, args.state);
        });
    });
}

void row_amax(Ctx& ctx, const RowAmaxArgs& args) {
    if (args.in.elems == 0) return;
    const PieceRange range("row_amax", args.in, args.begin, args.R, args.C);
    CHECK(args.amaxes != nullptr, "row_amax without amaxes");
    dispatch(args.in.dtype, "row_amax: in", [&](auto type) {
        using T = decltype(type);
        launch_early(ctx, row_amax_kernel<T>, grid_size(ceil_div(range.pieces, kThreads * kBatch<T>)), kThreads, 0,
                     args.amaxes, args.in.as<T>(), range);
    });
}

void quantize_int8_run(Ctx& ctx, const QuantizeInt8RunArgs& args) {
    if (args.in.elems == 0) return;
    const PieceRange range("quantize_int8_run", args.in, args.begin, args.R, args.C);
    expect(args.out, Dtype::kInt8, args.in.elems, "quantize_int8_run: out");
    CHECK(args.amaxes != nullptr && aligned(args.out, 8), "quantize_int8_run: no amaxes, or out not 8-byte aligned");
    dispatch(args.in.dtype, "quantize_int8_run: in", [&](auto type) {
        using T = decltype(type);
        launch_early(ctx, quantize_int8_run_kernel<T>, grid_size(ceil_div(range.pieces, kThreads * kBatch<T>)),
                     kThreads, 0, args.out.as<int8_t>(), args.in.as<T>(), args.amaxes, range);
    });
}

void row_scales(Ctx& ctx, const RowScalesArgs& args) {
    expect(args.scale_inv, Dtype::kFp32, args.R, "row_scales: scale_inv");
    CHECK(args.amaxes != nullptr, "row_scales without amaxes");
    launch_early(ctx, row_scales_kernel, grid_size(ceil_div(args.R, kThreads)), kThreads, 0,
                 args.scale_inv.as<float>(), args.amaxes, args.R);
}

void transpose_int8(Ctx& ctx, const TransposeInt8Args& args) {
    const int64_t R = args.R, C = args.C;
    CHECK(R > 0 && R % 16 == 0 && C % kTurnedColumns == 0, "transpose_int8: %lld x %lld", ll(R), ll(C));
    expect(args.in, Dtype::kInt8, R * C, "transpose_int8: in");
    expect(args.out, args.out.dtype, R * C, "transpose_int8: out");
    expect(args.scale_inv, Dtype::kFp32, R, "transpose_int8: scale_inv");
    for (const Tensor& t : {args.in, args.out, args.scale_inv}) expect_aligned(t, "transpose_int8: a tensor");
    CHECK(args.entry != nullptr, "transpose_int8 without a scale entry");
    with_format(args.out.dtype, "transpose_int8", [&](auto format) {
        constexpr Dtype kFormat = decltype(format)::value;
        auto kernel = args.counts ? transpose_int8_kernel<kFormat, true> : transpose_int8_kernel<kFormat, false>;
        launch_early(ctx, kernel, TransposeTile::grid(R, C), TransposeTile::kThreads, 0,
                     static_cast<uint8_t*>(args.out.data), args.in.as<int8_t>(), args.scale_inv.as<float>(), R, C,
                     args.entry, args.counts);
    });
}

}  // namespace cuda
