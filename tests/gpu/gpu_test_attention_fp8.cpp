// FP8 attention of the GPU: quantize_heads is bitwise equal to the CPU; the forward pass is compared with loops in
// double and has at most twice the error of the CPU.
#include "tests/gpu/gpu_tensor.h"
#include "tests/support/reference_attention_fp8.h"

using namespace documents_test;
using namespace op_test;

namespace attention_fp8_test {

namespace {

bool has_fp8_attention() {
    return std::string(cuda::attention_kernel(gpu(), Dtype::kBf16, 128)).find("wgmma") != std::string::npos;
}

// rope: quantize_heads applies rope.
Fp8Attention::Result on_gpu(const Fp8Attention& a, const HostTensor& input, bool rope = false,
                            const int32_t* positions = nullptr) {
    Fp8Attention::Result r = a.fresh(input);
    HostTensor host_table = angle_table(a.T, a.HS);
    DeviceTensor qkv(r.qkv), bytes(r.bytes), scales(r.scales), out(r.out), lse(r.lse), table(host_table),
        sinks(a.sink_tensor(Dtype::kBf16));
    DeviceTensor range_tensor(int_tensor(a.documents));
    const Fp8Heads copies{bytes.view(), scales.view()};
    QuantizeHeadsArgs args = a.quantize_args(copies, qkv.view(), rope ? table.view() : Tensor{});
    args.positions = positions;
    cuda::quantize_heads(gpu(), args);
    if (has_fp8_attention()) {
        const int32_t* ranges = a.ranges() ? range_tensor.view().as<int32_t>() : nullptr;
        cuda::attention_forward(gpu(), a.forward_args(out.view(), lse.view(), qkv.view(), ranges, copies,
                                                      sinks.view()));
    }
    cuda::synchronize(gpu());
    return {qkv.download(), bytes.download(), scales.download(), out.download(), lse.download()};
}

void check_copies(const Fp8Attention::Result& got, const Fp8Attention::Result& want) {
    CHECK(got.qkv.same_bits(want.qkv));
    CHECK(got.scales.same_bits(want.scales));
    CHECK(got.bytes.same_bits(want.bytes));
}

void check_against_loops(const Fp8Attention& a) {
    INFO(a.name());
    const HostTensor qkv = a.random_qkv();
    const Fp8Attention::Result got = on_gpu(a, qkv), cpu = a.on_cpu(qkv);
    check_copies(got, cpu);
    if (!has_fp8_attention()) return;
    check_fp8_attention(a, got, true);
    const Fp8Attention::Result again = on_gpu(a, qkv);
    CHECK(again.out.same_bits(got.out));
    CHECK(again.lse.same_bits(got.lse));
}

void check_against_cpu(const Fp8Attention& a) {
    INFO(a.name());
    const HostTensor qkv = a.random_qkv();
    const Fp8Attention::Result got = on_gpu(a, qkv), cpu = a.on_cpu(qkv);
    check_copies(got, cpu);
    if (!has_fp8_attention()) return;
    // Exact: attention of the same numbers in double.
    HostTensor exact(Dtype::kFp64, got.out.elems()), lse(Dtype::kFp64, got.lse.elems());
    HostTensor wide = a.operands(got);
    Ctx ctx;
    cpu::attention_forward(ctx, a.forward_args(exact.view(), lse.view(), wide.view(), nullptr));
    INFO("out: rms error " << rms_error(got.out, exact) << ", CPU " << rms_error(cpu.out, exact));
    CHECK_LE(rms_error(got.out, exact), 2 * rms_error(cpu.out, exact));
    INFO("lse: rms error " << rms_error(got.lse, lse) << ", CPU " << rms_error(cpu.lse, lse));
    CHECK_LE(rms_error(got.lse, lse), 2 * rms_error(cpu.lse, lse));
}

}  // namespace

TEST_CASE("gpu quantize_heads is bitwise equal to the CPU") {
    for (int64_t HS : {64, 128})
        for (const Fp8Attention& a :
             {Fp8Attention{2, 1, 2, 1, HS}, Fp8Attention{1, 17, 4, 2, HS}, Fp8Attention{3, 128, 1, 1, HS, 1e3},
              Fp8Attention{1, 129, 8, 1, HS, 1e-3}, Fp8Attention{2, 1000, 6, 2, HS},
              Fp8Attention{9, 700, 12, 12, HS}}) {
            INFO(a.name());
            HostTensor qkv = a.random_qkv();
            for (int64_t i = a.q(a.B - 1, a.T - 1, 0); i < a.q(a.B - 1, a.T - 1, 1); i++) qkv.set(i, 0);
            check_copies(on_gpu(a, qkv), a.on_cpu(qkv));
        }
}

// Also at positions that restart: documents of 7 tokens, counted over the batch.
TEST_CASE("gpu quantize_heads rotates as rope does, to the bit") {
    for (const Fp8Attention& a : {Fp8Attention{2, 150, 4, 2, 64}, Fp8Attention{2, 1000, 6, 2, 128},
                                  Fp8Attention{1, 1, 1, 1, 128}})
        for (bool restart : {false, true}) {
            INFO(a.name() << (restart ? "restarting" : ""));
            const HostTensor qkv = a.random_qkv();
            HostTensor host_positions(Dtype::kInt32, a.B * a.T);
            for (int64_t n = 0; n < a.B * a.T; n++) host_positions.set(n, static_cast<double>(n % 7));
            DeviceTensor rotated(qkv), table(angle_table(a.T, a.HS)), position_tensor(host_positions);
            const int32_t* positions = restart ? position_tensor.view().as<int32_t>() : nullptr;
            cuda::rope_forward(gpu(), {.qkv = rotated.view(), .cos_sin = table.view(), .N = a.B * a.T, .T = a.T,
                                       .NH = a.NH, .NKV = a.NKV, .HS = a.HS, .positions = positions});
            cuda::synchronize(gpu());
            check_copies(on_gpu(a, qkv, true, positions), on_gpu(a, rotated.download()));
            if (restart && a.T > 7) CHECK(!on_gpu(a, qkv, true).qkv.same_bits(rotated.download()));
        }
}

TEST_CASE("gpu quantize_heads: a value that is not finite makes only its block NaN") {
    const Fp8Attention a{1, 300, 2, 1, 64};
    for (double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL})
        for (int64_t head = 0; head < a.heads(); head++) {
            HostTensor qkv = a.random_qkv();
            qkv.set(a.q(0, 130, head) + 5, bad);
            const Fp8Attention::Result got = on_gpu(a, qkv), cpu = a.on_cpu(qkv);
            CHECK(got.bytes.same_bits(cpu.bytes));
            CHECK(got.scales.same_bits(cpu.scales));
            int64_t differences = 0;
            for (int64_t i = 0; i < qkv.elems(); i++) {
                const double want = cpu.qkv.get(i), value = got.qkv.get(i);
                differences += std::isnan(want) ? !std::isnan(value) : value != want;
            }
            CHECK_EQ(differences, 0);
            if (!has_fp8_attention()) continue;
            int64_t finite = 0;   // queries that attend to the whole block
            for (int64_t i = 256 * a.NH * a.HS; i < 300 * a.NH * a.HS; i++) {
                if (head >= a.NH) finite += std::isfinite(got.out.get(i));
            }
            CHECK_EQ(finite, 0);
        }
}

