// INT8 matmul of the GPU (compute capability 9.0): equal to the CPU's to the bit.
#include "llmc/cuda/gemm.h"
#include "tests/gpu/gpu_op.h"
#include "tests/support/int8_gemm_test.h"

using namespace op_test;

namespace gemm_int8_test {

namespace {

// Shared by all cases; null if the kernel cannot run.
Ctx* context() {
    static FreshContext opened;
    return cuda::gemm_int8_available(opened.ctx) ? &opened.ctx : nullptr;
}

// Downloading checks the bytes before and after D.
HostTensor on_gpu(Int8Product& p) {
    DeviceTensor a(p.a), b(p.b), d(p.d), bias(p.bias), a_scale_inv(p.a_scale_inv), b_scale_inv(p.b_scale_inv);
    cuda::gemm(*context(), p.args(d.view(), a.view(), b.view(), a_scale_inv.view(), b_scale_inv.view(), bias.view()));
    cuda::synchronize(*context());
    return d.download();
}

void check_bits(Int8Product& p, int repeats) {
    INFO(p.name());
    const HostTensor want = p.on_cpu(*context());
    for (int i = 0; i < repeats; i++) {
        const HostTensor got = on_gpu(p);
        INFO(first_difference(got, want));
        CHECK(got.same_bits(want));
    }
}

}  // namespace

// Blocks compute tiles of 128 x 256, in pairs along M, in steps of 128 along K, of which 4 are in shared memory; of a
// last step up to 64 only one half is multiplied. The shapes are below, at and above each of these sizes. Extreme codes
// give sums above 2^24, where the conversion to fp32 rounds.
TEST_CASE("gpu int8 gemm equals the CPU to the bit") {
    if (!context()) return;
    const int64_t kShapes[][3] = {{1, 16, 16},     {7, 48, 64},     {100, 272, 80},   {128, 256, 128}, {129, 240, 192},
                                  {256, 256, 384}, {260, 528, 512}, {388, 400, 576},  {64, 1600, 640}, {300, 784, 1040},
                                  {17, 64, 1536},  {5, 272, 14336}, {130, 16, 131072}};
    for (const auto& [M, N, K] : kShapes)
        for (bool bias : {false, true})
            for (bool extreme : {false, true}) {
                if (left_out(M * N) || left_out(M * K)) continue;
                Int8Product p = int8_product(M, N, K, bias, extreme);
                check_bits(p, 2);
            }
}

// More tiles than multiprocessors, so that a block computes several and its stores overlap with the next tile; few and
// many steps; the last pair of blocks has only rows of its first one.
TEST_CASE("gpu int8 gemm over many tiles equals the CPU to the bit in every run") {
    if (!context() || left_out(1 << 20)) return;
    const int64_t kShapes[][3] = {{2308, 4368, 64}, {2308, 4368, 320}, {4100, 2576, 528}, {2500, 3088, 1088}};
    for (const auto& [M, N, K] : kShapes)
        for (bool bias : {false, true}) {
            Int8Product p = int8_product(M, N, K, bias);
            check_bits(p, 4);
        }
}

TEST_CASE("gpu int8 gemm: one changed code, scale or bias changes the result") {
    if (!context()) return;
    const Int8Product start = int8_product(40, 272, 48, true);
    Int8Product p = start;
    const HostTensor before = on_gpu(p);
    const auto changed = [&](auto change) {
        Int8Product other = start;
        change(other);
        CHECK_FALSE(on_gpu(other).same_bits(before));
    };
    changed([](Int8Product& o) { o.a_codes()[40 * 48 - 1] ^= 64; });
    changed([](Int8Product& o) { o.b_codes()[272 * 48 - 1] ^= 64; });
    changed([](Int8Product& o) { o.a_scale_inv.set(39, 2 * o.a_scale_inv.get(39)); });
    changed([](Int8Product& o) { o.b_scale_inv.set(271, 2 * o.b_scale_inv.get(271)); });
    changed([](Int8Product& o) { o.bias.set(271, 1 - o.bias.get(271)); });
}

TEST_CASE("gpu int8 gemm counts as an FP8 matmul, and a wrong call is one line") {
    if (!context()) return;
    FreshContext fresh;
    Int8Product p = int8_product(16, 48, 80, false);
    DeviceTensor a(p.a), b(p.b), d(p.d), a_scale_inv(p.a_scale_inv), b_scale_inv(p.b_scale_inv);
    GemmArgs args = p.args(d.view(), a.view(), b.view(), a_scale_inv.view(), b_scale_inv.view(), {});
    cuda::gemm(fresh.ctx, args);
    CHECK_EQ(cuda::fp8_matmuls(fresh.ctx), 1);
    args.layout = GemmLayout::kDgrad;
    CHECK_NE(error_of([&] { cuda::gemm(fresh.ctx, args); }).find("only as in the forward pass"), std::string::npos);
    CHECK_EQ(cuda::fp8_matmuls(fresh.ctx), 1);
}

}  // namespace gemm_int8_test
