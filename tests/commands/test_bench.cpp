// `bench`: timed steps run the operations of their rehearsal and give the same bits as other steps; floors, sums and
// order of the table.
#include "tests/support/config_test.h"
#include "tests/support/fp8_model_test.h"

#include "llmc/base/system/nvml.h"
#include "llmc/commands/bench/bench_table.h"

namespace {

void add(StepRecorder& all, const StepRecorder& more, int64_t times) {
    for (const PlannedGemm& g : more.gemms) all.add(g.shape, times * g.count, g.in_update, g.experts);
    for (const PlannedOp& op : more.ops) all.add(op, times * op.count);
}

StepRecorder work_of(const OpTimer& timer, const std::deque<OpCall>& calls) {
    StepRecorder all;
    for (size_t i = 0; i < timer.calls(); i++) add(all, calls[i].work, 1);
    return all;
}

// Describes the first operation that the two did not run equally often; "" if there is none.
std::string difference(StepRecorder all, const StepRecorder& other) {
    add(all, other, -1);
    for (const PlannedGemm& g : all.gemms)
        if (g.count != 0) return gemm_text(g.shape);
    for (const PlannedOp& op : all.ops)
        if (op.count != 0) return op_text(op);
    return "";
}

// A timed step of a model, after one step that is not timed.
struct TimedStep {
    TestModel model;
    OpTimer timer{model.ctx};
    explicit TimedStep(const Config& config) : model(config, false) {
        model.set_random_batch(config.global_batch_size, 3);
        model.step();
        model.ctx.timer = &timer;
        model.step();
        model.ctx.timer = nullptr;
    }
};

OpCall call_of(const PlannedOp& op, double ms, bool on_side_stream = false) {
    OpCall call;
    call.work.add(op);
    call.on_side_stream = on_side_stream;
    call.ms = ms;
    return call;
}
OpCall call_of(const GemmArgs& gemm, double ms) {
    OpCall call;
    call.work.add(gemm);
    call.ms = ms;
    return call;
}
OpCall call_of_experts(const GemmArgs& gemm, int64_t experts) {
    OpCall call;
    call.work.add(gemm, 1, false, experts);
    return call;
}

PlannedOp op_of(OpKind kind, int64_t bytes) { return {.kind = kind, .bytes = bytes, .attention = {}}; }

GemmArgs gemm_of(int64_t M, int64_t N, int64_t K, Dtype in, Dtype out) {
    return {.D = {nullptr, out, M * N}, .A = {nullptr, in, M * K}, .B = {nullptr, in, N * K}, .M = M, .N = N, .K = K};
}

// 1 MB/ms, 1 GFLOP/ms in BF16, and twice that in FP8.
Ceilings round_ceilings() {
    Ceilings c;
    c.rows = {{"ceiling", "device copy"}}, c.copy_rate = 1e9, c.flops = {{Dtype::kBf16, 1e12}, {Dtype::kE4m3, 2e12}};
    return c;
}

std::deque<OpCall> one_step(double slower) {
    OpCall copy;
    copy.transfer = "copy", copy.bytes = 1000000, copy.ms = 1.5;
    return {call_of(op_of(OpKind::rmsnorm_forward, 2000000), 4 * slower),
            call_of(gemm_of(1000, 1000, 1000, Dtype::kBf16, Dtype::kBf16), 8 * slower),
            call_of(op_of(OpKind::rmsnorm_forward, 1000000), 3),
            call_of(op_of(OpKind::sum_ranks, 1000000), 100, true), copy};
}

}  // namespace

TEST_CASE("bench: a timed step runs each operation as often as its rehearsal") {
    for (const ModelConfig& shape : fp8_shapes())
        for (Fp8Recipe recipe : kRecipes)
            for (Recompute recompute : {Recompute::kNone, Recompute::kBlock, Recompute::kBlockKeepAttention}) {
                Config config = fp8_config(shape, recipe);
                config.recompute = recompute;
                config.global_batch_size = 4;
                TimedStep step(config);
                const auto& calls = step.timer.read();
                const StepRecorder ran = work_of(step.timer, calls);
                StepRecorder planned{step.model.plan.step_gemms, step.model.plan.step_ops};
                CHECK_EQ(difference(ran, planned), "");
                CHECK_EQ(difference(planned, ran), "");
                for (size_t i = 0; i < step.timer.calls(); i++) CHECK(calls[i].ms >= 0);
                // One operation more or less, of any kind, is found.
                for (PlannedOp& op : planned.ops) {
                    op.count++;
                    CHECK(contains(difference(ran, planned), op_text(op)));
                    op.count--;
                }
                for (PlannedGemm& gemm : planned.gemms) {
                    gemm.count--;
                    CHECK(contains(difference(ran, planned), gemm_text(gemm.shape)));
                    gemm.count++;
                }
            }
}