TEST_CASE("gpu FP8 attention against loops in double") {
    for (int64_t HS : {64, 128}) {
        for (const Fp8Attention& a :
             {Fp8Attention{2, 1, 2, 1, HS}, Fp8Attention{1, 7, 4, 2, HS}, Fp8Attention{1, 17, 1, 1, HS},
              Fp8Attention{2, 63, 2, 2, HS}, Fp8Attention{1, 64, 2, 1, HS}, Fp8Attention{2, 65, 4, 1, HS},
              Fp8Attention{1, 127, 2, 2, HS}, Fp8Attention{1, 128, 4, 2, HS}, Fp8Attention{2, 129, 8, 1, HS},
              Fp8Attention{2, 200, 3, 3, HS}, Fp8Attention{1, 257, 8, 2, HS}, Fp8Attention{2, 400, 2, 1, HS},
              Fp8Attention{1, 193, 4, 2, HS, 1.5}, Fp8Attention{1, 700, 2, 1, HS}}) {
            check_against_loops(a);
        }
    }
}

TEST_CASE("gpu FP8 attention: the largest score of each head, which changes no bit of the result") {
    if (!has_fp8_attention()) return;
    for (const AttentionShape& s : {AttentionShape{2, 301, 4, 2, 64}, AttentionShape{1, 517, 2, 2, 128}}) {
        Fp8Attention a{s};
        for (int64_t window : {0, 70}) {
            a.window = window;
            const Fp8Attention::Result r = on_gpu(a, a.random_qkv());
            DeviceTensor bytes(r.bytes), scales(r.scales), qkv(r.qkv), out(r.out), lse(r.lse);
            check_max_logits(a, a.operands(r).values(), HostTensor(Dtype::kFp32, a.NH), 8, [&](HostTensor& logits) {
                DeviceTensor device(logits);
                AttentionForwardArgs args = a.forward_args(out.view(), lse.view(), qkv.view(), nullptr,
                                                           {bytes.view(), scales.view()});
                args.max_logits = device.view().as<float>();
                cuda::attention_forward(gpu(), args);
                logits = device.download();
            });
            CHECK(out.download().same_bits(r.out));
            CHECK(lse.download().same_bits(r.lse));
        }
    }
}

