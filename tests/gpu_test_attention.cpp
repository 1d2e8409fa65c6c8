// Attention of the GPU against plain loops in double, with a bound that follows every rounding, and against
// the CPU operation of the same precision, whose error it may at most double.
#include "tests/documents_test.h"
#include "tests/gpu_tensor.h"

using namespace documents_test;
using namespace op_test;

namespace {

struct Shape {
    int64_t B, T, NH, NKV, HS;
};

// One problem; outputs of the device live beside the inputs. `out` and `lse` that the backward reads come
// from the CPU, so that both devices start from the same values.
struct Attention {
    Shape s;
    Dtype type;
    int64_t width = (s.NH + 2 * s.NKV) * s.HS, N = s.B * s.T;
    float softmax_mul = 1.3f / std::sqrt(static_cast<float>(s.HS));
    HostTensor qkv, dout;
    Lengths lengths;                  // of documents, or none
    std::vector<int32_t> documents;

    Attention(Shape shape, Dtype dtype, double magnitude = 1) : s(shape), type(dtype) {
        qkv = random_tensor(type, N * width, 1, magnitude);
        dout = random_tensor(type, N * s.NH * s.HS, 2, 1, 0.1);
        // Keys that grow along the sequence: the largest score keeps moving, in some heads by a lot.
        for (int64_t n = 0; n < N; n++) {
            const double growth = 0.5 + 2.0 * static_cast<double>(n % s.T) / static_cast<double>(s.T);
            for (int64_t c = n * width + s.NH * s.HS; c < n * width + (s.NH + s.NKV) * s.HS; c++)
                qkv.set(c, qkv.get(c) * growth);
        }
    }
    // The same numbers, cut into documents.
    Attention with_documents(Lengths of_sequences) const {
        Attention a = *this;
        a.lengths = std::move(of_sequences);
        a.documents = documents_of(a.lengths, s.T);
        return a;
    }
    int64_t start(int64_t b, int64_t t) const { return documents.empty() ? 0 : documents[b * s.T + t]; }
    AttentionForwardArgs forward_args(Tensor out, Tensor lse, Tensor qkv_view, const int32_t* borders) const {
        return {.out = out, .lse = lse, .qkv = qkv_view, .B = s.B, .T = s.T, .NH = s.NH, .NKV = s.NKV,
                .HS = s.HS, .softmax_mul = softmax_mul, .documents = borders};
    }
    AttentionBackwardArgs backward_args(Tensor dqkv, Tensor delta, Tensor dout_view, Tensor out, Tensor lse,
                                        Tensor qkv_view, const int32_t* borders, Tensor sums = {},
                                        bool fast = false) const {
        return {.dqkv = dqkv, .delta = delta, .dout = dout_view, .out = out, .lse = lse, .qkv = qkv_view,
                .B = s.B, .T = s.T, .NH = s.NH, .NKV = s.NKV, .HS = s.HS, .softmax_mul = softmax_mul,
                .documents = borders, .sums = sums, .fast = fast};
    }
    std::string name() const {
        return strf("B %lld T %lld heads %lld over %lld head size %lld %s ", (long long)s.B, (long long)s.T,
                    (long long)s.NH, (long long)s.NKV, (long long)s.HS, dtype_name(type))
               + (lengths.empty() ? "" : text_of(lengths));
    }
    struct Result {
        HostTensor out, lse, dqkv, delta;
    };
    Result fresh(Dtype dtype) const {
        Dtype stat = stat_dtype(dtype);
        return {HostTensor(dtype, N * s.NH * s.HS), HostTensor(stat, N * s.NH), HostTensor(dtype, N * width),
                HostTensor(stat, N * s.NH)};
    }
    // forward and backward of the CPU, computed in `dtype` from the same numbers.
    Result on_cpu(Dtype dtype) const {
        Result r = fresh(dtype);
        HostTensor x = qkv.to(dtype), dy = dout.to(dtype);
        Ctx ctx;
        const int32_t* borders = documents.empty() ? nullptr : documents.data();
        cpu::attention_forward(ctx, forward_args(r.out.view(), r.lse.view(), x.view(), borders));
        cpu::attention_backward(ctx, backward_args(r.dqkv.view(), r.delta.view(), dy.view(), r.out.view(),
                                                   r.lse.view(), x.view(), borders));
        return r;
    }
    // The backward reads out and lse of `given`.
    Result on_gpu(const Result& given, bool fast = false, int again = 0) const {
        Result r = fresh(type);
        const HostTensor scratch(Dtype::kFp32, cuda::attention_sums_elems(type, s.B, s.T, s.NH, s.HS));
        DeviceTensor sums(scratch);
        DeviceTensor x(qkv), dy(dout), out(r.out), lse(r.lse), dqkv(r.dqkv), delta(r.delta);
        HostTensor host_borders(Dtype::kInt32, static_cast<int64_t>(documents.size()));
        if (!documents.empty())
            std::memcpy(host_borders.data(), documents.data(), static_cast<size_t>(host_borders.bytes()));
        DeviceTensor border_tensor(host_borders);
        const int32_t* borders = documents.empty() ? nullptr : border_tensor.view().as<int32_t>();
        cuda::attention_forward(gpu(), forward_args(out.view(), lse.view(), x.view(), borders));
        DeviceTensor given_out(given.out), given_lse(given.lse);
        const AttentionBackwardArgs args = backward_args(dqkv.view(), delta.view(), dy.view(), given_out.view(),
                                                         given_lse.view(), x.view(), borders, sums.view(), fast);
        cuda::attention_backward(gpu(), args);
        const HostTensor first = dqkv.download();
        int64_t differ = 0;
        for (int i = 0; i < again; i++) {
            cuda::attention_backward(gpu(), args);
            differ += !dqkv.download().same_bits(first);
        }
        CHECK_EQ(differ, 0);
        sums.download();   // looks at its guards
        return {out.download(), lse.download(), dqkv.download(), delta.download()};
    }

