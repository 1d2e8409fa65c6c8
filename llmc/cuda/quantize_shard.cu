// FP8 weights quantized by several ranks, each from its shard range of a matrix: block amaxes, scales, casts, scale_inv
// of blocks, and the transpose of the gathered bytes.
#include "llmc/cuda/fp8.cuh"
#include "llmc/cuda/transpose_tile.cuh"

namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = static_cast<int>(kScaleBlock);
constexpr int kBatch = 8;   // vectors in flight per thread

// Elements [begin, begin + elems) of (R, C) matrices that follow each other, divided into tiles of 128 x 128 of each.
// Rows and tiles are counted over all matrices.
struct RangeTiles {
    int64_t begin, elems, R, C;
    int64_t first_row, last_row;         // rows of the elements `begin` and `begin + elems`, and their columns
    int64_t first_column, last_column;
    int64_t row_tiles, column_tiles;     // of a matrix
    int64_t first_row_tile;

    RangeTiles(int64_t begin_, int64_t elems_, int64_t R_, int64_t C_)
        : begin(begin_), elems(elems_), R(R_), C(C_), first_row(begin / C), last_row((begin + elems) / C),
          first_column(begin % C), last_column((begin + elems) % C), row_tiles(ceil_div(R, kTile)),
          column_tiles(ceil_div(C, kTile)), first_row_tile(row_tile_of(first_row)) {}
    int64_t row_tile_of(int64_t row) const { return row / R * row_tiles + row % R / kTile; }
    int64_t count() const { return (row_tile_of((begin + elems - 1) / C) - first_row_tile + 1) * column_tiles; }
};

// A thread's vectors of its block's tile: vector k has the same columns and rows kRowStep apart. Offsets from the first
// vector are 32 bits.
template <int kWidth> class TileLanes {
public:
    static constexpr int kRowVectors = kTile / kWidth;
    static constexpr int kRowStep = kThreads / kRowVectors;
    static constexpr int kVectors = kTile / kRowStep;
    static_assert(kVectors % kBatch == 0);

    __device__ explicit TileLanes(const RangeTiles& range) {
        const uint32_t column_tiles = static_cast<uint32_t>(range.column_tiles);
        const uint32_t row_tile = static_cast<uint32_t>(range.first_row_tile) + blockIdx.x / column_tiles;
        const uint32_t column_tile = blockIdx.x % column_tiles;
        const uint32_t matrix = row_tile / static_cast<uint32_t>(range.row_tiles);
        block_ = row_tile * range.column_tiles + column_tile;
        const int64_t first_row = matrix * range.R + (row_tile - matrix * range.row_tiles) * kTile;
        const int64_t row = first_row + threadIdx.x / kRowVectors;
        const int64_t column = int64_t{column_tile} * kTile + threadIdx.x % kRowVectors * kWidth;
        // The rows in which these columns belong to the range.
        const int64_t low = range.first_row + (column < range.first_column ? 1 : 0);
        const int64_t high = min(range.last_row + (column < range.last_column ? 1 : 0), (matrix + 1) * range.R);
        below_ = static_cast<int>(row - low);
        rows_ = column < range.C && low < high ? static_cast<uint32_t>(min(high - low, int64_t{1} << 30)) : 0;
        first_ = row * range.C + column - range.begin;
        step_ = kRowStep * static_cast<uint32_t>(range.C);
    }
    // Index of the tile among the blocks of the matrix.
    __device__ int64_t block() const { return block_; }
    // Offset of vector k in the range, and whether it belongs to the range.
    __device__ int64_t at(int k) const { return first_ + static_cast<uint32_t>(k) * step_; }
    __device__ bool valid(int k) const { return static_cast<uint32_t>(below_ + k * kRowStep) < rows_; }

private:
    int64_t block_, first_;
    uint32_t step_, rows_;
    int below_;
};

