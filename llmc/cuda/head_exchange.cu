// Copies before and after the all-to-alls of context parallelism, between rows that hold all heads and rows that hold
// the heads of each rank.
#include "llmc/cuda/common.cuh"

namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 4;   // rows that a thread copies at once

// Widths and columns in vectors of kWidth elements.
struct HeadsShape {
    int64_t tokens, T;   // tokens: B * T
    int ranks, share;    // share: ranks that have the same key head
    int q, kv;           // of the rows of a rank: query heads, key heads
    int NH, NKV;         // of the rows of all heads

    __device__ int own_width() const { return q + 2 * kv; }
    __device__ int all_width() const { return NH + 2 * NKV; }
    __device__ int64_t own_row(int64_t n, int rank) const { return (n / T * ranks + rank) * T + n % T; }
    // Where column c of rank's rows is in the rows of all heads.
    __device__ int all_column(int c, int rank) const {
        if (c < q) return rank * q + c;
        const int key = c - q, value = key - kv;
        return value < 0 ? NH + rank / share * kv + key : NH + NKV + rank / share * kv + value;
    }
};

// Math: out[b][r][t] = the heads of rank r in in[b][t].
// Source: Jacobs et al., arXiv 2309.14509.
// Traffic: `in` read once (key heads that several ranks have, from L2 again), out written once.
// Requires: kWidth > 1 needs HS a multiple of it and aligned tensors.
// Parallel: blockIdx.y is a rank; a thread copies a vector of kRows rows.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    split_heads_kernel(T* out, const T* in, const __grid_constant__ HeadsShape shape) {
    using Raw = typename Packed<T, kWidth>::Raw;
    wait_for_previous_kernels();
    const int rank = blockIdx.y, own = shape.own_width();
    const int64_t first = int64_t{blockIdx.x} * blockDim.y * kRows + threadIdx.y;
    for (int c = threadIdx.x; c < own; c += blockDim.x) {
        const Raw* from = reinterpret_cast<const Raw*>(in) + shape.all_column(c, rank);
        Raw value[kRows];
#pragma unroll
        for (int i = 0; i < kRows; i++) {
            const int64_t n = first + i * static_cast<int>(blockDim.y);
            if (n < shape.tokens) value[i] = from[n * shape.all_width()];
        }
#pragma unroll
        for (int i = 0; i < kRows; i++) {
            const int64_t n = first + i * static_cast<int>(blockDim.y);
            if (n < shape.tokens) reinterpret_cast<Raw*>(out)[shape.own_row(n, rank) * own + c] = value[i];
        }
    }
}

// Math: out[b][t] = the heads of in[b][r][t] of all ranks r; a key or value head is the sum, in fp32 and in the order
//       of ranks, over the ranks that have it.
// Source: Jacobs et al., arXiv 2309.14509.
// Traffic: in read, out written, once.
// Requires: kWidth > 1 needs HS a multiple of it and aligned tensors.
// Parallel: as split_heads_kernel; the first rank that has a key head adds it.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    join_heads_kernel(T* out, const T* in, const __grid_constant__ HeadsShape shape) {
    using Vector = Packed<T, kWidth>;
    wait_for_previous_kernels();
    const int rank = blockIdx.y, own = shape.own_width();
    const int64_t first = int64_t{blockIdx.x} * blockDim.y * kRows + threadIdx.y, rank_elems = shape.T * own * kWidth;
    const int columns = rank % shape.share == 0 ? own : shape.q;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        T* to = out + int64_t{shape.all_column(c, rank)} * kWidth;
        Vector value[kRows];
#pragma unroll
        for (int i = 0; i < kRows; i++) {
            const int64_t n = first + i * static_cast<int>(blockDim.y);
            if (n < shape.tokens) value[i].load(in + (shape.own_row(n, rank) * own + c) * kWidth);
        }
        if (shape.share > 1 && c >= shape.q) {
#pragma unroll
            for (int i = 0; i < kRows; i++) {
                const int64_t n = first + i * static_cast<int>(blockDim.y);
                if (n >= shape.tokens) continue;
                float sum[kWidth], more[kWidth];
                value[i].unpack_to(sum);
                for (int s = 1; s < shape.share; s++) {
                    Vector next;
                    next.load(in + (shape.own_row(n, rank) * own + c) * kWidth + s * rank_elems);
                    next.unpack_to(more);
#pragma unroll
                    for (int j = 0; j < kWidth; j++) sum[j] += more[j];
                }
                if constexpr (kWidth == 1) value[i].raw = from_float<T>(sum[0]);
                else value[i].raw = pack<T>(sum);
            }
        }
