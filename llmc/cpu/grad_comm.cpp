// Communication of gradients: quantization in chunks, local reduction in rank order, comparison of two reductions. CPU.
#include "llmc/cpu/cast_lines.h"
#include "llmc/cpu/common.h"

namespace cpu {
namespace {

template <typename T> void quantize_chunk(const QuantizeChunksArgs& args, int64_t chunk, Tally& tally) {
    const T* in = args.in.as<T>() + chunk * kGradCommChunk;
    uint8_t* out = static_cast<uint8_t*>(args.out.data) + chunk * kGradCommChunk;
    const ChunkScale chunk_scales = chunk_scale(amax_of_line(in, kGradCommChunk));
    float scale[kGradCommChunk];
    std::fill(scale, scale + kGradCommChunk, chunk_scales.scale);
    cast_line<Dtype::kE4m3>(out, in, scale, kGradCommChunk);
    if (args.counts) count_line<Dtype::kE4m3>(tally, out, in, scale, kGradCommChunk);
    args.scales.as<float>()[chunk] = chunk_scales.scale_inv;
}

// Values of one rank, dequantized.
template <typename T> struct Values {
    const T* in;
    float at(int64_t i) const { return widen(in[i]); }
};
struct ChunkValues {
    const uint8_t* in;
    const float* scales;
    const float* table = fp8_values(Dtype::kE4m3);
    float at(int64_t i) const { return table[in[i]] * scales[i / kGradCommChunk]; }
};

// out[i] (+)= the sum over the ranks of values_of(rank).at(i).
template <typename Out, typename ValuesOf> void add_ranks_to(const SumRanksArgs& args, ValuesOf&& values_of) {
    for_chunks(args.out.elems, [&](int64_t begin, int64_t count) {
        float sum[4096];
        for (int64_t rank = 0; rank < args.ranks; rank++) {
            const auto values = values_of(rank);
            for (int64_t i = 0; i < count; i++) {
                const float value = values.at(begin + i);
                sum[i] = rank == 0 ? value : sum[i] + value;
            }
        }
        Out* out = args.out.as<Out>() + begin;
        for (int64_t i = 0; i < count; i++) out[i] = Out(args.accumulate ? widen(out[i]) + sum[i] : sum[i]);
    });
}
template <typename ValuesOf> void add_ranks(const SumRanksArgs& args, ValuesOf&& values_of) {
    if (args.out.dtype == Dtype::kBf16) add_ranks_to<bf16>(args, values_of);
    else add_ranks_to<float>(args, values_of);
}

}  // namespace

void quantize_chunks(Ctx&, const QuantizeChunksArgs& args) {
    const int64_t n = args.in.elems, chunks = n / kGradCommChunk;
    CHECK(n % kGradCommChunk == 0, "quantize_chunks: %lld elements, no multiple of %lld", (long long)n,
          (long long)kGradCommChunk);
    check_tensor("quantize_chunks", "out", args.out, Dtype::kE4m3, n);
    check_tensor("quantize_chunks", "scales", args.scales, Dtype::kFp32, chunks);
    CHECK(args.in.dtype == Dtype::kFp32 || args.in.dtype == Dtype::kBf16, "quantize_chunks: in is %s",
          dtype_name(args.in.dtype));
    constexpr int64_t kPerTask = 64;
#pragma omp parallel for schedule(static) if (n >= kParallelElems)
    for (int64_t first = 0; first < chunks; first += kPerTask) {
        const int64_t count = std::min(kPerTask, chunks - first);
        Tally tally;
        for (int64_t chunk = first; chunk < first + count; chunk++) {
            if (args.in.dtype == Dtype::kFp32) quantize_chunk<float>(args, chunk, tally);
            else quantize_chunk<bf16>(args, chunk, tally);
        }
        if (args.counts) add_counts(args.counts, count * kGradCommChunk, tally);
    }
}

void sum_ranks(Ctx&, const SumRanksArgs& args) {
    const int64_t n = args.out.elems;
    CHECK(args.ranks > 0, "sum_ranks: %lld ranks", (long long)args.ranks);
    check_tensor("sum_ranks", "out", args.out, args.out.dtype == Dtype::kBf16 ? Dtype::kBf16 : Dtype::kFp32, n);
    check_tensor("sum_ranks", "in", args.in, args.in.dtype, args.ranks * n);
    CHECK(args.own_rank >= 0 && args.own_rank < args.ranks, "sum_ranks: rank %lld of %lld", (long long)args.own_rank,
          (long long)args.ranks);
    if (args.own) check_tensor("sum_ranks", "own", args.own, args.in.dtype, n);
    const auto block = [&](int64_t r) { return args.own && r == args.own_rank ? args.own : args.in.slice(r * n, n); };
    switch (args.in.dtype) {
        case Dtype::kFp32: return add_ranks(args, [&](int64_t r) { return Values<float>{block(r).as<float>()}; });
        case Dtype::kBf16: return add_ranks(args, [&](int64_t r) { return Values<bf16>{block(r).as<bf16>()}; });
        case Dtype::kE4m3: {
            CHECK(n % kGradCommChunk == 0, "sum_ranks: %lld elements, no multiple of %lld", (long long)n,
                  (long long)kGradCommChunk);
            CHECK(!args.own, "sum_ranks: a block of codes is not in `in`");
            const int64_t chunks = n / kGradCommChunk;
            check_tensor("sum_ranks", "scales", args.scales, Dtype::kFp32, args.ranks * chunks);
            return add_ranks(args, [&](int64_t r) {
                return ChunkValues{static_cast<const uint8_t*>(args.in.data) + r * n,
                                   args.scales.as<float>() + r * chunks};
            });
        }
        default: FAIL(kExitBug, "sum_ranks: in is %s", dtype_name(args.in.dtype));
    }
}

void compare_sums(Ctx&, const CompareSumsArgs& args) {
    const int64_t n = args.a.elems;
    check_tensor("compare_sums", "a", args.a, Dtype::kFp32, n);
    check_tensor("compare_sums", "b", args.b, Dtype::kFp32, n);
    check_at_least("compare_sums", "scratch", args.scratch, Dtype::kFp64, 4 * kPartialSums);
    const float *a = args.a.as<float>(), *b = args.b.as<float>();
    auto add = [&](int which, auto&& term) {
        add_in_chunks(args.sums + which, args.scratch.as<double>() + which * kPartialSums, n,
                      [&](int64_t begin, int64_t count) {
            return sum_terms(count, [&](int64_t i) {
                return term(static_cast<double>(a[begin + i]), static_cast<double>(b[begin + i]));
            });
        });
    };
    add(0, [](double x, double) { return x * x; });
    add(1, [](double, double y) { return y * y; });
    add(2, [](double x, double y) { return x * y; });
    add(3, [](double x, double y) { return (x - y) * (x - y); });
}

}  // namespace cpu