    // Positions of element 0 of head vectors.
    int64_t q(int64_t b, int64_t t, int64_t h) const { return (b * s.T + t) * width + h * s.HS; }
    int64_t k(int64_t b, int64_t t, int64_t h) const { return q(b, t, s.NH + h / (s.NH / s.NKV)); }
    int64_t v(int64_t b, int64_t t, int64_t h) const { return k(b, t, h) + s.NKV * s.HS; }
    int64_t o(int64_t b, int64_t t, int64_t h) const { return ((b * s.T + t) * s.NH + h) * s.HS; }
    int64_t row(int64_t b, int64_t t, int64_t h) const { return (b * s.NH + h) * s.T + t; }
};

// What the loops in double give, with the largest error each element may have.
struct Reference {
    std::vector<double> out, lse, dqkv, delta;
    std::vector<double> out_error, lse_error, dqkv_error, delta_error;
};

// Weights of one query over its keys, from `first` on: probabilities and how wrong each may be, relative.
struct Weights {
    int64_t first;
    std::vector<double> p, error;
    double lse = 0, lse_error = 0;
};

Weights weights_of(const Attention& a, const std::vector<double>& qkv, int64_t b, int64_t h, int64_t t) {
    const double u = 2 * 0x1p-24;   // a rounding of fp32; tensor cores drop what others would round
    Weights w{.first = a.start(b, t), .p = {}, .error = {}};
    std::vector<double> score;
    double largest = -1e300;
    for (int64_t j = w.first; j <= t; j++) {
        double dot = 0, magnitude = 0;
        for (int64_t d = 0; d < a.s.HS; d++) {
            double term = qkv[a.q(b, t, h) + d] * qkv[a.k(b, j, h) + d] * a.softmax_mul;
            dot += term, magnitude += std::fabs(term);
        }
        score.push_back(dot), w.error.push_back((a.s.HS + 4) * u * magnitude);
        largest = std::max(largest, dot);
    }
    double sum = 0, spread = 0, most = 0;
    for (size_t i = 0; i < score.size(); i++) {
        sum += std::exp(score[i] - largest);
        spread = std::max(spread, std::fabs(score[i]));
        most = std::max(most, w.error[i]);
    }
    w.lse = largest + std::log(sum);
    // The argument of an exponential is rounded too, in proportion to the scores and the reference.
    const double argument = u * (4 * spread + 2 * std::fabs(w.lse) + 8);
    w.lse_error = most + argument + (t / 4.0 + 8) * u;
    for (size_t i = 0; i < score.size(); i++) {
        w.p.push_back(std::exp(score[i] - w.lse));
        w.error[i] += argument + w.lse_error;
    }
    return w;
}

// operand: the relative error of a weight that tensor cores multiply with (they want bf16), 0 on the CUDA
// cores.
Reference reference_of(const Attention& a, const Attention::Result& given, double operand) {
    const double u = 2 * 0x1p-24, round = 1.01 * unit_roundoff(a.type), mul = a.softmax_mul;
    const double chain = static_cast<double>(a.s.T * (a.s.NH / a.s.NKV) + 16) * u;   // of sums over T
    const std::vector<double> qkv = a.qkv.values(), douts = a.dout.values(), outs = given.out.values();
    Reference r;
    r.out.resize(outs.size()), r.out_error = r.out;
    r.dqkv.resize(qkv.size()), r.dqkv_error = r.dqkv;
    r.lse.resize(static_cast<size_t>(a.N * a.s.NH)), r.lse_error = r.delta = r.delta_error = r.lse;
    for (int64_t task = 0; task < a.N * a.s.NH; task++) {
        const int64_t t = task % a.s.T, h = task / a.s.T % a.s.NH, b = task / a.s.T / a.s.NH;
        const Weights w = weights_of(a, qkv, b, h, t);
        const int64_t row = a.row(b, t, h), o = a.o(b, t, h), q = a.q(b, t, h);
        r.lse[row] = w.lse, r.lse_error[row] = w.lse_error + u * std::fabs(w.lse);
        double delta = 0, delta_error = 0;
        for (int64_t d = 0; d < a.s.HS; d++) {
            double term = douts[o + d] * outs[o + d];
            delta += term, delta_error += (a.s.HS + 4) * u * std::fabs(term);
        }
        r.delta[row] = delta, r.delta_error[row] = delta_error;
        for (int64_t j = w.first; j <= t; j++) {
            const int64_t k = a.k(b, j, h), v = a.v(b, j, h);
            const double p = w.p[j - w.first], own_error = w.error[j - w.first], p_error = own_error + operand;
            double dp = 0, dp_error = 0;
            for (int64_t d = 0; d < a.s.HS; d++) {
                double term = douts[o + d] * qkv[v + d];
                dp += term, dp_error += (a.s.HS + 4) * u * std::fabs(term);
                r.out[o + d] += p * qkv[v + d];
                r.out_error[o + d] += p * std::fabs(qkv[v + d]) * (p_error + chain);
                r.dqkv[v + d] += p * douts[o + d];
                r.dqkv_error[v + d] += p * std::fabs(douts[o + d]) * (p_error + chain);
            }
            const double ds = p * (dp - delta) * mul;
            const double ds_error = std::fabs(ds) * (operand + chain)
                                    + p * mul * (own_error * (std::fabs(dp) + std::fabs(delta)) + dp_error
                                                 + delta_error + 4 * u * (std::fabs(dp) + std::fabs(delta)));
            for (int64_t d = 0; d < a.s.HS; d++) {
                r.dqkv[q + d] += ds * qkv[k + d], r.dqkv_error[q + d] += ds_error * std::fabs(qkv[k + d]);
                r.dqkv[k + d] += ds * qkv[q + d], r.dqkv_error[k + d] += ds_error * std::fabs(qkv[q + d]);
            }
        }
    }
    auto add_rounding = [&](const std::vector<double>& value, std::vector<double>& error) {
        for (size_t i = 0; i < value.size(); i++)
            error[i] += round * (std::fabs(value[i]) + error[i]) + kTiny;
    };
    add_rounding(r.out, r.out_error), add_rounding(r.dqkv, r.dqkv_error);
    return r;
}

HostTensor tensor_of(const std::vector<double>& values) {
    HostTensor t(Dtype::kFp64, static_cast<int64_t>(values.size()));
    for (int64_t i = 0; i < t.elems(); i++) t.set(i, values[i]);
    return t;
}

bool on_tensor_cores(const Attention& a) { return a.type == Dtype::kBf16 && (a.s.HS == 64 || a.s.HS == 128); }

void check_against_loops(const Attention& a) {
    INFO(a.name());
    const Attention::Result cpu = a.on_cpu(a.type), got = a.on_gpu(cpu);
    const Reference want = reference_of(a, cpu, on_tensor_cores(a) ? 1.01 * 0x1p-8 : 0);
    auto check = [](const char* name, const HostTensor& value, const std::vector<double>& expected,
                    const std::vector<double>& error) {
        check_close(name, value, tensor_of(expected), [&](int64_t i) { return error[i]; });
    };
    check("out", got.out, want.out, want.out_error);
    check("lse", got.lse, want.lse, want.lse_error);
    check("delta", got.delta, want.delta, want.delta_error);
    // dk of a single key is 0 but for rounding: no share of its largest element is left to catch.
    if (a.s.T > 1) check("dqkv", got.dqkv, want.dqkv, want.dqkv_error);
    CHECK(a.on_gpu(cpu).dqkv.same_bits(got.dqkv));
    if (a.s.T > 1) check("dqkv, fast", a.on_gpu(cpu, true).dqkv, want.dqkv, want.dqkv_error);
}

// rms error of query, key and value heads apart: their sizes differ.
void check_rms(const Attention& a, const HostTensor& got, const HostTensor& cpu, const HostTensor& want,
               int64_t first, int64_t heads, const char* name) {
    double got_sum = 0, cpu_sum = 0;
    for (int64_t n = 0; n < a.N; n++) {
        for (int64_t c = first * a.s.HS; c < (first + heads) * a.s.HS; c++) {
            const int64_t i = n * a.width + c;
            got_sum += std::pow(got.get(i) - want.get(i), 2);
            cpu_sum += std::pow(cpu.get(i) - want.get(i), 2);
        }
    }
    INFO(name << ": rms error " << std::sqrt(got_sum) << " against " << std::sqrt(cpu_sum) << " on the CPU");
    CHECK_LE(std::sqrt(got_sum), 2 * std::sqrt(cpu_sum) + kTiny);
}

void check_against_cpu(const Attention& a) {
    INFO(a.name());
    const Attention::Result exact = a.on_cpu(Dtype::kFp64), cpu = a.on_cpu(a.type), got = a.on_gpu(cpu);
    INFO("out: rms error " << rms_error(got.out, exact.out) << ", CPU " << rms_error(cpu.out, exact.out));
    CHECK_LE(rms_error(got.out, exact.out), 2 * rms_error(cpu.out, exact.out) + kTiny);
    check_rms(a, got.dqkv, cpu.dqkv, exact.dqkv, 0, a.s.NH, "dq");
    check_rms(a, a.on_gpu(cpu, true).dqkv, cpu.dqkv, exact.dqkv, 0, a.s.NH, "dq, fast");
    check_rms(a, got.dqkv, cpu.dqkv, exact.dqkv, a.s.NH, a.s.NKV, "dk");
    check_rms(a, got.dqkv, cpu.dqkv, exact.dqkv, a.s.NH + a.s.NKV, a.s.NKV, "dv");
    const Attention::Result again = a.on_gpu(cpu);
    CHECK(again.out.same_bits(got.out));
    CHECK(again.lse.same_bits(got.lse));
    CHECK(again.dqkv.same_bits(got.dqkv));
}

}  // namespace

