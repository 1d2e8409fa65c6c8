// Quantization of one tile of bf16 results as QuantOut of ops.h requests it: casts in both layouts, block scales,
// column sums, amax.
//
// A tile is 128 x 128 results of X, so that the transposed output has 128 contiguous bytes per row, and a block of
// every granularity lies within a tile. A thread block has 256 threads per tile (and two adjacent tiles for producers
// with two outputs). Thread t owns 8 columns, from column 8 (t % 16), of 4 adjacent rows; with one output it owns a
// second such piece 64 rows below. 4 rows are what a 4 x 4 transpose of bytes in registers needs.
#pragma once
#include "llmc/cuda/fp8.cuh"
#include "llmc/cuda/ptx.cuh"
#include "llmc/cuda/reduce.cuh"

namespace cuda {

inline constexpr int kTile = static_cast<int>(kScaleBlock);
inline constexpr int kTileGroup = 4;   // row tiles that run concurrently: 512 bytes of a transposed row at a time

enum class TileCast { kNone, kTensor, kBlock1x128, kBlock128x128 };
// Compile-time properties. `count` is one of them, so that kernels that do not count pay nothing for it.
template <TileCast cast, Dtype format, bool count> struct TileKind {
    static constexpr TileCast kCast = cast;
    static constexpr Dtype kFormat = format;
    static constexpr bool kCount = count;
    static constexpr bool kRowBlocks = cast == TileCast::kBlock1x128;   // rows and columns have separate scales
};

// QuantOut in the form of the kernel; every pointer may be null.
struct TileOut {
    bf16* out;
    uint8_t *rowwise, *transposed;
    float *rowwise_scale_inv, *transposed_scale_inv;
    ScaleEntry* entry;
    Fp8Counts* counts;
    uint32_t* first_nonfinite;
    float* dbias_partial;
    const StepState* state;   // if given, nothing is done when state->skip
    int64_t N, C;             // of X
    uint32_t event;
    bool current, record;
};

// A thread's place in its tile; `valid` tells which of its rows are within X.
struct TileThread {
    int column_group, row_group;
    int rows_left, groups_left;        // rows, groups of 8 columns of X from the tile's corner on; at most 128, 16
    int64_t first_row, first_column;   // of the tile

