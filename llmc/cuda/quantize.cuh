// Quantized outputs: kernels that quantize the results of any elementwise producer tile by tile (quantize_tile.cuh).
#pragma once
#include "llmc/cuda/quantize_tile.cuh"

namespace cuda {

// A set of casts, one bit each.
constexpr unsigned cast_bit(TileCast cast) { return 1u << static_cast<int>(cast); }
inline constexpr unsigned kActivationCasts =
    cast_bit(TileCast::kNone) | cast_bit(TileCast::kTensor) | cast_bit(TileCast::kBlock1x128);
inline constexpr unsigned kAllCasts = kActivationCasts | cast_bit(TileCast::kBlock128x128);

// ---- the kernels. A producer is a struct of kernel parameters with
//   static constexpr int kOutputs, kBlocksPerSm
//   struct Raw;       inputs for 8 columns of a row
//   struct Columns;   values shared by all rows of 8 columns
//   void columns(int64_t column, Columns&), load(const TileThread&, int r, Raw&) of row r of the thread,
//   void compute(const Raw&, const Columns&, uint4 (&x)[kOutputs])   results packed bf16
// Output o of column c is column o * C / kOutputs + c of X.

// Computes the thread's results.
template <typename Producer>
__device__ inline void produce_tile(const Producer& producer, const TileThread& t,
                                    TileValues<Producer::kOutputs>& value) {
    constexpr int kOutputs = Producer::kOutputs, kRows = kTileRows<kOutputs>;
    constexpr int kBatch = 4 / kOutputs;   // rows in flight at a time
    typename Producer::Columns columns;
    if (t.column_valid()) producer.columns(t.column(), columns);
#pragma unroll
    for (int first = 0; first < kRows; first += kBatch) {
        typename Producer::Raw raw[kBatch];
        // The conditions also help in the interior: without them the assembler delays loads until after the arithmetic
        // of other rows.
#pragma unroll
        for (int j = 0; j < kBatch; j++) {
            if (t.valid(first + j)) producer.load(t, first + j, raw[j]);
        }
#pragma unroll
        for (int j = 0; j < kBatch; j++) {
            uint4 x[kOutputs] = {};
            if (t.valid(first + j)) producer.compute(raw[j], columns, x);
#pragma unroll
            for (int o = 0; o < kOutputs; o++) value[o][first + j] = x[o];
        }
    }
}

// Math: X = the producer's results rounded to bf16; then the outputs of QuantOut: to_fp8(x * scale), row-major and
// transposed, amax, counts, column sums.
// Source: fp8.h for casts and scales.
// Traffic: the producer's inputs read; 2 bytes per element written for bf16, 1 per FP8 output; all once.
// Requires: rows of X and of the transposed output in whole 16 bytes (C, N multiples of 16), aligned tensors.
// Parallel: a block owns a tile (two with two outputs); kTileGroup row tiles of a column are adjacent in the grid. The
// last rows come first, because they are still in L2 if a kernel has just written the input or read it for the amax.
template <typename Producer, typename Kind>
__global__ void __launch_bounds__(kTileThreads<Producer::kOutputs>,
                                  Kind::kCount ? 2 / Producer::kOutputs : Producer::kBlocksPerSm)
    quantize_tile_kernel(const __grid_constant__ Producer producer, const __grid_constant__ TileOut out) {
    constexpr int kOutputs = Producer::kOutputs;
    __shared__ TileShared<kOutputs> shared;
    wait_for_previous_kernels();
    const int64_t row_tile = int64_t{gridDim.z - 1 - blockIdx.z} * kTileGroup + blockIdx.x;
    if (row_tile * kTile >= out.N || (out.state != nullptr && out.state->skip)) return;
    const TileThread t = tile_thread(row_tile, blockIdx.y, out.N, out.C / kOutputs);
    TileValues<kOutputs> value;
    produce_tile(producer, t, value);
    if (out.out != nullptr) store_values<kOutputs>(out, t, value);
    write_tile<Kind, kOutputs>(out, t, value, shared);
}

// ---- host

// Codes of an optional tensor, which may have an address without elements.
inline uint8_t* codes_of(const Tensor& tensor) { return tensor ? static_cast<uint8_t*>(tensor.data) : nullptr; }

// Checks a request and converts it for the kernels. `out`: the bf16 output X, or empty.
TileOut tile_out(const QuantOut& quant, const Tensor& out, int64_t N, int64_t C, const char* op);

// Calls f with the TileKind of a request.
template <unsigned kCasts, typename F> void with_tile_kind(const QuantOut& quant, const char* op, F&& f) {
    auto call = [&]<TileCast kCast, Dtype kFormat, bool kCount>() {
        if constexpr ((kCasts & cast_bit(kCast)) != 0) f(TileKind<kCast, kFormat, kCount>{});
        else CHECK(false, "%s: not made for this granularity", op);
    };
    if (!quant.copies()) return call.template operator()<TileCast::kNone, Dtype::kE4m3, false>();
    auto with_cast = [&]<Dtype kFormat, bool kCount>() {
        switch (quant.granularity) {
            case Granularity::kTensor: return call.template operator()<TileCast::kTensor, kFormat, kCount>();
            case Granularity::kBlock1x128: return call.template operator()<TileCast::kBlock1x128, kFormat, kCount>();
            case Granularity::kBlock128x128:
                return call.template operator()<TileCast::kBlock128x128, kFormat, kCount>();
            case Granularity::kRow: CHECK(false, "%s: rows are quantized by quantize_int8", op);
        }
    };
    const Dtype format = quant.rowwise ? quant.rowwise.dtype : quant.transposed.dtype;
    with_format(format, op, [&](auto constant) {
        if (quant.counts) with_cast.template operator()<decltype(constant)::value, true>();
        else with_cast.template operator()<decltype(constant)::value, false>();
    });
}

// Quantizes X of shape (N, C) from the producer.
template <unsigned kCasts = kActivationCasts, typename Producer>
void quantize_tiles(Ctx& ctx, const Producer& producer, const QuantOut& quant, const Tensor& out, int64_t N, int64_t C,
                    const char* op, const StepState* state = nullptr) {
    TileOut tile = tile_out(quant, out, N, C, op);
    tile.state = state;
    CHECK(C % (8 * Producer::kOutputs) == 0 && C < (1 << 23), "%s: %lld columns quantized", op, (long long)C);
    CHECK(N < (1 << 24), "%s: %lld rows quantized", op, (long long)N);
    const dim3 grid(kTileGroup, grid_size(ceil_div(C / Producer::kOutputs, kTile)),
                    grid_size(ceil_div(N, kTile * kTileGroup)));
    with_tile_kind<kCasts>(quant, op, [&](auto kind) {
        launch_early(ctx, quantize_tile_kernel<Producer, decltype(kind)>, grid, kTileThreads<Producer::kOutputs>, 0,
                     producer, tile);
    });
    if (!quant.dbias) return;
    add_column_sums(ctx, {quant.dbias, quant.dbias_scratch.as<float>()}, {}, quant_partial_rows(N), C);
}

}  // namespace cuda
