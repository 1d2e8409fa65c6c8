// quantize and amax of the CPU against the definition, element by element.
#include "tests/support/fp8_format.h"
#include "tests/support/comm_ops_test.h"

using namespace op_test;

namespace quant_test {

namespace {

struct Shape {
    int64_t N, C;
};
// `transposed` needs N % 16 == 0; the last shapes are tested without it.
constexpr Shape kShapes[] = {{16, 16}, {128, 128}, {48, 144}, {144, 48}, {256, 400}, {16, 640}, {640, 16}, {272, 272}};
constexpr Shape kOddRows[] = {{1, 16}, {130, 272}, {257, 128}};

void run(const HostTensor& x, Shape shape, QuantMemory& to, const StepState* state = nullptr) {
    Ctx ctx;
    HostTensor in = x;
    cpu::quantize(ctx, {.quant = to.out(), .in = in.view(), .N = shape.N, .C = shape.C, .state = state});
    CHECK(in.same_bits(x));
}

bool equal(const HostTensor& got, const std::vector<uint8_t>& want) {
    return got.bytes() == static_cast<int64_t>(want.size()) && std::memcmp(got.data(), want.data(), want.size()) == 0;
}
bool equal(const HostTensor& got, const std::vector<float>& want) {
    return got.elems() == static_cast<int64_t>(want.size())
           && std::memcmp(got.data(), want.data(), want.size() * sizeof(float)) == 0;
}

double amax_of(const HostTensor& x) {
    double amax = 0;
    for (double value : x.values()) amax = std::max(amax, std::fabs(value));
    return amax;
}

float scale_of(const QuantRequest& request, const QuantMemory& before) {
    if (request.scaling == Scaling::kDelayed) return before.entry.scale;
    return fp8_largest(request.format) / std::bit_cast<float>(before.entry.amax_bits);
}

// delayed_scale: of delayed scaling.
void check_against_definition(const QuantRequest& request, Shape shape, const HostTensor& x, float delayed_scale = 24) {
    QuantMemory got(request, shape.N, shape.C, static_cast<float>(amax_of(x)));
    got.entry.scale = delayed_scale;
    const QuantMemory before = got;
    run(x, shape, got);
    const float scale = scale_of(request, before);
    const PlainQuantized rowwise = quantize_plainly(x, shape.N, shape.C, request.granularity, request.format, scale),
                         transposed = quantize_plainly(transpose_of(x, shape.N, shape.C), shape.C, shape.N,
                                                       request.granularity, request.format, scale);
    if (request.rowwise) CHECK(equal(got.rowwise, rowwise.codes));
    if (got.rowwise_scale_inv.elems()) CHECK(equal(got.rowwise_scale_inv, rowwise.scale_inv));
    if (request.transposed) CHECK(equal(got.transposed, transposed.codes));
    if (got.transposed_scale_inv.elems()) CHECK(equal(got.transposed_scale_inv, transposed.scale_inv));
    Fp8Counts counts = before.counts;   // of one cast
    const Fp8Counts& more = request.rowwise ? rowwise.counts : transposed.counts;
    if (request.counts && request.copies()) {
        counts.elems += more.elems, counts.saturated += more.saturated, counts.flushed += more.flushed;
        counts.nonfinite += more.nonfinite;
    }
    CHECK_EQ(std::memcmp(&got.counts, &counts, sizeof counts), 0);
    const bool whole = request.granularity == Granularity::kTensor && request.copies();
    CHECK_EQ(got.entry.scale_inv, whole ? 1 / scale : before.entry.scale_inv);
    CHECK_EQ(got.entry.scale, whole ? scale : before.entry.scale);
    if (more.nonfinite == 0) CHECK_EQ(got.entry.amax_bits, before.entry.amax_bits);
    CHECK_EQ(got.first_nonfinite, request.counts && more.nonfinite > 0 ? 5 : before.first_nonfinite);
    CHECK(got.guards_intact());
}

// Values at the ends of E4M3's range for a scale of 2, some not finite; a block of zeros, and one with a denormal of
// bf16, for whose scale the quotient is beyond the floats.
HostTensor edges(Shape shape) {
    constexpr double kInf = std::numeric_limits<double>::infinity();
    const double values[] = {0, -0.0, 224, 225, -232, 1e30, -3e38, kInf, -kInf, std::nan(""), 0x1p-11, -0x1p-11,
                             0x1.02p-11, 0x1p-130, 1};
    HostTensor x(Dtype::kBf16, shape.N * shape.C);
    for (int64_t i = 0; i < x.elems(); i++)
        x.set(i, i % shape.C / 128 == 1 ? i == 130 ? 0x1p-133 : 0 : values[static_cast<size_t>(i) % std::size(values)]);
    return x;
}

}  // namespace

TEST_CASE("cpu quantize: bytes, scales and counts match the definition") {
    for (const QuantRequest& request : quant_requests()) {
        std::vector<Shape> shapes(std::begin(kShapes), std::end(kShapes));
        if (!request.transposed) shapes.insert(shapes.end(), std::begin(kOddRows), std::end(kOddRows));
        for (Shape shape : shapes) {
            INFO(request.name << ", " << shape.N << " x " << shape.C);
            check_against_definition(request, shape, uneven_tensor(Dtype::kBf16, shape.N, shape.C, 7));
            if (request.scaling == Scaling::kDelayed) check_against_definition(request, shape, edges(shape), 2);
        }
    }
}

TEST_CASE("cpu quantize: an fp32 source is rounded to bf16 first") {
    const Shape shape{144, 272};
    const HostTensor wide = uneven_tensor(Dtype::kFp32, shape.N, shape.C, 13), narrow = wide.to(Dtype::kBf16);
    for (const QuantRequest& request : quant_requests()) {
        QuantMemory from_wide(request, shape.N, shape.C), from_narrow = from_wide;
        run(wide, shape, from_wide);
        run(narrow, shape, from_narrow);
        INFO(request.name);
        CHECK_EQ(from_wide.difference(from_narrow), "");
    }
    // Detects double rounding: just above the tie of two bf16 numbers, both of which are ties of E4M3.
    HostTensor x(Dtype::kFp32, 16);
    x.fill(1.0625 + 0x1p-10);
    QuantMemory got({.name = "delayed", .transposed = false}, 1, 16);
    got.entry.scale = 1;
    run(x, {1, 16}, got);
    CHECK_EQ(static_cast<const uint8_t*>(got.rowwise.data())[0], 0x38);   // 1.0625 in bf16, a tie, to even 1.0
}

TEST_CASE("cpu quantize: amax and first_nonfinite") {
    const Shape shape{48, 32};
    HostTensor x = random_tensor(Dtype::kBf16, shape.N * shape.C, 1);
    x.set(700, -9.5);
    const uint32_t amax = amax_bits_of(9.5f);
    for (QuantRequest request : quant_requests())
        for (bool record : {false, true}) {
            request.record = record;
            request.dbias = true;   // so that the QuantOut is never empty
            const bool copies = request.copies();
            const bool recorded = record && !(copies && request.scaling == Scaling::kCurrent);
            for (float before : {2.0f, 100.0f}) {
                INFO(request.name << ", record " << record << ", before " << before);
                QuantMemory got(request, shape.N, shape.C, before);
                run(x, shape, got);
                CHECK_EQ(got.entry.amax_bits, recorded ? std::max(amax, amax_bits_of(before)) : amax_bits_of(before));
                CHECK_EQ(got.entry.step_amax_bits, 0);
                CHECK_EQ(got.first_nonfinite, 77);
            }
        }
    // A NaN is larger than everything; the smallest event is kept.
    for (double odd : {std::nan(""), -std::numeric_limits<double>::infinity()}) {
        x.set(5, odd);
        QuantMemory got({.name = "record", .rowwise = false, .transposed = false, .record = true}, shape.N, shape.C);
        run(x, shape, got);
        CHECK_GE(got.entry.amax_bits, kInfinityBits);
        CHECK_EQ(got.entry.amax_bits > kInfinityBits, std::isnan(odd));
        CHECK_EQ(got.first_nonfinite, 5);
        got.first_nonfinite = 2;
        run(x, shape, got);
        CHECK_EQ(got.first_nonfinite, 2);
    }
}

TEST_CASE("cpu quantize: current scaling with an amax of 0, or one that is not finite, leaves the values as they are") {
    const Shape shape{16, 16};
    for (float amax : {0.0f, std::numeric_limits<float>::infinity(), std::nanf("")}) {
        QuantMemory got({.name = "current", .transposed = false, .scaling = Scaling::kCurrent}, shape.N, shape.C, amax);
        run(edges(shape), shape, got);
        CHECK_EQ(got.entry.scale, 1.0f);
        CHECK_EQ(got.entry.scale_inv, 1.0f);
    }
}

TEST_CASE("cpu quantize: dbias equals bias_backward of the same values") {
    Ctx ctx;
    for (Shape shape : {Shape{16, 16}, Shape{144, 272}, Shape{640, 48}, Shape{257, 16}})
        for (Dtype grad : {Dtype::kFp32, Dtype::kBf16})
            for (bool integers : {true, false}) {
                INFO(shape.N << " x " << shape.C << ", " << dtype_name(grad) << ", integers " << integers);
                HostTensor x = integers ? random_integers(Dtype::kBf16, shape.N * shape.C, 1, 3)
                                        : random_tensor(Dtype::kBf16, shape.N * shape.C, 1);
                QuantMemory got({.name = "dbias", .transposed = false, .dbias = true}, shape.N, shape.C);
                got.dbias = random_integers(grad, shape.C, 2, 100);
                HostTensor want = got.dbias, scratch(Dtype::kFp32, kPartialRows * shape.C);
                cpu::bias_backward(ctx, {.dbias = want.view(), .scratch = scratch.view(), .dout = x.view(),
                                         .N = shape.N, .C = shape.C});
                run(x, shape, got);
                CHECK(got.guards_intact());
                // Sums of integers below 2^24 are exact; otherwise both have at most one rounding per addition.
                const double chain = integers ? 0 : column_chain(shape.N) + 128
                                                        + static_cast<double>(quant_partial_rows(shape.N));
                auto bound = [&](int64_t c) {
                    double sizes = std::fabs(want.get(c));
                    for (int64_t n = 0; n < shape.N; n++) sizes += std::fabs(x.get(n * shape.C + c));
                    const double rounding = grad == Dtype::kBf16 && !integers ? 2 * 0x1p-8 * std::fabs(want.get(c)) : 0;
                    return chain * 0x1p-24 * sizes + rounding;
                };
                check_close("dbias", got.dbias, want, bound);
            }
}

TEST_CASE("cpu quantize: nothing happens in a skipped step") {
    const Shape shape{144, 48};
    const HostTensor x = random_tensor(Dtype::kBf16, shape.N * shape.C, 1);
    StepState state{};
    for (QuantRequest request : quant_requests()) {
        if (!request.rowwise && !request.transposed && !request.record) continue;
        request.dbias = false;
        QuantMemory got(request, shape.N, shape.C), before = got, done = got;
        state.skip = 1;
        run(x, shape, got, &state);
        CHECK_EQ(got.difference(before), "");
        state.skip = 0;
        run(x, shape, got, &state);
        run(x, shape, done);
        INFO(request.name);
        CHECK_EQ(got.difference(done), "");
        CHECK_NE(got.difference(before), "");
    }
}

TEST_CASE("cpu quantize refuses wrong arguments") {
    Ctx ctx;
    HostTensor x = random_tensor(Dtype::kBf16, 64 * 48, 1);
    auto attempt = [&](auto change) {
        QuantMemory memory({.name = "delayed", .dbias = true}, 64, 48);
        QuantizeArgs args{.quant = memory.out(), .in = x.view(), .N = 64, .C = 48};
        change(args);
        cpu::quantize(ctx, args);
    };
    CHECK_NOTHROW(attempt([](QuantizeArgs&) {}));
    const std::function<void(QuantizeArgs&)> mistakes[] = {
        [](QuantizeArgs& a) { a.N = 128, a.C = 24; },
        [](QuantizeArgs& a) { a.N = 24, a.C = 128; },
        [](QuantizeArgs& a) { a.quant.entry = nullptr; },
        [](QuantizeArgs& a) { a.quant.granularity = Granularity::kBlock1x128; },
        [](QuantizeArgs& a) { a.quant.rowwise.dtype = Dtype::kE5m2; },
        [](QuantizeArgs& a) { a.quant.rowwise.dtype = Dtype::kFp32; },
        [](QuantizeArgs& a) { a.quant.transposed.elems -= 16; },
        [](QuantizeArgs& a) { a.quant.dbias_scratch = {}; },
        [](QuantizeArgs& a) { a.quant.dbias.elems -= 1; },
        [](QuantizeArgs& a) { a.in.dtype = Dtype::kFp64; },
        [](QuantizeArgs& a) { a.quant = {}; }};
    for (auto& mistake : mistakes) CHECK_THROWS_AS(attempt(mistake), Error);
}

TEST_CASE("cpu count_scales: the blocks of a quantized matrix, by hand") {
    Ctx ctx;
    for (const bool lines : {true, false}) {
        const Granularity granularity = lines ? Granularity::kBlock1x128 : Granularity::kBlock128x128;
        const int64_t R = 130, K = 144, rows = lines ? R : 2;   // blocks: (rows, 2)
        HostTensor codes(Dtype::kE4m3, R * K), scale_inv(Dtype::kFp32, scale_inv_elems(granularity, R, K));
        std::memset(codes.data(), 0x80, static_cast<size_t>(R * K));   // -0
        scale_inv.fill(0);
        std::vector<unsigned long long> bins(kScaleBins, 3), expected = bins;
        const double values[] = {1, 0x1p-127, 0x1p-126, 0x1p120, 0.5};
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < 2; j++) {
                const int64_t at = lines ? j * R + i : i * 4 + j;
                const double value = values[(i + 2 * j) % 5];
                scale_inv.set(at, value);
                // The scale of a block of zeros is 1, and other blocks may have it, too; here the last value of the
                // block decides.
                const bool zeros = value == 1 && i % 2 == 0;
                const int64_t row = lines ? i : std::min<int64_t>(R, i * 128 + 128) - 1, column = j == 0 ? 127 : K - 1;
                if (!zeros) static_cast<uint8_t*>(codes.data())[row * K + column] = 0x81;
                expected[static_cast<size_t>(zeros ? kZeroBlocks : 127 - std::ilogb(1 / value))]++;
            }
        CountScalesArgs args{.bins = bins.data(), .codes = codes.view(), .scale_inv = scale_inv.view(),
                             .granularity = granularity, .R = R, .K = K};
        cpu::count_scales(ctx, args);
        CHECK(bins == expected);
        CHECK_GT(expected[kZeroBlocks], 3);
        args.scale_inv.elems -= 1;
        CHECK_THROWS_AS(cpu::count_scales(ctx, args), Error);
        args.scale_inv.elems += 1, args.granularity = Granularity::kTensor;
        CHECK_THROWS_AS(cpu::count_scales(ctx, args), Error);
    }
    // The ends of the range: the scales for the smallest and the largest amax, in both formats.
    CHECK_EQ(block_scale_of(1u << 16, fp8_largest(Dtype::kE4m3)), 0x1p127f);
    CHECK_EQ(block_scale_of(0x7f7f0000u, fp8_largest(Dtype::kE4m3)), 0x1p-120f);
    CHECK_EQ(block_scale_of(0x7f7f0000u, fp8_largest(Dtype::kE5m2)), 0x1p-113f);
}

