// Rotary position embedding, in place on the packed projections, or from them into FP8 outputs. In the backward, query
// heads may come from the sums of dQ that attention has left.
#include "llmc/cuda/attention_sums.cuh"
#include "llmc/cuda/quantize_rows.cuh"
#include "llmc/cuda/rope.cuh"

namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 2;   // heads that a thread rotates by the same angles
constexpr int kHeadsAtOnce = 2;   // the same with FP8 outputs

// Math: (x, y) -> (x cos - y sin, y cos + x sin) for the pairs (i, i + HS/2) of every query and key head;
// direction -1 rotates back.
// Source: Su et al., arXiv 2104.09864, in the rotate-half pairing.
// Traffic: query and key heads read and written once; the table (fp32, shared by all heads) mostly from L1; value heads
// read to record the amax.
// Requires: kWidth > 1 needs HS/2 a multiple of it and 16-byte alignment.
// Parallel: threads with the same z own a row; a thread kWidth pairs of kHeads heads. kRecord: `heads` includes the
// value heads for the amax, and only rotated_heads of them are rotated.
template <typename T, int kWidth, bool kRecord>
__global__ void __launch_bounds__(kThreads, kWidth == 8 ? 4 : 1)
    rope_kernel(T* qkv, const float* cos_sin, const int32_t* positions, int64_t N, uint32_t period, int rotated_heads,
                int heads, int64_t row_elems, int HS, float direction, AmaxOut amax_out) {
    wait_for_previous_kernels();
    const int64_t n = int64_t{blockIdx.x} * blockDim.z + threadIdx.z;
    if (n >= N && !kRecord) return;
    uint32_t amax = 0, seen = 0;
    if constexpr (kRecord) seen = amax_out.seen();
    const int half = HS / 2, groups = (heads + kHeads - 1) / kHeads;     // the heads of a thread are `groups` apart
    for (int first_head = threadIdx.y; first_head < groups && n < N; first_head += blockDim.y) {
        for (int i = threadIdx.x * kWidth; i < half; i += blockDim.x * kWidth) {
            T* at = qkv + n * row_elems + first_head * HS + i;
            const int apart = groups * HS;
            Packed<T, kWidth> x[kHeads], y[kHeads];
#pragma unroll
            for (int k = 0; k < kHeads; k++) {
                if (first_head + k * groups >= heads) continue;
                x[k].load(at + k * apart);
                y[k].load(at + k * apart + half);
            }
            float cosine[kWidth], sine[kWidth];
            const uint32_t position = positions ? max(positions[n], 0) : static_cast<uint32_t>(n) % period;
            load_angles(cos_sin + (int64_t{position} * half + i) * 2, direction, cosine, sine);
#pragma unroll
            for (int k = 0; k < kHeads; k++) {
                if (first_head + k * groups >= heads) continue;
                if (!kRecord || first_head + k * groups < rotated_heads) {
                    float a[kWidth], b[kWidth];
                    x[k].unpack_to(a);
                    y[k].unpack_to(b);
#pragma unroll
                    for (int j = 0; j < kWidth; j++) rotate(a[j], b[j], cosine[j], sine[j]);
                    if constexpr (kWidth == 1) {
                        x[k].raw = from_float<T>(a[0]), y[k].raw = from_float<T>(b[0]);
                    } else {
                        x[k].raw = pack<T>(a), y[k].raw = pack<T>(b);
                    }
                    *reinterpret_cast<typename Packed<T, kWidth>::Raw*>(at + k * apart) = x[k].raw;
                    *reinterpret_cast<typename Packed<T, kWidth>::Raw*>(at + k * apart + half) = y[k].raw;
                }
                if constexpr (kRecord) amax = max_pair(amax, max_pair(amax_pair(x[k].raw), amax_pair(y[k].raw)));
            }
        }
    }
    if constexpr (kRecord) amax_out.add(amax, seen);
}

// Inputs of the kernels with FP8 outputs or with dQ in sums.
struct RopeInput {
    const bf16* qkv;
    const float* cos_sin;
    int64_t N, row_elems;
    uint32_t period;
    int HS, rotated_heads;   // query and key heads come first
    float direction;
    const int32_t* positions;   // optional
    const float* dq;            // DqInSums of the first sum_heads heads, which are not read from qkv
    float dq_mul;
    int sum_heads;