// Math: amaxes[block] = max with the bits of every |in rounded to bf16| of the block.
// Source: rounding is monotonic, so only the amax of a tile is rounded.
// Traffic: in read once.
// Requires: kWidth = 4 needs begin, elems and C multiples of 4 and in aligned to 16 bytes.
// Parallel: a block of threads owns a tile; at most one atomic each.
template <int kWidth>
__global__ void __launch_bounds__(kThreads, 4)
    block_amax_kernel(uint32_t* amaxes, const float* in, const __grid_constant__ RangeTiles range) {
    __shared__ uint32_t shared[kThreads / 32];
    wait_for_previous_kernels();
    const TileLanes<kWidth> lanes(range);
    uint32_t amax = 0;
#pragma unroll 1
    for (int first = 0; first < lanes.kVectors; first += kBatch) {
        Packed<float, kWidth> raw[kBatch] = {};
#pragma unroll
        for (int j = 0; j < kBatch; j++) {
            if (lanes.valid(first + j)) raw[j].load(in + lanes.at(first + j));
        }
#pragma unroll
        for (int j = 0; j < kBatch; j++) {
            float value[kWidth];
            raw[j].unpack_to(value);
#pragma unroll
            for (int i = 0; i < kWidth; i++) amax = max(amax, amax_bits_of(value[i]));
        }
    }
    record_block_amax<kThreads>(&amaxes[lanes.block()], __uint_as_float(amax), shared);
}

// Math: scale_inv = 1 / scale; with current scaling, scale is first computed from the amax.
// Source: Fp8ScalesArgs.
// Traffic: every entry read and written.
// Requires: nothing.
// Parallel: one thread per entry.
__global__ void fp8_scales_kernel(ScaleEntry* entries, int64_t count, bool current, float largest,
                                  const StepState* state) {
    wait_for_previous_kernels();
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= count || (state != nullptr && state->skip)) return;
    const float scale = current ? scale_of(entries[i].amax_bits, largest) : entries[i].scale;
    entries[i].scale = scale;
    entries[i].scale_inv = 1.0f / scale;
}

// Rounds kWidth values to bf16 and casts them to bytes.
template <Dtype kFormat, bool kCount, typename T, int kWidth>
__device__ inline void cast_vector(uint8_t* out, const Packed<T, kWidth>& raw, float scale, CastTally& tally) {
    float v[kWidth];
    raw.unpack_to(v);
#pragma unroll
    for (int i = 0; i < kWidth; i++) {
        v[i] = rounded<bf16>(v[i]);
        if constexpr (kCount) tally.add<kFormat>(v[i], scale);
        v[i] *= scale;
    }
    if constexpr (kWidth == 4) *reinterpret_cast<uint32_t*>(out) = to_fp8x4<kFormat>(v[0], v[1], v[2], v[3]);
    else *out = static_cast<uint8_t>(to_fp8x2<kFormat>(v[0], v[0]));
}

// Math: out = to_fp8(in rounded to bf16 * scale), the scale of the entry or of the block; counts.
// Source: fp8.h for casts and scales.
// Traffic: in read, 1 byte per element written, once.
// Requires: kWidth = 4 needs begin, elems and C multiples of 4, in and out aligned to 4 elements.
// Parallel: a block of threads owns a tile, which has a single scale.
template <Dtype kFormat, bool kCount, typename T, int kWidth>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_run_kernel(uint8_t* out, const T* in, const __grid_constant__ RangeTiles range, const ScaleEntry* entry,
                        const uint32_t* block_amaxes, Fp8Counts* counts) {
    wait_for_previous_kernels();
    const TileLanes<kWidth> lanes(range);
    const float scale = entry != nullptr ? entry->scale : block_scale<kFormat>(block_amaxes[lanes.block()] >> 16).scale;
    CastTally tally;
#pragma unroll 1
    for (int first = 0; first < lanes.kVectors; first += kBatch) {
        Packed<T, kWidth> raw[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; j++) {
            if (lanes.valid(first + j)) raw[j].load(in + lanes.at(first + j));
        }
#pragma unroll
        for (int j = 0; j < kBatch; j++) {
            if (!lanes.valid(first + j)) continue;
            cast_vector<kFormat, kCount, T, kWidth>(out + lanes.at(first + j), raw[j], scale, tally);
        }
    }
    if constexpr (kCount) {
        tally.flush_to(counts);
        if (blockIdx.x + threadIdx.x == 0) atomicAdd(&counts->elems, static_cast<unsigned long long>(range.elems));
    }
}