TEST_CASE("gpu attention: tensor-core kernels against loops in double") {
    // Around tiles of 16, 32, 64 and 128 rows; groups of 1, 2, 4 and 8.
    for (int64_t HS : {64, 128}) {
        for (const Shape& s : {Shape{2, 1, 2, 1, HS}, Shape{1, 7, 4, 2, HS}, Shape{1, 63, 1, 1, HS},
                               Shape{2, 65, 4, 1, HS}, Shape{1, 127, 2, 2, HS}, Shape{1, 129, 8, 1, HS},
                               Shape{2, 200, 3, 3, HS}}) {
            check_against_loops(Attention(s, Dtype::kBf16));
        }
    }
}

TEST_CASE("gpu attention: around the tiles of large kernels, scores of large magnitude") {
    for (int64_t HS : {64, 128}) {
        for (const Shape& s : {Shape{1, 17, 2, 2, HS}, Shape{1, 64, 2, 1, HS}, Shape{2, 113, 4, 1, HS},
                               Shape{1, 128, 2, 1, HS}, Shape{2, 191, 2, 2, HS}, Shape{1, 192, 1, 1, HS},
                               Shape{1, 193, 8, 1, HS}, Shape{1, 256, 2, 2, HS}, Shape{2, 257, 2, 1, HS}}) {
            check_against_loops(Attention(s, Dtype::kBf16));
        }
        check_against_loops(Attention({2, 193, 4, 2, HS}, Dtype::kBf16, 6));
    }
}

