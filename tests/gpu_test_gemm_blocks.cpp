// Our own matmul of blockwise FP8 operands (compute capability 9.0): exact on whole numbers, otherwise within what
// tensor cores may lose; the library's bits where both are exact; what it takes and what stays with the library.
#include "tests/fp8_gemm_test.h"
#include "tests/gpu_op.h"

using namespace op_test;

namespace {

struct Shape {
    int64_t M, N, K;
};
// Tiles are 256 x 128 of blocks that stand in pairs along N, 128 of K at a time, four of them in shared memory: below,
// at and above each of these, last columns that only the first block of a pair has, an M of a few rows.
const Shape kShapes[] = {{4, 16, 16},      {4, 32, 144},    {100, 16, 272},   {128, 128, 128}, {256, 256, 512},
                         {144, 272, 528},  {260, 144, 640}, {388, 384, 1168}, {48, 1600, 400}, {112, 400, 1600}};
constexpr Granularity kVector = Granularity::kBlock1x128, kBlock = Granularity::kBlock128x128;
constexpr Dtype kE4m3 = Dtype::kE4m3;
const Fp8Kind kKinds[] = {{kE4m3, kE4m3, kVector, kBlock}, {kE4m3, kE4m3, kVector, kVector}};

// A context with the kernel on.
struct OwnContext {
    Ctx ctx;
    bool on;
    explicit OwnContext(bool own = true) {
        cuda::device_open(ctx, 0);
        cuda::gemm_set_own_blocks(ctx, own);
        on = std::string(cuda::gemm_blocks_kernel(ctx)).find("wgmma") != std::string::npos;
    }
    ~OwnContext() { cuda::device_close(ctx); }
    OwnContext(const OwnContext&) = delete;
};
// Null where the kernel does not run.
OwnContext* own() {
    static OwnContext context;
    return context.on ? &context : nullptr;
}

HostTensor on_gpu(Ctx& ctx, const Fp8Product& p) {
    DeviceTensor a(p.a), b(p.b), d(p.d), bias(p.bias), a_grid(p.a_grid), b_grid(p.b_grid);
    cuda::gemm(ctx, p.args(d.view(), a.view(), b.view(), a_grid.view(), b_grid.view(), bias.view()));
    cuda::synchronize(ctx);
    return d.download();
}

void for_products(const std::function<void(Fp8Product&)>& f) {
    for (const Fp8Kind& kind : kKinds)
        for (const Shape& s : kShapes)
            for (Dtype result : {Dtype::kBf16, Dtype::kFp32})
                for (bool accumulate : {false, true}) {
                    if (left_out(s.M * s.N)) continue;
                    Fp8Product p{.M = s.M, .N = s.N, .K = s.K, .kind = kind, .result = result,
                                 .accumulate = accumulate};
                    f(p);
                }
}

}  // namespace

TEST_CASE("gpu own blockwise gemm is exact on whole numbers and powers of two, with and without a bias") {
    if (!own()) return;
    for_products([](Fp8Product& p) {
        fill(p, 2, p.M % 8 == 0);
        // What is added to a bf16 D is not rounded before.
        check_close(p.name(), on_gpu(own()->ctx, p), expected_of(p).product.to(p.result), [](int64_t) { return 0.0; });
    });
}

TEST_CASE("gpu own blockwise gemm loses no more than tensor cores may") {
    if (!own()) return;
    for_products([](Fp8Product& p) {
        fill(p, 0, p.M % 8 == 0);
        const Fp8Expected e = expected_of(p);
        check_close(p.name(), on_gpu(own()->ctx, p), e.product, gpu_bound(p, e), 1.0 / 16);
    });
}

