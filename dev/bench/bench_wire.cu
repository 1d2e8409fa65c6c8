// Speed of the kernels for communication: quantized gradients and their sums, FP8 weights quantized in shard ranges;
// buckets and weights of Llama-3-8B.
//
// Random data, sets of tensors that rotate through more than three times the L2 cache, launches back to back. Bytes
// are those that must move at least (every tensor once); the ceiling is a copy on the device in the same run.
// tests/gpu/gpu_test_comm_ops.cpp checks the results.
//   usage: bench_wire [part of a name]
#include "dev/bench/bench_harness.h"
#include "llmc/base/fp8.h"

namespace {

constexpr Dtype kB = Dtype::kBf16, kF = Dtype::kFp32, kCodes = Dtype::kE4m3;

// Amaxes are 0 at first.
Tensors::Normal normal_of(const std::string& name) {
    return {name == "factors" ? 1.0f : 0.0f, name == "amaxes" ? 0.0f : 0.125f};
}

struct Shape {
    const char* name;
    int64_t R, C;
    int64_t elems() const { return R * C; }
};
const Shape kBucket = {"64 Mi", 8192, 8192}, kBlock = {"8 Mi", 1024, 8192}, kSmall = {"1 Mi", 1024, 1024};
const Shape kDown = {"4096 x 14336", 4096, 14336}, kQkv = {"6144 x 4096", 6144, 4096};
const Shape kExperts = {"32 x 1536 x 2048", 32 * 1536, 2048};   // of a rank, of a layer of Qwen3-30B-A3B

using Operation = void (*)(Ctx&, Tensors&, const Shape&);

template <Dtype from, bool count> void chunks(Ctx& ctx, Tensors& t, const Shape& s) {
    cuda::quantize_chunks(ctx, {.out = t("codes", kCodes, s.elems()),
                                .scales = t("sent", kF, s.elems() / kGradCommChunk),
                                .in = t("in", from, s.elems()),
                                .counts = count ? t.object("counts", Fp8Counts{}) : nullptr});
}
// The codes are arbitrary bytes; some are NaN, which does not change the time.
template <Dtype from, int ranks, Dtype to = kF, bool adds = false> void sum(Ctx& ctx, Tensors& t, const Shape& s) {
    const bool codes = from == kCodes;
    cuda::sum_ranks(ctx, {.out = t("out", to, s.elems()), .in = t("in", from, ranks * s.elems()),
                          .scales = codes ? t("factors", kF, ranks * s.elems() / kGradCommChunk) : Tensor{},
                          .ranks = ranks, .accumulate = adds});
}
void compare(Ctx& ctx, Tensors& t, const Shape& s) {
    struct Sums {
        double sums[4];
    };
    cuda::compare_sums(ctx, {.sums = t.object("sums", Sums{})->sums, .a = t("a", kF, s.elems()),
                             .b = t("b", kF, s.elems()), .scratch = t("scratch", Dtype::kFp64, 4 * kPartialSums)});
}

// The shard range of a rank: from an eighth of the matrix to three quarters, within blocks.
struct Part {
    int64_t begin, elems;
};
Part part_of(const Shape& s) { return {s.elems() / 8 + 128, s.elems() * 5 / 8}; }
uint32_t* amaxes_of(Tensors& t, const Shape& s) {
    const int64_t blocks = (s.R + 127) / 128 * ((s.C + 127) / 128);
    return static_cast<uint32_t*>(t("amaxes", kF, blocks).data);
}
void block_amax(Ctx& ctx, Tensors& t, const Shape& s) {
    const Part part = part_of(s);
    cuda::block_amax(ctx, {.amaxes = amaxes_of(t, s), .in = t("in", kF, part.elems), .begin = part.begin, .R = s.R,
                           .C = s.C});
}
template <bool blocks, bool count, Dtype from = kF> void run(Ctx& ctx, Tensors& t, const Shape& s) {
    const Part part = part_of(s);
    cuda::quantize_run(ctx, {.out = t("out", kCodes, part.elems), .in = t("in", from, part.elems), .begin = part.begin,
                             .R = s.R, .C = s.C,
                             .entry = blocks ? nullptr : t.object("entry", ScaleEntry{1.0f, 100.0f, 0, 0}),
                             .block_amaxes = blocks ? amaxes_of(t, s) : nullptr,
                             .counts = count ? t.object("counts", Fp8Counts{}) : nullptr});
}
template <int64_t launches, int64_t matrices> void transpose(Ctx& ctx, Tensors& t, const Shape& s) {
    const Tensor out = t("out", kCodes, s.elems()), in = t("in", kCodes, s.elems());
    for (int64_t i = 0, elems = s.elems() / launches; i < launches; i++)
        cuda::transpose_bytes(ctx, {.out = out.slice(i * elems, elems), .in = in.slice(i * elems, elems),
                                    .R = s.R / (launches * matrices), .C = s.C, .matrices = matrices});
}

struct Row {
    const char* op;
    Operation operation;
    const Shape& shape;
    double bytes;   // an element of the shape
};
constexpr double kScale = 4.0 / kGradCommChunk, kPart = 5.0 / 8;
const Row kRows[] = {
    {"quantize_chunks fp32", chunks<kF, false>, kBucket, 5 + kScale},
    {"quantize_chunks fp32, counts", chunks<kF, true>, kBucket, 5 + kScale},
    {"quantize_chunks bf16", chunks<kB, false>, kBucket, 3 + kScale},
    {"quantize_chunks fp32", chunks<kF, false>, kBlock, 5 + kScale},
    {"sum_ranks e4m3, 2 ranks", sum<kCodes, 2>, kBucket, 4 + 2 * (1 + kScale)},
    {"sum_ranks e4m3, 4 ranks", sum<kCodes, 4>, kBlock, 4 + 4 * (1 + kScale)},
    {"sum_ranks e4m3, 8 ranks", sum<kCodes, 8>, kBlock, 4 + 8 * (1 + kScale)},
    {"sum_ranks e4m3, 64 ranks", sum<kCodes, 64>, kSmall, 4 + 64 * (1 + kScale)},
    {"sum_ranks bf16, 2 ranks", sum<kB, 2>, kBucket, 8},
    {"sum_ranks bf16, 8 ranks", sum<kB, 8>, kBlock, 20},
    {"sum_ranks fp32, 8 ranks", sum<kF, 8>, kBlock, 36},
    {"sum_ranks bf16, 8 ranks, adds", sum<kB, 8, kF, true>, kBlock, 24},
    {"sum_ranks bf16, 8 ranks, adds to bf16", sum<kB, 8, kB, true>, kBlock, 20},
    {"sum_ranks fp32, 1 rank, adds to bf16", sum<kF, 1, kB, true>, kBlock, 8},
    {"compare_sums", compare, kBucket, 8},
    {"block_amax", block_amax, kDown, 4 * kPart},
    {"block_amax", block_amax, kQkv, 4 * kPart},
    {"quantize_run, one factor", run<false, false>, kDown, 5 * kPart},
    {"quantize_run, squares", run<true, false>, kDown, 5 * kPart},
    {"quantize_run bf16, one factor", run<false, false, kB>, kDown, 3 * kPart},
    {"quantize_run, squares, counts", run<true, true>, kDown, 5 * kPart},
    {"quantize_run, squares", run<true, false>, kQkv, 5 * kPart},
    {"transpose_bytes", transpose<1, 1>, kDown, 2},
    {"transpose_bytes", transpose<1, 1>, kQkv, 2},
    {"transpose_bytes in one launch", transpose<1, 32>, kExperts, 2},
    {"transpose_bytes in 32 launches", transpose<32, 1>, kExperts, 2},
};

void run_bench(Ctx& ctx, const Row& row, const std::string& name, double ceiling_gbps) {
    const double us = time_tensors_us(ctx, normal_of, [&](Tensors& set) { row.operation(ctx, set, row.shape); });
    const double gbps = row.bytes * static_cast<double>(row.shape.elems()) / us * 1e-3;
    std::printf("%-46s | %8.1f | %6.0f | %5.1f\n", name.c_str(), us, gbps, 100 * gbps / ceiling_gbps);
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    const std::string columns = strf("%-46s | %8s | %6s | %s", "kernel", "us", "GB/s", "% of the copy");
    return bench_main(argc, argv, "bench_wire", columns, [](Ctx& ctx, double ceiling_gbps, const Wanted& wanted) {
        for (const Row& row : kRows) {
            const std::string name = strf("%s, %s", row.op, row.shape.name);
            if (wanted(name)) run_bench(ctx, row, name, ceiling_gbps);
        }
    });
}