    __device__ const float* angles(int64_t n, int i) const {
        const uint32_t position = positions ? max(positions[n], 0) : static_cast<uint32_t>(n) % period;
        return cos_sin + (int64_t{position} * (HS / 2) + i) * 2;
    }
    // How many pieces of 16 rows and 32 pairs a head's tile of 64 rows has.
    __host__ __device__ int pieces() const { return kSumRows / 16 * (HS / 64); }
    // A warp rotates a piece of a head from sums: 16 rows from `row` on, pairs 32 part .. 32 part + 31. Calls put(eight
    // values, row, column of the head).
    template <typename Put> __device__ void rotate_sums(int64_t row, int head, int part, Put put) const {
        const int lane = static_cast<int>(threadIdx.x) % 32, rows = static_cast<int>(row % kSumRows) / 16;
        const uint32_t n = static_cast<uint32_t>(row), tiles = period / kSumRows;
        const uint32_t unit = (n / period * sum_heads + head) * tiles + n % period / kSumRows;
        const float* from = dq + static_cast<uint64_t>(unit) * (sum_bytes(HS) / 4);
        DqRows<2> pairs(from, dq_mul, rows, part, HS / 64, lane);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t own = row + 8 * half + lane / 4;
            const int i = 32 * part + 8 * (lane % 4);
            uint4 a = pairs.values(0, half, lane), b = pairs.values(1, half, lane);
            float cosine[8], sine[8];
            load_angles(angles(own, i), direction, cosine, sine);
            rotate_vectors(a, b, cosine, sine);
            put(a, own, i);
            put(b, own, i + HS / 2);
        }
    }
};
// Math: as rope_kernel, for the heads that attention's backward has left in sums, which are multiplied by dq_mul and
//       rounded first.
// Source: as rope_kernel.
// Traffic: sums (fp32) read, the heads written once; the table mostly from L1.
// Requires: bf16, head dim 64 or 128, aligned rows, sequences of a multiple of 64 rows.
// Parallel: a warp owns 16 rows and 32 pairs of a head.
template <bool kRecord>
__global__ void __launch_bounds__(kThreads)
    rope_sums_kernel(bf16* qkv, const __grid_constant__ RopeInput in, AmaxOut amax_out) {
    wait_for_previous_kernels();
    const uint32_t number = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
    const uint32_t piece = number % in.pieces(), tile = number / in.pieces() / in.sum_heads;
    const int head = static_cast<int>(number / in.pieces() % in.sum_heads), parts = in.HS / 64;
    const int64_t row = int64_t{tile} * kSumRows + piece / parts * 16;
    uint32_t amax = 0, seen = 0;
    if constexpr (kRecord) seen = amax_out.seen();
    if (row < in.N) {
        in.rotate_sums(row, head, static_cast<int>(piece) % parts, [&](const uint4& x, int64_t n, int column) {
            *reinterpret_cast<uint4*>(qkv + n * in.row_elems + head * in.HS + column) = x;
            if constexpr (kRecord) amax = max_pair(amax, amax_pair(x));
        });
    }
    if constexpr (kRecord) amax_out.add(amax, seen);
}