TEST_CASE("gpu own blockwise gemm: a changed code, a changed factor and a grid in the other order do not pass") {
    if (!own()) return;
    for (const Fp8Kind& kind : kKinds) {
        Fp8Product p{.M = 272, .N = 416, .K = 272, .kind = kind, .result = Dtype::kFp32};
        fill(p, 0);
        const Fp8Expected e = expected_of(p);
        auto difference = [&](const Fp8Product& wrong) {
            return first_difference(on_gpu(own()->ctx, wrong), e.product, gpu_bound(p, e));
        };
        CHECK_EQ(difference(p), "");
        Fp8Product wrong = p;
        const std::vector<double> b = decoded(p.b);
        const auto smaller = [](double x, double y) { return std::fabs(x) < std::fabs(y); };
        const auto largest = std::max_element(b.end() - p.K, b.end(), smaller);   // of the last column
        codes_of(wrong.b)[largest - b.begin()] ^= 0x80;   // another sign
        CHECK_NE(difference(wrong), "");
        for (int64_t k : {int64_t{0}, p.K - 1}) {
            wrong = p;
            const int64_t of_a = grid_index(kind.a_granularity, p.M, p.K, p.M - 1, k);
            wrong.a_grid.set(of_a, 1.5 * p.a_grid.get(of_a));
            CHECK_NE(difference(wrong), "");
            wrong = p;
            const int64_t of_b = grid_index(kind.b_granularity, p.N, p.K, p.N - 1, k);
            wrong.b_grid.set(of_b, 1.5 * p.b_grid.get(of_b));
            CHECK_NE(difference(wrong), "");
        }
        wrong = p;
        wrong.a_grid = transposed_grid(p.a_grid, p.M);
        CHECK_NE(difference(wrong), "");
        wrong = p;
        wrong.b_grid = transposed_grid(p.b_grid, kind.b_granularity == kBlock ? 4 : p.N);
        CHECK_NE(difference(wrong), "");
    }
}

// More tiles than multiprocessors: blocks that do several, the last group of the order of work with one row of tiles.
TEST_CASE("gpu own blockwise gemm over many tiles has the library's bits where both are exact, again and again") {
    if (!own() || left_out(1 << 20)) return;
    OwnContext library(false);
    for (const Fp8Kind& kind : kKinds)
        for (Dtype result : {Dtype::kBf16, Dtype::kFp32})
            for (const Shape& s : {Shape{2308, 2128, 656}, {1028, 4368, 128}}) {
                Fp8Product p{.M = s.M, .N = s.N, .K = s.K, .kind = kind, .result = result,
                             .accumulate = result == Dtype::kFp32};
                fill(p, 1);
                const HostTensor want = on_gpu(library.ctx, p);
                CAPTURE(p.name());
                CHECK_EQ(first_difference(on_gpu(own()->ctx, p), want, [](int64_t) { return 0.0; }), "");
                fill(p, 0);
                const HostTensor first = on_gpu(own()->ctx, p);
                for (int i = 0; i < 3; i++) CHECK(on_gpu(own()->ctx, p).same_bits(first));
            }
}

TEST_CASE("gpu own blockwise gemm counts as FP8, plans nothing, and leaves the rest to the library") {
    if (!own()) return;
    OwnContext fresh;
    const std::string no_plans = cuda::gemm_export_plans(fresh.ctx);
    Fp8Product p{.M = 16, .N = 48, .K = 144, .kind = kKinds[0]};
    for (const Fp8Kind& kind : kKinds) {
        p.kind = kind;
        on_gpu(fresh.ctx, fill(p, 0));
    }
    CHECK_EQ(cuda::fp8_matmuls(fresh.ctx), 2);
    CHECK_EQ(cuda::gemm_export_plans(fresh.ctx), no_plans);
    for (const Fp8Kind& kind : {Fp8Kind{Dtype::kE5m2, kE4m3, kVector, kBlock}, fp8_kinds()[0]}) {
        p.kind = kind;
        const std::string plans = cuda::gemm_export_plans(fresh.ctx);
        on_gpu(fresh.ctx, fill(p, 0));
        CHECK_NE(cuda::gemm_export_plans(fresh.ctx), plans);
    }
    CHECK_EQ(cuda::fp8_matmuls(fresh.ctx), 4);
    OwnContext library(false);
    CHECK_EQ(std::string(cuda::gemm_blocks_kernel(library.ctx)), "cuBLASLt");
    p.kind = kKinds[0];
    on_gpu(library.ctx, fill(p, 0));
    CHECK_NE(cuda::gemm_export_plans(library.ctx), no_plans);
}
