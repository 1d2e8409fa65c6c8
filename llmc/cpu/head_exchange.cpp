// Copies of heads before and after the all-to-alls of context parallelism. CPU.
#include "llmc/cpu/common.h"

namespace cpu {
namespace {

// A range of columns of a rank's rows and where it is in the rows of all heads.
struct Range {
    int64_t own, all, count;
};

template <typename Args> struct Shape {
    const Args& args;
    const int64_t kv = heads_of_rank(args.NKV, args.ranks);
    const int64_t share = args.NKV == 0 ? 1 : std::max<int64_t>(1, args.ranks / args.NKV);   // ranks per key head
    const int64_t q_width = args.NH / args.ranks * args.HS, kv_width = kv * args.HS;
    const int64_t own_width = q_width + 2 * kv_width, all_width = (args.NH + 2 * args.NKV) * args.HS;

    int64_t own_row(int64_t b, int64_t rank, int64_t t) const {
        return ((b * args.ranks + rank) * args.T + t) * own_width;
    }
    Range queries(int64_t rank) const { return {0, rank * q_width, q_width}; }
    // which: 0 keys, 1 values.
    Range keys(int64_t rank, int64_t which) const {
        return {q_width + which * kv_width, (args.NH + which * args.NKV) * args.HS + rank / share * kv_width, kv_width};
    }

    void check(const char* op, const Tensor& own, const Tensor& all) const {
        const int64_t ranks = args.ranks, NH = args.NH, NKV = args.NKV;
        CHECK(ranks > 0 && NH % ranks == 0 && (NKV == 0 || NKV % ranks == 0 || ranks % NKV == 0),
              "%s: %lld ranks, %lld query and %lld key heads", op, (long long)ranks, (long long)NH, (long long)NKV);
        CHECK(own.dtype == all.dtype && own.elems == args.B * ranks * args.T * own_width
                  && all.elems == args.B * args.T * all_width,
              "%s: %lld %s elements of ranks, %lld %s of all heads", op, (long long)own.elems, dtype_name(own.dtype),
              (long long)all.elems, dtype_name(all.dtype));
    }
};
template <typename Args> Shape(const Args&) -> Shape<Args>;

}  // namespace

void split_heads(Ctx&, const SplitHeadsArgs& args) {
    const Shape shape{args};
    shape.check("split_heads", args.out, args.in);
    for_working_type("split_heads", args.in.dtype, [&]<typename T>(Tag<T>) {
        parallel_for(args.B * args.T, args.in.elems, [&](int64_t n) {
            const T* in = args.in.as<T>() + n * shape.all_width;
            for (int64_t r = 0; r < args.ranks; r++) {
                T* out = args.out.as<T>() + shape.own_row(n / args.T, r, n % args.T);
                for (const Range& range : {shape.queries(r), shape.keys(r, 0), shape.keys(r, 1)})
                    std::copy_n(in + range.all, range.count, out + range.own);
            }
        });
    });
}

void join_heads(Ctx&, const JoinHeadsArgs& args) {
    const Shape shape{args};
    shape.check("join_heads", args.in, args.out);
    for_working_type("join_heads", args.in.dtype, [&]<typename T>(Tag<T>) {
        parallel_for(args.B * args.T, args.out.elems, [&](int64_t n) {
            T* out = args.out.as<T>() + n * shape.all_width;
            const auto row = [&](int64_t r) { return args.in.as<T>() + shape.own_row(n / args.T, r, n % args.T); };
            for (int64_t r = 0; r < args.ranks; r++) {
                const Range q = shape.queries(r);
                std::copy_n(row(r) + q.own, q.count, out + q.all);
                if (r % shape.share != 0) continue;
                for (const Range& range : {shape.keys(r, 0), shape.keys(r, 1)})
                    for (int64_t i = 0; i < range.count; i++) {
                        Acc<T> sum = widen(row(r)[range.own + i]);
                        for (int64_t s = 1; s < shape.share; s++) sum += widen(row(r + s)[range.own + i]);
                        out[range.all + i] = T(sum);
                    }
            }
        });
    });
}

}  // namespace cpu