// What a tile reaches beyond the end of its sequence is not the next sequence of the batch.
TEST_CASE("gpu attention: a sequence has nothing of the next one") {
    for (int64_t HS : {64, 128}) {
        for (int64_t T : {1, 65, 129, 200}) {
            const Attention clean({3, T, 4, 2, HS}, Dtype::kBf16);
            Attention spoilt = clean;
            for (int64_t i = T * clean.width; i < 2 * T * clean.width; i++) spoilt.qkv.set(i, std::nan(""));
            INFO(clean.name());
            const Attention::Result given = clean.on_cpu(Dtype::kBf16), want = clean.on_gpu(given),
                                    got = spoilt.on_gpu(given);
            int64_t other = 0;
            for (int64_t i = 0; i < got.out.elems(); i++) {
                if (i / (T * 4 * HS) != 1) other += got.out.get(i) != want.out.get(i);
            }
            for (int64_t i = 0; i < got.dqkv.elems(); i++) {
                if (i / (T * clean.width) != 1) other += got.dqkv.get(i) != want.dqkv.get(i);
            }
            CHECK_EQ(other, 0);
        }
    }
}

// More tiles than multiprocessors, several sections of heads, long sequences.
TEST_CASE("gpu attention: many tiles and long sequences") {
    check_against_cpu(Attention({6, 500, 8, 4, 64}, Dtype::kBf16));
    check_against_cpu(Attention({5, 400, 8, 1, 128}, Dtype::kBf16));
    check_against_cpu(Attention({1, 1000, 8, 2, 128}, Dtype::kBf16, 4));
    check_against_cpu(Attention({1, 4096, 8, 8, 64}, Dtype::kBf16));
    check_against_cpu(Attention({1, 8192, 8, 8, 128}, Dtype::kBf16));
}

