// Splitting heads among ranks and joining them on the GPU gives the bits of the CPU.
#include "tests/gpu/gpu_op.h"
#include "tests/support/heads_test.h"

using namespace op_test;

namespace heads_test {

namespace {

// Rows as in models, many rows, and rows that several blocks of threads process.
std::vector<HeadSplit> gpu_splits() {
    std::vector<HeadSplit> splits = head_splits();
    splits.insert(splits.end(), {{1, 131, 8, 32, 8, 128}, {2, 67, 2, 32, 8, 128}, {1, 129, 16, 64, 8, 128},
                                 {3, 100, 4, 12, 12, 64}, {1, 100, 8, 32, 0, 128}, {1, 36, 2, 72, 72, 64}});
    return splits;
}

template <typename Args>
void check_heads(const HeadSplit& s, Dtype type, int64_t shift_bytes, const char* what, int64_t in_elems,
                 int64_t out_elems, void (*on_gpu)(Ctx&, const Args&), void (*on_cpu)(Ctx&, const Args&),
                 Args (HeadSplit::*args)(Tensor, Tensor) const) {
    OpCase c(strf("%s of %s", what, s.name().c_str()), type, Dtype::kFp32, shift_bytes);
    c.random("in", Kind::kWork, in_elems);
    c.poison("out", Kind::kWork, out_elems);
    c.run_same_types(on_gpu, on_cpu, [&](auto view) { return (s.*args)(view("out"), view("in")); });
    c.check_bits("out");
    c.check_unchanged("in");
}

}  // namespace

TEST_CASE("gpu heads: split and joined") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16})
        for (const HeadSplit& s : gpu_splits()) {
            if (left_out(s.own_elems())) continue;
            for (int64_t shift : {int64_t{0}, dtype_bytes(type)}) {   // shifted: one element at a time
                check_heads(s, type, shift, "split_heads", s.all_elems(), s.own_elems(), cuda::split_heads,
                            cpu::split_heads, &HeadSplit::split_args);
                check_heads(s, type, shift, "join_heads", s.own_elems(), s.all_elems(), cuda::join_heads,
                            cpu::join_heads, &HeadSplit::join_args);
            }
        }
}

}  // namespace heads_test
