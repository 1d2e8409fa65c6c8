// The custom FP8 matmul with swiglu in its epilogue (compute capability 9.0): equal to the matmul followed by the
// activation, to the bit; which calls it supports; how a search chooses it.
#include "llmc/cuda/gemm.h"
#include "tests/gpu/gpu_op.h"
#include "tests/support/fp8_gemm_test.h"

using namespace op_test;

namespace gemm_swiglu_test {

namespace {

struct Shape {
    int64_t M, N, K;
};
// A pair of blocks computes 256 x 256 results, 128 columns of gate and the same of up, in steps of 128 along K, four of
// which are in shared memory. Some shapes have rows or columns that only the first block of a pair computes; the last
// two have more tiles than multiprocessors. Without whole 16 rows there is no transposed result.
const Shape kShapes[] = {{16, 32, 64},     {37, 96, 80},     {128, 256, 128},   {144, 544, 528},
                         {272, 800, 400},  {389, 416, 1168}, {1040, 4128, 272}, {4112, 2592, 144}};

// A product and its activation in device memory.
struct Case {
    Fp8Product p;
    int64_t F;
    bool transposes;
    DeviceTensor a, b, a_scale_inv, b_scale_inv;
    DeviceTensor d, act, transposed, slot;

    explicit Case(const Shape& s, bool transposes)
        : p(product(s)), F(s.N / 2), transposes(transposes), a(p.a), b(p.b),
          a_scale_inv(p.a_scale_inv), b_scale_inv(p.b_scale_inv), d(p.d), act(HostTensor(Dtype::kE4m3, s.M * F)),
          transposed(HostTensor(Dtype::kE4m3, transposes ? s.M * F : 0)), slot(start()) {}