#pragma unroll
        for (int i = 0; i < kRows; i++) {
            const int64_t n = first + i * static_cast<int>(blockDim.y);
            if (n < shape.tokens)
                *reinterpret_cast<typename Vector::Raw*>(to + n * shape.all_width() * kWidth) = value[i].raw;
        }
    }
}

// `ranked` has the rows of the ranks, `whole` those of all heads.
template <typename Args>
void check_heads(const Args& args, const Tensor& ranked, const Tensor& whole, const char* op) {
    const int64_t ranks = args.ranks, NH = args.NH, NKV = args.NKV;
    CHECK(ranks > 0 && ranks < 65536 && NH % ranks == 0 && (NKV == 0 || NKV % ranks == 0 || ranks % NKV == 0),
          "%s: %lld ranks, %lld query and %lld key heads", op, (long long)ranks, (long long)NH, (long long)NKV);
    const int64_t own = (NH / ranks + 2 * heads_of_rank(NKV, ranks)) * args.HS;
    CHECK((NH + 2 * NKV) * args.HS < int64_t{1} << 31, "%s: rows of %lld heads", op, (long long)(NH + 2 * NKV));
    expect(ranked, whole.dtype, args.B * ranks * args.T * own, op);
    expect(whole, whole.dtype, args.B * args.T * (NH + 2 * NKV) * args.HS, op);
}

// Launches the kernel that kernel_of returns for a type and width.
template <typename Args, typename KernelOf>
void copy_heads(Ctx& ctx, const Args& args, const Tensor& ranked, const Tensor& whole, const char* op,
                KernelOf&& kernel_of) {
    check_heads(args, ranked, whole, op);
    dispatch(whole.dtype, op, [&](auto type) {
        using T = decltype(type);
        with_width<T>(vectorizable<T>(args.HS, {args.in.data, args.out.data}), [&](auto width) {
            const auto vectors = [&](int64_t heads) { return static_cast<int>(heads * args.HS / width.value); };
            const HeadsShape shape{.tokens = args.B * args.T, .T = args.T, .ranks = static_cast<int>(args.ranks),
                                   .share = static_cast<int>(args.NKV > 0 && args.ranks > args.NKV
                                                                 ? args.ranks / args.NKV : 1),
                                   .q = vectors(args.NH / args.ranks),
                                   .kv = vectors(heads_of_rank(args.NKV, args.ranks)),
                                   .NH = vectors(args.NH), .NKV = vectors(args.NKV)};
            const unsigned columns = static_cast<unsigned>(shape.q + 2 * shape.kv);
            // Columns in as few rounds as possible, of equal size.
            const unsigned rounds = (columns + kThreads - 1) / kThreads, x = (columns + rounds - 1) / rounds;
            const dim3 block(x, kThreads / x);
            const dim3 grid(grid_size(ceil_div(shape.tokens, int64_t{block.y} * kRows)),
                            static_cast<unsigned>(shape.ranks));
            launch_early(ctx, kernel_of(type, width), grid, block, 0, args.out.template as<T>(),
                         args.in.template as<T>(), shape);
        });
    });
}

}  // namespace

void split_heads(Ctx& ctx, const SplitHeadsArgs& args) {
    copy_heads(ctx, args, args.out, args.in, "split_heads", [](auto type, auto width) {
        return split_heads_kernel<decltype(type), decltype(width)::value>;
    });
}

void join_heads(Ctx& ctx, const JoinHeadsArgs& args) {
    copy_heads(ctx, args, args.in, args.out, "join_heads", [](auto type, auto width) {
        return join_heads_kernel<decltype(type), decltype(width)::value>;
    });
}

}  // namespace cuda