// Math: scale_inv of each block in the layouts of each matrix and of its transpose; 0 in the padding of a row.
// Source: fp8.h.
// Traffic: the amaxes read, both layouts written.
// Requires: nothing.
// Parallel: a thread owns an element of either layout; blockIdx.y is the number of the matrix.
template <Dtype kFormat>
__global__ void block_scales_kernel(float* scale_inv, float* transposed_scale_inv, const uint32_t* amaxes, int rows,
                                    int columns) {
    wait_for_previous_kernels();
    const int padded = (columns + 3) / 4 * 4, transposed_padded = (rows + 3) / 4 * 4;
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), j = i - rows * padded;
    if (j >= columns * transposed_padded) return;
    amaxes += int64_t{blockIdx.y} * rows * columns;
    scale_inv += int64_t{blockIdx.y} * rows * padded;
    transposed_scale_inv += int64_t{blockIdx.y} * columns * transposed_padded;
    const bool first = j < 0;
    const int row = first ? i / padded : j % transposed_padded, column = first ? i % padded : j / transposed_padded;
    float scale = 0.0f;
    if (row < rows && column < columns) {
        scale = block_scale<kFormat>(amaxes[int64_t{row} * columns + column] >> 16).scale_inv;
    }
    if (first) scale_inv[i] = scale;
    else transposed_scale_inv[j] = scale;
}

// Math: out[c, r] = in[r, c], bytes, of each matrix.
// Source: transposes of 4 x 4 bytes in registers, of words through shared memory.
// Traffic: in read, out written, once.
// Requires: R and C multiples of 16, tensors aligned to 16 bytes.
// Parallel: a block owns a tile of 128 x 128; a thread 16 columns of 4 rows, then 16 rows of 4 columns.
__global__ void __launch_bounds__(TransposeTile::kThreads, 6)
    transpose_bytes_kernel(uint8_t* out, const uint8_t* in, int64_t R, int64_t C, unsigned matrices) {
    __shared__ __align__(16) uint32_t words[TransposeTile::kWords];
    wait_for_previous_kernels();
    const TransposeTile tile(R, C, matrices);
    if (tile.rows == 0) return;
    in += tile.matrix * R * C, out += tile.matrix * R * C;
    const int column = static_cast<int>(threadIdx.x % 8) * 16, w = static_cast<int>(threadIdx.x / 8);
    if (column < tile.columns && w * 4 < tile.rows) {
        const uint8_t* from = in + (tile.first_row + w * 4) * C + tile.first_column + column;
        uint4 row[4];
#pragma unroll
        for (int r = 0; r < 4; r++) row[r] = load_vec(from + r * C);
        uint32_t* to = words + tile.word(column, w);
        const auto turn = [&](int q, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
            uint32_t turned[4];
            transpose_bytes({a, b, c, d}, turned);
#pragma unroll
            for (int i = 0; i < 4; i++) to[(q * 4 + i) * 32] = turned[i];
        };
        turn(0, row[0].x, row[1].x, row[2].x, row[3].x), turn(1, row[0].y, row[1].y, row[2].y, row[3].y);
        turn(2, row[0].z, row[1].z, row[2].z, row[3].z), turn(3, row[0].w, row[1].w, row[2].w, row[3].w);
    }
    __syncthreads();
    tile.store(out, words, R);
}

template <typename Args> void check_range(const Args& a, const char* op) {
    expect(a.in, a.in.dtype, a.in.elems, op);
    CHECK(a.begin >= 0 && a.begin + a.in.elems <= a.matrices * a.R * a.C,
          "%s: elements [%lld, +%lld) of %lld x %lld x %lld", op, ll(a.begin), ll(a.in.elems), ll(a.matrices), ll(a.R),
          ll(a.C));
    CHECK(a.C < (1 << 23) && a.matrices * a.R < (1 << 24), "%s: %lld matrices of %lld x %lld", op, ll(a.matrices),
          ll(a.R), ll(a.C));
}

// Calls f(width) with 4 where all vectors of the tiles are aligned and lie entirely in the range, else with 1.
template <typename F> void with_range_width(const RangeTiles& range, const Tensor& in, const Tensor& out, F&& f) {
    const bool whole = range.begin % 4 == 0 && range.elems % 4 == 0 && range.C % 4 == 0;
    if (whole && aligned(in, 4) && aligned(out, 4)) f(std::integral_constant<int, 4>{});
    else f(std::integral_constant<int, 1>{});
}

}  // namespace

