// Causal attention of the CPU against plain loops in double, with error bounds derived from every rounding.
#include "tests/support/documents_test.h"
#include "tests/support/op_test.h"
#include "tests/support/reference_attention.h"

using namespace documents_test;
using namespace op_test;

namespace attention_test {

namespace {

using Shape = QkvShape;
// Around a block of queries (48), of keys (16) and of k (256); grouped heads; sizes that are not whole vectors.
const Shape kShapes[] = {{1, 1, 1, 1, 1},   {2, 5, 2, 2, 8},   {1, 48, 2, 1, 16}, {1, 49, 4, 2, 20},
                         {2, 101, 3, 3, 7}, {1, 270, 2, 1, 18}};

struct Attention : AttentionProblem {
    HostTensor out, lse, dqkv, delta;

    Attention(Shape shape, Dtype dtype) : AttentionProblem(shape, dtype) {
        Result poisoned = fresh(dtype);
        out = poisoned.out, lse = poisoned.lse, dqkv = poisoned.dqkv, delta = poisoned.delta;
    }
    const int32_t* documents_data() const { return documents.empty() ? nullptr : documents.data(); }
    void forward() {
        Ctx ctx;
        cpu::attention_forward(ctx, forward_args(out.view(), lse.view(), qkv.view(), documents_data()));
    }
    void backward() {
        Ctx ctx;
        cpu::attention_backward(ctx, backward_args(dqkv.view(), delta.view(), dout.view(), out.view(), lse.view(),
                                                   qkv.view(), documents_data()));
    }
};

// Calls f(b, h, t) for every query.
template <typename F> void for_queries(const Shape& s, F&& f) {
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t h = 0; h < s.NH; h++)
            for (int64_t t = 0; t < s.T; t++) f(b, h, t);
}

// Scores of one query and their error bounds in units of the accumulation roundoff.
struct Scores {
    int64_t first;                      // key of value[0]
    std::vector<double> value, error;
    double largest = -1e300, largest_error = 0, sum = 0, lse = 0;
    Scores(const Attention& a, const std::vector<double>& qkv, int64_t b, int64_t h, int64_t t)
        : first(a.start(b, t)) {
        for (int64_t j = first; j <= t; j++) {
            double dot = 0, magnitude = 0;
            for (int64_t d = 0; d < a.s.HS; d++) {
                double term = qkv[a.q(b, t, h) + d] * qkv[a.k(b, j, h) + d] * a.softmax_mul;
                dot += term, magnitude += std::fabs(term);
            }
            value.push_back(dot), error.push_back((a.s.HS + 4) * magnitude);
            largest = std::max(largest, dot), largest_error = std::max(largest_error, error.back());
        }
        for (double score : value) sum += std::exp(score - largest);
        lse = largest + std::log(sum);
    }
};

void check_forward(const Attention& a) {
    const double u = 2 * acc_roundoff(a.type), round = 1.01 * unit_roundoff(a.type);
    const std::vector<double> qkv = a.qkv.values();
    HostTensor out(Dtype::kFp64, a.out.elems()), lse(Dtype::kFp64, a.lse.elems()), out_error(out),
        lse_error(lse);
    for_queries(a.s, [&](int64_t b, int64_t h, int64_t t) {
        Scores s(a, qkv, b, h, t);
        // An exponential carries the error of its argument, and exp(s - max) one of |s - max| more.
        double spread = 0;
        for (double score : s.value) spread = std::max(spread, s.largest - score);
        double relative = (2 * s.largest_error + 2 * spread + t / 4.0 + 12) * u;
        lse.set(a.row(b, t, h), s.lse);
        lse_error.set(a.row(b, t, h), relative + 2 * u * (std::fabs(s.largest) + std::fabs(s.lse)));
        std::vector<double> probability;
        for (double score : s.value) probability.push_back(std::exp(score - s.lse));
        for (int64_t d = 0; d < a.s.HS; d++) {
            double sum = 0, magnitude = 0;
            for (int64_t j = s.first; j <= t; j++) {
                double term = probability[j - s.first] * qkv[a.v(b, j, h) + d];
                sum += term, magnitude += std::fabs(term);
            }
            out.set(a.o(b, t, h) + d, sum);
            out_error.set(a.o(b, t, h) + d,
                          magnitude * (2 * relative + (t + 4) * u) + round * std::fabs(sum) + kTiny);
        }
    });
    check_close("out", a.out, out, [&](int64_t i) { return out_error.get(i); });
    check_close("lse", a.lse, lse, [&](int64_t i) { return lse_error.get(i); });
}

// Gradient of one element of dqkv and its error bound.
struct Sum {
    double value = 0, error = 0;
    void add(double term, double term_error) { value += term, error += term_error; }
};

void check_backward(const Attention& a) {
    const double u = 2 * acc_roundoff(a.type), round = 1.01 * unit_roundoff(a.type), mul = a.softmax_mul;
    const double chain = 48 + a.s.T / 48.0 * a.s.NH + 8;   // a block of queries, then the blocks and heads
    const std::vector<double> qkv = a.qkv.values(), douts = a.dout.values();
    std::vector<Sum> dqkv(static_cast<size_t>(a.dqkv.elems()));
    HostTensor delta(Dtype::kFp64, a.delta.elems()), delta_error(delta);
    for_queries(a.s, [&](int64_t b, int64_t h, int64_t t) {
        Scores s(a, qkv, b, h, t);
        Sum row;
        for (int64_t d = 0; d < a.s.HS; d++) {
            double term = douts[a.o(b, t, h) + d] * a.out.get(a.o(b, t, h) + d);
            row.add(term, row_chain(a.s.HS) * u * std::fabs(term));
        }
        delta.set(a.row(b, t, h), row.value), delta_error.set(a.row(b, t, h), row.error);
        const double lse = a.lse.get(a.row(b, t, h));
        for (int64_t j = s.first; j <= t; j++) {
            double score = s.value[j - s.first], p = std::exp(score - lse),
                   p_error = p * u * (s.error[j - s.first] + 2 * std::fabs(score - lse) + 6);
            Sum dp;
            for (int64_t d = 0; d < a.s.HS; d++) {
                double dout = douts[a.o(b, t, h) + d], term = dout * qkv[a.v(b, j, h) + d];
                dp.add(term, (a.s.HS + 2) * u * std::fabs(term));
                dqkv[a.v(b, j, h) + d].add(p * dout, std::fabs(dout) * (p_error + chain * u * p));
            }
            double spread = std::fabs(dp.value) + std::fabs(row.value);
            double ds = p * (dp.value - row.value) * mul;
            double ds_error = mul * (p_error * spread + p * (dp.error + row.error + 4 * u * spread));
            for (int64_t d = 0; d < a.s.HS; d++) {
                double q = qkv[a.q(b, t, h) + d], k = qkv[a.k(b, j, h) + d];
                dqkv[a.q(b, t, h) + d].add(ds * k, std::fabs(k) * (ds_error + (t + 4) * u * std::fabs(ds)));
                dqkv[a.k(b, j, h) + d].add(ds * q, std::fabs(q) * (ds_error + chain * u * std::fabs(ds)));
            }
        }
    });
    check_close("delta", a.delta, delta, [&](int64_t i) { return delta_error.get(i) + kTiny; });
    HostTensor want(Dtype::kFp64, a.dqkv.elems());
    for (int64_t i = 0; i < want.elems(); i++) want.set(i, dqkv[i].value);
    check_close("dqkv", a.dqkv, want,
                [&](int64_t i) { return dqkv[i].error + round * std::fabs(dqkv[i].value) + kTiny; });
}

}  // namespace

