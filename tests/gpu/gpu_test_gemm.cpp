// Matmul of the GPU: exact on small integers, within an error bound and twice the CPU's error on random numbers; export
// and import of plans.
#include "tests/gpu/gpu_op.h"

using namespace op_test;

namespace gemm_test {

namespace {

struct Shape {
    int64_t M, N, K;
};
// M, N and K differ, so that a swapped or transposed operand cannot pass; multiples of 8, mostly odd ones.
const Shape kShapes[] = {{8, 16, 24},    {56, 24, 72},    {1, 40, 8},      {200, 136, 264},
                         {1000, 8, 520}, {136, 1544, 40}, {2056, 264, 1032}};
const GemmLayout kLayouts[] = {GemmLayout::kForward, GemmLayout::kDgrad, GemmLayout::kWgrad};

std::string name_of(const Shape& s, GemmLayout layout, Dtype operands, Dtype result) {
    return strf("layout %d M %lld N %lld K %lld %s -> %s", static_cast<int>(layout), (long long)s.M,
                (long long)s.N, (long long)s.K, dtype_name(operands), dtype_name(result));
}

// One product on both devices. Host tensors are inputs as well as what the outputs start from.
struct Product {
    Shape s{};
    GemmLayout layout = GemmLayout::kForward;
    bool accumulate = false;
    HostTensor a, b, d, bias;