TEST_CASE("cpu amax: the largest magnitude, rounded to bf16, never decreases") {
    Ctx ctx;
    for (Dtype type : {Dtype::kBf16, Dtype::kFp32})
        for (int64_t elems : {1, 7, 1000, 40001}) {
            HostTensor x = random_tensor(type, elems, 1, 1e-3);
            for (int64_t at : {int64_t{0}, elems / 2, elems - 1}) {
                HostTensor larger = x;
                larger.set(at, -5.003);
                ScaleEntry entry{.scale_inv = 1, .scale = 2, .amax_bits = 3, .step_amax_bits = 4};
                cpu::amax(ctx, {.entry = &entry, .in = larger.view()});
                CHECK_EQ(entry.amax_bits, amax_bits_of(static_cast<float>(bf16(5.003f))));
                cpu::amax(ctx, {.entry = &entry, .in = x.view()});
                CHECK_EQ(entry.amax_bits, amax_bits_of(static_cast<float>(bf16(5.003f))));
                larger.set(at, std::nan(""));
                cpu::amax(ctx, {.entry = &entry, .in = larger.view()});
                CHECK_GT(entry.amax_bits, kInfinityBits);
                CHECK_EQ(entry.scale_inv, 1.0f);
                CHECK_EQ(entry.scale, 2.0f);
                CHECK_EQ(entry.step_amax_bits, 4);
            }
        }
    HostTensor x(Dtype::kFp32, 1);
    x.set(0, 3.4e38);   // rounds to infinity in bf16
    ScaleEntry entry{};
    cpu::amax(ctx, {.entry = &entry, .in = x.view()});
    CHECK_EQ(entry.amax_bits, kInfinityBits);
    x.set(0, 1);
    CHECK_THROWS_AS(cpu::amax(ctx, {.entry = &entry, .in = HostTensor(Dtype::kInt32, 1).view()}), Error);
}