    static Fp8Product product(const Shape& s) {
        Fp8Product p{.M = s.M, .N = s.N, .K = s.K,
                     .kind = {Dtype::kE4m3, Dtype::kE4m3, Granularity::kTensor, Granularity::kTensor},
                     .result = Dtype::kBf16, .fast = true};
        fill(p, 0);
        // gate and up of order 1, where swiglu is not linear.
        p.a_scale_inv.set(0, 3 / (100 * 100 * std::sqrt(static_cast<double>(s.K)))), p.b_scale_inv.set(0, 0.75);
        return p;
    }
    static HostTensor start() {
        HostTensor slot(Dtype::kInt32, 4);
        *static_cast<Fp8Slot*>(slot.data()) = {.scale_inv = -1.0f, .scale = 70.5f, .amax_bits = 7u,
                                               .step_amax_bits = 5u};
        return slot;
    }
    std::string name() const { return p.name() + (transposes ? ", transposed too" : ""); }
    GemmActivationArgs args() {
        return {p.args(d.view(), a.view(), b.view(), a_scale_inv.view(), b_scale_inv.view(), {}),
                {.kind = Activation::kSwiglu, .out = {}, .in = d.view(), .N = p.M, .F = F,
                 .quant = {.rowwise = act.view(), .transposed = transposed.view(),
                           .slot = static_cast<Fp8Slot*>(slot.view().data), .record = true}}};
    }
};

// A new context: no plans, search off.
struct FreshContext {
    Ctx ctx;
    FreshContext() { cuda::device_open(ctx, 0); }
    ~FreshContext() { cuda::device_close(ctx); }
};

// act, its transpose and the slot have the bits that the activation's own kernel gets from the same D.
void check_activation(Case& c) {
    INFO(c.name());
    DeviceTensor act(HostTensor(Dtype::kE4m3, c.p.M * c.F)), slot(Case::start());
    DeviceTensor transposed(HostTensor(Dtype::kE4m3, c.transposes ? c.p.M * c.F : 0));
    ActivationForwardArgs args = c.args().activation;
    args.quant.rowwise = act.view(), args.quant.transposed = transposed.view();
    args.quant.slot = static_cast<Fp8Slot*>(slot.view().data);
    cuda::activation_forward(gpu(), args);
    cuda::synchronize(gpu());
    CHECK(c.act.download().same_bits(act.download()));
    CHECK(c.transposed.download().same_bits(transposed.download()));
    const HostTensor got = c.slot.download();
    CHECK(got.same_bits(slot.download()));
    CHECK_GT(static_cast<const Fp8Slot*>(got.data())->amax_bits, 7u);
}

// gate and up, against the CPU in double, or where that takes long against the library, whose sums may differ in their
// last places.
void check_product(Case& c, const HostTensor& got) {
    INFO(c.name());
    if (c.p.M * c.p.N * c.p.K < 1 << 27) {
        const Fp8Expected e = expected_of(c.p);
        return check_close(c.name(), got, e.product, gpu_bound(c.p, e), 1.0 / 8);
    }
    cuda::gemm(gpu(), c.args().gemm);
    cuda::synchronize(gpu());
    const HostTensor want = c.d.download();
    CHECK_EQ(first_difference(got, want, [&](int64_t i) { return 0.1 + 0.02 * std::fabs(want.get(i)); }), "");
}

}  // namespace

TEST_CASE("gpu gemm swiglu is equal to the matmul followed by the activation") {
    if (!cuda::gemm_fp8_blockwise_available(gpu())) return;
    for (const Shape& s : kShapes)
        for (bool transposes : {false, true}) {
            if (left_out(s.M * s.N) || (transposes && s.M % 16 != 0)) continue;
            Case c(s, transposes), again(s, transposes);
            for (Case* run : {&c, &again}) cuda::gemm_activation(gpu(), run->args());
            cuda::synchronize(gpu());
            const HostTensor d = c.d.download();
            CHECK(again.d.download().same_bits(d));
            check_activation(c);
            check_activation(again);
            check_product(c, d);
        }
}

TEST_CASE("gpu gemm swiglu: a search decides, its plans can be imported, and searches do not count as FP8 matmuls") {
    if (!cuda::gemm_fp8_blockwise_available(gpu())) return;
    const Shape s{2064, 1088, 272};
    FreshContext searching, importing;
    Ctx &first = searching.ctx, &second = importing.ctx;
    Case c(s, true);
    const GemmActivationArgs args = c.args();
    CHECK_FALSE(cuda::gemm_activation_fuses(second, args));   // no search, no plan
    cuda::gemm_set_search(first, true);
    const bool fuses = cuda::gemm_activation_fuses(first, args);
    CHECK_EQ(cuda::fp8_matmuls(first), 0);
    cuda::synchronize(first);
    check_activation(c);   // what the search left
    for (bool chosen : {true, false}) {
        std::string plans = cuda::gemm_export_plans(first);
        const std::string other = strf("\"own_kernel\":%s", fuses ? "true" : "false");
        const std::string wanted = strf("\"own_kernel\":%s", chosen ? "true" : "false");
        // Rows are of the matmul alone, which has no custom kernel, and of the pair.
        const size_t pair = plans.rfind("{", plans.find("\"swiglu\":true"));
        REQUIRE_NE(pair, std::string::npos);
        const size_t at = plans.find(other, pair);
        REQUIRE_NE(at, std::string::npos);
        plans.replace(at, other.size(), wanted);
        CHECK_EQ(cuda::gemm_import_plans(second, plans), "");
        CHECK_EQ(cuda::gemm_activation_fuses(second, args), chosen);
    }
    cuda::gemm_activation(second, args);
    CHECK_EQ(cuda::fp8_matmuls(second), 1);
    cuda::synchronize(second);
    check_activation(c);
}

TEST_CASE("gpu gemm swiglu supports only what it writes") {
    if (!cuda::gemm_fp8_blockwise_available(gpu())) return;
    Case c({32, 64, 64}, true);
    CHECK(cuda::gemm_swiglu_supports(gpu(), c.args()));
    Fp8Counts counts{};
    const std::pair<const char*, std::function<void(GemmActivationArgs&)>> changes[] = {
        {"another activation", [](GemmActivationArgs& a) { a.activation.kind = Activation::kGelu; }},
        {"precise accumulation", [](GemmActivationArgs& a) { a.gemm.fast_accumulation = false; }},
        {"a bias", [&](GemmActivationArgs& a) { a.gemm.bias = c.d.view(); a.gemm.epilogue = GemmEpilogue::kBias; }},
        {"act in bf16", [&](GemmActivationArgs& a) { a.activation.out = c.d.view(); }},
        {"current scaling", [](GemmActivationArgs& a) { a.activation.quant.scaling = Scaling::kCurrent; }},
        {"blocks", [](GemmActivationArgs& a) { a.activation.quant.granularity = Granularity::kBlock1x128; }},
        {"counts", [&](GemmActivationArgs& a) { a.activation.quant.counts = &counts; }},
        {"only the transposed cast", [](GemmActivationArgs& a) { a.activation.quant.rowwise = {}; }},
        {"no amax", [](GemmActivationArgs& a) { a.activation.quant.record = false; }},
        {"columns that are not 16 of each half", [](GemmActivationArgs& a) { a.gemm.N = 48, a.activation.F = 24; }},
    };
    for (const auto& [name, change] : changes) {
        INFO(name);
        GemmActivationArgs args = c.args();
        change(args);
        CHECK_FALSE(cuda::gemm_swiglu_supports(gpu(), args));
        CHECK_THROWS_WITH_AS(cuda::gemm_swiglu(gpu(), args), doctest::Contains("gemm_swiglu"), Error);
    }
}

}  // namespace gemm_swiglu_test
