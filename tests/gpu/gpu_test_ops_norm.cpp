// Norms and rope of the GPU against the CPU.
#include "tests/gpu/gpu_op.h"

using namespace op_test;

namespace ops_norm_test {

namespace {

struct Shape {
    int64_t N, C;
};
// One element; rows that are not whole vectors; one warp per row, with and without idle lanes; one block per row;
// several rounds of the persistent backward kernel (300 and 3000 rows); the longest rows of the backward and forward
// kernels, and longer ones.
const Shape kShapes[] = {{1, 1},      {3, 7},    {1, 8},     {5, 24},    {37, 256}, {3000, 768}, {9, 1000}, {33, 1024},
                         {70, 1600}, {131, 2048}, {300, 4096}, {7, 8192}, {3, 16384}, {2, 20000}, {2, 5001}};

// A stream to which the result is added; no residual; x copied out; a residual whose sum is exact in the working type;
// one whose sum is rounded.
enum class Residual { kStream, kNone, kKept, kAdded, kRounded };

OpCase norm_case(const char* op, Shape s, Dtype work, Dtype grad, int64_t shift_bytes) {
    OpCase c(strf("%s %lld x %lld", op, (long long)s.N, (long long)s.C), work, grad, shift_bytes);
    c.random("weight", Kind::kWork, s.C, 0.5, 1);
    return c;
}

void check_forward(bool layer, Shape s, Dtype work, int64_t shift_bytes, Residual residual, bool bias) {
    OpCase c = norm_case(layer ? "layernorm_forward" : "rmsnorm_forward", s, work, Dtype::kFp32, shift_bytes);
    c.random("in", Kind::kWork, s.N * s.C, 1, 0.5);
    if (residual >= Residual::kAdded) c.random("residual", Kind::kWork, s.N * s.C);
    if (residual > Residual::kNone) c.poison("residual_out", Kind::kWork, s.N * s.C);
    if (residual == Residual::kStream) c.random("stream", Kind::kWork, s.N * s.C);
    if (bias) c.random("bias", Kind::kWork, s.C);
    c.poison("out", Kind::kWork, s.N * s.C);
    c.poison("rstd", Kind::kStat, s.N);
    if (layer) c.poison("mean", Kind::kStat, s.N);
    // The fp64 run normalises the unrounded sum, so it is a reference only where the sum is exact.
    if (residual == Residual::kAdded) {
        HostTensor eighths(work, s.N * s.C), more(work, s.N * s.C);
        for (int64_t i = 0; i < eighths.elems(); i++) {
            const double normal = static_cast<double>(rng_normal(21, static_cast<uint64_t>(i)));
            eighths.set(i, std::round(8 * normal) / 8);
            more.set(i, static_cast<double>(i % 17) / 8 - 1);
        }
        c.add("in", Kind::kWork, eighths);
        c.add("residual", Kind::kWork, more);
    }
    c.run<NormForwardArgs>(layer ? cuda::layernorm_forward : cuda::rmsnorm_forward,
                           layer ? cpu::layernorm_forward : cpu::rmsnorm_forward, [&](auto view) {
                               return NormForwardArgs{.out = view("out"), .residual_out = view("residual_out"),
                                                      .mean = view("mean"), .rstd = view("rstd"), .in = view("in"),
                                                      .residual = view("residual"), .weight = view("weight"),
                                                      .bias = view("bias"), .N = s.N, .C = s.C, .eps = 1e-5f,
                                                      .stream = view("stream")};
                           });
    if (residual > Residual::kNone) c.check_bits("residual_out");
    if (residual == Residual::kRounded) return;
    c.check("out");
    c.check("rstd");
    if (layer) c.check("mean");
}

void check_backward(bool layer, Shape s, Dtype work, Dtype grad, int64_t shift_bytes, bool in_place,
                    bool residual, bool bias) {
    OpCase c = norm_case(layer ? "layernorm_backward" : "rmsnorm_backward", s, work, grad, shift_bytes);
    c.random("dout", Kind::kWork, s.N * s.C);
    c.random("x", Kind::kWork, s.N * s.C, 1, 0.25);
    c.random("rstd", Kind::kStat, s.N, 0.25, 1);
    if (layer) c.random("mean", Kind::kStat, s.N, 0.25);
    if (in_place) c.random("dx", Kind::kWork, s.N * s.C);
    else c.poison("dx", Kind::kWork, s.N * s.C);
    if (residual && !in_place) c.random("dresidual", Kind::kWork, s.N * s.C);
    c.random("dweight", Kind::kGrad, s.C);
    if (bias) c.random("dbias", Kind::kGrad, s.C);
    c.poison("scratch", Kind::kScratch, 2 * kPartialRows * s.C);
    c.run<NormBackwardArgs>(layer ? cuda::layernorm_backward : cuda::rmsnorm_backward,
                            layer ? cpu::layernorm_backward : cpu::rmsnorm_backward, [&](auto view) {
                                return NormBackwardArgs{.dx = view("dx"),
                                                        .dresidual = view(in_place ? "dx" : "dresidual"),
                                                        .dweight = view("dweight"), .dbias = view("dbias"),
                                                        .scratch = view("scratch"), .dout = view("dout"),
                                                        .x = view("x"), .mean = view("mean"), .rstd = view("rstd"),
                                                        .weight = view("weight"), .N = s.N, .C = s.C};
                            });
    c.check("dx");
    c.check("dweight");
    if (bias) c.check("dbias");
}

struct Heads {
    int64_t N, T, NH, NKV, HS, KS = 0;   // KS: 0 for HS
    int64_t key_HS() const { return KS > 0 ? KS : HS; }
    int64_t elems() const { return N * (NH * HS + 2 * NKV * key_HS()); }
};
// Head sizes of the vector paths (64, 128, 256) and odd ones; several chunks of partial sums; more heads than the
// blocks of an early launch process.
const Heads kHeads[] = {{1, 1, 1, 1, 2},        {3, 2, 3, 1, 6},      {5, 5, 2, 2, 48}, {33, 11, 5, 1, 80},
                            {37, 37, 12, 12, 64}, {600, 100, 12, 4, 64}, {300, 150, 32, 8, 128}, {9, 3, 4, 2, 256},
                           {2, 2, 9, 3, 512}, {900, 100, 24, 8, 64}};
// Over all heads: one or several rows a block, with and without idle lanes; fewer rows than a block has at a time, and
// several rounds; the longest rows of the backward kernel; longer ones, and rows that are not whole vectors.
const Heads kAllHeads[] = {{1, 1, 1, 1, 16},     {45, 1, 1, 1, 24},  {37, 1, 1, 1, 384},  {3001, 1, 1, 1, 768},
                           {9, 1, 1, 1, 1000},   {7, 1, 1, 1, 1026}, {70, 1, 1, 1, 1600}, {1, 1, 1, 1, 2048},
                           {1101, 1, 1, 1, 2048}, {301, 1, 1, 1, 4096}, {7, 1, 1, 1, 8192}, {3, 1, 1, 1, 8200},
                           // Grouped queries: of OLMo-3 32B, more rows of K than of Q a block, no whole vectors of K.
                           {301, 1, 1, 1, 5120, 1024}, {3001, 1, 1, 1, 768, 128}, {45, 1, 1, 1, 64, 16},
                           {1, 1, 1, 1, 24, 8}, {70, 1, 1, 1, 128, 50}, {7, 1, 1, 1, 8200, 1640}};

OpCase head_case(const char* op, const Heads& h, Dtype work, Dtype grad, int64_t shift_bytes) {
    return OpCase(strf("%s %lld x (%lld x %lld + 2 * %lld x %lld)", op, (long long)h.N, (long long)h.NH,
                       (long long)h.HS, (long long)h.NKV, (long long)h.key_HS()),
                  work, grad, shift_bytes);
}

void check_qk_norm_forward(const Heads& h, Dtype work, int64_t shift_bytes) {
    OpCase c = head_case("qk_norm_forward", h, work, Dtype::kFp32, shift_bytes);
    const int64_t elems = h.elems();
    c.random("in", Kind::kWork, elems);
    c.random("q_weight", Kind::kWork, h.HS, 0.5, 1);
    c.random("k_weight", Kind::kWork, h.key_HS(), 0.5, 1);
    c.poison("out", Kind::kWork, elems);
    c.poison("rstd", Kind::kStat, h.N * (h.NH + h.NKV));
    c.run(cuda::qk_norm_forward, cpu::qk_norm_forward, [&](auto view) {
        return QkNormForwardArgs{.out = view("out"), .rstd = view("rstd"), .in = view("in"),
                                 .q_weight = view("q_weight"), .k_weight = view("k_weight"), .N = h.N,
                                 .NH = h.NH, .NKV = h.NKV, .HS = h.HS, .KS = h.key_HS(), .eps = 1e-6f};
    });
    c.check("out");
    c.check("rstd");
}

void check_qk_norm_backward(const Heads& h, Dtype work, Dtype grad, int64_t shift_bytes) {
    OpCase c = head_case("qk_norm_backward", h, work, grad, shift_bytes);
    const int64_t elems = h.elems();
    c.random("in", Kind::kWork, elems);
    c.random("dqkv", Kind::kWork, elems);
    c.random("rstd", Kind::kStat, h.N * (h.NH + h.NKV), 0.25, 1);
    c.random("q_weight", Kind::kWork, h.HS, 0.5, 1);
    c.random("k_weight", Kind::kWork, h.key_HS(), 0.5, 1);
    c.random("dq_weight", Kind::kGrad, h.HS);
    c.random("dk_weight", Kind::kGrad, h.key_HS());
    c.poison("scratch", Kind::kScratch, 2 * kPartialRows * h.HS);
    c.run(cuda::qk_norm_backward, cpu::qk_norm_backward, [&](auto view) {
        return QkNormBackwardArgs{.dqkv = view("dqkv"), .dq_weight = view("dq_weight"),
                                  .dk_weight = view("dk_weight"), .scratch = view("scratch"),
                                  .in = view("in"), .rstd = view("rstd"), .q_weight = view("q_weight"),
                                  .k_weight = view("k_weight"), .N = h.N, .NH = h.NH, .NKV = h.NKV, .HS = h.HS,
                                  .KS = h.key_HS()};
    });
    c.check("dqkv");
    c.check("dq_weight");
    c.check("dk_weight");
}

// Whole heads, three quarters of them, or a half, which is not always whole vectors.
void check_rope(const Heads& h, Dtype work, int64_t shift_bytes, bool forward) {
    for (int64_t R : {h.HS, h.HS / 8 * 6, h.HS / 4 * 2}) {
        if (R == 0 || (R < h.HS && h.N * h.HS > 10000)) continue;
        OpCase c = head_case(forward ? "rope_forward" : "rope_backward", h, work, Dtype::kFp32, shift_bytes);
        c.add("cos_sin", Kind::kStat, angle_table(h.T, R));
        c.random("qkv", Kind::kWork, h.N * (h.NH + 2 * h.NKV) * h.HS);
        c.run(forward ? cuda::rope_forward : cuda::rope_backward,
              forward ? cpu::rope_forward : cpu::rope_backward, [&](auto view) {
                  return RopeArgs{.qkv = view("qkv"), .cos_sin = view("cos_sin"), .N = h.N, .T = h.T, .NH = h.NH,
                                  .NKV = h.NKV, .HS = h.HS, .rotated = R == h.HS ? 0 : R};
              });
        c.check("qkv");
    }
}

}  // namespace

TEST_CASE("gpu ops: layernorm and rmsnorm forward") {
    for (const Shape& s : kShapes) {
        if (left_out(s.N * s.C)) continue;
        for (Dtype work : {Dtype::kFp32, Dtype::kBf16})
            for (bool layer : {false, true}) {
                check_forward(layer, s, work, 0, Residual::kNone, layer);
                check_forward(layer, s, work, 0, Residual::kAdded, false);
                if (!layer) check_forward(layer, s, work, 0, Residual::kStream, false);
                if (s.N * s.C > 1000000) continue;
                check_forward(layer, s, work, 0, Residual::kKept, layer);
                check_forward(layer, s, work, 0, Residual::kRounded, layer);
                check_forward(layer, s, work, 4, Residual::kAdded, layer);
                if (!layer) check_forward(layer, s, work, 4, Residual::kStream, false);
                check_forward(layer, s, work, 4, Residual::kRounded, layer);
            }
    }
}

TEST_CASE("gpu ops: layernorm and rmsnorm backward") {
    for (const Shape& s : kShapes) {
        if (left_out(s.N * s.C)) continue;
        for_gpu_types([&](Dtype work, Dtype grad, int64_t shift_bytes) {
            const bool large = s.N * s.C > 1000000 || s.C > 4096;
            if (large && (grad == Dtype::kBf16 || shift_bytes)) return;
            for (bool layer : {false, true}) {
                check_backward(layer, s, work, grad, shift_bytes, false, true, layer);
                if (large) continue;
                check_backward(layer, s, work, grad, shift_bytes, true, true, false);
                check_backward(layer, s, work, grad, shift_bytes, false, false, layer);
            }
        });
    }
}

TEST_CASE("gpu ops: qk-norm and rope") {
    for (const Heads& h : kHeads) {
        if (left_out(h.N * h.NH * h.HS)) continue;
        for_gpu_types([&](Dtype work, Dtype grad, int64_t shift_bytes) {
            if (h.N * h.NH * h.HS > 100000 && shift_bytes) return;
            check_qk_norm_backward(h, work, grad, shift_bytes);
            if (work == grad) return;
            check_qk_norm_forward(h, work, shift_bytes);
            check_rope(h, work, shift_bytes, true);
            check_rope(h, work, shift_bytes, false);
        });
        check_qk_norm_forward(h, Dtype::kFp32, 0);
        check_rope(h, Dtype::kFp32, 0, true);
        check_rope(h, Dtype::kFp32, 0, false);
    }
}

TEST_CASE("gpu ops: qk-norm over all heads") {
    for (const Heads& h : kAllHeads) {
        if (left_out(3 * h.N * h.HS)) continue;
        for_gpu_types([&](Dtype work, Dtype grad, int64_t shift_bytes) {
            if (h.N * h.HS > 1000000 && (grad == Dtype::kBf16 || shift_bytes)) return;
            check_qk_norm_backward(h, work, grad, shift_bytes);
            if (grad == Dtype::kFp32) check_qk_norm_forward(h, work, shift_bytes);
        });
    }
}

}  // namespace ops_norm_test