// Math: to_fp8(X * scale), X = qkv rotated as by rope_kernel or rope_sums_kernel.
// Source: as rope_kernel.
// Traffic: qkv (or sums) read, 1 byte per element and output written, once; the table once for the heads of a block.
// Requires: head dim 64 or 128, aligned rows, delayed scaling.
// Parallel: a block owns 32 rows of chunk_heads heads; a thread 8 pairs of a row, of every head (64: every second
//           head); of heads in sums a warp owns pieces as in rope_sums_kernel.
template <bool kCount>
__global__ void __launch_bounds__(kThreads, kCount ? 3 : 4)
    rope_rows_kernel(const __grid_constant__ RopeInput in, const __grid_constant__ RowsOut quant, int chunk_heads) {
    extern __shared__ uint4 group[];
    wait_for_previous_kernels();
    const int HS = in.HS, half = HS / 2, lanes = half / 8, first_head = blockIdx.y * chunk_heads;
    const int heads = min(chunk_heads, static_cast<int>(in.row_elems / HS) - first_head);
    const int i = threadIdx.x % lanes * 8, y = threadIdx.x / lanes % kGroupRows;
    const int first = threadIdx.x / (lanes * kGroupRows), step = kThreads / (lanes * kGroupRows);
    const int64_t first_row = int64_t{blockIdx.x} * kGroupRows, row = first_row + y;
    RowsWriter<kCount> writer(quant, group, int64_t{first_head} * HS, heads * HS, chunk_heads * HS + 64);
    const int in_sums = max(min(in.sum_heads - first_head, heads), 0);   // of the chunk's heads
    if (in_sums > 0) {
        const int parts = HS / 64, pieces = kGroupRows / 16 * parts;   // of a head
        for (int number = threadIdx.x / 32; number < in_sums * pieces; number += kThreads / 32) {
            const int head = number / pieces;
            in.rotate_sums(first_row + number % pieces / parts * 16, first_head + head, number % parts,
                           [&](const uint4& x, int64_t n, int column) {
                writer.put(x, n, static_cast<int>(n - first_row), head * HS + column);
            });
        }
    }
    if (in_sums < heads && row < in.N) {
        float cosine[8], sine[8];
        load_angles(in.angles(row, i), in.direction, cosine, sine);
        const bf16* at = in.qkv + row * in.row_elems + int64_t{first_head} * HS + i;
        for (int h = in_sums + first; h < heads; h += kHeadsAtOnce * step) {
            uint4 a[kHeadsAtOnce], b[kHeadsAtOnce];
#pragma unroll
            for (int k = 0; k < kHeadsAtOnce; k++) {
                if (h + k * step >= heads) continue;
                a[k] = load_vec_streaming(at + (h + k * step) * HS);
                b[k] = load_vec_streaming(at + (h + k * step) * HS + half);
            }
#pragma unroll
            for (int k = 0; k < kHeadsAtOnce; k++) {
                const int head = h + k * step;
                if (head >= heads) continue;
                if (first_head + head < in.rotated_heads) rotate_vectors(a[k], b[k], cosine, sine);
                writer.put(a[k], row, y, head * HS + i);
                writer.put(b[k], row, y, head * HS + i + half);
            }
        }
    }
    writer.end_group(first_row);
    writer.finish();
}

RopeInput input_of(const RopeArgs& args, float direction) {
    return {.qkv = args.qkv.as<bf16>(), .cos_sin = args.cos_sin.as<float>(), .N = args.N,
            .row_elems = (args.NH + 2 * args.NKV) * args.HS, .period = static_cast<uint32_t>(args.T),
            .HS = static_cast<int>(args.HS), .rotated_heads = static_cast<int>(args.NH + args.NKV),
            .direction = direction, .positions = args.positions,
            .dq = args.dq ? args.dq.sums.as<const float>() : nullptr, .dq_mul = args.dq.softmax_mul,
            .sum_heads = static_cast<int>(args.dq ? args.NH : 0)};
}

// Rotates the query heads from sums into qkv, with their amax if requested.
void rope_sums(Ctx& ctx, const RopeArgs& args, float direction, const AmaxOut* amax) {
    const RopeInput in = input_of(args, direction);
    const int64_t warps = ceil_div(args.N, kSumRows) * args.NH * in.pieces();
    launch_early(ctx, amax ? rope_sums_kernel<true> : rope_sums_kernel<false>,
                 grid_size(ceil_div(warps, kThreads / 32)), kThreads, 0, args.qkv.as<bf16>(), in,
                 amax ? *amax : AmaxOut{});
    CHECK_LAUNCH("rope_sums_kernel");
}

// Quantizes qkv in one pass if supported; returns whether it did.
bool rope_copies(Ctx& ctx, const RopeArgs& args, float direction) {
    constexpr int64_t kChunkColumns = 1024;   // 32 KB of bytes: four blocks per multiprocessor
    const int64_t heads = args.NH + 2 * args.NKV, row_elems = heads * args.HS;
    const QuantOut& quant = args.quant;
    if (!rows_can(quant) || quant.dbias || (args.HS != 64 && args.HS != 128)) return false;
    if (!vectorizable<bf16>(args.HS, {args.qkv.data, args.cos_sin.data}) || args.T >= int64_t{1} << 31) return false;
    const RopeInput in = input_of(args, direction);
    // Chunks of nearly equal size.
    const int64_t chunks = ceil_div(row_elems, kChunkColumns), chunk_heads = ceil_div(heads, chunks);
    const size_t shared_bytes = group_bytes(quant, chunk_heads * args.HS + 64);
    auto kernel = quant.counts ? rope_rows_kernel<true> : rope_rows_kernel<false>;
    allow_shared_memory(kernel, shared_bytes);
    const dim3 grid(grid_size(ceil_div(args.N, kGroupRows)), grid_size(ceil_div(heads, chunk_heads)));
    launch_early(ctx, kernel, grid, kThreads, shared_bytes, in, rows_out(quant, args.N, row_elems), chunk_heads);
    CHECK_LAUNCH("rope_rows_kernel");
    return true;
}

