// Quantization of a weight matrix by several ranks, each of which has a shard range. CPU.
#include "llmc/cpu/cast_lines.h"

namespace cpu {
namespace {

template <typename Args> void check_range(const char* op, const Args& a) {
    CHECK(a.begin >= 0 && a.begin + a.in.elems <= a.matrices * a.R * a.C,
          "%s: elements [%lld, +%lld) of %lld x %lld x %lld", op, (long long)a.begin, (long long)a.in.elems,
          (long long)a.matrices, (long long)a.R, (long long)a.C);
}

// The part of a shard range in one row of one block.
struct Line {
    int64_t block;         // index of the block, row-major
    int64_t begin, count;  // within the shard range
};

// Calls body(line) for all lines of the elements [begin, begin + elems) of (R, C) matrices.
template <typename Body> void for_block_lines(int64_t begin, int64_t elems, int64_t R, int64_t C, Body&& body) {
    const int64_t end = begin + elems, first = begin / C, rows = ceil_div(end, C) - first;
#pragma omp parallel for schedule(static) if (elems >= kParallelElems)
    for (int64_t row = first; row < first + rows; row++) {
        const int64_t stop = std::min(C, end - row * C), row_block = row / R * scale_blocks(R) + row % R / kScaleBlock;
        int64_t column = std::max<int64_t>(0, begin - row * C);
        while (column < stop) {
            const int64_t count = std::min(kScaleBlock - column % kScaleBlock, stop - column);
            body(Line{row_block * scale_blocks(C) + column / kScaleBlock, row * C + column - begin, count});
            column += count;
        }
    }
}

template <Dtype format> void quantize_line(const QuantizeRunArgs& args, const Line& line) {
    bf16 x[kScaleBlock];
    if (args.in.dtype == Dtype::kBf16) std::copy_n(args.in.as<bf16>() + line.begin, line.count, x);
    else round_line(x, args.in.as<float>() + line.begin, line.count);
    float scale[kScaleBlock];
    std::fill(scale, scale + kScaleBlock,
              args.entry ? args.entry->scale : block_scale(args.block_amaxes[line.block], format));
    uint8_t* codes = static_cast<uint8_t*>(args.out.data) + line.begin;
    cast_line<format>(codes, x, scale, line.count);
    if (!args.counts) return;
    Tally tally;
    count_line<format>(tally, codes, x, scale, line.count);
    add_counts(args.counts, line.count, tally);
}

}  // namespace

void block_amax(Ctx&, const BlockAmaxArgs& args) {
    if (args.in.elems == 0) return;
    check_tensor("block_amax", "in", args.in, Dtype::kFp32, args.in.elems);
    check_range("block_amax", args);
    for_block_lines(args.begin, args.in.elems, args.R, args.C, [&](const Line& line) {
        raise_amax(&args.amaxes[line.block], rounded_amax_of_line(args.in.as<float>() + line.begin, line.count));
    });
}

void fp8_scales(Ctx&, const Fp8ScalesArgs& args) {
    CHECK(is_fp8(args.format), "fp8_scales of %s", dtype_name(args.format));
    if (args.state && args.state->skip) return;
    for (int64_t i = 0; i < args.count; i++) {
        ScaleEntry& entry = args.entries[i];
        if (args.scaling == Scaling::kCurrent) entry.scale = scale_of(entry.amax_bits, fp8_largest(args.format));
        entry.scale_inv = 1 / entry.scale;
    }
}

void quantize_run(Ctx&, const QuantizeRunArgs& args) {
    if (args.in.elems == 0) return;
    check_tensor("quantize_run", "in", args.in, args.in.dtype == Dtype::kBf16 ? Dtype::kBf16 : Dtype::kFp32,
                 args.in.elems);
    check_range("quantize_run", args);
    CHECK(is_fp8(args.out.dtype) && args.out.elems == args.in.elems, "quantize_run: out is %s with %lld elements",
          dtype_name(args.out.dtype), (long long)args.out.elems);
    CHECK((args.entry != nullptr) != (args.block_amaxes != nullptr), "quantize_run: needs an entry or block_amaxes");
    for_block_lines(args.begin, args.in.elems, args.R, args.C, [&](const Line& line) {
        if (args.out.dtype == Dtype::kE4m3) quantize_line<Dtype::kE4m3>(args, line);
        else quantize_line<Dtype::kE5m2>(args, line);
    });
}

void block_scales(Ctx&, const BlockScalesArgs& args) {
    constexpr Granularity kBlocks = Granularity::kBlock128x128;
    CHECK(is_fp8(args.format), "block_scales of %s", dtype_name(args.format));
    const int64_t elems = scale_inv_elems(kBlocks, args.R, args.C), turned = scale_inv_elems(kBlocks, args.C, args.R);
    check_tensor("block_scales", "scale_inv", args.scale_inv, Dtype::kFp32, args.matrices * elems);
    check_tensor("block_scales", "transposed_scale_inv", args.transposed_scale_inv, Dtype::kFp32,
                 args.matrices * turned);
    for (const Tensor& all : {args.scale_inv, args.transposed_scale_inv}) std::fill_n(all.as<float>(), all.elems, 0.0f);
    const int64_t rows = scale_blocks(args.R), columns = scale_blocks(args.C);
    for (int64_t block = 0; block < args.matrices * rows * columns; block++) {
        const int64_t m = block / (rows * columns), i = block / columns % rows, j = block % columns;
        const float scale_inv = 1 / block_scale(args.amaxes[block], args.format);
        args.scale_inv.as<float>()[m * elems + i * block_row_stride(args.C) + j] = scale_inv;
        args.transposed_scale_inv.as<float>()[m * turned + j * block_row_stride(args.R) + i] = scale_inv;
    }
}

void transpose_bytes(Ctx&, const TransposeBytesArgs& args) {
    const int64_t R = args.R, C = args.C;
    CHECK(is_fp8(args.in.dtype) && R % 16 == 0 && C % 16 == 0, "transpose_bytes: %lld x %lld of %s", (long long)R,
          (long long)C, dtype_name(args.in.dtype));
    check_tensor("transpose_bytes", "in", args.in, args.in.dtype, args.matrices * R * C);
    check_tensor("transpose_bytes", "out", args.out, args.in.dtype, args.matrices * R * C);
    const int64_t tile_columns = scale_blocks(C), tiles = scale_blocks(R) * tile_columns;
    parallel_for(args.matrices * tiles, args.matrices * R * C, [&](int64_t i) {
        const uint8_t* in = static_cast<const uint8_t*>(args.in.data) + i / tiles * R * C;
        uint8_t* out = static_cast<uint8_t*>(args.out.data) + i / tiles * R * C;
        const int64_t top = i % tiles / tile_columns * kScaleBlock, left = i % tile_columns * kScaleBlock;
        for (int64_t c = left; c < std::min(C, left + kScaleBlock); c++)
            for (int64_t r = top; r < std::min(R, top + kScaleBlock); r++) out[c * R + r] = in[r * C + c];
    });
}

}  // namespace cpu
