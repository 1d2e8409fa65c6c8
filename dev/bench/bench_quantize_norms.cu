// Speed of norms and rope as producers of FP8, at the shapes of Llama-3-8B and GPT-2 124M; bf16 alone beside them.
//
// Random data, sets of tensors that rotate through more than three times the L2 cache. Bytes are those that must move
// for the passes that each way takes (every tensor of a pass once); the ceiling is a copy on the device in the same
// run. tests/gpu/gpu_test_quant_norms.cpp checks the results.
//   usage: bench_quantize_norms [part of a name]
#include "dev/bench/bench_harness.h"

namespace {

constexpr Dtype kB = Dtype::kBf16, kF = Dtype::kFp32;

struct Dims {
    const char* name;
    bool layer;
    int64_t N, C, T, NH, NKV, HS;
    int64_t row() const { return (NH + 2 * NKV) * HS; }
};
const Dims kLlama8B = {"8B", false, 8192, 4096, 8192, 32, 8, 128};
const Dims kGpt2 = {"124M", true, 65536, 768, 1024, 12, 12, 64};
// Rows of other lengths: GPT-2 1558M, 350M and 774M, layernorms of 2048 and 4096 columns, a rmsnorm of llama3-small.
const Dims kLengths[] = {
    {"16384 x 1600", true, 16384, 1600, 0, 0, 0, 0}, {"32768 x 1600", true, 32768, 1600, 0, 0, 0, 0},
    {"16384 x 768", true, 16384, 768, 0, 0, 0, 0},   {"16384 x 1024", true, 16384, 1024, 0, 0, 0, 0},
    {"16384 x 1280", true, 16384, 1280, 0, 0, 0, 0}, {"16384 x 2048", true, 16384, 2048, 0, 0, 0, 0},
    {"8192 x 4096", true, 8192, 4096, 0, 0, 0, 0},   {"16384 x 2048", false, 16384, 2048, 0, 0, 0, 0}};

enum class Ask { kBf16, kSums, kDelayed, kReplay, kRowwise, kDelayedCounts, kRecord, kTensorwise, kBlocks };
const char* ask_name(Ask ask) {
    switch (ask) {
        case Ask::kBf16: return "bf16 alone";
        case Ask::kSums: return "bf16 and sums of dx";
        case Ask::kDelayed: return "delayed";
        case Ask::kReplay: return "delayed, no residual";
        case Ask::kRowwise: return "delayed, rowwise";
        case Ask::kDelayedCounts: return "delayed, counts";
        case Ask::kRecord: return "record";
        case Ask::kTensorwise: return "tensorwise: record, quantize";
        case Ask::kBlocks: return "blocks";
    }
    return "?";
}

Tensors::Normal normal_of(const std::string& name) {
    return name == "rstd" ? Tensors::Normal{1.0f, 0.125f} : Tensors::Normal{0.0f, 1.0f};
}

QuantOut request(Tensors& t, Ask ask, int64_t N, int64_t C) {
    QuantOut quant;
    if (ask == Ask::kBf16 || ask == Ask::kSums) return quant;
    quant.entry = t.object("entry", ScaleEntry{1.0f, 100.0f, 0, 0});
    quant.record = true;
    if (ask == Ask::kRecord || ask == Ask::kTensorwise) return quant;
    quant.rowwise = t("rowwise", Dtype::kE4m3, N * C);
    if (ask != Ask::kRowwise) quant.transposed = t("transposed", Dtype::kE4m3, N * C);
    if (ask == Ask::kDelayedCounts) quant.counts = t.object("counts", Fp8Counts{});
    if (ask != Ask::kBlocks) return quant;
    quant.record = false;
    quant.granularity = Granularity::kBlock1x128;
    quant.rowwise_scale_inv = t("rowwise_grid", kF, scale_inv_elems(quant.granularity, N, C));
    quant.transposed_scale_inv = t("transposed_grid", kF, scale_inv_elems(quant.granularity, C, N));
    return quant;
}
// The second pass of tensorwise scaling.
void then_quantize(Ctx& ctx, Tensors& t, Ask ask, Tensor x, int64_t N, int64_t C) {
    if (ask != Ask::kTensorwise) return;
    QuantOut quant = request(t, Ask::kDelayed, N, C);
    quant.scaling = Scaling::kCurrent;
    cuda::quantize(ctx, {.quant = quant, .in = x, .N = N, .C = C});
}

void forward(Ctx& ctx, Tensors& t, const Dims& d, Ask ask) {
    const int64_t NC = d.N * d.C;
    const bool out = ask == Ask::kBf16 || ask == Ask::kRecord || ask == Ask::kTensorwise;
    (d.layer ? cuda::layernorm_forward : cuda::rmsnorm_forward)(
        ctx, {.out = out ? t("out", kB, NC) : Tensor{},
              .residual_out = ask == Ask::kReplay ? Tensor{} : t("sum", kB, NC),
              .mean = d.layer ? t("mean", kF, d.N) : Tensor{}, .rstd = t("rstd", kF, d.N), .in = t("x", kB, NC),
              .residual = ask == Ask::kReplay ? Tensor{} : t("residual", kB, NC),
              .weight = t("weight", kB, d.C), .bias = d.layer ? t("bias", kB, d.C) : Tensor{}, .N = d.N, .C = d.C,
              .eps = 1e-5f, .quant = request(t, ask, d.N, d.C)});
    if (out) then_quantize(ctx, t, ask, t("out", kB, NC), d.N, d.C);
}
void backward(Ctx& ctx, Tensors& t, const Dims& d, Ask ask) {
    const int64_t NC = d.N * d.C;
    QuantOut quant = request(t, ask, d.N, d.C);
    if (d.layer && ask != Ask::kBf16 && ask != Ask::kRecord && ask != Ask::kTensorwise) {
        quant.dbias = t("quant_dbias", kF, d.C);
        quant.dbias_scratch = t("quant_dbias_scratch", kF, quant_partial_rows(d.N) * d.C);
    }
    (d.layer ? cuda::layernorm_backward : cuda::rmsnorm_backward)(
        ctx, {.dx = t("dx", kB, NC), .dresidual = t("residual", kB, NC), .dweight = t("dweight", kF, d.C),
              .dbias = d.layer ? t("dbias", kF, d.C) : Tensor{}, .scratch = t("scratch", kF, 2 * kPartialRows * d.C),
              .dout = t("out", kB, NC), .x = t("x", kB, NC), .mean = d.layer ? t("mean", kF, d.N) : Tensor{},
              .rstd = t("rstd", kF, d.N), .weight = t("weight", kB, d.C), .N = d.N, .C = d.C, .quant = quant});
    then_quantize(ctx, t, ask, t("dx", kB, NC), d.N, d.C);
}
void rope(Ctx& ctx, Tensors& t, const Dims& d, Ask ask) {
    cuda::rope_backward(ctx, {.qkv = t("qkv", kB, d.N * d.row()), .cos_sin = t("cos_sin", kF, d.T * d.HS), .N = d.N,
                              .T = d.T, .NH = d.NH, .NKV = d.NKV, .HS = d.HS,
                              .quant = request(t, ask, d.N, d.row())});
    then_quantize(ctx, t, ask, t("qkv", kB, d.N * d.row()), d.N, d.row());
}

using Operation = void (*)(Ctx&, Tensors&, const Dims&, Ask);

struct Row {
    const char* op;
    Operation operation;
    const Dims& dims;
    Ask ask;
    double bytes;   // an element
};
std::vector<Row> rows() {
    std::vector<Row> all;
    for (const Dims* d : {&kLlama8B, &kGpt2}) {
        const double grids = 2 * 4 / 128.0;
        const char* norm = d->layer ? "layernorm_forward" : "rmsnorm_forward";
        all.push_back({norm, forward, *d, Ask::kBf16, 8});
        all.push_back({norm, forward, *d, Ask::kDelayed, 8});
        all.push_back({norm, forward, *d, Ask::kDelayedCounts, 8});
        all.push_back({norm, forward, *d, Ask::kRecord, 8});
        all.push_back({norm, forward, *d, Ask::kTensorwise, 12});
        all.push_back({norm, forward, *d, Ask::kBlocks, 10 + grids});
        norm = d->layer ? "layernorm_backward" : "rmsnorm_backward";
        all.push_back({norm, backward, *d, Ask::kBf16, 8});
        if (d->layer) all.push_back({norm, backward, *d, Ask::kSums, 8});
        all.push_back({norm, backward, *d, Ask::kDelayed, 10});
        all.push_back({norm, backward, *d, Ask::kDelayedCounts, 10});
        all.push_back({norm, backward, *d, Ask::kRecord, 8});
        all.push_back({norm, backward, *d, Ask::kTensorwise, 12});
        all.push_back({norm, backward, *d, Ask::kBlocks, 12 + grids});
    }
    for (const Dims& d : kLengths) {
        const char* norm = d.layer ? "layernorm_forward" : "rmsnorm_forward";
        all.push_back({norm, forward, d, Ask::kBf16, 8});
        all.push_back({norm, forward, d, Ask::kDelayed, 8});
        all.push_back({norm, forward, d, Ask::kReplay, 4});
        all.push_back({norm, forward, d, Ask::kRowwise, 7});
        all.push_back({norm, forward, d, Ask::kDelayedCounts, 8});
        norm = d.layer ? "layernorm_backward" : "rmsnorm_backward";
        all.push_back({norm, backward, d, Ask::kBf16, 8});
        if (d.layer) all.push_back({norm, backward, d, Ask::kSums, 8});
        all.push_back({norm, backward, d, Ask::kDelayed, 10});
        all.push_back({norm, backward, d, Ask::kDelayedCounts, 10});
    }
    const Dims& d = kLlama8B;
    const double turned = static_cast<double>((d.NH + d.NKV) * d.HS) / static_cast<double>(d.row());
    const double table = 4.0 * static_cast<double>(d.HS) / static_cast<double>(d.row());
    all.push_back({"rope_backward", rope, d, Ask::kBf16, 4 * turned + table});
    all.push_back({"rope_backward", rope, d, Ask::kDelayed, 4 + table});
    all.push_back({"rope_backward", rope, d, Ask::kDelayedCounts, 4 + table});
    all.push_back({"rope_backward", rope, d, Ask::kRecord, 2 + 2 * turned + table});
    all.push_back({"rope_backward", rope, d, Ask::kTensorwise, 6 + 2 * turned + table});
    all.push_back({"rope_backward", rope, d, Ask::kBlocks, 4 + 4 * turned + table + 2 * 4 / 128.0});
    return all;
}

void run_bench(Ctx& ctx, const Row& row, const std::string& name, double ceiling_gbps) {
    auto run = [&](Tensors& set) { row.operation(ctx, set, row.dims, row.ask); };
    const double us = time_tensors_us(ctx, normal_of, run);
    const int64_t columns = row.operation == rope ? row.dims.row() : row.dims.C;
    const double gbps = row.bytes * static_cast<double>(row.dims.N * columns) / us * 1e-3;
    std::printf("%-54s | %8.1f | %5.2f | %6.0f | %5.1f\n", name.c_str(), us, row.bytes, gbps,
                100 * gbps / ceiling_gbps);
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    const std::string columns =
        strf("%-54s | %8s | %5s | %6s | %s", "kernel", "us", "B/el.", "GB/s", "% of the copy");
    return bench_main(argc, argv, "bench_quantize_norms", columns,
                      [](Ctx& ctx, double ceiling_gbps, const Wanted& wanted) {
        for (const Row& row : rows()) {
            const std::string name = strf("%s %s, %s", row.op, row.dims.name, ask_name(row.ask));
            if (wanted(name)) run_bench(ctx, row, name, ceiling_gbps);
        }
    });
}
