// Attention of the GPU: sequences of one document.
#include "tests/gpu/gpu_attention.h"

using namespace attention_test;

namespace attention_gpu_test {

TEST_CASE("gpu attention: tensor-core kernels against loops in double") {
    // Around tiles of 16, 32, 64, 80, 128 and 192 rows; groups of 1, 2, 4 and 8; then scores of large magnitude.
    for (int64_t HS : kTensorDims) {
        for (const Shape& s : {Shape{2, 1, 2, 1, HS}, Shape{1, 7, 4, 2, HS}, Shape{1, 63, 1, 1, HS},
                               Shape{2, 65, 4, 1, HS}, Shape{1, 127, 2, 2, HS}, Shape{1, 129, 8, 1, HS},
                               Shape{2, 200, 3, 3, HS}, Shape{1, 17, 2, 2, HS}, Shape{1, 64, 2, 1, HS},
                               Shape{2, 113, 4, 1, HS}, Shape{1, 128, 2, 1, HS}, Shape{2, 191, 2, 2, HS},
                               Shape{1, 192, 1, 1, HS}, Shape{1, 2, 2, 1, HS}, Shape{1, 79, 2, 1, HS},
                               Shape{1, 80, 2, 2, HS}, Shape{2, 81, 4, 2, HS}, Shape{1, 161, 3, 1, HS},
                               Shape{1, 193, 8, 1, HS}, Shape{1, 256, 2, 2, HS}, Shape{2, 257, 2, 1, HS}}) {
            check_against_loops(Attention(s, Dtype::kBf16));
        }
        check_against_loops(Attention({2, 193, 4, 2, HS, 6}, Dtype::kBf16));
    }
    for (int64_t HS : {72, 88}) check_against_loops(Attention({2, 200, 4, 2, HS}, Dtype::kBf16));
}

// A tile that ends beyond its sequence must not read the next sequence of the batch.
TEST_CASE("gpu attention: the largest score of each head, which changes no bit of the result") {
    for (Dtype type : {Dtype::kBf16, Dtype::kFp32})
        for (const Shape& s : {Shape{2, 301, 4, 2, 64}, Shape{1, 517, 2, 2, 128}, Shape{1, 330, 2, 1, 96},
                               Shape{2, 401, 2, 1, 256}, Shape{2, 77, 3, 1, 20}})
            for (const Attention& a : {Attention(s, type), with_window(Attention(s, type), 70),
                                       with_sinks(Attention(s, type), {40})}) {
                const Attention::Result plain = on_gpu(a, a.on_cpu(type));
                DeviceTensor x(a.qkv), out(plain.out), lse(plain.lse), sinks(a.sink_tensor(type));
                const auto forward = [&](HostTensor& logits) {
                    DeviceTensor device(logits);
                    AttentionForwardArgs args = a.forward_args(out.view(), lse.view(), x.view(), nullptr, {},
                                                               sinks.view());
                    args.max_logits = device.view().as<float>();
                    cuda::attention_forward(gpu(), args);
                    logits = device.download();
                };
                check_max_logits(a, a.qkv.values(), HostTensor(Dtype::kFp32, a.NH), a.HS + 4.0, forward);
                // Without wgmma a warp of HS 128 has other rows, and so other references.
                const std::string kernel = cuda::attention_kernel(gpu(), type, a.HS);
                if (kernel.find("mma.sync") != std::string::npos && a.HS == 128) continue;
                CHECK(out.download().same_bits(plain.out));
                CHECK(lse.download().same_bits(plain.lse));
            }
}

TEST_CASE("gpu attention: a sequence does not depend on the next one") {
    for (int64_t HS : kTensorDims)
        for (int64_t T : {1, 65, 129, 200}) {
            const Attention clean({3, T, 4, 2, HS}, Dtype::kBf16);
            Attention corrupted = clean;
            for (int64_t i = T * clean.width(); i < 2 * T * clean.width(); i++) corrupted.qkv.set(i, std::nan(""));
            INFO(clean.name());
            const Attention::Result given = clean.on_cpu(Dtype::kBf16), want = on_gpu(clean, given),
                                    got = on_gpu(corrupted, given);
            int64_t other = 0;
            for (int64_t i = 0; i < got.out.elems(); i++) {
                if (i / (T * 4 * HS) != 1) other += got.out.get(i) != want.out.get(i);
            }
            for (int64_t i = 0; i < got.dqkv.elems(); i++) {
                if (i / (T * clean.width()) != 1) other += got.dqkv.get(i) != want.dqkv.get(i);
            }
            CHECK_EQ(other, 0);
        }
}

// More tiles than multiprocessors, several sections of heads, long sequences.
TEST_CASE("gpu attention: many tiles and long sequences") {
    check_against_cpu(Attention({6, 500, 8, 4, 64}, Dtype::kBf16));
    check_against_cpu(Attention({5, 400, 8, 1, 128}, Dtype::kBf16));
    check_against_cpu(Attention({1, 1000, 8, 2, 128, 4}, Dtype::kBf16));
    check_against_cpu(Attention({1, 4096, 8, 8, 64}, Dtype::kBf16));
    check_against_cpu(Attention({6, 500, 8, 4, 96}, Dtype::kBf16));
    check_against_cpu(Attention({5, 400, 8, 1, 256}, Dtype::kBf16));
    check_against_cpu(Attention({1, 4100, 8, 4, 256}, Dtype::kBf16));
    check_against_cpu(Attention({1, 8192, 8, 8, 128}, Dtype::kBf16));
}

// Sums to which several blocks add must not depend on their speed: blocks of all lengths, in different orders.
TEST_CASE("gpu attention: equal bits in 200 runs") {
    for (const Attention& a :
         {Attention({1, 2048, 8, 2, 128}, Dtype::kBf16), Attention({8, 1000, 12, 12, 64}, Dtype::kBf16),
          Attention({1, 2048, 8, 2, 256}, Dtype::kBf16), Attention({4, 1000, 6, 6, 96}, Dtype::kBf16),
          with_documents(Attention({1, 2048, 4, 4, 256}, Dtype::kBf16), {{1, 700, 1300, 47}}),
          with_documents(Attention({1, 2048, 4, 4, 128}, Dtype::kBf16), {{1, 700, 1300, 47}})}) {
        INFO(a.name());
        Attention::Result given = a.fresh(a.type);   // the values do not matter
        for (int64_t i = 0; i < given.out.elems(); i++) given.out.set(i, 0.01 * static_cast<double>(i % 7));
        for (int64_t i = 0; i < given.lse.elems(); i++) given.lse.set(i, 8);
        on_gpu(a, given, 200);
    }
}

TEST_CASE("gpu attention: plain kernels against loops in double") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16}) {
        for (const Shape& s : {Shape{1, 1, 1, 1, 2}, Shape{2, 7, 2, 1, 10}, Shape{1, 33, 4, 1, 80},
                               Shape{2, 65, 3, 3, 256}, Shape{2, 65, 3, 3, 250},
                               Shape{1, 129, 4, 2, 48}}) {
            check_against_loops(Attention(s, type));
        }
    }
    for (int64_t HS : kTensorDims) check_against_loops(Attention({1, 100, 4, 2, HS}, Dtype::kFp32));
}

TEST_CASE("gpu attention: at most twice the CPU's error, equal bits in every run") {
    for (const Shape& s : {Shape{2, 300, 4, 1, 64}, Shape{1, 700, 8, 2, 128}, Shape{1, 1025, 2, 2, 64},
                           Shape{1, 257, 4, 2, 96}, Shape{1, 700, 8, 2, 256}, Shape{2, 300, 4, 1, 80}}) {
        check_against_cpu(Attention(s, Dtype::kBf16));
    }
    check_against_cpu(Attention({2, 300, 4, 1, 64}, Dtype::kFp32));
}

}  // namespace attention_gpu_test
