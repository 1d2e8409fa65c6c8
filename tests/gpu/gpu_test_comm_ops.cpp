// Communicated gradients and weights quantized by several ranks on the GPU: bitwise equal to the CPU except for the
// payloads of NaN.
#include "tests/gpu/gpu_bulk.h"
#include "tests/gpu/gpu_op.h"
#include "tests/support/comm_ops_test.h"

using namespace op_test;

namespace comm_ops_test {

namespace {

constexpr Dtype kB = Dtype::kBf16, kF = Dtype::kFp32, kCodes = Dtype::kE4m3, kBits = Dtype::kInt32;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct OnGpu {
    using Memory = DeviceTensor;
    static Ctx& ctx() { return gpu(); }
    static constexpr auto amax = cuda::amax;
    static constexpr auto quantize = cuda::quantize;
    static constexpr auto block_amax = cuda::block_amax;
    static constexpr auto fp8_scales = cuda::fp8_scales;
    static constexpr auto quantize_run = cuda::quantize_run;
    static constexpr auto block_scales = cuda::block_scales;
    static constexpr auto transpose_bytes = cuda::transpose_bytes;
};

HostTensor random_codes(int64_t elems, uint64_t key) {
    HostTensor codes(kCodes, elems);
    for (int64_t i = 0; i < elems; i++) {
        const uint8_t code = static_cast<uint8_t>(philox(key, static_cast<uint64_t>(i)).word[0]);
        static_cast<uint8_t*>(codes.data())[i] = code % 128 == 127 ? static_cast<uint8_t>(code - 1) : code;
    }
    return codes;
}

void check_chunks(const HostTensor& x, bool counted = true) {
    OpCase c(strf("quantize_chunks of %lld", (long long)x.elems()), x.dtype());
    c.add("in", Kind::kFixed, x);
    c.add("out", Kind::kFixed, HostTensor(kCodes, x.elems()));
    c.add("scales", Kind::kFixed, HostTensor(kF, x.elems() / kGradCommChunk));
    c.add("counts", Kind::kFixed, HostTensor(kBits, 8).fill(3));
    c.run_same_types(cuda::quantize_chunks, cpu::quantize_chunks, [&](auto view) {
        return QuantizeChunksArgs{.out = view("out"), .scales = view("scales"), .in = view("in"),
                                  .counts = counted ? object_in<Fp8Counts>(view("counts")) : nullptr};
    });
    for (const char* name : {"in", "out", "scales", "counts"}) c.check_bits(name);
    const Fp8Counts got = object_of<Fp8Counts>(c.on_gpu("counts"));
    CHECK_EQ(got.elems, 3 + (3ull << 32) + (counted ? static_cast<unsigned long long>(x.elems()) : 0));
    CHECK_EQ(got.saturated, 3 + (3ull << 32));
}

// One value per chunk: 18 significands of every power of two of fp32, denormals included.
HostTensor lone_values() {
    HostTensor x(kF, 277 * 18 * kGradCommChunk);
    x.fill(0);
    for (int64_t i = 0; i < 277 * 18; i++) {
        const uint32_t random = philox(1, static_cast<uint64_t>(i)).word[0] >> 9;
        const double low = i % 18 == 0 ? 0 : i % 18 == 1 ? 1 - 0x1p-23 : 0x1p-23 * random;
        x.set(i * kGradCommChunk + i % kGradCommChunk,
              std::ldexp(i % 2 ? -1 - low : 1 + low, static_cast<int>(i / 18 - 149)));
    }
    return x;
}

void check_sum(const HostTensor& in, int64_t ranks, const HostTensor& scales, int64_t shift_bytes) {
    const int64_t n = in.elems() / ranks;
    for (Dtype sums : {kF, kB})
        for (bool accumulate : {false, true}) {
            OpCase c(strf("sum_ranks of %lld by %lld to %s%s", (long long)ranks, (long long)n, dtype_name(sums),
                          accumulate ? ", accumulates" : ""), in.dtype(), sums, shift_bytes);
            c.add("in", Kind::kFixed, in);
            c.add("scales", Kind::kFixed, scales);
            c.add("out", Kind::kFixed, accumulate ? uneven_tensor(sums, 1, n, 11) : HostTensor(sums, n));
            c.run_same_types(cuda::sum_ranks, cpu::sum_ranks, [&](auto view) {
                return SumRanksArgs{.out = view("out"), .in = view("in"), .scales = view("scales"), .ranks = ranks,
                                    .accumulate = accumulate};
            });
            c.check_bits("out");
            c.check_unchanged("in");
        }
}

// The block of `own_rank` is elsewhere, and NaN in its place.
void check_own(const HostTensor& in, int64_t ranks, int64_t own_rank, int64_t shift_bytes) {
    const int64_t n = in.elems() / ranks;
    HostTensor others = in;
    for (int64_t i = 0; i < n; i++) others.set(own_rank * n + i, kNan);
    OpCase c(strf("sum_ranks of %lld by %lld, rank %lld elsewhere", (long long)ranks, (long long)n,
                  (long long)own_rank), in.dtype(), kF, shift_bytes);
    c.add("in", Kind::kFixed, others);
    c.add("own", Kind::kFixed, part_of(in, {own_rank * n, n}));
    c.add("out", Kind::kFixed, HostTensor(kF, n));
    c.run_same_types(cuda::sum_ranks, cpu::sum_ranks, [&](auto view) {
        return SumRanksArgs{.out = view("out"), .in = view("in"), .scales = {}, .own = view("own"),
                            .own_rank = own_rank, .ranks = ranks};
    });
    c.check_bits("out");
    HostTensor want(kF, n), whole = in;
    Ctx ctx;
    cpu::sum_ranks(ctx, {.out = want.view(), .in = whole.view(), .scales = {}, .ranks = ranks});
    CHECK(c.on_gpu("out").same_bits(want));
}

void check_ranges(const HostTensor& x, int64_t N, int64_t C, const std::vector<ShardRange>& ranges,
                  bool corrupted = false, int64_t shift_bytes = 0) {
    for (const QuantRequest& request : weight_requests()) {
        INFO(request.name << " " << std::string(dtype_name(request.format)) << " " << N << " x " << C << " in "
                          << ranges.size() << " ranges, the second from " << ranges[ranges.size() > 1].begin
                          << ", shift " << shift_bytes);
        const QuantMemory got = quantize_shards<OnGpu>(request, x, N, C, ranges, shift_bytes);
        CHECK_EQ(got.difference(quantize_whole<OnGpu>(request, x, N, C)), "");
        QuantMemory want = quantize_whole<OnCpu>(request, x, N, C);
        if (corrupted) want.entry.amax_bits = got.entry.amax_bits;   // a payload
        CHECK_EQ(got.difference(want), "");
    }
}

}  // namespace

TEST_CASE("gpu comm ops: quantize_chunks") {
    for (Dtype dtype : {kF, kB})
        for (int64_t chunks : {1, 7, 8, 9, 64, 65, 3001})
            for (int powers : {1, 40, 250}) {
                if (left_out(chunks * kGradCommChunk)) continue;
                HostTensor x = uneven_tensor(dtype, chunks, kGradCommChunk, 5, powers);
                check_chunks(x);
                check_chunks(x, false);
                for (int64_t i = 0; i < chunks; i += 5)   // some chunks that are not finite
                    x.set(i * kGradCommChunk + i % kGradCommChunk, i % 3 == 0   ? kNan
                                                                   : i % 3 == 1 ? HUGE_VAL
                                                                                : -HUGE_VAL);
                check_chunks(x);
            }
    check_chunks(HostTensor(kF, 5 * kGradCommChunk).fill(0));
}

TEST_CASE("gpu comm ops: quantize_chunks of every magnitude") {
    if (left_out(1 << 20)) return;
    check_chunks(lone_values());
    HostTensor all(kB, 65536);   // every bf16 number, each chunk of one exponent or of many
    for (int64_t stride : {1, 40503}) {
        for (int64_t i = 0; i < 65536; i++) all.as<bf16>()[i] = bf16::from_bits(static_cast<uint16_t>(i * stride));
        check_chunks(all);
    }
}

TEST_CASE("gpu comm ops: sum_ranks") {
    for (Dtype dtype : {kF, kB})
        for (int64_t ranks : {1, 2, 3, 4, 5, 8, 13})
            for (int64_t n : {1, 7, 8, 1020, 4096, 10007, 70004})
                for (int64_t shift_bytes : {0, 4})
                    if (!left_out(n * ranks))
                        check_sum(uneven_tensor(dtype, ranks, n, 3), ranks, HostTensor(), shift_bytes);
    for (Dtype dtype : {kF, kB})
        for (int64_t ranks : {2, 5, 8})
            for (int64_t n : {7, 4096, 70004})
                for (int64_t own_rank : {int64_t{0}, ranks - 1})
                    for (int64_t shift_bytes : {0, 4})
                        if (!left_out(n * ranks))
                            check_own(uneven_tensor(dtype, ranks, n, 3), ranks, own_rank, shift_bytes);
    for (int64_t ranks : {1, 2, 3, 4, 5, 8, 13})
        for (int64_t chunks : {1, 2, 31, 33, 500}) {
            if (left_out(chunks * kGradCommChunk * ranks)) continue;
            const HostTensor scales = uneven_tensor(kF, ranks, chunks, 4, 100);
            check_sum(random_codes(ranks * chunks * kGradCommChunk, 6), ranks, scales, 0);
        }
}

TEST_CASE("gpu comm ops: a value that is not finite on one rank makes the sum not finite") {
    const int64_t ranks = 3, n = 4 * kGradCommChunk;
    HostTensor codes = random_codes(ranks * n, 7), scales = random_tensor(kF, ranks * 4, 8);
    scales.set(4 + 2, kNan);                                // chunk 2 of rank 1
    static_cast<uint8_t*>(codes.data())[2 * n + 5] = 0xff;   // element 5 of rank 2
    HostTensor values = random_tensor(kB, ranks * n, 9);
    values.set(n + 300, HUGE_VAL), values.set(2 * n + 300, -HUGE_VAL), values.set(7, kNan);
    const DeviceTensor device_codes(codes), device_scales(scales), device_values(values);
    DeviceTensor sum(HostTensor(kF, n)), other(HostTensor(kF, n));
    cuda::sum_ranks(gpu(), {.out = sum.view(), .in = device_codes.view(), .scales = device_scales.view(),
                            .ranks = ranks});
    cuda::sum_ranks(gpu(), {.out = other.view(), .in = device_values.view(), .scales = {}, .ranks = ranks});
    const HostTensor of_codes = sum.download(), of_values = other.download();
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++) {
        wrong += std::isnan(of_codes.get(i)) != (i / kGradCommChunk == 2 || i == 5);
        wrong += std::isnan(of_values.get(i)) != (i == 300 || i == 7);
    }
    CHECK_EQ(wrong, 0);
}

