// Speed of the elementwise kernels that make FP8 and INT8: quantize, activations, adamw with an amax; shapes of
// Llama-3-8B and GPT-2 124M.
//
// Random data, sets of tensors that rotate through more than three times the L2 cache, launches back to back. Bytes are
// those that must move at least (every tensor once); the ceiling is a copy on the device in the same run.
// tests/gpu/gpu_test_quant.cpp checks the results.
//   usage: bench_quantize [part of a name]
#include <array>

#include "dev/bench/bench_harness.h"
#include "llmc/base/fp8.h"

namespace {

constexpr Dtype kB = Dtype::kBf16, kF = Dtype::kFp32;

enum class Ask { kDelayed, kDelayedE5m2, kCounts, kCurrent, kBlocks, kSquares, kRecord, kSums, kRows };
const char* ask_name(Ask ask) {
    const char* names[] = {"delayed", "delayed e5m2", "delayed, counts", "current", "blocks", "squares", "record",
                           "sums alone", "rows"};
    return names[static_cast<int>(ask)];
}

// "v" holds squares.
Tensors::Normal normal_of(const std::string& name) { return {name == "v" ? 1.0f : 0.0f, 0.125f}; }

QuantOut request(Tensors& t, Ask ask, int64_t N, int64_t C, bool dbias = false) {
    QuantOut quant;
    quant.entry = t.object("entry", ScaleEntry{1.0f, 100.0f, amax_bits_of(4.5f), 0});
    quant.record = ask == Ask::kDelayed || ask == Ask::kDelayedE5m2 || ask == Ask::kCounts || ask == Ask::kRecord;
    if (dbias) {
        quant.dbias = t("quant_dbias", kF, C);
        quant.dbias_scratch = t("quant_dbias_scratch", kF, quant_partial_rows(N) * C);
    }
    if (ask == Ask::kRecord || ask == Ask::kSums) return quant;
    const Dtype format = ask == Ask::kDelayedE5m2 ? Dtype::kE5m2 : Dtype::kE4m3;
    quant.rowwise = t("rowwise", format, N * C);
    quant.transposed = t("transposed", format, N * C);
    if (ask == Ask::kCurrent) quant.scaling = Scaling::kCurrent;
    if (ask == Ask::kCounts) quant.counts = t.object("counts", Fp8Counts{});
    if (ask != Ask::kBlocks && ask != Ask::kSquares) return quant;
    quant.granularity = ask == Ask::kBlocks ? Granularity::kBlock1x128 : Granularity::kBlock128x128;
    quant.rowwise_scale_inv = t("rowwise_grid", kF, scale_inv_elems(quant.granularity, N, C));
    quant.transposed_scale_inv = t("transposed_grid", kF, scale_inv_elems(quant.granularity, C, N));
    return quant;
}

struct Shape {
    const char* name;
    int64_t N, C;
};
const Shape kX = {"8192 x 4096", 8192, 4096}, kUp = {"8192 x 14336", 8192, 14336};
const Shape kSmallX = {"65536 x 768", 65536, 768}, kSmallUp = {"65536 x 3072", 65536, 3072};
const Shape kGateUpWeight = {"28672 x 4096", 28672, 4096};
const Shape kDownWeight = {"4096 x 14336", 4096, 14336}, kQkvWeight = {"6144 x 4096", 6144, 4096};
constexpr int64_t kExperts = 32;   // of a rank, of a layer of Qwen3-30B-A3B
const Shape kExpertWeights = {"32 x 1536 x 2048", kExperts * 1536, 2048};

using Operation = void (*)(Ctx&, Tensors&, const Shape&, Ask);

template <Dtype from> void quantize(Ctx& ctx, Tensors& t, const Shape& s, Ask ask) {
    cuda::quantize(ctx, {.quant = request(t, ask, s.N, s.C), .in = t("in", from, s.N * s.C), .N = s.N, .C = s.C});
}
template <bool together> void quantize_experts(Ctx& ctx, Tensors& t, const Shape& s, Ask ask) {
    const QuantOut all = request(t, ask, s.N, s.C);
    const Tensor in = t("in", kF, s.N * s.C);
    const int64_t N = s.N / kExperts;
    if (together) cuda::quantize(ctx, {.quant = all, .in = in, .N = N, .C = s.C, .matrices = kExperts});
    for (int64_t e = 0; e < kExperts && !together; e++)
        cuda::quantize(ctx, {.quant = of_matrix(all, e, kExperts), .in = in.slice(e * N * s.C, N * s.C), .N = N,
                             .C = s.C});
}
Tensor row_scale_inv(Tensors& t, const Shape& s) { return t("scale_inv", kF, s.N); }
template <Dtype from> void quantize_int8(Ctx& ctx, Tensors& t, const Shape& s, Ask) {
    cuda::quantize_int8(ctx, {.out = t("codes", Dtype::kInt8, s.N * s.C), .scale_inv = row_scale_inv(t, s),
                              .in = t("in", from, s.N * s.C), .N = s.N, .C = s.C});
}
uint32_t* row_amaxes(Tensors& t, const Shape& s) {
    return static_cast<uint32_t*>(t("amaxes", kF, s.N).data);   // normally distributed, which is neither 0 nor infinity
}
void row_amax(Ctx& ctx, Tensors& t, const Shape& s, Ask) {
    cuda::row_amax(ctx, {.amaxes = row_amaxes(t, s), .in = t("in", kF, s.N * s.C), .begin = 0, .R = s.N, .C = s.C});
}
void quantize_int8_run(Ctx& ctx, Tensors& t, const Shape& s, Ask) {
    cuda::quantize_int8_run(ctx, {.out = t("codes", Dtype::kInt8, s.N * s.C), .in = t("in", kF, s.N * s.C),
                                  .amaxes = row_amaxes(t, s), .begin = 0, .R = s.N, .C = s.C});
}
void transpose_int8(Ctx& ctx, Tensors& t, const Shape& s, Ask) {
    cuda::transpose_int8(ctx, {.out = t("transposed", Dtype::kE4m3, s.N * s.C),
                               .in = t("codes", Dtype::kInt8, s.N * s.C), .scale_inv = row_scale_inv(t, s),
                               .entry = request(t, Ask::kRecord, s.N, s.C).entry, .R = s.N, .C = s.C});
}
void amax(Ctx& ctx, Tensors& t, const Shape& s, Ask) {
    cuda::amax(ctx, {.entry = request(t, Ask::kRecord, s.N, s.C).entry, .in = t("in", kB, s.N * s.C)});
}
template <Activation kind> void forward(Ctx& ctx, Tensors& t, const Shape& s, Ask ask) {
    const Tensor out = ask == Ask::kRecord ? t("out", kB, s.N * s.C) : Tensor{};
    cuda::activation_forward(ctx, {.kind = kind, .out = out, .in = t("in", kB, s.N * activation_inputs(kind, s.C)),
                                   .N = s.N, .F = s.C, .quant = request(t, ask, s.N, s.C)});
}
// GPT-2 has biases.
template <Activation kind> void backward(Ctx& ctx, Tensors& t, const Shape& s, Ask ask) {
    const int64_t C = activation_inputs(kind, s.C);
    const Tensor din = ask == Ask::kRecord || ask == Ask::kSums ? t("din", kB, s.N * C) : Tensor{};
    cuda::activation_backward(ctx, {.kind = kind, .din = din, .dout = t("dout", kB, s.N * s.C),
                                    .in = t("in", kB, s.N * C), .N = s.N, .F = s.C,
                                    .quant = request(t, ask, s.N, C, !activation_function(kind).gated)});
}
// Weights that exist as fp32 masters and FP8 only, with bf16 moments.
template <bool with_amax> void adamw(Ctx& ctx, Tensors& t, const Shape& s, Ask) {
    StepState state{};
    state.lr = 1e-4f, state.grad_mul = 0.5f, state.adam_step = 100;
    const int64_t n = s.N * s.C;
    cuda::adamw(ctx, {.param = {}, .master = t("master", kF, n), .m = t("m", kB, n), .v = t("v", kB, n),
                      .grad = t("grad", kF, n), .state = t.object("state", state), .beta1 = 0.9f, .beta2 = 0.95f,
                      .eps = 1e-8f, .weight_decay = 0.1f, .rng_key = 99, .element_offset = 0,
                      .entry = with_amax ? request(t, Ask::kRecord, s.N, s.C).entry : nullptr});
}

struct Row {
    const char* op;
    Operation operation;
    const Shape& shape;
    Ask ask;
    double bytes;   // an element of the shape
};
constexpr double kGrids = 2 * 4 / 128.0;
const Row kRows[] = {
    {"quantize bf16", quantize<kB>, kX, Ask::kCurrent, 4},
    {"quantize bf16", quantize<kB>, kUp, Ask::kCurrent, 4},
    {"quantize bf16", quantize<kB>, kUp, Ask::kBlocks, 4 + kGrids},
    {"quantize bf16", quantize<kB>, kSmallX, Ask::kCurrent, 4},
    {"quantize bf16", quantize<kB>, kSmallUp, Ask::kCurrent, 4},
    {"quantize fp32", quantize<kF>, kDownWeight, Ask::kDelayed, 6},
    {"quantize fp32", quantize<kF>, kDownWeight, Ask::kCurrent, 6},
    {"quantize fp32", quantize<kF>, kDownWeight, Ask::kSquares, 6},
    {"quantize fp32", quantize<kF>, kQkvWeight, Ask::kCurrent, 6},
    {"quantize fp32", quantize<kF>, kQkvWeight, Ask::kSquares, 6},
    {"quantize fp32 in one launch", quantize_experts<true>, kExpertWeights, Ask::kSquares, 6},
    {"quantize fp32 in 32 launches", quantize_experts<false>, kExpertWeights, Ask::kSquares, 6},
    {"quantize_int8 bf16", quantize_int8<kB>, kX, Ask::kRows, 3},
    {"quantize_int8 bf16", quantize_int8<kB>, kUp, Ask::kRows, 3},
    {"quantize_int8 bf16", quantize_int8<kB>, kSmallX, Ask::kRows, 3},
    {"quantize_int8 fp32", quantize_int8<kF>, kGateUpWeight, Ask::kRows, 5},
    {"row_amax fp32", row_amax, kGateUpWeight, Ask::kRows, 4},
    {"quantize_int8_run fp32", quantize_int8_run, kGateUpWeight, Ask::kRows, 5},
    {"transpose_int8", transpose_int8, kX, Ask::kRows, 2},
    {"transpose_int8", transpose_int8, kGateUpWeight, Ask::kRows, 2},
    {"amax", amax, kX, Ask::kRecord, 2},
    {"swiglu_forward", forward<Activation::kSwiglu>, kUp, Ask::kDelayed, 6},
    {"swiglu_forward", forward<Activation::kSwiglu>, kUp, Ask::kCounts, 6},
    {"swiglu_forward", forward<Activation::kSwiglu>, kUp, Ask::kRecord, 6},
    {"swiglu_forward", forward<Activation::kSwiglu>, kUp, Ask::kBlocks, 6 + kGrids},
    {"swiglu_backward", backward<Activation::kSwiglu>, kUp, Ask::kDelayed, 10},
    {"swiglu_backward", backward<Activation::kSwiglu>, kUp, Ask::kDelayedE5m2, 10},
    {"swiglu_backward", backward<Activation::kSwiglu>, kUp, Ask::kCounts, 10},
    {"swiglu_backward", backward<Activation::kSwiglu>, kUp, Ask::kRecord, 10},
    {"swiglu_backward", backward<Activation::kSwiglu>, kUp, Ask::kBlocks, 10 + 2 * kGrids},
    {"gelu_forward", forward<Activation::kGelu>, kSmallUp, Ask::kDelayed, 4},
    {"gelu_forward", forward<Activation::kGelu>, kSmallUp, Ask::kRecord, 4},
    {"gelu_forward", forward<Activation::kGelu>, kSmallUp, Ask::kBlocks, 4 + kGrids},
    {"gelu_backward, dbias", backward<Activation::kGelu>, kSmallUp, Ask::kDelayedE5m2, 6},
    {"gelu_backward, dbias", backward<Activation::kGelu>, kSmallUp, Ask::kRecord, 6},
    {"gelu_backward, dbias", backward<Activation::kGelu>, kSmallUp, Ask::kBlocks, 6 + kGrids},
    {"gelu_backward, dbias", backward<Activation::kGelu>, kSmallUp, Ask::kSums, 6},
    {"adamw without amax", adamw<false>, kDownWeight, Ask::kRecord, 20},
    {"adamw with amax", adamw<true>, kDownWeight, Ask::kRecord, 20},
};

void run_bench(Ctx& ctx, const Row& row, const std::string& name, double ceiling_gbps) {
    auto run = [&](Tensors& set) { row.operation(ctx, set, row.shape, row.ask); };
    const double us = time_tensors_us(ctx, normal_of, run);
    const double gbps = row.bytes * static_cast<double>(row.shape.N * row.shape.C) / us * 1e-3;
    std::printf("%-52s | %8.1f | %6.0f | %5.1f\n", name.c_str(), us, gbps, 100 * gbps / ceiling_gbps);
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    const std::string columns = strf("%-52s | %8s | %6s | %s", "kernel", "us", "GB/s", "% of the copy");
    return bench_main(argc, argv, "bench_quantize", columns, [](Ctx& ctx, double ceiling_gbps, const Wanted& wanted) {
        for (const Row& row : kRows) {
            const std::string name = strf("%s %s, %s", row.op, row.shape.name, ask_name(row.ask));
            if (wanted(name)) run_bench(ctx, row, name, ceiling_gbps);
        }
    });
}
