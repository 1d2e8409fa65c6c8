// Compares attention on the GPU with plain loops in double, within a bound derived from every rounding, and with the
// CPU operation of the same precision, whose error may at most be doubled.
#pragma once
#include "tests/gpu/gpu_tensor.h"
#include "tests/support/reference_attention.h"

namespace attention_test {

using namespace documents_test;
using namespace op_test;

using Shape = AttentionShape;

// Of the tensor-core kernels of compute capability 9.0. 80 and 96 are padded to 128; 256 has tiles of 80 keys.
constexpr int64_t kTensorDims[] = {64, 80, 96, 128, 256};
// A large AttentionShape::magnitude. With 6 and 256 columns, bounds of single elements are above a 16th of the largest
// gradient, so that check_close would not notice an error of that size.
inline double large_magnitude(int64_t HS) { return HS < 256 ? 6 : 3; }

// The backward pass reads out and lse of `given`.
inline Attention::Result on_gpu(const Attention& a, const Attention::Result& given, int again = 0, Ctx& ctx = gpu()) {
    Attention::Result r = a.fresh(a.type);
    const HostTensor scratch(Dtype::kFp32, cuda::attention_sums_elems(a.type, a.B, a.T, a.NH, a.HS));
    DeviceTensor sums(scratch);
    DeviceTensor x(a.qkv), dy(a.dout), out(r.out), lse(r.lse), dqkv(r.dqkv), delta(r.delta), dsinks(r.dsinks),
        sinks(a.sink_tensor(a.type));
    DeviceTensor range_tensor(int_tensor(a.documents));
    const int32_t* ranges = a.ranges() ? range_tensor.view().as<int32_t>() : nullptr;
    cuda::attention_forward(ctx, a.forward_args(out.view(), lse.view(), x.view(), ranges, {}, sinks.view()));
    DeviceTensor given_out(given.out), given_lse(given.lse);
    const AttentionBackwardArgs args = a.backward_args(dqkv.view(), delta.view(), dy.view(), given_out.view(),
                                                       given_lse.view(), x.view(), ranges, sums.view(), sinks.view(),
                                                       dsinks.view());
    cuda::attention_backward(ctx, args);
    const HostTensor first = dqkv.download();
    int64_t differ = 0;
    for (int i = 0; i < again; i++) {
        cuda::attention_backward(ctx, args);
        differ += !dqkv.download().same_bits(first);
    }
    CHECK_EQ(differ, 0);
    sums.download();   // checks its guards
    return {out.download(), lse.download(), dqkv.download(), delta.download(), dsinks.download()};
}

inline void check_against_loops(const Attention& a, Ctx& ctx = gpu()) {
    INFO(a.name());
    const Attention::Result cpu = a.on_cpu(a.type), got = on_gpu(a, cpu, 0, ctx);
    const std::string kernel = cuda::attention_kernel(ctx, a.type, a.HS, a.softcap > 0);
    const bool tensor_cores = kernel.rfind("tensor cores", 0) == 0;
    check_attention(a, got, cpu, tensor_cores ? 1.01 * 0x1p-8 : 0);
    CHECK(on_gpu(a, cpu, 0, ctx).same_bits(got));
}

// The rms errors of query, key and value heads are compared separately, because their sizes differ.
inline void check_rms(const Attention& a, const HostTensor& got, const HostTensor& cpu, const HostTensor& want,
               int64_t first, int64_t heads, const char* name) {
    double got_sum = 0, cpu_sum = 0;
    for (int64_t n = 0; n < a.B * a.T; n++)
        for (int64_t c = first * a.HS; c < (first + heads) * a.HS; c++) {
            const int64_t i = n * a.width() + c;
            got_sum += std::pow(got.get(i) - want.get(i), 2);
            cpu_sum += std::pow(cpu.get(i) - want.get(i), 2);
        }
    INFO(name << ": rms error " << std::sqrt(got_sum) << " against " << std::sqrt(cpu_sum) << " on the CPU");
    CHECK_LE(std::sqrt(got_sum), 2 * std::sqrt(cpu_sum) + kTiny);
}

inline void check_against_cpu(const Attention& a) {
    INFO(a.name());
    const Attention::Result exact = a.on_cpu(Dtype::kFp64), cpu = a.on_cpu(a.type), got = on_gpu(a, cpu);
    INFO("out: rms error " << rms_error(got.out, exact.out) << ", CPU " << rms_error(cpu.out, exact.out));
    CHECK_LE(rms_error(got.out, exact.out), 2 * rms_error(cpu.out, exact.out) + kTiny);
    check_rms(a, got.dqkv, cpu.dqkv, exact.dqkv, 0, a.NH, "dq");
    check_rms(a, got.dqkv, cpu.dqkv, exact.dqkv, a.NH, a.NKV, "dk");
    check_rms(a, got.dqkv, cpu.dqkv, exact.dqkv, a.NH + a.NKV, a.NKV, "dv");
    if (!a.sinks.empty()) CHECK_LE(rms_error(got.dsinks, exact.dsinks), 2 * rms_error(cpu.dsinks, exact.dsinks));
    const Attention::Result again = on_gpu(a, cpu);
    CHECK(again.same_bits(got));
}

}  // namespace attention_test
