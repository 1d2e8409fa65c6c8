// Helpers of the tests of FP8 attention on both devices.
#pragma once
#include "tests/support/documents_test.h"
#include "tests/support/op_test.h"

#include "llmc/base/fp8.h"
#include "tests/support/reference_attention_fp8.h"

namespace op_test {

inline HostTensor angles_of(const Fp8Attention& a) {
    HostTensor angles(Dtype::kFp32, a.T * a.HS);
    for (int64_t i = 0; i < angles.elems(); i++) {
        const double angle = static_cast<double>(i / a.HS) / (1.0 + static_cast<double>(i % a.HS / 2));
        angles.set(i, i % 2 ? std::sin(angle) : std::cos(angle));
    }
    return angles;
}
inline Fp8Attention with_documents(Fp8Attention a, const documents_test::Lengths& lengths) {
    a.documents = documents_test::documents_of(lengths, a.T);
    return a;
}
inline Fp8Attention with_window(Fp8Attention a, int64_t window) {
    a.window = window;
    return a;
}
inline std::string name_of(const Fp8Attention& a) {
    std::string text = strf("B %lld T %lld heads %lld over %lld head size %lld magnitude %g window %lld ",
                            (long long)a.B, (long long)a.T, (long long)a.NH, (long long)a.NKV, (long long)a.HS,
                            a.magnitude, (long long)a.window);
    for (int64_t row = 0; row < a.B * a.T && !a.documents.empty(); row++)   // first positions of documents
        if (a.documents[static_cast<size_t>(row)] == row % a.T) text += strf("%lld ", (long long)(row % a.T));
    return text;
}

// Compares with the reference. An error of 1/4 in one element must be detected.
inline void check_fp8_attention(const Fp8Attention& a, const Fp8Attention::Result& got, bool tensor_cores) {
    const Fp8Reference want = fp8_attention_reference(a, got.qkv, tensor_cores);
    check_close("out", got.out, want.out, [&](int64_t i) { return want.out_error[i]; }, 1.0 / 4);
    check_close("lse", got.lse, want.lse, [&](int64_t i) { return want.lse_error[i]; }, 1.0 / 4);
}

}  // namespace op_test
