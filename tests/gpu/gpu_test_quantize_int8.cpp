// The operations of INT8 matrices on the GPU: bitwise equal to the CPU's.
#include "tests/gpu/gpu_op.h"
#include "tests/support/int8_test.h"

using namespace op_test;

namespace int8_test {

namespace {

constexpr Dtype kB = Dtype::kBf16, kF = Dtype::kFp32;

// The shapes of the CPU's tests, several groups per thread of a block, all numbers of groups per lane, and the widest
// row; also rows for more than one iteration of every block.
std::vector<Shape> gpu_shapes() {
    std::vector<Shape> all = shapes();
    for (Shape shape : {Shape{9, 512}, {300, 768}, {11, 1024}, {13, 2048}, {10, 2112}, {12, 4096}, {9, 8192},
                        {10, 16384}, {9, 16448}, {9, 28672}, {9, 32768}, {20000, 64}, {3000, 2176}})
        all.push_back(shape);
    return all;
}

void check_quantize(const HostTensor& x, Shape shape, int skip = 0) {
    StepState state{};
    state.skip = skip;
    OpCase c(strf("quantize_int8 of %lld x %lld%s", ll(shape.N), ll(shape.C), skip ? ", skipped" : ""), x.dtype());
    c.add("in", Kind::kFixed, x);
    c.add("state", Kind::kFixed, tensor_of(state));
    c.add("out", Kind::kFixed, HostTensor(Dtype::kInt8, x.elems()));
    c.add("scale_inv", Kind::kFixed, HostTensor(kF, shape.N));
    c.run_same_types(cuda::quantize_int8, cpu::quantize_int8, [&](auto view) {
        return QuantizeInt8Args{.out = view("out"), .scale_inv = view("scale_inv"), .in = view("in"), .N = shape.N,
                                .C = shape.C, .state = object_in<const StepState>(view("state"))};
    });
    c.check_bits("out");
    c.check_bits("scale_inv");
    c.check_unchanged("in");
    if (skip) c.check_unchanged("out");
}

}  // namespace

TEST_CASE("gpu int8: quantize_int8") {
    for (Shape shape : gpu_shapes())
        for (Dtype dtype : {kF, kB}) {
            if (left_out(shape.N * shape.C)) continue;
            check_quantize(rows_of(dtype, shape, 1), shape);
            if (shape.N == 129) check_quantize(rows_of(dtype, shape, 2), shape, 1);
        }
}

TEST_CASE("gpu int8: quantize_int8 of every bf16 number") {
    HostTensor all(kB, 65536);   // rows of one exponent, or of many
    for (int64_t stride : {1, 40503})
        for (Shape shape : {Shape{1024, 64}, {16, 4096}}) {
            for (int64_t i = 0; i < 65536; i++)
                all.as<bf16>()[i] = bf16::from_bits(static_cast<uint16_t>(i * stride));
            check_quantize(all, shape);
        }
}

TEST_CASE("gpu int8: row_amax, quantize_int8_run and row_scales of shard ranges") {
    for (Shape shape : {Shape{1, 64}, {3, 192}, {129, 576}, {9, 14336}, {700, 64}, {40, 4096}})
        for (Dtype dtype : {kF, kB})
            for (ShardRange range : random_ranges(shape.N * shape.C, 3, 64, static_cast<uint64_t>(shape.C))) {
                if (range.elems == 0 || left_out(shape.N * shape.C)) continue;
                const std::string where = strf(" of %lld x %lld from %lld", ll(shape.N), ll(shape.C), ll(range.begin));
                const HostTensor x = part_of(rows_of(dtype, shape, 3), range);
                HostTensor amaxes(Dtype::kInt32, shape.N);
                for (int64_t r = 0; r < shape.N; r++)   // some that are larger than those of the range
                    amaxes.set(r, r % 5 == 4 ? std::bit_cast<int32_t>(1e4f) : 0);
                OpCase a("row_amax" + where, dtype);
                a.add("in", Kind::kFixed, x);
                a.add("amaxes", Kind::kFixed, amaxes);
                a.run_same_types(cuda::row_amax, cpu::row_amax, [&](auto view) {
                    return RowAmaxArgs{.amaxes = object_in<uint32_t>(view("amaxes")), .in = view("in"),
                                       .begin = range.begin, .R = shape.N, .C = shape.C};
                });
                a.check_bits("amaxes");
                OpCase c("quantize_int8_run" + where, dtype);
                c.add("in", Kind::kFixed, x);
                c.add("amaxes", Kind::kFixed, a.on_cpu("amaxes"));
                c.add("out", Kind::kFixed, HostTensor(Dtype::kInt8, x.elems()));
                c.run_same_types(cuda::quantize_int8_run, cpu::quantize_int8_run, [&](auto view) {
                    return QuantizeInt8RunArgs{.out = view("out"), .in = view("in"),
                                               .amaxes = object_in<const uint32_t>(view("amaxes")),
                                               .begin = range.begin, .R = shape.N, .C = shape.C};
                });
                c.check_bits("out");
                OpCase s("row_scales" + where, kF);
                s.add("amaxes", Kind::kFixed, a.on_cpu("amaxes"));
                s.add("scale_inv", Kind::kFixed, HostTensor(kF, shape.N));
                s.run_same_types(cuda::row_scales, cpu::row_scales, [&](auto view) {
                    return RowScalesArgs{.scale_inv = view("scale_inv"),
                                         .amaxes = object_in<const uint32_t>(view("amaxes")), .R = shape.N};
                });
                s.check_bits("scale_inv");
            }
}

TEST_CASE("gpu int8: transpose_int8") {
    for (Shape shape : {Shape{16, 64}, {48, 192}, {144, 576}, {1040, 128}, {256, 4096}, {2080, 14336}})
        for (Dtype format : {Dtype::kE4m3, Dtype::kE5m2})
            for (bool counted : {false, true}) {
                const int64_t R = shape.N, C = shape.C;
                if (left_out(R * C)) continue;
                const Int8Matrix q = quantized_int8(rows_of(kB, shape, 4), shape);
                const ScaleEntry entry{.scale_inv = 9, .scale = format == Dtype::kE4m3 ? 0.01f : 2.0f, .amax_bits = 5,
                                       .step_amax_bits = 6};
                OpCase c(strf("transpose_int8 of %lld x %lld to %s%s", ll(R), ll(C), dtype_name(format),
                              counted ? ", counted" : ""), kB);
                c.add("in", Kind::kFixed, q.codes);
                c.add("scale_inv", Kind::kFixed, q.scale_inv);
                c.add("entry", Kind::kFixed, tensor_of(entry));
                c.add("counts", Kind::kFixed, HostTensor(Dtype::kInt32, 8).fill(3));
                c.add("out", Kind::kFixed, HostTensor(format, R * C));
                c.run_same_types(cuda::transpose_int8, cpu::transpose_int8, [&](auto view) {
                    return TransposeInt8Args{.out = view("out"), .in = view("in"), .scale_inv = view("scale_inv"),
                                             .entry = object_in<ScaleEntry>(view("entry")), .R = R, .C = C,
                                             .counts = counted ? object_in<Fp8Counts>(view("counts")) : nullptr};
                });
                for (const char* name : {"out", "entry", "counts"}) c.check_bits(name);
            }
}

TEST_CASE("gpu int8: transpose_int8 of codes whose sums are the largest") {
    const Shape shape{64, 64};
    Int8Matrix q(shape.N, shape.C);
    for (int64_t i = 0; i < shape.N * shape.C; i++) {
        const bool odd = std::popcount(static_cast<uint64_t>(i / 64 & i % 64)) % 2;
        static_cast<int8_t*>(q.codes.data())[i] = odd ? -127 : 127;
    }
    q.scale_inv.fill(1);
    OpCase c("transpose_int8 of rows of the matrix of Hadamard", kB);
    c.add("in", Kind::kFixed, q.codes);
    c.add("scale_inv", Kind::kFixed, q.scale_inv);
    c.add("entry", Kind::kFixed, tensor_of(ScaleEntry{.scale_inv = 9, .scale = 0.25f, .amax_bits = 0,
                                                      .step_amax_bits = 0}));
    c.add("out", Kind::kFixed, HostTensor(Dtype::kE4m3, shape.N * shape.C));
    c.run_same_types(cuda::transpose_int8, cpu::transpose_int8, [&](auto view) {
        return TransposeInt8Args{.out = view("out"), .in = view("in"), .scale_inv = view("scale_inv"),
                                 .entry = object_in<ScaleEntry>(view("entry")), .R = shape.N, .C = shape.C};
    });
    c.check_bits("out");
    for (int64_t i = 0; i < 64 * 64; i++)   // 127 * 64 / 8 / 4 = 254, which becomes 256
        CHECK_EQ(from_fp8(Dtype::kE4m3, byte_of(c.on_gpu("out"), i)), i % 64 == i / 64 ? 256.0f : 0.0f);
}

}  // namespace int8_test
