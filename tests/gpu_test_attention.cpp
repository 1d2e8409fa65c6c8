// Attention of the GPU against plain loops in double, with a bound that follows every rounding, and against
// the CPU operation of the same precision, whose error it may at most double.
#include "tests/gpu_tensor.h"

#include "llmc/oracle_attention.h"

using namespace op_test;

namespace {

using Shape = AttentionShape;

// The backward reads out and lse of `given`.
Attention::Result on_gpu(const Attention& a, const Attention::Result& given) {
    Attention::Result r = a.fresh(a.type);
    DeviceTensor x(a.qkv), dy(a.dout), out(r.out), lse(r.lse), dqkv(r.dqkv), delta(r.delta);
    cuda::attention_forward(gpu(), a.forward_args(out.view(), lse.view(), x.view()));
    DeviceTensor given_out(given.out), given_lse(given.lse);
    cuda::attention_backward(gpu(), a.backward_args(dqkv.view(), delta.view(), dy.view(), given_out.view(),
                                                  given_lse.view(), x.view()));
    cuda::synchronize(gpu());
    return {out.download(), lse.download(), dqkv.download(), delta.download()};
}

HostTensor tensor_of(const std::vector<double>& values) {
    HostTensor t(Dtype::kFp64, static_cast<int64_t>(values.size()));
    for (int64_t i = 0; i < t.elems(); i++) t.set(i, values[i]);
    return t;
}

void check_against_loops(const Attention& a) {
    INFO(a.name());
    const Attention::Result cpu = a.on_cpu(a.type), got = on_gpu(a, cpu);
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
    CHECK(on_gpu(a, cpu).dqkv.same_bits(got.dqkv));
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
    const Attention::Result exact = a.on_cpu(Dtype::kFp64), cpu = a.on_cpu(a.type), got = on_gpu(a, cpu);
    INFO("out: rms error " << rms_error(got.out, exact.out) << ", CPU " << rms_error(cpu.out, exact.out));
    CHECK_LE(rms_error(got.out, exact.out), 2 * rms_error(cpu.out, exact.out) + kTiny);
    check_rms(a, got.dqkv, cpu.dqkv, exact.dqkv, 0, a.s.NH, "dq");
    check_rms(a, got.dqkv, cpu.dqkv, exact.dqkv, a.s.NH, a.s.NKV, "dk");
    check_rms(a, got.dqkv, cpu.dqkv, exact.dqkv, a.s.NH + a.s.NKV, a.s.NKV, "dv");
    const Attention::Result again = on_gpu(a, cpu);
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