// How fast blocks are must not show in sums that several add to: blocks of all lengths, beside each other and in turn.
TEST_CASE("gpu attention: equal bits in 200 runs") {
    for (const Attention& a : {Attention({1, 2048, 8, 2, 128}, Dtype::kBf16), Attention({8, 1000, 12, 12, 64}, Dtype::kBf16),
                               Attention({1, 2048, 4, 4, 128}, Dtype::kBf16).with_documents({{1, 700, 1300, 47}})}) {
        INFO(a.name());
        Attention::Result given = a.fresh(a.type);   // equal bits need no true ones
        for (int64_t i = 0; i < given.out.elems(); i++) given.out.set(i, 0.01 * static_cast<double>(i % 7));
        for (int64_t i = 0; i < given.lse.elems(); i++) given.lse.set(i, 8);
        a.on_gpu(given, false, 200);
    }
}

TEST_CASE("gpu attention: plain kernels against loops in double") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16}) {
        for (const Shape& s : {Shape{1, 1, 1, 1, 2}, Shape{2, 7, 2, 1, 10}, Shape{1, 33, 4, 1, 80},
                               Shape{2, 65, 3, 3, 256}, Shape{1, 129, 4, 2, 48}}) {
            check_against_loops(Attention(s, type));
        }
    }
    for (int64_t HS : {64, 128}) check_against_loops(Attention({1, 100, 4, 2, HS}, Dtype::kFp32));
}

