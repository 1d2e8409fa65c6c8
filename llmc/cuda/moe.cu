// Mixtures of experts: permutation of rows.
#include "llmc/cuda/common.cuh"

namespace cuda {
namespace {

constexpr int kLanes = 32, kWarps = 8, kThreads = kLanes * kWarps;

// The row of a warp, of blocks of kWarps warps.
__device__ inline int64_t warp_row() { return int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes; }
unsigned warp_grid(int64_t rows) { return grid_size(ceil_div(rows, kWarps)); }

// ---- rows of experts; a warp per row, kWidth elements per access

constexpr int kGatherLoads = 4;   // that a lane has in flight

// The `blocks` scales of rows in FP8: one of each row, then the next.
struct GatheredScales {
    float* out;
    const float* in;
    int blocks;
    int64_t parts;
};

// Math: see GatherRowsArgs.
// Source: none.
// Traffic: in read, out written, once.
// Requires: kWidth > 1 needs aligned rows; K <= 32.
// Parallel: a warp per kGatherLoads loads of a row of in.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(T* out, const T* in, const int32_t* slot_rows, int64_t R, int64_t N, int K, int64_t C,
                       GatheredScales scales) {
    constexpr int kStep = kLanes * kWidth;
    wait_for_previous_kernels();
    const int64_t parts = (C + kGatherLoads * kStep - 1) / (kGatherLoads * kStep), n = warp_row() / parts;
    const int lane = threadIdx.x % kLanes;
    // int: with a remainder of 64 bits nvcc 13.0 stores the 16 bytes of the first part as four words.
    const int64_t begin = static_cast<int>(warp_row() % parts) * kGatherLoads * kStep, first = begin + lane * kWidth;
    if (n >= N) return;
    const int64_t of_part = N / scales.parts;
    const int32_t mine = lane < K ? slot_rows[n * K + lane] : 0;
    in += n * C;
    Packed<T, kWidth> part[kGatherLoads];
#pragma unroll
    for (int p = 0; p < kGatherLoads; p++)
        if (first + p * kStep < C) part[p].load(in + first + p * kStep);
    for (int k = 0; k < K; k++) {
        const int64_t row = __shfl_sync(0xffffffffu, mine, k);
        if (row < 0) continue;
        T* const to = out + row * C + first;
#pragma unroll
        for (int p = 0; p < kGatherLoads; p++)
            if (first + p * kStep < C)
                *reinterpret_cast<typename Packed<T, kWidth>::Raw*>(to + p * kStep) = part[p].raw;
        for (int b = lane; begin == 0 && b < scales.blocks; b += kLanes)
            scales.out[b * R + row] = scales.in[(n / of_part * scales.blocks + b) * of_part + n % of_part];
    }
}

// kWidth elements of a row as they are in memory, read once.
template <typename T, int kWidth> class RowPart {
public:
    __device__ void load(const T* p) {
#pragma unroll
        for (int i = 0; i < kPieces; i++) {
            if constexpr (kPiece == kVec<T>) piece_[i].raw = load_vec_streaming(p + i * kPiece);
            else piece_[i].load(p + i * kPiece);
        }
    }
    __device__ void add_to(float (&sum)[kWidth]) const {
#pragma unroll
        for (int i = 0; i < kPieces; i++) {
            float value[kPiece];
            piece_[i].unpack_to(value);
#pragma unroll
            for (int j = 0; j < kPiece; j++) sum[i * kPiece + j] += value[j];
        }
    }

private:
    static constexpr int kPiece = std::min(kWidth, kVec<T>), kPieces = kWidth / kPiece;
    Packed<T, kPiece> piece_[kPieces];
};

// A row to be added to its token's sum: its first element, and how many levels of the tree are closed before.
struct CombinedRow {
    int64_t begin;
    int32_t closes;
};
// Writes the rows that the warp's token n has, in order, and returns their number; ends with a barrier of the warp.
__device__ inline int list_rows(CombinedRow* rows, const int32_t* slot_rows, const int32_t* experts, int64_t n,
                                int64_t N, int K, int64_t C, int of_group) {
    const int lane = threadIdx.x % kLanes;
    int32_t row = -1, group = 0;
    if (lane < K) row = experts ? slot_rows[n * K + lane] : static_cast<int32_t>(lane * N + n);
    if (lane < K) group = (experts ? experts[n * K + lane] : lane) / of_group;
    const uint32_t present = __ballot_sync(0xffffffffu, row >= 0), lower = present & ((1u << lane) - 1);
    const int32_t before = __shfl_sync(0xffffffffu, group, lower ? 31 - __clz(static_cast<int>(lower)) : lane);
    if (row >= 0) rows[__popc(lower)] = {row * C, 32 - __clz(group ^ before)};
    __syncwarp();
    return __popc(present);
}

constexpr int kCombineThreads = 128, kCombineLevels = 3;
static_assert(1 << kCombineLevels == kCombineGroups);

// Math: see CombineRowsArgs.
// Source: none.
// Traffic: in read, out (read and) written, once.
// Requires: as gather_rows_kernel; K <= 32.
// Parallel: a warp per row of out; a lane has loads of kAtOnce rows in flight. sums[l] is that of the rows so far that
//           share a node of level l of the tree with the latest one; a child is added to its parent once its last row
//           is in it.
template <typename Out, typename In, int kWidth>
__global__ void __launch_bounds__(kCombineThreads, 5)
    combine_rows_kernel(Out* out, const In* in, const int32_t* slot_rows, const int32_t* experts, int64_t N, int K,
                        int64_t C, int of_group, bool accumulate) {
    constexpr int kAtOnce = kWidth > kVec<In> ? 4 : 8;
    __shared__ CombinedRow all_rows[kCombineThreads / kLanes][kLanes];
    wait_for_previous_kernels();
    const int64_t n = int64_t{blockIdx.x} * (kCombineThreads / kLanes) + threadIdx.x / kLanes;
    if (n >= N) return;
    CombinedRow* const rows = all_rows[threadIdx.x / kLanes];
    const int count = list_rows(rows, slot_rows, experts, n, N, K, C, of_group);
    out += n * C;
    for (int64_t c = threadIdx.x % kLanes * kWidth; c < C; c += kLanes * kWidth) {
        float sums[kCombineLevels + 1][kWidth] = {};
        const auto close = [&](int levels) {
#pragma unroll
            for (int l = 0; l < kCombineLevels; l++) {
                if (l >= levels) break;
#pragma unroll
                for (int i = 0; i < kWidth; i++) sums[l + 1][i] += sums[l][i], sums[l][i] = 0.0f;
            }
        };
        RowPart<Out, kWidth> before;
        if (accumulate) before.load(out + c);
        for (int k = 0; k < count; k += kAtOnce) {
            RowPart<In, kWidth> parts[kAtOnce];
            const auto load = [&](int rows_left) {
#pragma unroll
                for (int j = 0; j < kAtOnce; j++) {
                    if (j >= rows_left) break;
                    parts[j].load(in + rows[k + j].begin + c);
                }
            };
            if (k + kAtOnce <= count) load(kAtOnce);   // without branches between the loads
            else load(count - k);
#pragma unroll
            for (int j = 0; j < kAtOnce; j++) {
                if (k + j >= count) break;
                close(rows[k + j].closes);
                parts[j].add_to(sums[0]);
            }
        }
        close(kCombineLevels);
        if (accumulate) before.add_to(sums[kCombineLevels]);
        store_floats<Out, kWidth>(out + c, sums[kCombineLevels]);
    }
}

}  // namespace