TEST_CASE("gpu comm ops: compare_sums") {
    for (int64_t n : {1, 3, 4, 1000, 70001, 3000003})
        for (int64_t shift_bytes : {0, 4}) {
            if (left_out(n)) continue;
            OpCase c(strf("compare_sums of %lld", (long long)n), kF, kF, shift_bytes);
            const HostTensor a = random_tensor(kF, n, 1), b = random_tensor(kF, n, 2, 3);
            c.add("a", Kind::kFixed, a);
            c.add("b", Kind::kFixed, b);
            c.add("sums", Kind::kFixed, HostTensor(Dtype::kFp64, 4).fill(5));
            c.add("scratch", Kind::kFixed, HostTensor(Dtype::kFp64, 4 * kPartialSums));
            c.run_same_types(cuda::compare_sums, cpu::compare_sums, [&](auto view) {
                return CompareSumsArgs{.sums = view("sums").template as<double>(), .a = view("a"), .b = view("b"),
                                       .scratch = view("scratch")};
            });
            double sizes[4] = {5, 5, 5, 5};
            for (int64_t i = 0; i < n; i++) {
                const double x = a.get(i), y = b.get(i), terms[4] = {x * x, y * y, x * y, (x - y) * (x - y)};
                for (int k = 0; k < 4; k++) sizes[k] += std::fabs(terms[k]);
            }
            // Both have one rounding per addition; a change of one element by half is far more.
            const double chain = 2 * 0x1p-53 * static_cast<double>(n + 8);
            check_close(c.name(), c.on_gpu("sums"), c.on_cpu("sums"), [&](int64_t k) { return chain * sizes[k]; },
                        1e-5);
        }
}