TEST_CASE("gpu attention: at most twice the CPU's error, equal bits in every run") {
    for (const Shape& s : {Shape{2, 300, 4, 1, 64}, Shape{1, 700, 8, 2, 128}, Shape{1, 1025, 2, 2, 64},
                           Shape{1, 257, 4, 2, 96}}) {
        check_against_cpu(Attention(s, Dtype::kBf16));
    }
    check_against_cpu(Attention({2, 300, 4, 1, 64}, Dtype::kFp32));
}

// ---- documents

namespace {

// Around tiles of 16, 32, 64, 128 and 192 rows: documents of one token, borders on and beside those of tiles, many in
// one tile, one over many tiles, and sequences cut in different ways. All have T = 400.
const std::vector<Lengths> kBorders = {
    {{400}, {1, 399}},
    {{399, 1}, {1, 1, 1, 61, 64, 64, 1, 15, 192}},
    {{63, 1, 64, 65, 207}, {127, 1, 1, 127, 144}},
    {equal_parts(400, 1), equal_parts(400, 7)},
    {equal_parts(400, 16), equal_parts(400, 128)},
    {{129, 271}, {191, 1, 1, 207}},
};

Attention documents_problem(int64_t NH, int64_t NKV, int64_t HS, Dtype type, const Lengths& lengths) {
    return Attention({2, 400, NH, NKV, HS}, type).with_documents(lengths);
}

// Calls f(b, begin, length) for every document.
template <typename F> void for_each_document(const Lengths& lengths, F&& f) {
    for (size_t b = 0; b < lengths.size(); b++) {
        int64_t begin = 0;
        for (int64_t length : lengths[b]) f(static_cast<int64_t>(b), begin, length), begin += length;
    }
}

// How many results of rows [begin, begin + rows) of sequence b differ.
int64_t differences(const Attention& a, const Attention::Result& x, const Attention::Result& y, int64_t b,
                    int64_t begin, int64_t rows) {
    int64_t count = 0;
    for (int64_t t = begin; t < begin + rows; t++) {
        for (int64_t i = 0; i < a.width; i++) count += x.dqkv.get(a.q(b, t, 0) + i) != y.dqkv.get(a.q(b, t, 0) + i);
        for (int64_t i = 0; i < a.s.NH * a.s.HS; i++)
            count += x.out.get(a.o(b, t, 0) + i) != y.out.get(a.o(b, t, 0) + i);
        for (int64_t h = 0; h < a.s.NH; h++) count += x.lse.get(a.row(b, t, h)) != y.lse.get(a.row(b, t, h));
    }
    return count;
}

// The rows of a document as a problem of its own.
Attention cut_out(const Attention& a, int64_t b, int64_t begin, int64_t rows) {
    Attention part({1, rows, a.s.NH, a.s.NKV, a.s.HS}, a.type);
    const int64_t token = b * a.s.T + begin, out_width = a.s.NH * a.s.HS;
    for (int64_t i = 0; i < rows * a.width; i++) part.qkv.set(i, a.qkv.get(token * a.width + i));
    for (int64_t i = 0; i < rows * out_width; i++) part.dout.set(i, a.dout.get(token * out_width + i));
    return part;
}

}  // namespace