void block_amax(Ctx& ctx, const BlockAmaxArgs& args) {
    if (args.in.elems == 0) return;
    expect(args.in, Dtype::kFp32, args.in.elems, "block_amax: in");
    check_range(args, "block_amax");
    CHECK(args.amaxes != nullptr, "block_amax without amaxes");
    const RangeTiles range(args.begin, args.in.elems, args.R, args.C);
    with_range_width(range, args.in, {}, [&](auto width) {
        launch_early(ctx, block_amax_kernel<decltype(width)::value>, grid_size(range.count()), kThreads, 0, args.amaxes,
                     args.in.as<float>(), range);
    });
}

void fp8_scales(Ctx& ctx, const Fp8ScalesArgs& args) {
    CHECK(is_fp8(args.format), "fp8_scales of %s", dtype_name(args.format));
    if (args.count == 0) return;
    CHECK(args.entries != nullptr, "fp8_scales without entries");
    launch_early(ctx, fp8_scales_kernel, grid_size(ceil_div(args.count, 128)), 128, 0, args.entries, args.count,
                 args.scaling == Scaling::kCurrent, fp8_largest(args.format), args.state);
}

void quantize_run(Ctx& ctx, const QuantizeRunArgs& args) {
    if (args.in.elems == 0) return;
    check_range(args, "quantize_run");
    expect(args.out, args.out.dtype, args.in.elems, "quantize_run: out");
    CHECK((args.entry != nullptr) != (args.block_amaxes != nullptr), "quantize_run: a scale entry or amaxes of blocks");
    const RangeTiles range(args.begin, args.in.elems, args.R, args.C);
    with_format(args.out.dtype, "quantize_run", [&](auto format) {
        with_range_width(range, args.in, args.out, [&](auto width) {
            dispatch(args.in.dtype, "quantize_run: in", [&](auto type) {
                using T = decltype(type);
                auto launch = [&](auto kernel) {
                    launch_early(ctx, kernel, grid_size(range.count()), kThreads, 0,
                                 static_cast<uint8_t*>(args.out.data), args.in.as<T>(), range, args.entry,
                                 args.block_amaxes, args.counts);
                };
                constexpr Dtype kFormat = decltype(format)::value;
                constexpr int kWidth = decltype(width)::value;
                if (args.counts) launch(quantize_run_kernel<kFormat, true, T, kWidth>);
                else launch(quantize_run_kernel<kFormat, false, T, kWidth>);
            });
        });
    });
}

void block_scales(Ctx& ctx, const BlockScalesArgs& args) {
    const int64_t elems = scale_inv_elems(Granularity::kBlock128x128, args.R, args.C);
    const int64_t transposed_elems = scale_inv_elems(Granularity::kBlock128x128, args.C, args.R);
    const int64_t matrices = args.matrices;
    expect(args.scale_inv, Dtype::kFp32, matrices * elems, "block_scales: scale_inv");
    expect(args.transposed_scale_inv, Dtype::kFp32, matrices * transposed_elems, "block_scales: transposed_scale_inv");
    CHECK(args.amaxes != nullptr && elems + transposed_elems < (1 << 30), "block_scales: %lld elements",
          (long long)(elems + transposed_elems));
    with_format(args.format, "block_scales", [&](auto format) {
        launch_early(ctx, block_scales_kernel<decltype(format)::value>,
                     dim3(grid_size(ceil_div(elems + transposed_elems, 128)), grid_size(matrices)), 128, 0,
                     args.scale_inv.as<float>(),
                     args.transposed_scale_inv.as<float>(), args.amaxes, ceil_div(args.R, kTile),
                     ceil_div(args.C, kTile));
    });
}

void transpose_bytes(Ctx& ctx, const TransposeBytesArgs& args) {
    const int64_t R = args.R, C = args.C, elems = args.matrices * R * C;
    CHECK(is_fp8(args.in.dtype) && R > 0 && R % 16 == 0 && C % 16 == 0, "transpose_bytes: %lld x %lld of %s",
          (long long)R, (long long)C, dtype_name(args.in.dtype));
    expect(args.in, args.in.dtype, elems, "transpose_bytes: in");
    expect(args.out, args.in.dtype, elems, "transpose_bytes: out");
    expect_aligned(args.in, "transpose_bytes: in");
    expect_aligned(args.out, "transpose_bytes: out");
    launch_early(ctx, transpose_bytes_kernel, TransposeTile::grid(R, C, args.matrices), TransposeTile::kThreads, 0,
                 static_cast<uint8_t*>(args.out.data), static_cast<const uint8_t*>(args.in.data), R, C, args.matrices);
}

}  // namespace cuda
