// Quantization of a matrix by several ranks: codes and scales equal those of one quantize of the whole matrix.
#include "tests/support/fp8_format.h"
#include "tests/support/comm_ops_test.h"

using namespace op_test;

namespace quantize_shard_test {

namespace {

struct Shape {
    int64_t N, C;
};
constexpr Shape kShapes[] = {{16, 16}, {128, 128}, {48, 144}, {144, 48}, {256, 400}, {16, 640}, {640, 16}, {272, 272}};

void check_ranges(const HostTensor& x, Shape shape, const std::vector<ShardRange>& ranges) {
    for (const QuantRequest& request : weight_requests()) {
        INFO(request.name << " " << std::string(dtype_name(request.format)) << " " << shape.N << " x " << shape.C
                          << " in " << ranges.size() << " ranges, the second from " << ranges[ranges.size() > 1].begin);
        const QuantMemory want = quantize_whole<OnCpu>(request, x, shape.N, shape.C);
        CHECK_EQ(quantize_shards<OnCpu>(request, x, shape.N, shape.C, ranges).difference(want), "");
    }
}

uint32_t* bits_of(HostTensor& amaxes) { return object_in<uint32_t>(amaxes.view()); }

}  // namespace

TEST_CASE("cpu quantize_run: bf16 gives the bits of the same values in fp32") {
    for (Shape shape : kShapes)
        for (const QuantRequest& request : weight_requests()) {
            const int64_t elems = shape.N * shape.C;
            HostTensor rounded = uneven_tensor(Dtype::kFp32, shape.N, shape.C, 11).to(Dtype::kBf16);
            const HostTensor wide = rounded.to(Dtype::kFp32);
            const auto ranges = random_ranges(elems, 3, 1, 12);
            const QuantMemory want = quantize_shards<OnCpu>(request, wide, shape.N, shape.C, ranges);
            const auto got = [&] {
                return quantize_shards<OnCpu>(request, wide, shape.N, shape.C, ranges, 0, rounded).difference(want);
            };
            CHECK_EQ(got(), "");
            rounded.set(elems / 2, -1 - rounded.get(elems / 2));   // one element, which is seen
            CHECK_NE(got(), "");
        }
}

TEST_CASE("cpu quantize_run: ranges of one element, and borders around the corner of a block") {
    const Shape tiny{16, 16}, shape{144, 144};
    std::vector<ShardRange> singles;
    for (int64_t i = 0; i < 256; i++) singles.push_back({i, 1});
    check_ranges(uneven_tensor(Dtype::kFp32, 16, 16, 4), tiny, singles);
    const HostTensor x = uneven_tensor(Dtype::kFp32, shape.N, shape.C, 5);
    const int64_t corner = 128 * shape.C + 128;
    for (int64_t cut : {corner - shape.C, corner - 1, corner, corner + 1, corner + 16, corner + shape.C})
        check_ranges(x, shape, {{0, cut}, {cut, shape.N * shape.C - cut}});
}

TEST_CASE("cpu quantize_run: values that are not finite, denormals and ties") {
    for (uint64_t key = 0; key < 8; key++) {
        const Shape shape = kShapes[key];
        HostTensor x = uneven_tensor(Dtype::kFp32, shape.N, shape.C, key, 250);
        corrupt(x, key);
        check_ranges(x, shape, random_ranges(shape.N * shape.C, 3, 1, key));
        HostTensor tiny(Dtype::kFp32, shape.N * shape.C);
        tiny.fill(0);
        check_ranges(tiny, shape, {{0, tiny.elems()}});
        tiny.set(static_cast<int64_t>(key) * 16 + 3, 0x1p-149);   // rounds to 0
        tiny.set(tiny.elems() - 1, -0x1p-133);                    // the smallest bf16 number
        check_ranges(tiny, shape, random_ranges(tiny.elems(), 2, 16, key));
    }
}

TEST_CASE("cpu quantize_run: random matrices, partitions and numbers of ranks") {
    for (uint64_t trial = 0; trial < 60; trial++) {
        const Philox4 random = philox(99, trial);
        const Shape shape{16 + 16 * (random.word[0] % 20), 16 + 16 * (random.word[1] % 20)};
        const int64_t aligns[] = {1, 4, 16, 128}, align = aligns[random.word[2] % 4];
        HostTensor x = uneven_tensor(Dtype::kFp32, shape.N, shape.C, trial, 1 + random.word[3] % 200);
        if (trial % 3 == 0) corrupt(x, trial);
        check_ranges(x, shape, random_ranges(shape.N * shape.C, 1 + random.word[3] % 9, align, trial));
    }
}

TEST_CASE("cpu quantize and the steps of ranks: several matrices in one call") {
    for (Shape shape : kShapes)
        for (int64_t matrices : {2, 5})
            for (int64_t align : {1, 16}) check_matrices<OnCpu>(matrices, shape.N, shape.C, align);
    QuantMemory to(quant_request("delayed"), 16, 16, 0, 2);
    HostTensor x = random_tensor(Dtype::kFp32, 512, 1);
    Ctx ctx;
    CHECK_THROWS_AS(cpu::quantize(ctx, {.quant = to.out(), .in = x.view(), .N = 16, .C = 16, .matrices = 2}), Error);
}

TEST_CASE("cpu block_amax matches the definition and never decreases") {
    Ctx ctx;
    const Shape shape{272, 400};
    const HostTensor x = uneven_tensor(Dtype::kFp32, shape.N, shape.C, 8), rounded = x.to(Dtype::kBf16);
    HostTensor amaxes = amaxes_of_ranges<OnCpu>(x, shape.N, shape.C, random_ranges(x.elems(), 4, 1, 8));
    for (int64_t i = 0; i < 3; i++)
        for (int64_t j = 0; j < 4; j++) {
            const double want = plain_amax(rounded, shape.N, shape.C, i * 128, j * 128, 128);
            CHECK_EQ(std::bit_cast<float>(bits_of(amaxes)[i * 4 + j]), static_cast<float>(want));
        }
    for (int64_t i = 0; i < amaxes.elems(); i++) bits_of(amaxes)[i] = kInfinityBits + static_cast<uint32_t>(i);
    const HostTensor before = amaxes;
    HostTensor in = x;
    cpu::block_amax(ctx, {.amaxes = bits_of(amaxes), .in = in.view(), .begin = 0, .R = shape.N, .C = shape.C});
    CHECK(amaxes.same_bits(before));
}

TEST_CASE("cpu fp8_scales sets entries as quantize does") {
    Ctx ctx;
    std::vector<ScaleEntry> entries;
    for (float amax : {0.0f, 3.5f, 1e-44f, 3e38f, HUGE_VALF, std::nanf("")})
        entries.push_back({.scale_inv = -1, .scale = 24, .amax_bits = amax_bits_of(amax), .step_amax_bits = 9});
    for (Dtype format : {Dtype::kE4m3, Dtype::kE5m2})
        for (Scaling scaling : {Scaling::kDelayed, Scaling::kCurrent})
            for (int skip : {0, 1}) {
                std::vector<ScaleEntry> got = entries;
                StepState state{};
                state.skip = skip;
                cpu::fp8_scales(ctx, {.entries = got.data(), .count = static_cast<int64_t>(got.size()) - 1,
                                       .scaling = scaling, .format = format, .state = &state});
                for (size_t i = 0; i < entries.size(); i++) {
                    HostTensor x(Dtype::kBf16, 16), codes(format, 16);
                    x.fill(1);
                    ScaleEntry want = entries[i];
                    QuantOut quant;
                    quant.rowwise = codes.view(), quant.scaling = scaling, quant.entry = &want;
                    if (i + 1 < entries.size() && !skip)
                        cpu::quantize(ctx, {.quant = quant, .in = x.view(), .N = 1, .C = 16});
                    CHECK_EQ(std::memcmp(&got[i], &want, sizeof want), 0);
                }
            }
}

TEST_CASE("cpu transpose_bytes") {
    Ctx ctx;
    for (Shape shape : kShapes) {
        HostTensor in(Dtype::kE5m2, shape.N * shape.C), out(Dtype::kE5m2, in.elems());
        for (int64_t i = 0; i < in.elems(); i++)
            static_cast<uint8_t*>(in.data())[i] = static_cast<uint8_t>(philox(1, static_cast<uint64_t>(i)).word[0]);
        cpu::transpose_bytes(ctx, {.out = out.view(), .in = in.view(), .R = shape.N, .C = shape.C});
        CHECK(out.same_bits(transpose_of(in, shape.N, shape.C)));
    }
}

TEST_CASE("cpu quantize_run, block_amax, block_scales and transpose_bytes refuse wrong arguments") {
    Ctx ctx;
    HostTensor in = random_tensor(Dtype::kFp32, 64, 1), out(Dtype::kE4m3, 64), scales(Dtype::kFp32, 4);
    uint32_t amaxes[1] = {};
    ScaleEntry entry{};
    auto run = [&](auto change) {
        QuantizeRunArgs args{.out = out.view(), .in = in.view(), .begin = 0, .R = 16, .C = 16, .entry = &entry};
        change(args);
        cpu::quantize_run(ctx, args);
    };
    run([](QuantizeRunArgs&) {});
    CHECK_THROWS_AS(run([](QuantizeRunArgs& a) { a.begin = 193; }), Error);
    CHECK_THROWS_AS(run([](QuantizeRunArgs& a) { a.begin = -1; }), Error);
    CHECK_THROWS_AS(run([](QuantizeRunArgs& a) { a.entry = nullptr; }), Error);
    CHECK_THROWS_AS(run([&](QuantizeRunArgs& a) { a.block_amaxes = amaxes; }), Error);
    CHECK_THROWS_AS(run([](QuantizeRunArgs& a) { a.out.elems = 63; }), Error);
    CHECK_THROWS_AS(run([&](QuantizeRunArgs& a) { a.out = in.view(); }), Error);
    CHECK_THROWS_AS(cpu::block_amax(ctx, {.amaxes = amaxes, .in = in.view(), .begin = 200, .R = 16, .C = 16}), Error);
    CHECK_THROWS_AS(cpu::block_scales(ctx, {.scale_inv = scales.view(),
                                            .transposed_scale_inv = scales.view(),
                                            .amaxes = amaxes,
                                            .R = 16,
                                            .C = 16,
                                            .format = Dtype::kBf16}),
                    Error);
    CHECK_THROWS_AS(cpu::transpose_bytes(ctx, {.out = out.view(), .in = out.view(), .R = 8, .C = 8}), Error);
}

}  // namespace quantize_shard_test