TEST_CASE("gpu attention within documents: tensor-core kernels against loops in double") {
    for (int64_t HS : {64, 128})
        for (const Lengths& lengths : kBorders) check_against_loops(documents_problem(4, 2, HS, Dtype::kBf16, lengths));
    // Groups, ends of sequences inside and on tiles, scores of large magnitude.
    for (int64_t HS : {64, 128}) {
        check_against_loops(Attention({1, 1, 2, 1, HS}, Dtype::kBf16).with_documents({{1}}));
        check_against_loops(Attention({1, 193, 8, 1, HS}, Dtype::kBf16).with_documents({{64, 128, 1}}));
        check_against_loops(Attention({1, 256, 3, 3, HS}, Dtype::kBf16).with_documents({{113, 17, 126}}));
        check_against_loops(Attention({2, 193, 4, 1, HS}, Dtype::kBf16, 6).with_documents({{97, 96}, {5, 188}}));
    }
}

TEST_CASE("gpu attention within documents: plain kernels against loops in double") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16})
        for (const Lengths& lengths : kBorders) check_against_loops(documents_problem(4, 2, 48, type, lengths));
    check_against_loops(Attention({1, 33, 4, 1, 80}, Dtype::kFp32).with_documents({{15, 1, 17}}));
    for (int64_t HS : {64, 128})
        check_against_loops(Attention({1, 100, 4, 2, HS}, Dtype::kFp32).with_documents({{31, 1, 32, 36}}));
}

// Tiles fall elsewhere in a document that runs alone, and sums with them: the bounds are those of the loops in double
// of the document alone, the inputs of its backward its own.
TEST_CASE("gpu attention: a document agrees with itself as a sequence of its own") {
    for (int64_t HS : {48, 64, 128}) {
        const Attention a = documents_problem(4, 2, HS, Dtype::kBf16, kBorders[2]);
        const Attention::Result given = a.on_cpu(a.type), all = a.on_gpu(given);
        for_each_document(a.lengths, [&](int64_t b, int64_t begin, int64_t length) {
            const Attention part = cut_out(a, b, begin, length);
            const Attention::Result own = part.on_cpu(part.type), alone = part.on_gpu(own);
            const Reference want = reference_of(part, own, on_tensor_cores(part) ? 1.01 * 0x1p-8 : 0);
            INFO(a.name() << "document at " << b << ", " << begin);
            int64_t wrong = 0;
            for (int64_t t = 0; t < length; t++) {
                for (int64_t i = 0; i < a.width; i++) {
                    const int64_t x = a.q(b, begin + t, 0) + i, y = part.q(0, t, 0) + i;
                    wrong += !(std::fabs(all.dqkv.get(x) - alone.dqkv.get(y)) <= 2 * want.dqkv_error[y]);
                }
                for (int64_t i = 0; i < a.s.NH * HS; i++) {
                    const int64_t x = a.o(b, begin + t, 0) + i, y = part.o(0, t, 0) + i;
                    wrong += !(std::fabs(all.out.get(x) - alone.out.get(y)) <= 2 * want.out_error[y]);
                }
                for (int64_t h = 0; h < a.s.NH; h++) {
                    const int64_t x = a.row(b, begin + t, h), y = part.row(0, t, h);
                    wrong += !(std::fabs(all.lse.get(x) - alone.lse.get(y)) <= 2 * want.lse_error[y]);
                }
            }
            CHECK_EQ(wrong, 0);
        });
    }
}

