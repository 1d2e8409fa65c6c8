// Products of INT8 operands for the tests of both devices.
#pragma once
#include "llmc/base/rng.h"
#include "tests/support/op_test.h"

namespace op_test {

struct Int8Product {
    int64_t M, N, K;
    HostTensor a = {}, b = {}, a_scale_inv = {}, b_scale_inv = {}, d = {}, bias = {};

    std::string name() const {
        return strf("M %lld N %lld K %lld%s", (long long)M, (long long)N, (long long)K, bias.elems() ? ", bias" : "");
    }
    int8_t* a_codes() { return a.as<int8_t>(); }
    int8_t* b_codes() { return b.as<int8_t>(); }
    // Arguments with tensors of the caller's device.
    GemmArgs args(Tensor D, Tensor A, Tensor B, Tensor A_scale_inv, Tensor B_scale_inv, Tensor of_bias) const {
        return {.D = D, .A = A, .B = B, .bias = of_bias, .M = M, .N = N, .K = K, .A_granularity = Granularity::kRow,
                .B_granularity = Granularity::kRow, .A_scale_inv = A_scale_inv, .B_scale_inv = B_scale_inv};
    }
    HostTensor on_cpu(Ctx& ctx) {
        HostTensor out = d;
        cpu::gemm(ctx, args(out.view(), a.view(), b.view(), a_scale_inv.view(), b_scale_inv.view(), bias.view()));
        return out;
    }
};

// Codes of all values from -127 to 127, or only these two, scales between 2^-10 and 2^-2.
inline Int8Product int8_product(int64_t M, int64_t N, int64_t K, bool with_bias, bool extreme = false) {
    Int8Product p{.M = M, .N = N, .K = K};
    const auto codes = [&](int64_t elems, uint64_t key) {
        HostTensor t(Dtype::kInt8, elems);
        for (int64_t i = 0; i < elems; i++) {
            const uint32_t random = philox(key, static_cast<uint64_t>(i)).word[0];
            t.as<int8_t>()[i] = static_cast<int8_t>(extreme ? (random % 8 == 0 ? -127 : 127)
                                                            : static_cast<int>(random % 255) - 127);
        }
        return t;
    };
    const auto scales = [&](int64_t rows, uint64_t key) {
        HostTensor t(Dtype::kFp32, rows);
        for (int64_t i = 0; i < rows; i++) {
            const Philox4 random = philox(key, static_cast<uint64_t>(i));
            t.set(i, std::ldexp(1 + random.word[1] * 0x1p-32, static_cast<int>(random.word[0] % 8) - 10));
        }
        return t;
    };
    p.a = codes(M * K, 1), p.b = codes(N * K, 2);
    p.a_scale_inv = scales(M, 3), p.b_scale_inv = scales(N, 4);
    p.d = HostTensor(Dtype::kBf16, M * N);
    if (with_bias) p.bias = random_tensor(Dtype::kBf16, N, 6, std::sqrt(static_cast<double>(K)));
    return p;
}

}  // namespace op_test