    __device__ bool column_valid() const { return column_group < groups_left; }
    __device__ int row_in_tile(int r) const { return row_group * 4 + r / 4 * 64 + r % 4; }
    __device__ bool valid(int r) const { return column_valid() && row_in_tile(r) < rows_left; }
    __device__ int64_t row(int r) const { return first_row + row_in_tile(r); }
    __device__ int64_t column() const { return first_column + column_group * 8; }
    // The thread's 8 columns of row r in a matrix with `columns` columns. The offset from the corner is 32 bits, so
    // that an address takes one instruction; `opaque` keeps the compiler from merging both parts.
    template <typename T> __device__ T* at(T* matrix, int r, int64_t columns) const {
        T* corner = ptx::opaque(matrix + (first_row * columns + first_column));
        return corner + static_cast<uint32_t>(row_in_tile(r) * static_cast<int>(columns) + column_group * 8);
    }
};
// For a matrix of N rows and `width` columns.
__device__ inline TileThread tile_thread(int64_t row_tile, int64_t column_tile, int64_t N, int64_t width) {
    TileThread t;
    t.column_group = static_cast<int>(threadIdx.x % 16), t.row_group = static_cast<int>(threadIdx.x / 16);
    t.first_row = row_tile * kTile, t.first_column = column_tile * kTile;
    t.rows_left = static_cast<int>(min(N - t.first_row, int64_t{kTile}));
    t.groups_left = static_cast<int>(min(width - t.first_column, int64_t{kTile})) / 8;
    return t;
}

template <int kOutputs> inline constexpr int kTileThreads = 256 * kOutputs;
template <int kOutputs> inline constexpr int kTileRows = 8 / kOutputs;   // per thread
// A thread's results, packed bf16. (nvcc 12.4 takes such an array only as the member of a class.)
template <int kOutputs> struct TileValuesOf { using Type = uint4[kOutputs][kTileRows<kOutputs>]; };
template <int kOutputs> using TileValues = typename TileValuesOf<kOutputs>::Type;

template <int kOutputs> struct TileShared {
    static constexpr int kWarps = 8 * kOutputs;
    union {
        uint32_t words[kOutputs][kTile * kTile / 4];    // transposed bytes: 4 rows of a column per word, swizzled
        float sums[kOutputs][kWarps][kTile];            // column sums
    };
    uint32_t column_amax[kOutputs][kWarps][kTile / 2];  // two columns per word
    float column_scale[kOutputs][kTile];
    uint32_t warp_amax[kWarps];
};

// Index of word w (rows 4w to 4w + 3) of a column. One instruction writes 16 column groups with 2 adjacent w, or reads
// 16 bytes per lane with 8 lanes per column; both use all 32 banks.
__device__ inline int tile_word(int column, int w) { return column * 32 + (w ^ column / 8 * 2); }

// Writes the column sums of the tile to dbias_partial[row tile]; ends with a barrier.
template <int kOutputs>
__device__ inline void add_tile_columns(const TileOut& out, const TileThread& t,
                                        const TileValues<kOutputs>& value, TileShared<kOutputs>& shared) {
    const int warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
    for (int o = 0; o < kOutputs; o++) {
        float sum[8] = {};
#pragma unroll
        for (int r = 0; r < kTileRows<kOutputs>; r++) {
            float x[8];
            unpack<bf16>(value[o][r], x);
#pragma unroll
            for (int i = 0; i < 8; i++) sum[i] += x[i];
        }
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 16);
        if (threadIdx.x % 32 < 16) {
            store_floats<float, 8>(&shared.sums[o][warp][t.column_group * 8], sum);
        }
    }
    __syncthreads();
    const int o = static_cast<int>(threadIdx.x / kTile), c = static_cast<int>(threadIdx.x % kTile);
    const int64_t width = out.C / kOutputs;
    if (o < kOutputs && t.first_column + c < width) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < TileShared<kOutputs>::kWarps; w++) sum += shared.sums[o][w][c];
        out.dbias_partial[t.first_row / kTile * out.C + o * width + t.first_column + c] = sum;
    }
    __syncthreads();
}

// Computes scales of 1x128 blocks along the rows, for four rows of the thread. Two rows share a shuffle.
template <Dtype kFormat>
__device__ inline void row_scales(const TileOut& out, const TileThread& t, int first, int64_t output,
                                   const uint4 (&value)[4], float (&scale)[4]) {
    float* scale_inv = out.rowwise_scale_inv + (output + t.first_column) / kTile * out.N;
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        const uint32_t a = amax_pair(value[j]), b = amax_pair(value[j + 1]);
        uint32_t both = max_pair(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
#pragma unroll
        for (int lanes = 8; lanes > 0; lanes /= 2) {
            both = max_pair(both, __shfl_xor_sync(0xffffffffu, both, lanes));
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const BlockScale block = block_scale<kFormat>(i == 0 ? both & 0xffffu : both >> 16);
            scale[j + i] = block.scale;
            const int r = first + j + i;
            if (t.column_group == 0 && t.row_in_tile(r) < t.rows_left) scale_inv[t.row(r)] = block.scale_inv;
        }
    }
}