// Also within the tile, the warp and the four lanes that share a row's work. The backward reads out and lse of the
// forward of the CPU, of which those of other documents are the same bits.
TEST_CASE("gpu attention: a token reaches its own document only, to the bit") {
    for (int64_t HS : {48, 64, 128}) {
        for (const Lengths& lengths : {kBorders[1], kBorders[2], kBorders[4]}) {
            const Attention a = documents_problem(4, 2, HS, Dtype::kBf16, lengths);
            const Attention::Result before = a.on_gpu(a.on_cpu(a.type));
            for (int64_t t : {0, 63, 64, 200, 399}) {
                Attention changed = a;
                for (int64_t i = a.q(1, t, 0); i < a.q(1, t, 0) + a.width; i++)
                    changed.qkv.set(i, a.qkv.get(i) * 9 + 1);
                const Attention::Result after = changed.on_gpu(changed.on_cpu(a.type));
                for_each_document(lengths, [&](int64_t b, int64_t begin, int64_t length) {
                    const bool own = b == 1 && begin <= t && t < begin + length;
                    INFO(a.name() << "token " << t << " changed, document at " << b << ", " << begin);
                    CHECK((differences(a, before, after, b, begin, length) > 0) == own);
                });
            }
        }
    }
}

// Where all tiles end with a document, a kernel must not even look at the other one: 0 times NaN would show.
TEST_CASE("gpu attention: tiles of other documents are skipped, not masked") {
    for (int64_t HS : {48, 64, 128}) {
        const Attention clean = Attention({1, 1152, 4, 2, HS}, Dtype::kBf16).with_documents({{384, 384, 384}});
        const Attention::Result given = clean.on_cpu(clean.type), before = clean.on_gpu(given);
        for (int64_t spoilt_begin : {0, 384, 768}) {
            Attention spoilt = clean;
            for (int64_t i = spoilt_begin * clean.width; i < (spoilt_begin + 384) * clean.width; i++)
                spoilt.qkv.set(i, std::nan(""));
            const Attention::Result after = spoilt.on_gpu(given);
            for (int64_t begin : {0, 384, 768}) {
                INFO(clean.name() << "NaN from " << spoilt_begin << ", document at " << begin);
                CHECK_EQ(differences(clean, before, after, 0, begin, 384) > 0, begin == spoilt_begin);
            }
        }
    }
}

TEST_CASE("gpu attention: one document over all of a sequence has the bits of none") {
    for (int64_t HS : {48, 64, 128}) {
        const Attention a({2, 400, 4, 2, HS}, Dtype::kBf16);
        // With mma.sync, the rows of a warp share the choice of a reference unless there are documents.
        if (std::string(cuda::attention_kernel(gpu(), a.type, HS)).find("mma.sync") != std::string::npos) continue;
        const Attention::Result given = a.on_cpu(a.type), none = a.on_gpu(given),
                                one = a.with_documents({{400}, {400}}).on_gpu(given);
        INFO(a.name());
        CHECK(one.out.same_bits(none.out));
        CHECK(one.lse.same_bits(none.lse));
        CHECK(one.dqkv.same_bits(none.dqkv));
    }
}

// More tiles than multiprocessors; documents far shorter and longer than tiles; equal bits in every run.
TEST_CASE("gpu attention within documents: many tiles and long sequences") {
    check_against_cpu(Attention({6, 500, 8, 4, 64}, Dtype::kBf16).with_documents(Lengths(6, equal_parts(500, 83))));
    check_against_cpu(Attention({1, 4096, 8, 2, 128}, Dtype::kBf16).with_documents({{1, 700, 1300, 95, 2000}}));
    check_against_cpu(Attention({1, 4096, 8, 8, 64}, Dtype::kBf16).with_documents({equal_parts(4096, 391)}));
    check_against_cpu(Attention({2, 300, 4, 1, 96}, Dtype::kBf16).with_documents({{299, 1}, {33, 267}}));
}