TEST_CASE("gpu comm ops: quantization in shard ranges gives the result of one quantize") {
    struct Shape {
        int64_t N, C;
    };
    for (const Shape& s : {Shape{16, 16}, {128, 128}, {48, 144}, {144, 48}, {256, 400}, {16, 640}, {640, 16},
                           {272, 1600}, {1040, 528}}) {
        const int64_t elems = s.N * s.C;
        if (left_out(elems)) continue;
        const HostTensor x = uneven_tensor(kF, s.N, s.C, 11);
        check_ranges(x, s.N, s.C, {{0, elems}});
        check_ranges(x, s.N, s.C, random_ranges(elems, 4, 128, 12));
        check_ranges(x, s.N, s.C, random_ranges(elems, 3, 4, 13));
        check_ranges(x, s.N, s.C, random_ranges(elems, 3, 1, 14));
        check_ranges(x, s.N, s.C, random_ranges(elems, 2, 128, 15), false, 4);
        HostTensor odd = x;
        corrupt(odd, 16);
        check_ranges(odd, s.N, s.C, random_ranges(elems, 3, 16, 17), true);
    }
    HostTensor tiny(kF, 256 * 256);
    tiny.fill(0);
    tiny.set(5, 0x1p-149), tiny.set(200, -0x1p-133), tiny.set(40000, 0x1p-126);
    check_ranges(tiny, 256, 256, random_ranges(tiny.elems(), 2, 16, 18));
}