void rope(Ctx& ctx, const RopeArgs& args, float direction, const char* op) {
    CHECK(args.HS % 2 == 0, "%s: head dim %lld is odd", op, (long long)args.HS);
    CHECK(args.N < int64_t{1} << 31 && args.T < int64_t{1} << 31, "%s: %lld rows, %lld positions", op,
          (long long)args.N, (long long)args.T);
    const int64_t row_elems = (args.NH + 2 * args.NKV) * args.HS;
    expect(args.qkv, args.qkv.dtype, args.N * row_elems, op);
    expect_at_least(args.cos_sin, Dtype::kFp32, std::min(args.T, args.N) * args.HS, op);
    const QuantOut& quant = args.quant;
    if (quant) expect_quant(quant, args.qkv.dtype, args.N, row_elems, op);
    if (args.dq) {
        CHECK(direction < 0 && args.qkv.dtype == Dtype::kBf16 && (args.HS == 64 || args.HS == 128)
                  && args.T % kSumRows == 0 && args.N % args.T == 0,
              "%s: dq in sums needs bf16, head dim 64 or 128 and whole tiles of 64 tokens: %lld rows, T = %lld, "
              "head dim %lld", op, (long long)args.N, (long long)args.T,
              (long long)args.HS);
        expect_at_least(args.dq.sums, Dtype::kFp32, args.N * args.NH * args.HS, "rope_backward: dq in sums");
        expect_aligned(args.dq.sums, "rope_backward: dq in sums");
        expect_aligned(args.qkv, "rope_backward: qkv");
        expect_aligned(args.cos_sin, "rope_backward: cos_sin");
    }
    if (quant.copies() && rope_copies(ctx, args, direction)) return;
    bool recorded = false;
    const int64_t in_sums = args.dq ? args.NH : 0;   // heads that rope_sums rotates
    dispatch(args.qkv.dtype, op, [&](auto type) {
        using T = decltype(type);
        T* qkv = args.qkv.as<T>() + in_sums * args.HS;
        const float* cos_sin = args.cos_sin.as<float>();
        with_width<T>(vectorizable<T>(args.HS / 2, {qkv, cos_sin}), [&](auto width) {
            constexpr int kWidth = decltype(width)::value;
            const bool record = kWidth == 8 && quant.only_records();
            const int64_t rotated = args.NH + args.NKV - in_sums, heads = record ? rotated + args.NKV : rotated;
            const unsigned x = static_cast<unsigned>(std::min<int64_t>(args.HS / 2 / kWidth, kThreads));
            const unsigned y = static_cast<unsigned>(std::min<int64_t>(ceil_div(heads, kHeads), kThreads / x));
            const dim3 block(x, y, std::min(kThreads / (x * y), 64u));
            const AmaxOut amax = record ? amax_out(quant) : AmaxOut{};
            auto kernel = rope_kernel<T, kWidth, false>;
            if constexpr (kWidth == 8) {
                if (record) kernel = rope_kernel<T, kWidth, true>;
            }
            launch_early(ctx, kernel, grid_size(ceil_div(args.N, block.z)), block, 0, qkv, cos_sin, args.positions,
                         args.N, args.T, rotated, heads, row_elems, args.HS, direction, amax);
            CHECK_LAUNCH("rope_kernel");
            if (args.dq) rope_sums(ctx, args, direction, record ? &amax : nullptr);
            recorded = record;
        });
    });
    if (quant && !recorded) quantize(ctx, {.quant = quant, .in = args.qkv, .N = args.N, .C = row_elems});
}

}  // namespace

void rope_forward(Ctx& ctx, const RopeArgs& args) { rope(ctx, args, 1.0f, "rope_forward"); }
void rope_backward(Ctx& ctx, const RopeArgs& args) { rope(ctx, args, -1.0f, "rope_backward"); }

}  // namespace cuda
