// Rates of operations from the times of calls in a step.
#include "llmc/commands/bench/bench_rates.h"

#include "llmc/perf/kernel_rates.h"
#include "tests/support/config_test.h"

TEST_CASE("bench rates: of a matmul and its activation in one operation, the activation gets what the matmul leaves") {
    Rates rates = measured_rates();
    rates.ops.clear();
    GemmArgs gemm{};
    gemm.M = 8192, gemm.N = 28672, gemm.K = 4096, gemm.fast_accumulation = true;
    gemm.A.dtype = gemm.B.dtype = Dtype::kE4m3, gemm.D.dtype = Dtype::kBf16;
    const PlannedOp activation{.kind = OpKind::activation_forward, .mode = OpMode::kCopies, .dtype = Dtype::kBf16,
                               .bytes = 704'643'072, .attention = {}, .activation = Activation::kSwiglu};
    const PlannedOp alone{.kind = OpKind::cast, .dtype = Dtype::kFp32, .bytes = 1'000'000, .attention = {}};
    const double gemm_us = predicted_matmul_us(gemm, rates);
    for (double rest : {170.0, -50.0}) {
        OpCall fused, cast;
        fused.work.add(gemm, 1), fused.work.add(activation, 1), fused.ms = (gemm_us + rest) / 1e3 + 0.004;
        cast.work.add(alone, 1), cast.ms = 0.02 + 0.004;
        RateRows rows;
        rows.add_step({fused, cast}, 2, 0.004);
        Rates found = rates;
        rows.put(found);
        REQUIRE_EQ(found.ops.size(), 2);
        CHECK_EQ(found.ops[0].kind, OpKind::cast);
        CHECK_EQ(found.ops[0].us, doctest::Approx(20));
        CHECK_EQ(found.ops[1].kind, OpKind::activation_forward);
        CHECK_EQ(found.ops[1].activation, Activation::kSwiglu);
        CHECK_EQ(found.ops[1].us, doctest::Approx(rest > 0 ? rest : kKernelUs));
    }
}
