// Generation on the GPU against the CPU: attention over a cache, the cache, and positions of rows.
#include "tests/gpu/gpu_op.h"
#include "tests/support/decode_test.h"

using namespace op_test;

namespace decode_test {

namespace {

// Many splits, groups larger than a block's heads, head dims of models.
std::vector<DecodeShape> gpu_shapes() {
    std::vector<DecodeShape> shapes = decode_shapes();
    shapes.insert(shapes.end(), {{32, 8, 128, 4200, {4100, 1, 2049}},
                                 {28, 4, 128, 300, {299, 7, 0, 128, 129, 31, 32, 33, 200, 1, 2, 3, 4, 5, 6, 0}},
                                 {71, 1, 64, 600, {513, 600}},
                                 {12, 12, 80, 1030, {1025, 30}},
                                 {8, 2, 64, 1030, {1025, 300, 256, 0, 17}, 256},
                                 {8, 2, 128, 1030, {1024, 301, 255}, 45}});
    return shapes;
}

void check_decode(const DecodeShape& shape, Dtype type, double magnitude) {
    const DecodeCase c(shape, type, magnitude);
    DeviceTensor cache(c.cache), qkv(c.qkv), slots(c.slots), positions(c.positions),
        out(HostTensor(type, c.N * shape.NH * shape.HS)), splits(HostTensor(Dtype::kFp32, c.split_elems()));
    const KvCache at = c.cache_args(cache.view(), slots.view(), positions.view());
    cuda::cache_append(gpu(), c.append_args(at, qkv.view()));
    const HostTensor appended = cache.download();
    cuda::attention_decode(gpu(), c.decode_args(at, qkv.view(), out.view(), splits.view()));
    check_against_loops(c, out.download());
    splits.download();   // checks its guards
    CHECK(cache.download().same_bits(appended));
    CHECK(qkv.download().same_bits(c.qkv));
}

}  // namespace

TEST_CASE("gpu attention over a cache") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16})
        for (const DecodeShape& shape : gpu_shapes())
            for (double magnitude : {1.0, 6.0}) check_decode(shape, type, magnitude);
}

TEST_CASE("gpu attention over a cache: the bits of a row do not depend on other rows") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16}) {
        for (const DecodeShape& shape : gpu_shapes()) {
            const DecodeCase all(shape, type);
            const int64_t row = (shape.NH + 2 * shape.NKV) * shape.HS, out_row = shape.NH * shape.HS;
            auto decode = [&](const DecodeCase& c, const HostTensor& rows) {
                DeviceTensor cache(c.cache), qkv(rows), slots(c.slots), positions(c.positions),
                    out(HostTensor(type, c.N * out_row)), splits(HostTensor(Dtype::kFp32, c.split_elems()));
                const KvCache at = c.cache_args(cache.view(), slots.view(), positions.view());
                cuda::cache_append(gpu(), c.append_args(at, qkv.view()));
                cuda::attention_decode(gpu(), c.decode_args(at, qkv.view(), out.view(), splits.view()));
                return out.download();
            };
            const HostTensor together = decode(all, all.qkv);
            for (int64_t n = 0; n < all.N; n++) {
                if (shape.lengths[static_cast<size_t>(n)] == 0) continue;
                DecodeCase one(all);
                one.s.lengths = {shape.lengths[static_cast<size_t>(n)]};
                one.N = 1;
                one.slots = one.positions = HostTensor(Dtype::kInt32, 1);
                one.slots.set(0, static_cast<double>(all.slot(n)));
                one.positions.set(0, all.positions.get(n));
                HostTensor qkv(type, row);
                for (int64_t i = 0; i < row; i++) qkv.set(i, all.qkv.get(n * row + i));
                const HostTensor alone = decode(one, qkv);
                int64_t differ = 0;
                for (int64_t i = 0; i < out_row; i++) differ += alone.get(i) != together.get(n * out_row + i);
                INFO(all.name() << " row " << n);
                CHECK_EQ(differ, 0);
            }
        }
    }
}

TEST_CASE("gpu cache of keys and values") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16}) {
        for (const DecodeShape& shape : gpu_shapes()) {
            for (int64_t shift_bytes : {0, 4}) {   // of qkv: the scalar path
                const DecodeCase c(shape, type);
                DeviceTensor cache(c.cache), qkv(c.qkv, shift_bytes), slots(c.slots), positions(c.positions);
                cuda::cache_append(gpu(), c.append_args(c.cache_args(cache.view(), slots.view(), positions.view()),
                                                        qkv.view()));
                HostTensor expected = c.cache, same_slots = c.slots, same_positions = c.positions, rows = c.qkv;
                Ctx ctx;
                cpu::cache_append(ctx, c.append_args(c.cache_args(expected.view(), same_slots.view(),
                                                                  same_positions.view()), rows.view()));
                INFO(c.name());
                CHECK(cache.download().same_bits(expected));
            }
        }
    }
}

TEST_CASE("gpu rope and embedding at given positions") {
    constexpr int64_t N = 37, T = 100, V = 61;
    HostTensor positions(Dtype::kInt32, N), tokens(Dtype::kInt32, N);
    for (int64_t n = 0; n < N; n++) {
        positions.set(n, n % 5 == 4 ? -1.0 : static_cast<double>(n * 29 % T));
        tokens.set(n, static_cast<double>(n * 17 % V));
    }
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16}) {
        for (int64_t HS : {6, 64, 80, 128}) {
            for (int64_t shift_bytes : {0, 4}) {
                constexpr int64_t NH = 3, NKV = 2;
                OpCase rope("rope_forward at positions", type, Dtype::kFp32, shift_bytes);
                rope.random("qkv", Kind::kWork, N * (NH + 2 * NKV) * HS);
                rope.random("angles", Kind::kStat, T * HS);
                rope.add("positions", Kind::kFixed, positions);
                rope.run(cuda::rope_forward, cpu::rope_forward, [&](auto view) {
                    return RopeArgs{.qkv = view("qkv"), .cos_sin = view("angles"), .N = N, .T = 1, .NH = NH,
                                    .NKV = NKV, .HS = HS, .positions = view("positions").template as<int32_t>()};
                });
                rope.check("qkv");
                OpCase embedding("embedding_forward at positions", type, Dtype::kFp32, shift_bytes);
                embedding.random("wte", Kind::kWork, V * HS);
                embedding.random("wpe", Kind::kWork, T * HS);
                embedding.poison("out", Kind::kWork, N * HS);
                embedding.add("positions", Kind::kFixed, positions);
                embedding.add("tokens", Kind::kFixed, tokens);
                embedding.add("bad", Kind::kFixed, HostTensor(Dtype::kInt32, 1).fill(0));
                embedding.run(cuda::embedding_forward, cpu::embedding_forward, [&](auto view) {
                    return EmbeddingForwardArgs{.out = view("out"), .wte = view("wte"), .wpe = view("wpe"),
                                                .tokens = view("tokens").template as<int32_t>(),
                                                .bad_tokens = view("bad").template as<int32_t>(), .N = N, .T = 1,
                                                .C = HS, .V = V,
                                                .positions = view("positions").template as<int32_t>()};
                });
                embedding.check_bits("out");
            }
        }
    }
}

}  // namespace decode_test