TEST_CASE("gpu FP8 attention: the largest sums of integers") {
    for (int64_t HS : {64, 128}) {
        const Fp8Attention a{2, 300, 4, 2, HS};
        const HostTensor qkv = a.largest_sums();
        const Fp8Attention::Result got = on_gpu(a, qkv);
        check_copies(got, a.on_cpu(qkv));
        if (has_fp8_attention()) check_fp8_attention(a, got, true);
    }
}

TEST_CASE("gpu FP8 attention within documents against loops in double") {
    for (int64_t HS : {64, 128})
        for (const Lengths& lengths : kBorders)
            check_against_loops(with_documents(Fp8Attention{2, 400, 4, 2, HS}, lengths));
}

TEST_CASE("gpu FP8 attention within a window against loops in double") {
    for (int64_t HS : {64, 128})
        for (int64_t window : {1, 2, 64, 127, 128, 129, 200, 399}) {
            const Fp8Attention a = with_window(Fp8Attention{2, 400, 4, 2, HS}, window);
            check_against_loops(a);
            check_against_loops(with_documents(a, {{129, 271}, {191, 1, 1, 207}}));
        }
}

TEST_CASE("gpu FP8 attention with sinks against loops in double; one of -infinity changes no bit") {
    for (int64_t HS : {64, 128}) {
        for (int64_t window : {0, 1, 129}) {
            const Fp8Attention a = with_window(Fp8Attention{2, 400, 5, 1, HS}, window);
            check_against_loops(with_sinks(a));
            check_against_loops(with_documents(with_sinks(a), {{129, 271}, {191, 1, 1, 207}}));
            const HostTensor qkv = a.random_qkv();
            const Fp8Attention::Result none = on_gpu(a, qkv), lowest = on_gpu(with_sinks(a, {-HUGE_VAL}), qkv);
            CHECK(lowest.out.same_bits(none.out));
            CHECK(lowest.lse.same_bits(none.lse));
        }
        check_against_loops(with_sinks(Fp8Attention{1, 17, 5, 5, HS}));
    }
}

TEST_CASE("gpu FP8 attention: a window of the whole sequence is bitwise equal to none") {
    if (!has_fp8_attention()) return;
    for (int64_t HS : {64, 128}) {
        const Fp8Attention a{2, 400, 4, 2, HS};
        const HostTensor qkv = a.random_qkv();
        const Fp8Attention::Result none = on_gpu(a, qkv);
        for (int64_t window : {400, 5000}) CHECK(on_gpu(with_window(a, window), qkv).out.same_bits(none.out));
        CHECK_FALSE(on_gpu(with_window(a, 399), qkv).out.same_bits(none.out));
    }
}

// Includes large magnitudes.
TEST_CASE("gpu FP8 attention: at most twice the CPU's error") {
    for (const Fp8Attention& a : {Fp8Attention{6, 500, 8, 4, 64}, Fp8Attention{5, 400, 8, 1, 128},
                                  Fp8Attention{1, 193, 4, 2, 64, 6}, Fp8Attention{1, 193, 4, 2, 128, 6},
                                  Fp8Attention{1, 1000, 8, 2, 128, 3}, Fp8Attention{1, 4096, 2, 2, 64},
                                  Fp8Attention{1, 8192, 2, 1, 128}}) {
        check_against_cpu(a);
    }
}

// NaN in a block reaches neither other sequences nor other documents.
TEST_CASE("gpu FP8 attention: tiles of other sequences and documents are not read") {
    if (!has_fp8_attention()) return;
    for (int64_t HS : {64, 128}) {
        const Fp8Attention a = with_documents(Fp8Attention{3, 1152, 4, 2, HS}, Lengths(3, equal_parts(1152, 384)));
        const HostTensor clean = a.random_qkv();
        const Fp8Attention::Result before = on_gpu(a, clean);
        for (int64_t corrupted : {0, 1, 2}) {
            HostTensor qkv = clean;
            const int64_t begin = a.q(1, 384 * corrupted, 0);
            for (int64_t i = begin; i < begin + 384 * a.width(); i++) qkv.set(i, std::nan(""));
            const Fp8Attention::Result after = on_gpu(a, qkv);
            int64_t touched = 0, intact = 0;
            for (int64_t i = 0; i < after.out.elems(); i++) {
                const int64_t document = i / (384 * a.NH * HS);
                if (document == 3 + corrupted) intact += !std::isnan(after.out.get(i));
                else touched += after.out.get(i) != before.out.get(i);
            }
            INFO(a.name() << ", corrupted document " << corrupted);
            CHECK_EQ(touched, 0);
            CHECK_EQ(intact, 0);
        }
    }
}

}  // namespace attention_fp8_test