    GemmArgs args(Tensor D, Tensor A, Tensor B, Tensor bias_view) const {
        return {.D = D, .A = A, .B = B, .bias = bias_view, .M = s.M, .N = s.N, .K = s.K, .layout = layout,
                .accumulate = accumulate};
    }
    HostTensor on_gpu(Ctx& ctx, int64_t shift_bytes = 0) const {
        DeviceTensor da(a, shift_bytes), db(b, shift_bytes), dd(d, shift_bytes), dbias(bias);
        cuda::gemm(ctx, args(dd.view(), da.view(), db.view(), dbias.view()));
        cuda::synchronize(ctx);
        return dd.download();
    }
    // In the given types; sums in the wider of fp32 and `operands`.
    HostTensor on_cpu(Dtype operands, Dtype result) const {
        HostTensor ca = a.to(operands), cb = b.to(operands), cd = d.to(result), cbias = bias.to(operands);
        Ctx ctx;
        cpu::gemm(ctx, args(cd.view(), ca.view(), cb.view(), cbias.view()));
        return cd;
    }
    HostTensor exact() const { return on_cpu(Dtype::kFp64, Dtype::kFp64); }
};

Product product(Shape s, GemmLayout layout, Dtype operands, Dtype result) {
    Product p;
    p.s = s, p.layout = layout, p.a = random_tensor(operands, s.M * s.K, 1);
    p.b = random_tensor(operands, s.N * s.K, 2, 0.5, 0.125), p.d = HostTensor(result, s.M * s.N);
    return p;
}
// Operands are -1, 0 or 1, so that sums stay whole numbers that bf16 holds exactly (up to 256).
Product integer_product(Shape s, GemmLayout layout, Dtype operands, Dtype result) {
    Product p = product(s, layout, operands, result);
    p.a = random_integers(operands, s.M * s.K, 3, 1);
    p.b = random_integers(operands, s.N * s.K, 4, 1);
    return p;
}

// The error of D: K products in fp32 sums (tensor cores align the terms of a step and drop the bits below,
// hence twice the roundoff), then one rounding to the result's type. The magnitudes come from |A| |B|.
Bound product_bound(const Product& p, const HostTensor& want, HostTensor& magnitude) {
    Product absolute = p;
    auto make_absolute = [](HostTensor& t) {
        for (int64_t i = 0; i < t.elems(); i++) t.set(i, std::fabs(t.get(i)));
    };
    make_absolute(absolute.a), make_absolute(absolute.b);
    if (p.bias.elems()) make_absolute(absolute.bias);
    if (p.accumulate) make_absolute(absolute.d);
    magnitude = absolute.exact();
    const double sums = 2 * 0x1p-23 * static_cast<double>(p.s.K + 8);
    const double round = 1.01 * unit_roundoff(p.d.dtype());
    return [&want, &magnitude, sums, round](int64_t i) {
        return sums * magnitude.get(i) + round * std::fabs(want.get(i)) + kTiny;
    };
}

void check_product(const std::string& name, const Product& p) {
    const HostTensor got = p.on_gpu(gpu()), want = p.exact(), cpu = p.on_cpu(p.a.dtype(), p.d.dtype());
    HostTensor magnitude;
    check_close(name, got, want, product_bound(p, want, magnitude));
    // For fp32 results of bf16 operands the CPU sums in exact fp32 arithmetic, and tensor cores do not.
    if (p.d.dtype() == p.a.dtype()) {
        INFO(name << ": rms error " << rms_error(got, want) << ", CPU " << rms_error(cpu, want));
        CHECK_LE(rms_error(got, want), 2 * rms_error(cpu, want) + kTiny);
    }
}

void for_types(const std::function<void(Dtype operands, Dtype result)>& f) {
    f(Dtype::kBf16, Dtype::kBf16);
    f(Dtype::kBf16, Dtype::kFp32);
    f(Dtype::kFp32, Dtype::kFp32);
}

}  // namespace

TEST_CASE("gpu gemm: small integers are exact in every layout, type and alignment") {
    for (const Shape& s : kShapes)
        for (GemmLayout layout : kLayouts) {
            for_types([&](Dtype operands, Dtype result) {
                Product p = integer_product(s, layout, operands, result);
                const HostTensor want = p.exact();
                check_equal(name_of(s, layout, operands, result), p.on_gpu(gpu()), want);
                if (s.M > 300) return;
                check_equal(name_of(s, layout, operands, result) + " shifted by 8 bytes", p.on_gpu(gpu(), 8), want);
            });
        }
}

TEST_CASE("gpu gemm: random numbers within a derived bound and twice the CPU's error") {
    for (const Shape& s : kShapes)
        for (GemmLayout layout : kLayouts) {
            for_types([&](Dtype operands, Dtype result) {
                check_product(name_of(s, layout, operands, result), product(s, layout, operands, result));
            });
        }
}

TEST_CASE("gpu gemm: adds to D once, with and without a search") {
    FreshContext fresh;
    for (bool search : {false, true}) {
        cuda::gemm_set_search(fresh.ctx, search);
        for (const Shape& s : kShapes) {
            // Another M for each, so that the search meets shapes without a plan.
            const Shape shape{search ? s.M + 8 : s.M, s.N, s.K};
            for_types([&](Dtype operands, Dtype result) {
                Product p = integer_product(shape, GemmLayout::kWgrad, operands, result);
                p.d = random_integers(result, shape.M * shape.N, 5, 50);
                p.accumulate = true;
                check_equal(name_of(shape, p.layout, operands, result) + (search ? " searching" : ""),
                            p.on_gpu(fresh.ctx), p.exact());
            });
        }
    }
}

TEST_CASE("gpu gemm: bias") {
    for (const Shape& s : {Shape{56, 24, 72}, Shape{200, 136, 264}, Shape{1000, 8, 520}})
        for (Dtype type : {Dtype::kBf16, Dtype::kFp32}) {
            Product p = product(s, GemmLayout::kForward, type, type);
            p.bias = random_tensor(type, s.N, 6, 3);
            check_product(name_of(s, p.layout, type, type) + " bias", p);
        }
}

TEST_CASE("gpu gemm: equal bits in every run and with an imported plan") {
    FreshContext first, second, other;
    cuda::gemm_set_search(first.ctx, true);
    // Long sums and few outputs, for which split-K algorithms are fastest.
    for (const Shape& s : {Shape{136, 264, 8200}, Shape{200, 136, 264}}) {
        for_types([&](Dtype operands, Dtype result) {
            Product p = product(s, GemmLayout::kWgrad, operands, result);
            p.d = random_tensor(result, s.M * s.N, 7);
            p.accumulate = true;
            const HostTensor searched = p.on_gpu(first.ctx);
            CHECK(p.on_gpu(first.ctx).same_bits(searched));
            const std::string plans = cuda::gemm_export_plans(first.ctx);
            CHECK_EQ(cuda::gemm_import_plans(second.ctx, plans), "");
            CHECK(p.on_gpu(second.ctx).same_bits(searched));
            CHECK_EQ(cuda::gemm_export_plans(second.ctx), plans);
        });
    }
    // Another library's plans are refused with a reason, and matmuls still run.
    std::string plans = cuda::gemm_export_plans(first.ctx);
    const size_t at = plans.find("cuBLASLt ");
    REQUIRE_NE(at, std::string::npos);
    plans.replace(at, 10, "cuBLASLt 0");
    const std::string reason = cuda::gemm_import_plans(other.ctx, plans);
    CHECK_NE(reason.find("cuBLASLt 0"), std::string::npos);
    CHECK_NE(cuda::gemm_export_plans(other.ctx).find("\"plans\":[]"), std::string::npos);
    CHECK_NE(cuda::gemm_import_plans(other.ctx, cpu::gemm_export_plans(other.ctx)).find("made by cpu"),
             std::string::npos);
    for (const char* text : {"", "{", "[]", "{\"library\": 1}"}) {
        const std::string error = error_of([&] { cuda::gemm_import_plans(other.ctx, text); });
        CHECK_NE(error.find("exit 5: matmul plans"), std::string::npos);   // they are a checkpoint's
    }
}

TEST_CASE("gpu gemm: a wrong call is one line that names it") {
    Product p = product({8, 16, 24}, GemmLayout::kForward, Dtype::kBf16, Dtype::kBf16);
    p.s.K = 32;
    CHECK_NE(error_of([&] { p.on_gpu(gpu()); }).find("gemm forward M 8 N 16 K 32, bf16 -> bf16"), std::string::npos);
    p = product({8, 16, 24}, GemmLayout::kForward, Dtype::kFp32, Dtype::kBf16);
    CHECK_NE(error_of([&] { p.on_gpu(gpu()); }).find("fp32 operands give an fp32 D"), std::string::npos);
    p = product({8, 16, 24}, GemmLayout::kForward, Dtype::kBf16, Dtype::kFp32);
    p.bias = random_tensor(Dtype::kBf16, 16, 6);
    CHECK_NE(error_of([&] { p.on_gpu(gpu()); }).find("no bf16 bias into an fp32 D"), std::string::npos);
}

}  // namespace gemm_test
