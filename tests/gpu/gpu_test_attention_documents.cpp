// Attention of the GPU within documents.
#include "tests/gpu/gpu_attention.h"

using namespace attention_test;

namespace attention_documents_test {

namespace {

Attention documents_problem(int64_t NH, int64_t NKV, int64_t HS, Dtype type, const Lengths& lengths) {
    return with_documents(Attention({2, 400, NH, NKV, HS}, type), lengths);
}

}  // namespace

TEST_CASE("gpu attention within documents: tensor-core kernels against loops in double") {
    for (int64_t HS : kTensorDims)
        for (const Lengths& lengths : kBorders) check_against_loops(documents_problem(4, 2, HS, Dtype::kBf16, lengths));
    // Groups, ends of sequences inside and on tiles, scores of large magnitude.
    for (int64_t HS : kTensorDims) {
        check_against_loops(with_documents(Attention({1, 1, 2, 1, HS}, Dtype::kBf16), {{1}}));
        check_against_loops(with_documents(Attention({1, 193, 8, 1, HS}, Dtype::kBf16), {{64, 128, 1}}));
        check_against_loops(with_documents(Attention({1, 256, 3, 3, HS}, Dtype::kBf16), {{113, 17, 126}}));
        const Attention large({2, 193, 4, 1, HS, large_magnitude(HS)}, Dtype::kBf16);
        check_against_loops(with_documents(large, {{97, 96}, {5, 188}}));
    }
}

TEST_CASE("gpu attention within documents: plain kernels against loops in double") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16})
        for (const Lengths& lengths : kBorders) check_against_loops(documents_problem(4, 2, 48, type, lengths));
    check_against_loops(with_documents(Attention({1, 33, 4, 1, 80}, Dtype::kFp32), {{15, 1, 17}}));
    for (int64_t HS : kTensorDims)
        check_against_loops(with_documents(Attention({1, 100, 4, 2, HS}, Dtype::kFp32), {{31, 1, 32, 36}}));
}

// Also within the tile, the warp and the four lanes that share a row. The backward pass reads out and lse of the CPU,
// which are bitwise equal for the other documents.
TEST_CASE("gpu attention: a token reaches its own document only, to the bit") {
    for (int64_t HS : {48, 64, 96, 128, 256})
        for (const Lengths& lengths : {kBorders[1], kBorders[2], kBorders[4]}) {
            const Attention a = documents_problem(4, 2, HS, Dtype::kBf16, lengths);
            const Attention::Result before = on_gpu(a, a.on_cpu(a.type));
            for (int64_t t : {0, 63, 64, 200, 399}) {
                Attention changed = a;
                for (int64_t i = a.q(1, t, 0); i < a.q(1, t, 0) + a.width(); i++)
                    changed.qkv.set(i, a.qkv.get(i) * 9 + 1);
                const Attention::Result after = on_gpu(changed, changed.on_cpu(a.type));
                for_each_document(lengths, [&](int64_t b, int64_t begin, int64_t length) {
                    const bool own = b == 1 && begin <= t && t < begin + length;
                    INFO(a.name() << "token " << t << " changed, document at " << b << ", " << begin);
                    CHECK((differences(a, before, b, begin, length, a, after, b, begin) > 0) == own);
                });
            }
        }
}

// If documents end with tiles, a kernel must not read the other document at all: 0 times NaN would be NaN.
TEST_CASE("gpu attention: tiles of other documents are skipped, not masked") {
    for (int64_t HS : {48, 64, 96, 128}) {
        const Attention clean = with_documents(Attention({1, 1152, 4, 2, HS}, Dtype::kBf16), {{384, 384, 384}});
        const Attention::Result given = clean.on_cpu(clean.type), before = on_gpu(clean, given);
        for (int64_t corrupted_begin : {0, 384, 768}) {
            Attention corrupted = clean;
            for (int64_t i = corrupted_begin * clean.width(); i < (corrupted_begin + 384) * clean.width(); i++)
                corrupted.qkv.set(i, std::nan(""));
            const Attention::Result after = on_gpu(corrupted, given);
            for (int64_t begin : {0, 384, 768}) {
                INFO(clean.name() << "NaN from " << corrupted_begin << ", document at " << begin);
                CHECK_EQ(differences(clean, before, 0, begin, 384, clean, after, 0, begin) > 0,
                         begin == corrupted_begin);
            }
        }
    }
}

TEST_CASE("gpu attention: one document per sequence is bitwise equal to none") {
    for (int64_t HS : {48, 64, 96, 128, 256}) {
        const Attention a({2, 400, 4, 2, HS}, Dtype::kBf16);
        // With mma.sync, the rows of a warp update their running maximum together unless there are documents.
        if (std::string(cuda::attention_kernel(gpu(), a.type, HS)).find("mma.sync") != std::string::npos) continue;
        const Attention::Result given = a.on_cpu(a.type), none = on_gpu(a, given),
                                one = on_gpu(with_documents(a, {{400}, {400}}), given);
        INFO(a.name());
        CHECK(one.same_bits(none));
    }
}

// More tiles than multiprocessors; documents far shorter and longer than tiles; equal bits in every run.
TEST_CASE("gpu attention within documents: many tiles and long sequences") {
    check_against_cpu(with_documents(Attention({6, 500, 8, 4, 64}, Dtype::kBf16), Lengths(6, equal_parts(500, 83))));
    check_against_cpu(with_documents(Attention({1, 4096, 8, 2, 128}, Dtype::kBf16), {{1, 700, 1300, 95, 2000}}));
    check_against_cpu(with_documents(Attention({1, 4096, 8, 8, 64}, Dtype::kBf16), {equal_parts(4096, 391)}));
    for (int64_t HS : {80, 96, 256})
        check_against_cpu(with_documents(Attention({2, 300, 4, 1, HS}, Dtype::kBf16), {{299, 1}, {33, 267}}));
    check_against_cpu(with_documents(Attention({1, 4096, 8, 2, 256}, Dtype::kBf16), {{1, 700, 1300, 95, 2000}}));
}

}  // namespace attention_documents_test
