// Rotary position embedding, in place on the packed projections, or from them into FP8 outputs.
#include "llmc/cuda/quantize_rows.cuh"
#include "llmc/cuda/rope.cuh"

namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 2;   // heads that a thread rotates by the same angles

// Math: (x, y) -> (x cos - y sin, y cos + x sin) for the pairs (i, i + half) of every query and key head;
// direction -1 rotates back.
// Source: Su et al., arXiv 2104.09864, in the rotate-half pairing.
// Traffic: query and key heads read and written once; the table (fp32, shared by all heads) mostly from L1; value heads
// read to record the amax.
// Requires: kWidth > 1 needs half a multiple of it and 16-byte alignment; kRecord: half = HS / 2.
// Parallel: threads with the same z own a row; a thread kWidth pairs of kHeads heads. kRecord: `heads` includes the
// value heads for the amax, and only rotated_heads of them are rotated.
template <typename T, int kWidth, bool kRecord>
__global__ void __launch_bounds__(kThreads, kWidth == 8 ? 4 : 1)
    rope_kernel(T* qkv, const float* cos_sin, const int32_t* positions, int64_t N, uint32_t period, int rotated_heads,
                int heads, int64_t row_elems, int HS, int half, float direction, AmaxOut amax_out) {
    wait_for_previous_kernels();
    const int64_t n = int64_t{blockIdx.x} * blockDim.z + threadIdx.z;
    if (n >= N && !kRecord) return;
    uint32_t amax = 0, seen = 0;
    if constexpr (kRecord) seen = amax_out.seen();
    const int groups = (heads + kHeads - 1) / kHeads;     // the heads of a thread are `groups` apart
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
            const uint32_t position = positions ? positions[n] : static_cast<uint32_t>(n) % period;
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

// Inputs of the kernel with FP8 outputs.
struct RopeInput {
    const bf16* qkv;
    const float* cos_sin;
    int64_t N, row_elems;
    uint32_t period;
    int HS, rotated_heads;   // query and key heads come first
    float direction;
    const int32_t* positions;   // optional

    __device__ const float* angles(int64_t n, int i) const {
        const uint32_t position = positions ? positions[n] : static_cast<uint32_t>(n) % period;
        return cos_sin + (int64_t{position} * (HS / 2) + i) * 2;
    }
};
// Math: to_fp8(X * scale), X = qkv rotated as by rope_kernel.
// Source: as rope_kernel.
// Traffic: qkv read, 1 byte per element and output written, once; the table once for the heads of a block.
// Requires: head dim 64 or 128, aligned rows, delayed scaling.
// Parallel: a block owns 32 rows of chunk_heads heads; a thread 8 pairs of a row, of every head (64: every second
//           head).
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
    if (row < in.N) {
        float cosine[8], sine[8];
        load_angles(in.angles(row, i), in.direction, cosine, sine);
        const bf16* at = in.qkv + row * in.row_elems + int64_t{first_head} * HS + i;
        for (int h = first; h < heads; h += kHeads * step) {
            uint4 a[kHeads], b[kHeads];
#pragma unroll
            for (int k = 0; k < kHeads; k++) {
                if (h + k * step >= heads) continue;
                a[k] = load_vec_streaming(at + (h + k * step) * HS);
                b[k] = load_vec_streaming(at + (h + k * step) * HS + half);
            }
#pragma unroll
            for (int k = 0; k < kHeads; k++) {
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

// Quantizes qkv in one pass if supported; returns whether it did.
bool rope_copies(Ctx& ctx, const RopeArgs& args, float direction) {
    constexpr int64_t kChunkColumns = 1024;   // 32 KB of bytes: four blocks per multiprocessor
    const int64_t heads = args.NH + 2 * args.NKV, row_elems = heads * args.HS;
    const QuantOut& quant = args.quant;
    if (!rows_can(quant) || quant.dbias || args.R() != args.HS || (args.HS != 64 && args.HS != 128)) return false;
    if (!vectorizable<bf16>(args.HS, {args.qkv.data, args.cos_sin.data}) || args.T >= int64_t{1} << 31) return false;
    const RopeInput in{.qkv = args.qkv.as<bf16>(), .cos_sin = args.cos_sin.as<float>(), .N = args.N,
                       .row_elems = row_elems, .period = static_cast<uint32_t>(args.T),
                       .HS = static_cast<int>(args.HS), .rotated_heads = static_cast<int>(args.NH + args.NKV),
                       .direction = direction, .positions = args.positions};
    // Chunks of nearly equal size.
    const int64_t chunks = ceil_div(row_elems, kChunkColumns), chunk_heads = ceil_div(heads, chunks);
    const size_t shared_bytes = group_bytes(quant, chunk_heads * args.HS + 64);
    auto kernel = quant.counts ? rope_rows_kernel<true> : rope_rows_kernel<false>;
    allow_shared_memory(kernel, shared_bytes);
    const dim3 grid(grid_size(ceil_div(args.N, kGroupRows)), grid_size(ceil_div(heads, chunk_heads)));
    launch_early(ctx, kernel, grid, kThreads, shared_bytes, in, rows_out(quant, args.N, row_elems), chunk_heads);
    return true;
}

void rope(Ctx& ctx, const RopeArgs& args, float direction, const char* op) {
    CHECK(args.R() % 2 == 0 && args.R() <= args.HS, "%s: %lld elements of a head", op, ll(args.R()));
    CHECK(args.N < int64_t{1} << 31 && args.T < int64_t{1} << 31, "%s: %lld rows, %lld positions", op,
          (long long)args.N, (long long)args.T);
    const int64_t row_elems = (args.NH + 2 * args.NKV) * args.HS;
    expect(args.qkv, args.qkv.dtype, args.N * row_elems, op);
    expect_at_least(args.cos_sin, Dtype::kFp32, std::min(args.T, args.N) * args.R(), op);
    const QuantOut& quant = args.quant;
    if (quant) expect_quant(quant, args.qkv.dtype, args.N, row_elems, op);
    if (quant.copies() && rope_copies(ctx, args, direction)) return;
    bool recorded = false;
    dispatch(args.qkv.dtype, op, [&](auto type) {
        using T = decltype(type);
        T* qkv = args.qkv.as<T>();
        const float* cos_sin = args.cos_sin.as<float>();
        const bool whole = args.R() == args.HS;
        with_width<T>(vectorizable<T>(args.R() / 2, {qkv, cos_sin}) && args.HS % kVec<T> == 0, [&](auto width) {
            constexpr int kWidth = decltype(width)::value;
            const bool record = kWidth == 8 && whole && quant.only_records();
            const int64_t rotated = args.NH + args.NKV, heads = record ? rotated + args.NKV : rotated;
            const unsigned x = static_cast<unsigned>(std::min<int64_t>(args.R() / 2 / kWidth, kThreads));
            const unsigned y = static_cast<unsigned>(std::min<int64_t>(ceil_div(heads, kHeads), kThreads / x));
            const dim3 block(x, y, std::min(kThreads / (x * y), 64u));
            auto kernel = rope_kernel<T, kWidth, false>;
            if constexpr (kWidth == 8) {
                if (record) kernel = rope_kernel<T, kWidth, true>;
            }
            launch_early(ctx, kernel, grid_size(ceil_div(args.N, block.z)), block, 0, qkv, cos_sin, args.positions,
                         args.N, args.T, rotated, heads, row_elems, args.HS, args.R() / 2, direction,
                         record ? amax_out(quant) : AmaxOut{});
            recorded = record;
        });
    });
    if (quant && !recorded) quantize(ctx, {.quant = quant, .in = args.qkv, .N = args.N, .C = row_elems});
}

}  // namespace

void rope_forward(Ctx& ctx, const RopeArgs& args) { rope(ctx, args, 1.0f, "rope_forward"); }
void rope_backward(Ctx& ctx, const RopeArgs& args) { rope(ctx, args, -1.0f, "rope_backward"); }

}  // namespace cuda