TEST_CASE("gpu comm ops: random matrices, partitions and numbers of ranks") {
    for (uint64_t trial = 0; trial < 30; trial++) {
        const Philox4 random = philox(98, trial);
        const int64_t N = 16 + 16 * (random.word[0] % 24), C = 16 + 16 * (random.word[1] % 24);
        const int64_t aligns[] = {1, 4, 16, 128}, align = aligns[random.word[2] % 4];
        if (left_out(N * C)) continue;
        HostTensor x = uneven_tensor(kF, N, C, trial, 1 + static_cast<int>(random.word[3] % 200));
        if (trial % 3 == 0) corrupt(x, trial);
        check_ranges(x, N, C, random_ranges(N * C, 1 + random.word[3] % 6, align, trial), trial % 3 == 0);
    }
}

// Also matrices of several groups of row tiles, and rows that no block of 128 divides.
TEST_CASE("gpu comm ops: several matrices in one call give what each alone gives on the CPU") {
    for (const auto& [matrices, N, C] : {std::array<int64_t, 3>{2, 16, 16}, {3, 128, 128}, {5, 48, 144}, {4, 144, 48},
                                         {7, 256, 400}, {2, 640, 16}, {3, 1040, 528}, {130, 16, 272}}) {
        if (left_out(matrices * N * C)) continue;
        for (int64_t align : {1, 16, 128}) check_matrices<OnGpu>(matrices, N, C, align);
        check_matrices<OnGpu>(matrices, N, C, 128, 4);
    }
}

TEST_CASE("gpu comm ops: quantize_run of bf16 gives the bits of the same values in fp32") {
    for (const auto& [N, C] : {std::pair<int64_t, int64_t>{16, 16}, {144, 48}, {272, 1600}})
        for (const QuantRequest& request : weight_requests())
            for (int64_t align : {1, 128})
                for (int64_t shift_bytes : {0, 4}) {
                    HostTensor rounded = uneven_tensor(kF, N, C, 11).to(kB);
                    const HostTensor wide = rounded.to(kF);
                    const auto ranges = random_ranges(N * C, 3, align, 12);
                    const QuantMemory want = quantize_shards<OnCpu>(request, wide, N, C, ranges);
                    CHECK_EQ(quantize_shards<OnGpu>(request, wide, N, C, ranges, shift_bytes, rounded).difference(want),
                             "");
                    rounded.set(N * C / 2, -1 - rounded.get(N * C / 2));   // one element, which is seen
                    CHECK_NE(quantize_shards<OnGpu>(request, wide, N, C, ranges, shift_bytes, rounded).difference(want),
                             "");
                }
}

TEST_CASE("gpu comm ops: fp8_scales") {
    const float amaxes[] = {0, 3.5f, 1e-44f, 3e38f, HUGE_VALF, std::nanf(""), 1e-3f};
    HostTensor entries(kBits, 300 * 4);
    for (int64_t i = 0; i < 300; i++)
        object_in<ScaleEntry>(entries.view())[i] = {.scale_inv = -1, .scale = 24.0f + static_cast<float>(i),
                                               .amax_bits = amax_bits_of(amaxes[i % 7]), .step_amax_bits = 9};
    for (Dtype format : {Dtype::kE4m3, Dtype::kE5m2})
        for (Scaling scaling : {Scaling::kDelayed, Scaling::kCurrent})
            for (int skip : {0, 1}) {
                StepState state{};
                state.skip = skip;
                OpCase c("fp8_scales", kF);
                c.add("entries", Kind::kFixed, entries);
                c.add("state", Kind::kFixed, tensor_of(state));
                c.run_same_types(cuda::fp8_scales, cpu::fp8_scales, [&](auto view) {
                    return Fp8ScalesArgs{.entries = object_in<ScaleEntry>(view("entries")), .count = 299,
                                          .scaling = scaling, .format = format,
                                          .state = object_in<const StepState>(view("state"))};
                });
                CHECK(c.on_gpu("entries").same_bits(c.on_cpu("entries")));
                CHECK_EQ(c.on_gpu("entries").same_bits(entries), skip == 1);
            }
}

