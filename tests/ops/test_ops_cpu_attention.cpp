// Causal attention of the CPU against plain loops in double.
#include "tests/support/reference_attention.h"

using namespace documents_test;
using namespace op_test;

namespace attention_test {

namespace {

using Shape = AttentionShape;
// Around a block of queries (48), of keys (16) and of k (256); grouped heads; sizes that are not whole vectors.
const Shape kShapes[] = {{1, 1, 1, 1, 1},   {2, 5, 2, 2, 8},   {1, 48, 2, 1, 16}, {1, 49, 4, 2, 20},
                         {2, 101, 3, 3, 7}, {1, 270, 2, 1, 18}};

void check(const Attention& a) {
    INFO(a.name());
    const Attention::Result r = a.on_cpu(a.type);
    check_attention(a, r, r);
}

}  // namespace

TEST_CASE("cpu attention") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64})
        for (const Shape& s : kShapes) check(Attention(s, type));
}

TEST_CASE("cpu attention: the largest score of each head, which changes no bit of the result") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16})
        for (const Shape& s : kShapes)
            for (const Attention& a : {Attention(s, type), with_window(Attention(s, type), 3),
                                       with_sinks(Attention(s, type), {40})}) {
                const Attention::Result plain = a.on_cpu(type);
                Attention::Result r = a.fresh(type);
                HostTensor qkv = a.qkv, sinks = a.sink_tensor(type);
                const auto forward = [&](HostTensor& logits) {
                    AttentionForwardArgs args = a.forward_args(r.out.view(), r.lse.view(), qkv.view(), nullptr, {},
                                                               sinks.view());
                    args.max_logits = logits.as<float>();
                    Ctx ctx;
                    cpu::attention_forward(ctx, args);
                };
                check_max_logits(a, a.qkv.values(), HostTensor(Dtype::kFp32, a.NH), a.HS + 4.0, forward);
                CHECK(r.out.same_bits(plain.out));
                CHECK(r.lse.same_bits(plain.lse));
            }
}

TEST_CASE("cpu attention survives large scores") {
    // exp of such scores overflows unless the largest is subtracted
    Attention large({1, 60, 2, 1, 8}, Dtype::kFp32);
    large.softmax_mul = 100;
    const Attention::Result r = large.on_cpu(large.type);
    for (int64_t i = 0; i < r.out.elems(); i++) REQUIRE(std::isfinite(r.out.get(i)));
    for (int64_t i = 0; i < r.dqkv.elems(); i++) REQUIRE(std::isfinite(r.dqkv.get(i)));
}

namespace {

void check_refused(const Attention& a, Attention::Result r) {
    CHECK_THROWS_AS(a.cpu_forward(r), Error);
    CHECK_THROWS_AS(a.cpu_backward(r), Error);
}

}  // namespace

TEST_CASE("cpu attention refuses wrong shapes") {
    const Attention a({1, 4, 3, 2, 4}, Dtype::kFp32);   // 3 query heads over 2 key heads
    check_refused(a, a.fresh(a.type));
    const Attention b({1, 4, 2, 2, 4}, Dtype::kFp32);
    Attention::Result r = b.fresh(b.type);
    r.lse = HostTensor(Dtype::kBf16, 8);
    check_refused(b, r);
}

namespace {

// Documents around a block of queries (48), of one token, and one that fills its sequence.
struct DocumentCase {
    Shape s;
    Lengths lengths;
};
const std::vector<DocumentCase> kDocumentCases = {
    {{1, 1, 1, 1, 3}, {{1}}}, {{2, 5, 2, 2, 8}, {{1, 3, 1}, {5}}}, {{1, 49, 4, 2, 20}, {{47, 1, 1}}},
    {{2, 101, 3, 3, 7}, {{1, 1, 49, 50}, {7, 48, 33, 13}}}, {{1, 270, 2, 1, 18}, {{97, 1, 172}}},
};

// Rows [begin, begin + rows) of a sequence as a separate problem.
Attention cut_out(const Attention& a, int64_t b, int64_t begin, int64_t rows) {
    Attention part({1, rows, a.NH, a.NKV, a.HS}, a.type);
    for (int64_t i = 0; i < part.qkv.elems(); i++) part.qkv.set(i, a.qkv.get(a.q(b, begin, 0) + i));
    for (int64_t i = 0; i < part.dout.elems(); i++) part.dout.set(i, a.dout.get(a.o(b, begin, 0) + i));
    return part;
}

}  // namespace

TEST_CASE("cpu attention within documents") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64})
        for (const DocumentCase& c : kDocumentCases) check(with_documents(Attention(c.s, type), c.lengths));
}

TEST_CASE("cpu attention: a document is bitwise equal to a separate sequence") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64})
        for (const DocumentCase& c : kDocumentCases) {
            const Attention a = with_documents(Attention(c.s, type), c.lengths);
            INFO(a.name());
            const Attention::Result whole = a.on_cpu(type);
            for_each_document(c.lengths, [&](int64_t b, int64_t begin, int64_t length) {
                const Attention alone = cut_out(a, b, begin, length);
                CHECK_EQ(differences(a, whole, b, begin, length, alone, alone.on_cpu(type), 0, 0), 0);
            });
        }
}

TEST_CASE("cpu attention refuses documents with gaps and overlaps") {
    Attention a({2, 6, 2, 2, 4}, Dtype::kFp32);
    const std::vector<int32_t> sound = documents_of({{2, 4}, {6}}, 6);
    a.documents = sound;
    const Attention::Result r = a.on_cpu(a.type);
    for (size_t i = 0; i < sound.size(); i++)
        for (int32_t change : {-1, 1}) {
            a.documents = sound;
            a.documents[i] += change;
            check_refused(a, r);
        }
}

TEST_CASE("cpu attention within a window, alone and with documents") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64})
        for (const DocumentCase& c : kDocumentCases)
            for (int64_t window : {1, 2, 5, 47, 48, 50, 97}) {
                if (window > 5 && c.s.T < 49) continue;
                const Attention a = with_window(Attention(c.s, type), window);
                check(a);
                check(with_documents(a, c.lengths));
            }
}

TEST_CASE("cpu attention with sinks: gradients of all four inputs, also with documents and a window") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64})
        for (const DocumentCase& c : kDocumentCases)
            for (int64_t window : {0, 1, 5, 50}) {
                Attention a = with_sinks(with_window(Attention(c.s, type), window));
                check(a);
                a.bf16_dsinks = type != Dtype::kFp64;
                check(with_documents(a, c.lengths));
            }
}

// Caps that bend nearly all scores, and only the largest ones.
TEST_CASE("cpu attention with a soft cap, also with documents, a window and sinks") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64})
        for (double cap : {1.5, 12.0}) {
            for (const Shape& s : kShapes) check(with_softcap(Attention(s, type), cap));
            for (const DocumentCase& c : kDocumentCases)
                for (int64_t window : {0, 5, 50}) {
                    const Attention a = with_softcap(with_window(Attention(c.s, type), window), cap);
                    check(with_documents(a, c.lengths));
                    check(with_sinks(a));
                }
        }
}

TEST_CASE("cpu attention: a sink of -infinity changes no bit, and a very large one takes all of P") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64})
        for (const Attention& a :
             {Attention({2, 101, 3, 3, 7}, type), with_window(Attention({1, 60, 4, 2, 16}, type), 1)})
            check_extreme_sinks(a, a.on_cpu(type), with_sinks(a, {-HUGE_VAL}).on_cpu(type),
                                with_sinks(a, {8192}).on_cpu(type));
}

}  // namespace attention_test