void gather_rows(Ctx& ctx, const GatherRowsArgs& args) {
    const int64_t R = args.out.elems / args.C;
    expect(args.slot_rows, Dtype::kInt32, args.N * args.K, "gather_rows: slot_rows");
    expect(args.in, args.in.dtype, args.N * args.C, "gather_rows: in");
    expect(args.out, args.in.dtype, R * args.C, "gather_rows: out");
    const bool fp8 = is_fp8(args.in.dtype);   // two codes are copied as a bf16
    const int64_t C = fp8 ? args.C / 2 : args.C, blocks = fp8 ? scale_blocks(args.C) : 0;
    CHECK(!fp8 || (args.C % 16 == 0 && args.in_scale_inv.elems == blocks * args.N
                   && args.out_scale_inv.elems == blocks * R), "gather_rows: FP8 rows of %lld", ll(args.C));
    CHECK(args.K <= kLanes, "gather_rows: %lld experts of a token", ll(args.K));
    const GatheredScales scales{args.out_scale_inv.as<float>(), args.in_scale_inv.as<float>(),
                                static_cast<int>(blocks), args.parts};
    dispatch(fp8 ? Dtype::kBf16 : args.in.dtype, "gather_rows", [&](auto type) {
        using T = decltype(type);
        with_width<T>(vectorizable<T>(C, {args.out.data, args.in.data}), [&](auto width) {
            const int64_t parts = ceil_div(C, int64_t{kGatherLoads * kLanes * width});
            launch_early(ctx, gather_rows_kernel<T, width>, warp_grid(args.N * parts), kThreads, 0,
                         static_cast<T*>(args.out.data), static_cast<const T*>(args.in.data),
                         args.slot_rows.as<int32_t>(), R, args.N, args.K, C, scales);
        });
    });
}

void combine_rows(Ctx& ctx, const CombineRowsArgs& args) {
    for (const Tensor& t : {args.slot_rows, args.experts})
        if (args.experts) expect(t, Dtype::kInt32, args.N * args.K, "combine_rows: slots");
    expect(args.in, args.in.dtype, args.in.elems, "combine_rows: in");
    expect(args.out, args.out.dtype, args.N * args.C, "combine_rows: out");
    CHECK(args.K <= kLanes && (args.experts || (args.E == args.K && args.in.elems == args.N * args.K * args.C)),
          "combine_rows: %lld experts of a token", ll(args.K));
    const auto* const experts = args.experts ? args.experts.as<int32_t>() : nullptr;
    const auto run = [&](auto out_type, auto in_type) {
        using Out = decltype(out_type);
        using In = decltype(in_type);
        const bool vectors = vectorizable<Out>(args.C, {args.out.data}) && vectorizable<In>(args.C, {args.in.data});
        using Wide = std::conditional_t<sizeof(Out) < sizeof(In), Out, In>;
        with_width<Wide>(vectors, [&](auto width) {
            launch_early(ctx, combine_rows_kernel<Out, In, width>,
                         grid_size(ceil_div(args.N, kCombineThreads / kLanes)), kCombineThreads, 0, args.out.as<Out>(),
                         args.in.as<In>(), experts ? args.slot_rows.as<int32_t>() : nullptr, experts, args.N, args.K,
                         args.C, experts_of_group(args.E), args.accumulate);
        });
    };
    dispatch(args.in.dtype, "combine_rows", [&](auto in) {
        dispatch(args.out.dtype, "combine_rows", [&](auto out) { run(out, in); });
    });
}

}  // namespace cuda