TEST_CASE("cpu dlogits_residual gives what rounding took from a row's sum to the row of its target") {
    constexpr int64_t N = 7, V = 250, Vp = 272, C = 48;
    const std::vector<int32_t> targets = {0, V - 1, kIgnoreIndex, 130, V, 130, -2};
    for (const char* name : {"delayed, rowwise only", "1x128, rowwise only"})
        for (Dtype format : {Dtype::kE4m3, Dtype::kE5m2}) {
            QuantRequest request = quant_request(name);
            request.format = format;
            QuantMemory codes(request, N, Vp);
            const HostTensor dlogits = random_tensor(Dtype::kBf16, N * Vp, 3),
                             before = random_tensor(Dtype::kBf16, N * C, 4),
                             weight = random_tensor(Dtype::kBf16, Vp * C, 5);
            run(dlogits, {N, Vp}, codes);
            const bool blocks = codes.rowwise_scale_inv.elems() > 0;
            HostTensor scale_inv = codes.rowwise_scale_inv, dx = before, in = dlogits, w = weight;
            Ctx ctx;
            cpu::dlogits_residual(ctx, {.dx = dx.view(), .dlogits = in.view(), .codes = codes.rowwise.view(),
                                        .scale_inv = blocks ? scale_inv.view() : Tensor{&codes.entry, Dtype::kFp32, 1},
                                        .granularity = request.granularity, .weight = w.view(),
                                        .targets = targets.data(), .N = N, .C = C, .V = V, .Vp = Vp});
            for (int64_t n = 0; n < N; n++) {
                const int64_t target = targets[static_cast<size_t>(n)];
                const bool counted = target >= 0 && target < V;
                double residual = 0;
                for (int64_t v = 0; counted && v < Vp; v++) {
                    const double by = blocks ? scale_inv.get(v / 128 * N + n) : double{codes.entry.scale_inv};
                    residual += dlogits.get(n * Vp + v) - fp8_value(format, byte_of(codes.rowwise, n * Vp + v)) * by;
                }
                if (counted) CHECK(std::fabs(residual) > 1e-3);
                for (int64_t c = 0; c < C; c++) {
                    const double want = before.get(n * C + c) + (counted ? residual * weight.get(target * C + c) : 0);
                    CHECK(std::fabs(dx.get(n * C + c) - want) <= 1.01 * unit_roundoff(Dtype::kBf16) * std::fabs(want));
                }
            }
        }
}

}  // namespace quant_test