// Computes scales of 1x128 blocks along the columns into shared.column_scale; ends with a barrier.
template <Dtype kFormat, int kOutputs>
__device__ inline void column_scales(const TileOut& out, const TileThread& t,
                                      const TileValues<kOutputs>& value, TileShared<kOutputs>& shared) {
    const int warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
    for (int o = 0; o < kOutputs; o++) {
        uint32_t amax[4] = {};
#pragma unroll
        for (int r = 0; r < kTileRows<kOutputs>; r++) {
            const uint4& x = value[o][r];
            amax[0] = max_pair(amax[0], magnitudes(x.x)), amax[1] = max_pair(amax[1], magnitudes(x.y));
            amax[2] = max_pair(amax[2], magnitudes(x.z)), amax[3] = max_pair(amax[3], magnitudes(x.w));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) amax[i] = max_pair(amax[i], __shfl_xor_sync(0xffffffffu, amax[i], 16));
        if (threadIdx.x % 32 < 16) {
            store_vec(&shared.column_amax[o][warp][t.column_group * 4], make_uint4(amax[0], amax[1], amax[2], amax[3]));
        }
    }
    __syncthreads();
    const int o = static_cast<int>(threadIdx.x / kTile), c = static_cast<int>(threadIdx.x % kTile);
    if (o < kOutputs) {
        uint32_t amax = 0;
#pragma unroll
        for (int w = 0; w < TileShared<kOutputs>::kWarps; w++) {
            amax = max_pair(amax, shared.column_amax[o][w][c / 2]);
        }
        const BlockScale block = block_scale<kFormat>(c % 2 == 0 ? amax & 0xffffu : amax >> 16);
        shared.column_scale[o][c] = block.scale;
        const int64_t width = out.C / kOutputs, column = t.first_column + c;
        if (column < width) {
            out.transposed_scale_inv[t.first_row / kTile * out.C + o * width + column] = block.scale_inv;
        }
    }
    __syncthreads();
}

// Stores scale_inv of a 128x128 block in both layouts; padding of their rows is set to 0.
__device__ inline void store_block_scale(const TileOut& out, const TileThread& t, float scale_inv) {
    auto store = [&](float* scale_invs, int64_t row, int64_t column, int64_t columns) {
        if (scale_invs == nullptr) return;
        const int64_t padded = (columns + 3) / 4 * 4;
        scale_invs[row * padded + column] = scale_inv;
        for (int64_t i = columns; column + 1 == columns && i < padded; i++) scale_invs[row * padded + i] = 0.0f;
    };
    const int64_t row = t.first_row / kTile, column = t.first_column / kTile;
    store(out.rowwise_scale_inv, row, column, (out.C + kTile - 1) / kTile);
    store(out.transposed_scale_inv, column, row, (out.N + kTile - 1) / kTile);
}

// Casts four rows of 8 columns with one scale per row, for the rowwise output; transpose_rows turns them into columns.
template <Dtype kFormat>
__device__ inline void cast_rows(const uint4 (&value)[4], const float (&scale)[4], uint2 (&bytes)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) bytes[j] = to_fp8x8<kFormat>(value[j], scale[j]);
}
__device__ inline void transpose_rows(const uint2 (&bytes)[4], uint32_t (&word)[8]) {
    uint32_t column[4];
    transpose_bytes({bytes[0].x, bytes[1].x, bytes[2].x, bytes[3].x}, column);
#pragma unroll
    for (int i = 0; i < 4; i++) word[i] = column[i];
    transpose_bytes({bytes[0].y, bytes[1].y, bytes[2].y, bytes[3].y}, column);
#pragma unroll
    for (int i = 0; i < 4; i++) word[4 + i] = column[i];
}
// Casts four rows of 8 columns with one scale per column, to one word per column.
template <Dtype kFormat>
__device__ inline void cast_columns(const uint4 (&value)[4], const float* column_scale, uint32_t (&word)[8]) {
    float x[4][8], scale[8];
    load_floats<float, 8>(column_scale, scale);
#pragma unroll
    for (int j = 0; j < 4; j++) unpack<bf16>(value[j], x[j]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        word[i] = to_fp8x4<kFormat>(x[0][i] * scale[i], x[1][i] * scale[i], x[2][i] * scale[i], x[3][i] * scale[i]);
    }
}