TEST_CASE("bench: every operation and transfer of a step is one call, and timing changes no bit") {
    const Config config = fp8_config(fp8_shapes()[1], Fp8Recipe::kDelayed);
    TimedStep timed(config);
    TestModel plain(config, false);
    plain.set_random_batch(config.global_batch_size, 3);
    plain.step();
    plain.step();
    CHECK(plain.loss() == timed.model.loss());
    for (size_t i = 0; i < plain.table.params.size(); i++)
        CHECK(plain.grad(static_cast<int>(i)) == timed.model.grad(static_cast<int>(i)));
    int64_t planned = 0, fills = 0, passes = 0;
    for (const PlannedGemm& gemm : plain.plan.step_gemms) planned += gemm.count;
    for (const PlannedOp& op : plain.plan.step_ops) planned += op.count;
    int64_t ran = 0;
    const auto& calls = timed.timer.read();
    for (size_t i = 0; i < timed.timer.calls(); i++) {
        const int64_t entries = static_cast<int64_t>(calls[i].work.ops.size() + calls[i].work.gemms.size());
        CHECK_EQ(entries == 0, calls[i].transfer != nullptr);
        CHECK(!calls[i].on_side_stream);
        ran += entries;
        passes += entries == 2;
        fills += calls[i].transfer && calls[i].bytes == timed.model.trainer->gradients().memory().bytes();
    }
    CHECK_EQ(ran, planned);
    CHECK_EQ(fills, 1);   // of the gradients
    CHECK_EQ(passes, config.shape.num_layers);   // attention that makes copies; backward, rope makes them
}

TEST_CASE("bench: floors") {
    const auto floor_ms = [](const auto& work) { return row_of(call_of(work, 0), round_ceilings()).floor_ms; };
    CHECK(floor_ms(op_of(OpKind::adamw, 3000000)) == doctest::Approx(3));
    // 16 GFLOP, and 28 MB.
    GemmArgs gemm = gemm_of(1000, 2000, 4000, Dtype::kBf16, Dtype::kBf16);
    CHECK(floor_ms(gemm) == doctest::Approx(28));
    // Of 4 experts, each with weights of 16 MB, or with gradients of 4 MB.
    const auto of_experts = [&] { return row_of(call_of_experts(gemm, 4), round_ceilings()); };
    CHECK(of_experts().floor_ms == doctest::Approx(76));
    CHECK(of_experts().name.ends_with(", 4 experts"));
    gemm.layout = GemmLayout::kWgrad;
    CHECK(of_experts().floor_ms == doctest::Approx(40));
    GemmArgs square = gemm_of(8000, 8000, 8000, Dtype::kBf16, Dtype::kBf16);
    CHECK(floor_ms(square) == doctest::Approx(1024));
    square.A.dtype = Dtype::kE5m2;
    CHECK(floor_ms(square) == doctest::Approx(512));
    // An accumulating matmul also reads its result.
    GemmArgs thin = gemm_of(1000, 1000, 16, Dtype::kBf16, Dtype::kFp32);
    CHECK(floor_ms(thin) == doctest::Approx(4.064));
    thin.accumulate = true;
    CHECK(floor_ms(thin) == doctest::Approx(8.064));
    PlannedOp attention = op_of(OpKind::attention_forward, 1000);
    attention.attention = {.B = 2, .T = 1000, .NH = 4, .HS = 100};
    CHECK(floor_ms(attention) == doctest::Approx(2 * 2 * 4 * 1e6 * 100 / 1e9));
    attention.attention.window = 500;   // leaves three quarters
    CHECK(floor_ms(attention) == doctest::Approx(2 * 2 * 4 * 0.75e6 * 100 / 1e9));
    CHECK(op_text(attention).find("heads of 100, window 500") != std::string::npos);
    attention.attention.window = 0, attention.attention.backward = true;
    CHECK(floor_ms(attention) == doctest::Approx(5 * 2 * 4 * 1e6 * 100 / 1e9));
    attention.attention.backward = false, attention.attention.fp8 = true;
    CHECK(floor_ms(attention) == doctest::Approx(2 * 4 * 1e6 * 100 / 1e9));
}

