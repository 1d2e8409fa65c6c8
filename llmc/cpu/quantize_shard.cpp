// Quantization of a weight matrix by several ranks, each of which has a shard range. CPU.
#include "llmc/cpu/cast_lines.h"

namespace cpu {
namespace {

void check_range(const char* op, const Tensor& in, int64_t begin, int64_t R, int64_t C) {
    CHECK(begin >= 0 && begin + in.elems <= R * C, "%s: elements [%lld, +%lld) of %lld x %lld", op, (long long)begin,
          (long long)in.elems, (long long)R, (long long)C);
}

// The part of a shard range in one row of one block.
struct Line {
    int64_t block;         // index of the block, row-major
    int64_t begin, count;  // within the shard range
};

// Calls body(line) for all lines of the elements [begin, begin + elems) of a matrix with C columns.
template <typename Body> void for_block_lines(int64_t begin, int64_t elems, int64_t C, Body&& body) {
    const int64_t end = begin + elems, first = begin / C, rows = ceil_div(end, C) - first;
#pragma omp parallel for schedule(static) if (elems >= kParallelElems)
    for (int64_t row = first; row < first + rows; row++) {
        const int64_t stop = std::min(C, end - row * C);
        int64_t column = std::max<int64_t>(0, begin - row * C);
        while (column < stop) {
            const int64_t count = std::min(kScaleBlock - column % kScaleBlock, stop - column);
            body(Line{row / kScaleBlock * scale_blocks(C) + column / kScaleBlock, row * C + column - begin, count});
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
    check_range("block_amax", args.in, args.begin, args.R, args.C);
    for_block_lines(args.begin, args.in.elems, args.C, [&](const Line& line) {
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
    check_range("quantize_run", args.in, args.begin, args.R, args.C);
    CHECK(is_fp8(args.out.dtype) && args.out.elems == args.in.elems, "quantize_run: out is %s with %lld elements",
          dtype_name(args.out.dtype), (long long)args.out.elems);
    CHECK((args.entry != nullptr) != (args.block_amaxes != nullptr), "quantize_run: needs an entry or block_amaxes");
    for_block_lines(args.begin, args.in.elems, args.C, [&](const Line& line) {
        if (args.out.dtype == Dtype::kE4m3) quantize_line<Dtype::kE4m3>(args, line);
        else quantize_line<Dtype::kE5m2>(args, line);
    });
}

void block_scales(Ctx&, const BlockScalesArgs& args) {
    constexpr Granularity kBlocks = Granularity::kBlock128x128;
    CHECK(is_fp8(args.format), "block_scales of %s", dtype_name(args.format));
    check_tensor("block_scales", "scale_inv", args.scale_inv, Dtype::kFp32, scale_inv_elems(kBlocks, args.R, args.C));
    check_tensor("block_scales", "transposed_scale_inv", args.transposed_scale_inv, Dtype::kFp32,
                 scale_inv_elems(kBlocks, args.C, args.R));
    for (const Tensor& all : {args.scale_inv, args.transposed_scale_inv}) std::fill_n(all.as<float>(), all.elems, 0.0f);
    const int64_t columns = scale_blocks(args.C);
    for (int64_t i = 0; i < scale_blocks(args.R); i++)
        for (int64_t j = 0; j < columns; j++) {
            const float scale_inv = 1 / block_scale(args.amaxes[i * columns + j], args.format);
            args.scale_inv.as<float>()[i * block_row_stride(args.C) + j] = scale_inv;
            args.transposed_scale_inv.as<float>()[j * block_row_stride(args.R) + i] = scale_inv;
        }
}

void transpose_bytes(Ctx&, const TransposeBytesArgs& args) {
    const int64_t R = args.R, C = args.C;
    CHECK(is_fp8(args.in.dtype) && R % 16 == 0 && C % 16 == 0, "transpose_bytes: %lld x %lld of %s", (long long)R,
          (long long)C, dtype_name(args.in.dtype));
    check_tensor("transpose_bytes", "in", args.in, args.in.dtype, R * C);
    check_tensor("transpose_bytes", "out", args.out, args.in.dtype, R * C);
    const uint8_t* in = static_cast<const uint8_t*>(args.in.data);
    uint8_t* out = static_cast<uint8_t*>(args.out.data);
    const int64_t tile_columns = scale_blocks(C), tiles = scale_blocks(R) * tile_columns;
    parallel_for(tiles, R * C, [&](int64_t tile) {
        const int64_t top = tile / tile_columns * kScaleBlock, left = tile % tile_columns * kScaleBlock;
        for (int64_t c = left; c < std::min(C, left + kScaleBlock); c++)
            for (int64_t r = top; r < std::min(R, top + kScaleBlock); r++) out[c * R + r] = in[r * C + c];
    });
}

}  // namespace cpu