TEST_CASE("cpu attention") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64})
        for (const Shape& s : kShapes) {
            INFO(dtype_name(type) << " B " << s.B << " T " << s.T << " NH " << s.NH << " NKV " << s.NKV
                                  << " HS " << s.HS);
            Attention a(s, type);
            a.forward();
            check_forward(a);
            a.backward();
            check_backward(a);
        }
}

TEST_CASE("cpu attention survives large scores") {
    // exp of such scores overflows unless the largest is subtracted
    Attention large({1, 60, 2, 1, 8}, Dtype::kFp32);
    large.softmax_mul = 100;
    large.forward();
    large.backward();
    for (int64_t i = 0; i < large.out.elems(); i++) REQUIRE(std::isfinite(large.out.get(i)));
    for (int64_t i = 0; i < large.dqkv.elems(); i++) REQUIRE(std::isfinite(large.dqkv.get(i)));
}

TEST_CASE("cpu attention refuses wrong shapes") {
    Attention a({1, 4, 3, 2, 4}, Dtype::kFp32);   // 3 query heads over 2 key heads
    CHECK_THROWS_AS(a.forward(), Error);
    CHECK_THROWS_AS(a.backward(), Error);
    Attention b({1, 4, 2, 2, 4}, Dtype::kFp32);
    b.lse = HostTensor(Dtype::kBf16, 8);
    CHECK_THROWS_AS(b.forward(), Error);
}