TEST_CASE("bench: ceilings are measured for the types that a step uses") {
    Ctx ctx;
    device::device_open(ctx, 0);
    StepRecorder work;
    work.add(gemm_of(1, 1, 1, Dtype::kBf16, Dtype::kBf16));
    CHECK(measure_ceilings(ctx, work).flops.size() == 1);
    work.add(gemm_of(1, 1, 1, Dtype::kE5m2, Dtype::kBf16));
    work.add(gemm_of(1, 1, 1, Dtype::kFp32, Dtype::kFp32));
    const Ceilings c = measure_ceilings(ctx, work);
    CHECK(c.copy_rate > 0);
    REQUIRE(c.flops.size() == 3);
    for (const auto& [dtype, flops] : c.flops) CHECK(flops > 0);
    CHECK(c.flops.count(Dtype::kE4m3) == 1);
    CHECK(c.rows.size() == 4);
    device::device_close(ctx);
}

TEST_CASE("bench: rows add up to the step without the cost of events, and are sorted by what they lose") {
    BenchTable table(round_ceilings());
    for (const auto& [ms, exposed_ms] : {std::pair(31, 2), std::pair(30, 2), std::pair(90, 70)})
        table.add_step(ms, exposed_ms);
    for (const auto& [ms, slower] : {std::pair(32.5, 1.0), std::pair(40.0, 1.5)}) {
        const std::deque<OpCall> calls = one_step(slower);
        table.add_timed_step(ms, calls, calls.size());
    }
    // The fastest timed step takes 2.5 ms longer than the fastest other one: half a millisecond for each of 5 calls.
    const std::vector<BenchRow> rows = table.rows();
    const struct {
        const char *part, *name;
        int64_t calls;
        double ms, floor_ms;
    } want[] = {{"ceiling", "device copy", 0, 0, 0}, {"overlapped", "sum_ranks", 1, 99.5, 1},
                {"memory-bound", "rmsnorm_forward", 2, 4 * 1.25 + 3 - 2 * 0.5, 3},
                {"matmul", "matmul forward 1000 x 1000 x 1000 bf16 to bf16", 1, 8 * 1.25 - 0.5, 6},
                {"memory-bound", "copy", 1, 1, 1}, {"step", "matmul", 0, 9.5, 6}, {"step", "attention", 0, 0, 0},
                {"step", "memory-bound", 0, 8, 4},
                {"step", "exposed communication", 0, 2, 0},   // of the step that communication slowed down: not 70
                {"step", "gaps", 0, 31 - 9.5 - 8 - 2, 0},
                {"step", "step", 0, 31, 10}};
    REQUIRE(rows.size() == std::size(want));
    for (size_t i = 0; i < rows.size(); i++) {
        CHECK(rows[i].part == want[i].part);
        CHECK(contains(rows[i].name, want[i].name));
        CHECK(rows[i].calls == want[i].calls);
        CHECK(rows[i].ms == doctest::Approx(want[i].ms));
        CHECK(rows[i].floor_ms == doctest::Approx(want[i].floor_ms));
    }
}

TEST_CASE("bench: clocks") {
    CHECK_EQ(throttle_text(0), "none");
    CHECK_EQ(throttle_text(1), "none");   // idle
    CHECK_EQ(throttle_text(kThrottlePowerCap | kThrottleHardwareThermal), "power cap, heat (hardware)");
    GpuSampler none("");
    CHECK(none.stop().states.empty());
    GpuSampler missing("0000:01:00.0", "libno-such-library.so.1");
    const GpuSamples samples = missing.stop();
    CHECK(samples.states.empty());
    CHECK(contains(samples.error, "cannot be opened"));
}
