// Quantization: FP8 results with their scales, statistics and column sums, one tile of 128 x 128 at a time. CPU.
#include "llmc/cpu/quantize.h"

namespace cpu {
namespace {

// A block of X and its position.
struct Tile {
    const bf16* x;
    int64_t N, C;
    int64_t row, column;     // of the first element
    int64_t rows, columns;
    const bf16* line(int64_t n) const { return x + (row + n) * C + column; }
};
uint32_t amax_of_tile(const Tile& tile) {
    uint32_t amax = 0;
    for (int64_t n = 0; n < tile.rows; n++) amax = std::max(amax, amax_of_line(tile.line(n), tile.columns));
    return amax;
}
void amaxes_of_columns(const Tile& tile, uint32_t* amaxes) {
    std::fill(amaxes, amaxes + kScaleBlock, 0);
    for (int64_t n = 0; n < tile.rows; n++) {
        const bf16* x = tile.line(n);
        for (int64_t c = 0; c < tile.columns; c++) amaxes[c] = std::max(amaxes[c], wide_bits(magnitude(x[c])));
    }
}

// Scales of a tile, one per row or one per column.
struct TileScales {
    bool per_column = false;
    float scale[kScaleBlock];
};

// codes (rows x kScaleBlock) = the tile in FP8.
template <Dtype format>
void cast_tile(uint8_t* codes, const Tile& tile, const TileScales& scales, Tally* tally) {
    float same[kScaleBlock];
    for (int64_t n = 0; n < tile.rows; n++) {
        std::fill(same, same + kScaleBlock, scales.scale[n]);
        const float* scale = scales.per_column ? scales.scale : same;
        cast_line<format>(codes + n * kScaleBlock, tile.line(n), scale, tile.columns);
        if (tally) count_line<format>(*tally, codes + n * kScaleBlock, tile.line(n), scale, tile.columns);
    }
}

uint8_t* bytes_of(const Tensor& t) { return static_cast<uint8_t*>(t.data); }

void store_rowwise(const Tensor& to, const Tile& tile, const uint8_t* codes) {
    for (int64_t n = 0; n < tile.rows; n++)
        std::copy_n(codes + n * kScaleBlock, tile.columns, bytes_of(to) + (tile.row + n) * tile.C + tile.column);
}
void store_transposed(const Tensor& to, const Tile& tile, const uint8_t* codes) {
    for (int64_t c = 0; c < tile.columns; c++) {
        uint8_t* line = bytes_of(to) + (tile.column + c) * tile.N + tile.row;
        for (int64_t n = 0; n < tile.rows; n++) line[n] = codes[n * kScaleBlock + c];
    }
}

// Returns the scales of the rowwise result of a tile and writes their inverses to scale_inv. A 128x128 block has the
// same scale in the transposed result, so both are written.
TileScales row_scales(const QuantOut& quant, const Tile& tile, Dtype format) {
    TileScales scales;
    if (quant.granularity == Granularity::kBlock1x128) {
        for (int64_t n = 0; n < tile.rows; n++) {
            scales.scale[n] = block_scale(amax_of_line(tile.line(n), tile.columns), format);
            quant.rowwise_scale_inv.as<float>()[tile.column / kScaleBlock * tile.N + tile.row + n] =
                1 / scales.scale[n];
        }
        return scales;
    }
    const bool per_tensor = quant.granularity == Granularity::kTensor;
    const float scale = per_tensor ? quant.entry->scale : block_scale(amax_of_tile(tile), format);
    std::fill(scales.scale, scales.scale + kScaleBlock, scale);
    if (per_tensor) return scales;
    const int64_t i = tile.row / kScaleBlock, j = tile.column / kScaleBlock;
    if (quant.rowwise) quant.rowwise_scale_inv.as<float>()[i * block_row_stride(tile.C) + j] = 1 / scale;
    if (quant.transposed) quant.transposed_scale_inv.as<float>()[j * block_row_stride(tile.N) + i] = 1 / scale;
    return scales;
}

TileScales column_scales(const QuantOut& quant, const Tile& tile, Dtype format) {
    TileScales scales{.per_column = true, .scale = {}};
    uint32_t amaxes[kScaleBlock];
    amaxes_of_columns(tile, amaxes);
    for (int64_t c = 0; c < tile.columns; c++) {
        scales.scale[c] = block_scale(amaxes[c], format);
        quant.transposed_scale_inv.as<float>()[tile.row / kScaleBlock * tile.C + tile.column + c] = 1 / scales.scale[c];
    }
    return scales;
}

// Quantizes a tile rowwise and transposed. The scales of the two differ only for 1x128 blocks.
template <Dtype format> void quantize_tile(const QuantOut& quant, const Tile& tile, Tally* tally) {
    alignas(64) uint8_t codes[kScaleBlock * kScaleBlock];
    const bool differ = quant.granularity == Granularity::kBlock1x128;
    if (quant.rowwise || !differ) {
        cast_tile<format>(codes, tile, row_scales(quant, tile, format), tally);
        if (quant.rowwise) store_rowwise(quant.rowwise, tile, codes);
        if (quant.transposed && !differ) store_transposed(quant.transposed, tile, codes);
    }
    if (quant.transposed && differ) {
        cast_tile<format>(codes, tile, column_scales(quant, tile, format), quant.rowwise ? nullptr : tally);
        store_transposed(quant.transposed, tile, codes);
    }
}

// *first = min(*first, event). Thread-safe.
void lower_event(uint32_t* first, uint32_t event) {
    std::atomic_ref<uint32_t> earliest(*first);
    uint32_t before = earliest.load(std::memory_order_relaxed);
    while (before > event && !earliest.compare_exchange_weak(before, event, std::memory_order_relaxed)) {}
}

void sum_columns(float* partial, const Tile& tile) {
    float* sum = partial + tile.row / kScaleBlock * tile.C + tile.column;
    std::fill(sum, sum + tile.columns, 0.0f);
    for (int64_t n = 0; n < tile.rows; n++) add_row(sum, tile.line(n), tile.columns);
}

bool records(const QuantOut& quant) {
    return quant.record && !(quant.copies() && quant.scaling == Scaling::kCurrent);
}

void do_tile(const QuantOut& quant, const Tile& tile) {
    if (records(quant) || quant.first_nonfinite) {
        const uint32_t amax = amax_of_tile(tile);
        if (records(quant)) raise_amax(&quant.entry->amax_bits, amax);
        if (quant.first_nonfinite && amax >= kInfinityBits) lower_event(quant.first_nonfinite, quant.event);
    }
    if (quant.dbias) sum_columns(quant.dbias_scratch.as<float>(), tile);
    if (!quant.copies()) return;
    Tally tally;
    Tally* counted = quant.counts ? &tally : nullptr;
    const Dtype format = (quant.rowwise ? quant.rowwise : quant.transposed).dtype;
    if (format == Dtype::kE4m3) quantize_tile<Dtype::kE4m3>(quant, tile, counted);
    else quantize_tile<Dtype::kE5m2>(quant, tile, counted);
    if (counted) add_counts(quant.counts, tile.rows * tile.columns, tally);
}

void check_codes(const char* op, const char* name, const QuantOut& quant, const Tensor& codes,
                const Tensor& scale_inv, int64_t R, int64_t K) {
    CHECK(is_fp8(codes.dtype) && codes.elems == R * K, "%s: %s is %s with %lld elements, expected FP8 with %lld", op,
          name, dtype_name(codes.dtype), (long long)codes.elems, (long long)(R * K));
    if (quant.granularity != Granularity::kTensor)
        check_tensor(op, name, scale_inv, Dtype::kFp32, scale_inv_elems(quant.granularity, R, K));
}

}  // namespace

void check_quant(const char* op, const QuantOut& quant, Dtype T, int64_t N, int64_t C) {
    CHECK(T == Dtype::kBf16, "%s: cannot quantize a result in %s, only bf16", op, dtype_name(T));
    CHECK((!quant.copies() || C % 16 == 0) && (!quant.transposed || N % 16 == 0),
          "%s: cannot quantize %lld x %lld, not multiples of 16", op, (long long)N, (long long)C);
    if (quant.rowwise) check_codes(op, "rowwise", quant, quant.rowwise, quant.rowwise_scale_inv, N, C);
    if (quant.transposed)
        check_codes(op, "transposed", quant, quant.transposed, quant.transposed_scale_inv, C, N);
    CHECK(!quant.rowwise || !quant.transposed || quant.rowwise.dtype == quant.transposed.dtype,
          "%s: rowwise in %s, transposed in %s", op, dtype_name(quant.rowwise.dtype),
          dtype_name(quant.transposed.dtype));
    const bool needs_entry = records(quant) || (quant.copies() && quant.granularity == Granularity::kTensor);
    CHECK(quant.entry || !needs_entry, "%s: no entry for the scale or the amax", op);
    if (!quant.dbias) return;
    check_grad<bf16>(op, "dbias", quant.dbias, C);
    check_at_least(op, "dbias_scratch", quant.dbias_scratch, Dtype::kFp32, quant_partial_rows(N) * C);
}

void apply_quant(const QuantOut& quant, const bf16* x, int64_t N, int64_t C) {
    if (quant.copies() && quant.granularity == Granularity::kTensor) {
        const Dtype format = (quant.rowwise ? quant.rowwise : quant.transposed).dtype;
        if (quant.scaling == Scaling::kCurrent)
            quant.entry->scale = scale_of(quant.entry->amax_bits, fp8_largest(format));
        quant.entry->scale_inv = 1 / quant.entry->scale;
    }
    if (quant.copies() && quant.granularity == Granularity::kBlock128x128)   // sets the padding
        for (const Tensor& all : {quant.rowwise_scale_inv, quant.transposed_scale_inv})
            if (all) std::fill_n(all.as<float>(), all.elems, 0.0f);
    const int64_t tile_rows = scale_blocks(N), tile_columns = scale_blocks(C);
    parallel_for(tile_rows * tile_columns, N * C, [&](int64_t i) {
        const int64_t row = i / tile_columns * kScaleBlock, column = i % tile_columns * kScaleBlock;
        do_tile(quant, {x, N, C, row, column, std::min(kScaleBlock, N - row), std::min(kScaleBlock, C - column)});
    });
    if (quant.dbias) add_partials_to_grad(quant.dbias, quant.dbias_scratch.as<float>(), tile_rows, C, C);
}

void quantize(Ctx& ctx, const QuantizeArgs& args) {
    CHECK(args.quant, "quantize: nothing asked for");
    const bool wide = args.in.dtype == Dtype::kFp32;
    check_tensor("quantize", "in", args.in, wide ? Dtype::kFp32 : Dtype::kBf16, args.matrices * args.N * args.C);
    CHECK(args.matrices == 1 || (args.quant.granularity == Granularity::kBlock128x128 && !args.quant.record
                                 && !args.quant.first_nonfinite && !args.quant.dbias),
          "quantize: %lld matrices, not only blocks of 128 x 128", (long long)args.matrices);
    for (int64_t m = 0; m < args.matrices && args.matrices > 1; m++)
        quantize(ctx, {.quant = of_matrix(args.quant, m, args.matrices),
                       .in = args.in.slice(m * args.N * args.C, args.N * args.C), .N = args.N, .C = args.C,
                       .state = args.state});
    if (args.matrices > 1) return;
    check_quant("quantize", args.quant, Dtype::kBf16, args.N, args.C);
    CHECK(!args.state || !args.quant.dbias, "quantize: dbias of a step that may be skipped");
    if (args.state && args.state->skip) return;
    if (!wide) return apply_quant(args.quant, args.in.as<bf16>(), args.N, args.C);
    auto rounded = make_buffer<bf16>(args.in.elems);
    for_chunks(args.in.elems, [&](int64_t begin, int64_t count) {
        round_line(rounded.get() + begin, args.in.as<float>() + begin, count);
    });
    apply_quant(args.quant, rounded.get(), args.N, args.C);
}

void amax(Ctx&, const AmaxArgs& args) {
    const bool wide = args.in.dtype == Dtype::kFp32;
    check_tensor("amax", "in", args.in, wide ? Dtype::kFp32 : Dtype::kBf16, args.in.elems);
    for_chunks(args.in.elems, [&](int64_t begin, int64_t count) {
        raise_amax(&args.entry->amax_bits, wide ? rounded_amax_of_line(args.in.as<float>() + begin, count)
                                               : amax_of_line(args.in.as<bf16>() + begin, count));
    });
}

void fp8_clear(Ctx&, const Fp8ClearArgs& args) {
    if (args.state && args.state->skip) return;
    for (int64_t i = 0; i < args.count; i++) {
        ScaleEntry& entry = args.entries[i];
        entry.step_amax_bits = args.step ? 0 : std::max(entry.step_amax_bits, entry.amax_bits);
        entry.amax_bits = 0;
    }
}

static void count_matrix(const CountScalesArgs& args, const uint8_t* codes, const float* scale_inv) {
    const bool lines = args.granularity == Granularity::kBlock1x128;
    const int64_t R = args.R, K = args.K, height = lines ? 1 : kScaleBlock;
    for (int64_t row = 0; row < R; row += height)
        for (int64_t k = 0; k * kScaleBlock < K; k++) {
            const int64_t at = lines ? k * R + row : row / kScaleBlock * block_row_stride(K) + k;
            const int64_t rows = std::min(height, R - row), columns = std::min(kScaleBlock, K - k * kScaleBlock);
            bool zeros = true;
            for (int64_t i = 0; i < rows && zeros; i++) {
                const uint8_t* line = codes + (row + i) * K + k * kScaleBlock;
                zeros = std::all_of(line, line + columns, [](uint8_t code) { return (code & 0x7f) == 0; });
            }
            const uint32_t bits = std::bit_cast<uint32_t>(scale_inv[at]);
            args.bins[zeros ? kZeroBlocks : static_cast<int64_t>(bits >> 23 & 0xff)]++;
        }
}

void count_scales(Ctx&, const CountScalesArgs& args) {
    const int64_t codes = args.R * args.K;
    CHECK(args.granularity != Granularity::kTensor && args.K % 16 == 0, "count_scales: %lld x %lld",
          (long long)args.R, (long long)args.K);
    check_tensor("count_scales", "codes", args.codes, args.codes.dtype, args.matrices * codes);
    CHECK(is_fp8(args.codes.dtype), "count_scales: codes in %s", dtype_name(args.codes.dtype));
    const int64_t scales = scale_inv_elems(args.granularity, args.R, args.K);
    check_tensor("count_scales", "scale_inv", args.scale_inv, Dtype::kFp32, args.matrices * scales);
    for (int64_t m = 0; m < args.matrices; m++)
        count_matrix(args, static_cast<const uint8_t*>(args.codes.data) + m * codes,
                     args.scale_inv.as<float>() + m * scales);
}

void fp8_update(Ctx&, const Fp8UpdateArgs& args) {
    CHECK(args.length > 0 && args.interval > 0, "fp8_update: history of %lld, interval %lld", (long long)args.length,
          (long long)args.interval);
    for (int64_t i = 0; i < args.count; i++) {
        ScaleEntry& entry = args.entries[i];
        const uint32_t last = entry.amax_bits;
        entry.step_amax_bits = std::max(entry.step_amax_bits, last);
        entry.amax_bits = 0;
        if ((args.state && args.state->skip) || last == 0) continue;
        float* ring = args.history + i * args.length;
        const int32_t update = args.updates[i]++;
        std::memcpy(&ring[update % args.length], &last, 4);
        uint32_t amax_bits = last;
        if (!args.most_recent)
            for (int64_t j = 0; j < args.length; j++) amax_bits = std::max(amax_bits, amax_bits_of(ring[j]));
        if (update % args.interval == 0 && amax_bits < kInfinityBits)
            entry.scale = scale_of(amax_bits, args.largest[i]);
    }
}

}  // namespace cpu
