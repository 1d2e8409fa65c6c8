// Splitting heads among ranks and joining them on the CPU, compared with loops.
#include "tests/support/heads_test.h"

using namespace op_test;

namespace heads_test {

namespace {

constexpr Dtype kTypes[] = {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64};

}  // namespace

TEST_CASE("heads: each rank gets its query heads and the key heads that they read") {
    Ctx ctx;
    for (Dtype type : kTypes)
        for (const HeadSplit& s : head_splits()) {
            INFO(s.name() << " " << std::string(dtype_name(type)));
            HostTensor in = random_tensor(type, s.all_elems(), 3), out(type, s.own_elems());
            cpu::split_heads(ctx, s.split_args(out.view(), in.view()));
            CHECK(out.same_bits(s.split(in)));
        }
}

TEST_CASE("heads: joined gradients are sums over the ranks of a key head, in their order") {
    Ctx ctx;
    for (Dtype type : kTypes)
        for (const HeadSplit& s : head_splits()) {
            INFO(s.name() << " " << std::string(dtype_name(type)));
            HostTensor in = random_tensor(type, s.own_elems(), 4), out(type, s.all_elems());
            cpu::join_heads(ctx, s.join_args(out.view(), in.view()));
            CHECK(out.same_bits(s.join(in)));
        }
}

TEST_CASE("heads: a key head's gradients are added in FP32 and rounded once") {
    Ctx ctx;
    const HeadSplit s{1, 1, 4, 4, 1, 2};
    HostTensor in(Dtype::kBf16, s.own_elems()), out(Dtype::kBf16, s.all_elems());
    in.fill(0);
    // The value head of rank r: columns 4 and 5 of its row of 6. 1 + 3 x 2^-9 rounds to 1 + 2^-7, and would be 1 if
    // every sum were rounded to BF16.
    for (int64_t r = 0; r < 4; r++) in.set(r * 6 + 4, r == 0 ? 1 : 0x1p-9);
    cpu::join_heads(ctx, s.join_args(out.view(), in.view()));
    CHECK(out.get(10) == 1 + 0x1p-7);
}

TEST_CASE("heads: numbers that do not fit are refused") {
    Ctx ctx;
    HostTensor in(Dtype::kFp32, 1 << 12), out(Dtype::kFp32, 1 << 12);
    for (const HeadSplit& s : {HeadSplit{1, 2, 3, 4, 4, 8}, HeadSplit{1, 2, 4, 12, 6, 8}}) {
        CHECK_THROWS_AS(cpu::split_heads(ctx, s.split_args(out.view(), in.view())), Error);
        CHECK_THROWS_AS(cpu::join_heads(ctx, s.join_args(out.view(), in.view())), Error);
    }
}

}  // namespace heads_test