namespace {

// Documents around a block of queries (48), of one token, and one that fills its sequence.
struct DocumentCase {
    Shape s;
    Lengths lengths;
};
const std::vector<DocumentCase> kDocumentCases = {
    {{1, 1, 1, 1, 3}, {{1}}},
    {{2, 5, 2, 2, 8}, {{1, 3, 1}, {5}}},
    {{1, 49, 4, 2, 20}, {{47, 1, 1}}},
    {{2, 101, 3, 3, 7}, {{1, 1, 49, 50}, {7, 48, 33, 13}}},
    {{1, 270, 2, 1, 18}, {{97, 1, 172}}},
};
Attention with_documents(const DocumentCase& c, Dtype type) {
    Attention a(c.s, type);
    a.documents = documents_of(c.lengths, c.s.T);
    return a;
}

// Rows [begin, begin + rows) of a sequence as a separate problem.
Attention cut_out(const Attention& a, int64_t b, int64_t begin, int64_t rows) {
    Attention part({1, rows, a.s.NH, a.s.NKV, a.s.HS}, a.type);
    const int64_t token = b * a.s.T + begin, out_width = a.s.NH * a.s.HS;
    for (int64_t i = 0; i < rows * a.width; i++) part.qkv.set(i, a.qkv.get(token * a.width + i));
    for (int64_t i = 0; i < rows * out_width; i++) part.dout.set(i, a.dout.get(token * out_width + i));
    return part;
}

// Counts the results of rows [begin, begin + rows) of sequence b that differ from rows [at, at + rows) of sequence
// part_b of `part`.
int64_t differences(const Attention& a, int64_t b, int64_t begin, int64_t rows, const Attention& part, int64_t part_b,
                    int64_t at) {
    int64_t count = 0;
    for (int64_t t = 0; t < rows; t++) {
        for (int64_t i = 0; i < a.width; i++)
            count += a.dqkv.get(a.q(b, begin + t, 0) + i) != part.dqkv.get(part.q(part_b, at + t, 0) + i);
        for (int64_t i = 0; i < a.s.NH * a.s.HS; i++)
            count += a.out.get(a.o(b, begin + t, 0) + i) != part.out.get(part.o(part_b, at + t, 0) + i);
        for (int64_t h = 0; h < a.s.NH; h++) {
            const int64_t row = a.row(b, begin + t, h), part_row = part.row(part_b, at + t, h);
            count += a.lse.get(row) != part.lse.get(part_row);
            count += a.delta.get(row) != part.delta.get(part_row);
        }
    }
    return count;
}

// Calls f(b, begin, length) for every document.
template <typename F> void for_each_document(const DocumentCase& c, F&& f) {
    for (int64_t b = 0; b < c.s.B; b++) {
        int64_t begin = 0;
        for (int64_t length : c.lengths[b]) f(b, begin, length), begin += length;
    }
}

}  // namespace

TEST_CASE("cpu attention within documents") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64})
        for (const DocumentCase& c : kDocumentCases) {
            INFO(dtype_name(type) << " T " << c.s.T << " " << text_of(c.lengths));
            Attention a = with_documents(c, type);
            a.forward();
            check_forward(a);
            a.backward();
            check_backward(a);
        }
}

TEST_CASE("cpu attention: a document is bitwise equal to a separate sequence") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64})
        for (const DocumentCase& c : kDocumentCases) {
            INFO(dtype_name(type) << " T " << c.s.T << " " << text_of(c.lengths));
            Attention a = with_documents(c, type);
            a.forward(), a.backward();
            for_each_document(c, [&](int64_t b, int64_t begin, int64_t length) {
                Attention alone = cut_out(a, b, begin, length);
                alone.forward(), alone.backward();
                CHECK_EQ(differences(a, b, begin, length, alone, 0, 0), 0);
            });
        }
}

TEST_CASE("cpu attention refuses documents with gaps and overlaps") {
    Attention a({2, 6, 2, 2, 4}, Dtype::kFp32);
    const std::vector<int32_t> sound = documents_of({{2, 4}, {6}}, 6);
    a.documents = sound;
    a.forward(), a.backward();
    for (size_t i = 0; i < sound.size(); i++)
        for (int32_t change : {-1, 1}) {
            a.documents = sound;
            a.documents[i] += change;
            CHECK_THROWS_AS(a.forward(), Error);
            CHECK_THROWS_AS(a.backward(), Error);
        }
}

TEST_CASE("cpu attention within a window, alone and with documents") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64})
        for (const DocumentCase& c : kDocumentCases)
            for (int64_t window : {1, 2, 5, 47, 48, 50, 97}) {
                for (bool documents : {false, true}) {
                    if (window > 5 && c.s.T < 49) continue;
                    INFO(dtype_name(type) << " T " << c.s.T << " window " << window << " "
                                          << (documents ? text_of(c.lengths) : ""));
                    Attention a = documents ? with_documents(c, type) : Attention(c.s, type);
                    a.window = window;
                    a.forward();
                    check_forward(a);
                    a.backward();
                    check_backward(a);
                }
            }
}

}  // namespace attention_test
