// Compares attention on the GPU with plain loops in double, within a bound derived from every rounding, and with the
// CPU operation of the same precision, whose error may at most be doubled.
#pragma once
#include "tests/gpu/gpu_tensor.h"
#include "tests/support/documents_test.h"

#include "tests/support/reference_attention.h"

namespace attention_test {

using namespace documents_test;
using namespace op_test;

using Shape = QkvShape;

// A problem on the GPU, with one document per sequence or several.
struct Attention : AttentionProblem {
    Lengths lengths;   // of documents, or none

    using AttentionProblem::AttentionProblem;
    // The same numbers, cut into documents.
    Attention with_documents(Lengths of_sequences) const {
        Attention a = *this;
        a.lengths = std::move(of_sequences);
        a.documents = documents_of(a.lengths, s.T);
        return a;
    }
    Attention with_window(int64_t tokens) const {
        Attention a = *this;
        a.window = tokens;
        return a;
    }
    std::string name() const {
        return strf("B %lld T %lld heads %lld over %lld head size %lld %s window %lld ", (long long)s.B,
                    (long long)s.T, (long long)s.NH, (long long)s.NKV, (long long)s.HS, dtype_name(type),
                    (long long)window)
               + (lengths.empty() ? "" : text_of(lengths));
    }
    // The backward pass reads out and lse of `given`.
    Result on_gpu(const Result& given, int again = 0) const {
        Result r = fresh(type);
        const HostTensor scratch(Dtype::kFp32, cuda::attention_sums_elems(type, s.B, s.T, s.NH, s.HS));
        DeviceTensor sums(scratch);
        DeviceTensor x(qkv), dy(dout), out(r.out), lse(r.lse), dqkv(r.dqkv), delta(r.delta);
        HostTensor host_ranges(Dtype::kInt32, static_cast<int64_t>(documents.size()));
        if (!documents.empty())
            std::memcpy(host_ranges.data(), documents.data(), static_cast<size_t>(host_ranges.bytes()));
        DeviceTensor range_tensor(host_ranges);
        const int32_t* ranges = documents.empty() ? nullptr : range_tensor.view().as<int32_t>();
        cuda::attention_forward(gpu(), forward_args(out.view(), lse.view(), x.view(), ranges));
        DeviceTensor given_out(given.out), given_lse(given.lse);
        const AttentionBackwardArgs args = backward_args(dqkv.view(), delta.view(), dy.view(), given_out.view(),
                                                         given_lse.view(), x.view(), ranges, sums.view());
        cuda::attention_backward(gpu(), args);
        const HostTensor first = dqkv.download();
        int64_t differ = 0;
        for (int i = 0; i < again; i++) {
            cuda::attention_backward(gpu(), args);
            differ += !dqkv.download().same_bits(first);
        }
        CHECK_EQ(differ, 0);
        sums.download();   // checks its guards
        return {out.download(), lse.download(), dqkv.download(), delta.download()};
    }
};

inline HostTensor tensor_of(const std::vector<double>& values) {
    HostTensor t(Dtype::kFp64, static_cast<int64_t>(values.size()));
    for (int64_t i = 0; i < t.elems(); i++) t.set(i, values[i]);
    return t;
}

inline void check_against_loops(const Attention& a) {
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
    // dk of a single key is 0 except for rounding, so a wrong element cannot be detected there.
    if (a.s.T > 1) check("dqkv", got.dqkv, want.dqkv, want.dqkv_error);
    CHECK(a.on_gpu(cpu).dqkv.same_bits(got.dqkv));
}

// The rms errors of query, key and value heads are compared separately, because their sizes differ.
inline void check_rms(const Attention& a, const HostTensor& got, const HostTensor& cpu, const HostTensor& want,
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

inline void check_against_cpu(const Attention& a) {
    INFO(a.name());
    const Attention::Result exact = a.on_cpu(Dtype::kFp64), cpu = a.on_cpu(a.type), got = a.on_gpu(cpu);
    INFO("out: rms error " << rms_error(got.out, exact.out) << ", CPU " << rms_error(cpu.out, exact.out));
    CHECK_LE(rms_error(got.out, exact.out), 2 * rms_error(cpu.out, exact.out) + kTiny);
    check_rms(a, got.dqkv, cpu.dqkv, exact.dqkv, 0, a.s.NH, "dq");
    check_rms(a, got.dqkv, cpu.dqkv, exact.dqkv, a.s.NH, a.s.NKV, "dk");
    check_rms(a, got.dqkv, cpu.dqkv, exact.dqkv, a.s.NH + a.s.NKV, a.s.NKV, "dv");
    const Attention::Result again = a.on_gpu(cpu);
    CHECK(again.out.same_bits(got.out));
    CHECK(again.lse.same_bits(got.lse));
    CHECK(again.dqkv.same_bits(got.dqkv));
}

}  // namespace attention_test