// Copies from shared to global memory, 16 bytes per lane, 8 lanes per row of the transposed output.
template <int kOutputs>
__device__ inline void store_transposed(const TileOut& out, const TileThread& t, const TileShared<kOutputs>& shared) {
    const int64_t width = out.C / kOutputs;
    const int q = static_cast<int>(threadIdx.x % 8), first = static_cast<int>(threadIdx.x / 8);
    const bool rows_valid = q * 16 < t.rows_left;
#pragma unroll
    for (int o = 0; o < kOutputs; o++) {
        uint8_t* corner = ptx::opaque(out.transposed + ((o * width + t.first_column) * out.N + t.first_row));
#pragma unroll
        for (int i = 0; i < 4 / kOutputs; i++) {
            const int c = first + i * (kTileThreads<kOutputs> / 8);
            // The swizzle's lowest bit swaps the halves of a 16-byte chunk.
            const uint4 raw = load_vec(&shared.words[o][c * 32 + ((q ^ c / 16) * 4)]);
            const uint4 straight = c / 8 % 2 == 0 ? raw : make_uint4(raw.z, raw.w, raw.x, raw.y);
            if (rows_valid && c / 8 < t.groups_left) {
                store_vec(corner + static_cast<uint32_t>(c * static_cast<int>(out.N) + q * 16), straight);
            }
        }
    }
}

// Returns the scale of a whole tensor; the first thread of the grid also stores it.
template <Dtype kFormat> __device__ inline float tensor_scale(const TileOut& out, bool first_of_grid) {
    ScaleEntry* entry = out.entry;
    const float scale = out.current ? scale_of(entry->amax_bits, fp8_largest(kFormat)) : entry->scale;
    if (first_of_grid) {
        entry->scale_inv = 1.0f / scale;
        if (out.current) entry->scale = scale;
    }
    return scale;
}

// Stores the amax of each warp's values in shared memory; after a barrier tile_amax is that of the tile.
template <int kOutputs>
__device__ inline void share_amax(const TileValues<kOutputs>& value, TileShared<kOutputs>& shared) {
    uint32_t amax = 0;
#pragma unroll
    for (int o = 0; o < kOutputs; o++) {
#pragma unroll
        for (int r = 0; r < kTileRows<kOutputs>; r++) amax = max_pair(amax, amax_pair(value[o][r]));
    }
    amax = __reduce_max_sync(0xffffffffu, larger_of_pair(amax));
    if (threadIdx.x % 32 == 0) shared.warp_amax[threadIdx.x / 32] = amax;
}
template <int kOutputs> __device__ inline uint32_t tile_amax(const TileShared<kOutputs>& shared) {
    uint32_t amax = 0;
#pragma unroll
    for (int w = 0; w < TileShared<kOutputs>::kWarps; w++) amax = max(amax, shared.warp_amax[w]);
    return amax;
}

// Casts four rows of the thread: rowwise bytes to global memory, transposed ones to shared memory.
template <typename Kind>
__device__ inline void cast_quad(const TileOut& out, const TileThread& t, int first, int64_t output,
                                 const uint4 (&value)[4], const float (&row_scale)[4], const float* column_scale,
                                 uint32_t* words, CastTally& tally) {
    constexpr Dtype kFormat = Kind::kFormat;
    const bool rows = !Kind::kRowBlocks || out.rowwise != nullptr;
    uint2 bytes[4];
    if (rows) cast_rows<kFormat>(value, row_scale, bytes);
    if constexpr (Kind::kCount) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (rows) tally.add_cast<kFormat>(value[j], amax_pair(value[j]), row_scale[j], bytes[j]);
            else tally.add_columns<kFormat>(value[j], column_scale);
        }
    }
    if (out.rowwise != nullptr) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (!t.valid(first + j)) continue;
            *reinterpret_cast<uint2*>(t.at(out.rowwise + output, first + j, out.C)) = bytes[j];
        }
    }
    if (out.transposed != nullptr) {
        uint32_t word[8];
        if constexpr (Kind::kRowBlocks) cast_columns<kFormat>(value, column_scale, word);
        else transpose_rows(bytes, word);
        uint32_t* to = words + tile_word(t.column_group * 8, t.row_in_tile(first) / 4);
#pragma unroll
        for (int i = 0; i < 8; i++) to[tile_word(i, 0)] = word[i];
    }
}