TEST_CASE("gpu comm ops: more than 2^31 elements") {
    if (left_out(int64_t{1} << 31)) return;
    // Checks the last elements, which a 32-bit index would not reach.
    const int64_t n = (int64_t{1} << 31) + 3 * kGradCommChunk, last = 64 * kGradCommChunk;
    {
        Bulk in(kB, n), codes(kCodes, n), scales(kF, n / kGradCommChunk);
        cuda::fill_normal(gpu(), {in.tensor, 1, 0, 0.0f, 1.0f});
        cuda::quantize_chunks(gpu(), {.out = codes.tensor, .scales = scales.tensor, .in = in.tensor});
        HostTensor x = in.part(n - last, last), want(kCodes, last), want_scales(kF, 64);
        Ctx ctx;
        cpu::quantize_chunks(ctx, {.out = want.view(), .scales = want_scales.view(), .in = x.view()});
        CHECK(codes.part(n - last, last).same_bits(want));
        CHECK(scales.part(n / kGradCommChunk - 64, 64).same_bits(want_scales));
        // Treats the codes as those of 3 ranks.
        const int64_t mine = n / 3 / kGradCommChunk * kGradCommChunk;
        Bulk sum(kF, mine);
        cuda::sum_ranks(gpu(), {.out = sum.tensor, .in = codes.tensor.slice(0, 3 * mine),
                                .scales = scales.tensor.slice(0, 3 * mine / kGradCommChunk), .ranks = 3});
        HostTensor sent(kCodes, 3 * last), sent_scales(kF, 3 * 64), want_sum(kF, last);
        for (int64_t r = 0; r < 3; r++) {
            const int64_t begin = (r + 1) * mine - last;
            put_part(sent, {r * last, last}, codes.part(begin, last));
            put_part(sent_scales, {r * 64, 64}, scales.part(begin / kGradCommChunk, 64));
        }
        cpu::sum_ranks(ctx, {.out = want_sum.view(), .in = sent.view(), .scales = sent_scales.view(), .ranks = 3});
        CHECK(sum.part(mine - last, last).same_bits(want_sum));
    }
    // A range near the end of a matrix of 2^33 elements, with block scales.
    const int64_t R = int64_t{1} << 21, C = 4096, begin = R * C - 300 * C - 16;
    const HostTensor x = random_tensor(kF, 300 * C + 16, 2);
    HostTensor amaxes(kBits, R / 128 * (C / 128));
    amaxes.fill(0);
    OpCase c("quantize_run far into a matrix", kF);
    c.add("in", Kind::kFixed, x);
    c.add("out", Kind::kFixed, HostTensor(kCodes, x.elems()));
    c.add("amaxes", Kind::kFixed, amaxes);
    c.run_same_types(cuda::block_amax, cpu::block_amax, [&](auto view) {
        return BlockAmaxArgs{.amaxes = object_in<uint32_t>(view("amaxes")), .in = view("in"), .begin = begin, .R = R,
                             .C = C};
    });
    CHECK(c.on_gpu("amaxes").same_bits(c.on_cpu("amaxes")));
    CHECK_FALSE(c.on_gpu("amaxes").same_bits(amaxes));
    c.add("amaxes", Kind::kFixed, c.on_cpu("amaxes"));
    c.run_same_types(cuda::quantize_run, cpu::quantize_run, [&](auto view) {
        return QuantizeRunArgs{.out = view("out"), .in = view("in"), .begin = begin, .R = R, .C = C,
                               .block_amaxes = object_in<const uint32_t>(view("amaxes"))};
    });
    CHECK(c.on_gpu("out").same_bits(c.on_cpu("out")));
}

TEST_CASE("gpu comm ops: transposes of more than 2^31 bytes") {
    if (left_out(int64_t{1} << 31)) return;
    const int64_t R = 65536 + 16, C = 32768 + 144;
    Bulk in(kF, R * C / 4), out(kCodes, R * C);   // random numbers as random bytes
    cuda::fill_normal(gpu(), {in.tensor, 3, 0, 0.0f, 1.0f});
    cuda::transpose_bytes(gpu(), {.out = out.tensor, .in = {in.tensor.data, kCodes, R * C}, .R = R, .C = C});
    Ctx ctx;
    int64_t wrong = 0;
    for (int64_t c : {int64_t{0}, C / 2 + 3, C - 1}) {
        const HostTensor row = out.part(c * R, R);
        for (int64_t r = 0; r < R; r += 37) {
            HostTensor word(kF, 1);
            cpu::fill_normal(ctx, {word.view(), 3, (r * C + c) / 4, 0.0f, 1.0f});
            wrong += byte_of(row, r) != byte_of(word, (r * C + c) % 4);
        }
    }
    CHECK_EQ(wrong, 0);
}

}  // namespace comm_ops_test