// Casts the thread's values. tile_scale: the scale of the tile, unless Kind::kRowBlocks.
template <typename Kind, int kOutputs>
__device__ inline void cast_tile(const TileOut& out, const TileThread& t, const TileValues<kOutputs>& value,
                                 float tile_scale, TileShared<kOutputs>& shared) {
    const int64_t width = out.C / kOutputs;
    CastTally tally;
#pragma unroll
    for (int o = 0; o < kOutputs; o++) {
#pragma unroll
        for (int r = 0; r < kTileRows<kOutputs>; r += 4) {
            const uint4 quad[4] = {value[o][r], value[o][r + 1], value[o][r + 2], value[o][r + 3]};
            float scale[4] = {tile_scale, tile_scale, tile_scale, tile_scale};
            if constexpr (Kind::kRowBlocks) {
                if (out.rowwise != nullptr) row_scales<Kind::kFormat>(out, t, r, o * width, quad, scale);
            }
            const float* column_scale = &shared.column_scale[o][t.column_group * 8];
            cast_quad<Kind>(out, t, r, o * width, quad, scale, column_scale, shared.words[o], tally);
        }
    }
    if constexpr (Kind::kCount) tally.flush_to(out.counts);
}

// Stores the bf16 output, which may alias the input of the values.
template <int kOutputs>
__device__ inline void store_values(const TileOut& out, const TileThread& t, const TileValues<kOutputs>& value) {
    const int64_t width = out.C / kOutputs;
#pragma unroll
    for (int o = 0; o < kOutputs; o++) {
#pragma unroll
        for (int r = 0; r < kTileRows<kOutputs>; r++) {
            if (t.valid(r)) store_vec(t.at(out.out + o * width, r, out.C), value[o][r]);
        }
    }
}

// Writes everything that QuantOut requests of one tile, except the bf16 output. Called by every thread of the block.
template <typename Kind, int kOutputs>
__device__ inline void write_tile(const TileOut& out, const TileThread& t, const TileValues<kOutputs>& value,
                                  TileShared<kOutputs>& shared) {
    constexpr Dtype kFormat = Kind::kFormat;
    constexpr TileCast kCast = Kind::kCast;
    const bool first_thread = threadIdx.x == 0;
    const bool first_of_grid = t.first_row == 0 && t.first_column == 0 && first_thread;
    const bool block_amax = out.record || out.first_nonfinite != nullptr || kCast == TileCast::kBlock128x128;

    if (block_amax) share_amax<kOutputs>(value, shared);
    if (out.dbias_partial != nullptr) add_tile_columns<kOutputs>(out, t, value, shared);
    [[maybe_unused]] float tile_scale = 1.0f;
    if constexpr (kCast == TileCast::kTensor) tile_scale = tensor_scale<kFormat>(out, first_of_grid);
    if constexpr (kCast == TileCast::kBlock128x128) {
        __syncthreads();
        const BlockScale block = block_scale<kFormat>(tile_amax<kOutputs>(shared));
        tile_scale = block.scale;
        if (first_thread) store_block_scale(out, t, block.scale_inv);
    }
    if constexpr (Kind::kRowBlocks) {
        if (out.transposed != nullptr) column_scales<kFormat, kOutputs>(out, t, value, shared);
    }
    if constexpr (kCast != TileCast::kNone) cast_tile<Kind, kOutputs>(out, t, value, tile_scale, shared);
    if (block_amax || out.transposed != nullptr) __syncthreads();
    if (block_amax && first_thread) {
        const uint32_t amax = tile_amax<kOutputs>(shared);
        if (out.record) record_amax(&out.entry->amax_bits, amax << 16, out.entry->amax_bits);
        if (out.first_nonfinite != nullptr && amax >= kInfinityMagnitude) atomicMin(out.first_nonfinite, out.event);
    }
    if constexpr (kCast != TileCast::kNone) {
        if (out.transposed != nullptr) store_transposed<kOutputs>(out, t, shared);
    }
    if constexpr (Kind::kCount) {
        if (first_of_grid) atomicAdd(&out.counts->elems, static_cast<unsigned long long>(out.N * out.C));
    }
}

}  // namespace cuda
