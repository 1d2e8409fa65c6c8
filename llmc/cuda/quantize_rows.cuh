// Quantized outputs of row kernels: the amax alone, or FP8 outputs.
//
// FP8 outputs are for kernels whose blocks own groups of 32 consecutive rows of a result and compute one or a few at a
// time, with delayed scaling per tensor. Rowwise bytes are stored at once; for the transposed output the rows stay in
// shared memory until the group is complete. 32 rows are a whole sector of each column: with 16, and two blocks per
// multiprocessor instead of one, rmsnorm forward of 8192 x 4096 took 146 us instead of 81 on an H200.
#pragma once
#include "llmc/cuda/quantize.cuh"

namespace cuda {

inline constexpr int kGroupRows = 32;

// Amax recording by kernels that write only bf16.
struct AmaxOut {
    ScaleEntry* entry = nullptr;   // null: nothing
    uint32_t* first_nonfinite = nullptr;
    uint32_t event = 0;

    __device__ uint32_t seen() const { return entry ? entry->amax_bits : 0; }
    // Records the larger magnitude of a thread's pair; called by all lanes of a warp. `seen` was read earlier, so that
    // few warps reach the atomic operation.
    __device__ void add(uint32_t pair, uint32_t seen) const {
        const uint32_t amax = __reduce_max_sync(0xffffffffu, larger_of_pair(pair));
        const uint32_t thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        if (thread % 32 != 0) return;   // rows of a block may split warps
        record_amax(&entry->amax_bits, amax << 16, seen);
        if (first_nonfinite && amax >= kInfinityMagnitude) atomicMin(first_nonfinite, event);
    }
};
inline AmaxOut amax_out(const QuantOut& quant) {
    if (!quant.only_records()) return {};
    return {quant.entry, quant.first_nonfinite, quant.event};
}

// QuantOut in the form of these kernels; every pointer but entry may be null.
struct RowsOut {
    uint8_t *rowwise, *transposed;
    ScaleEntry* entry;
    Fp8Counts* counts;
    uint32_t* first_nonfinite;
    int64_t N, C;
    uint32_t event;
    bool record, e5m2;
};
inline RowsOut rows_out(const QuantOut& quant, int64_t N, int64_t C) {
    return {codes_of(quant.rowwise), codes_of(quant.transposed), quant.entry, quant.counts, quant.first_nonfinite,
            N, C, quant.event, quant.record,
            (quant.rowwise ? quant.rowwise : quant.transposed).dtype == Dtype::kE5m2};
}
// Every producer's first check; tile_out has the others.
inline void expect_quant(const QuantOut& quant, Dtype dtype, int64_t N, int64_t C, const char* op) {
    CHECK(dtype == Dtype::kBf16, "%s: FP8 copies of a result in %s, they are made of bf16", op, dtype_name(dtype));
    tile_out(quant, {}, N, C, op);
}
// Whether these kernels support a QuantOut; callers check column sums themselves.
inline bool rows_can(const QuantOut& quant) {
    return quant.copies() && quant.granularity == Granularity::kTensor && quant.scaling == Scaling::kDelayed;
}

// Bytes of shared memory for a group with rows `stride` bytes apart (a multiple of 8); a multiple of 16.
inline size_t group_bytes(const QuantOut& quant, int64_t stride) {
    return quant.transposed ? static_cast<size_t>(kGroupRows * stride + 64) : 0;
}

// Returns the number of blocks, at most `most`, for a kernel that loops over the groups of N rows: all resident, and
// chosen so that the busiest multiprocessor has the fewest groups. 0 if no block fits with this much shared memory.
template <typename Kernel>
int64_t row_blocks(const Ctx& ctx, Kernel* kernel, dim3 block, size_t shared_bytes, int64_t N, int64_t most) {
    if (!shared_memory_fits(ctx, kernel, shared_bytes)) return 0;
    int resident = 0;
    allow_shared_memory(kernel, shared_bytes);
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, static_cast<int>(block.x * block.y),
                                                             shared_bytes));
    CHECK(N < (1 << 30), "%lld rows quantized, RowWalk counts in 32 bits", static_cast<long long>(N));
    const int64_t groups = ceil_div(N, kGroupRows);
    int64_t best = 0, best_load = 0;
    for (int64_t per_sm = 1; per_sm <= resident; per_sm++) {
        const int64_t blocks = std::min(groups, per_sm * ctx.sm_count);
        const int64_t load = ceil_div(groups, blocks) * ceil_div(blocks, ctx.sm_count);
        if (blocks > most || (best > 0 && load > best_load)) continue;
        best = blocks, best_load = load;
    }
    return best > 0 || resident == 0 ? best : std::min(groups, most);
}

// The rows of a block: groups blockIdx.x, blockIdx.x + gridDim.x, ... of 32 rows, blockDim.y (a power of two) at a
// time.
struct RowWalk {
    int base;   // row of threadIdx.y == 0

    __device__ RowWalk() : base(static_cast<int>(blockIdx.x) * kGroupRows) {}
    __device__ int in_group() const { return base & (kGroupRows - 1); }
    __device__ int group() const { return base - in_group(); }   // first row of the group
    __device__ bool group_ends(int64_t N) const {
        return in_group() + static_cast<int>(blockDim.y) == kGroupRows || base + static_cast<int>(blockDim.y) >= N;
    }
    __device__ void advance() {
        base += static_cast<int>(blockDim.y);
        if (in_group() == 0) base += static_cast<int>(gridDim.x - 1) * kGroupRows;
    }
};

// One thread's part in the FP8 outputs of its block's rows: of all columns, or of some from first_column on.
// kCount: whether counts may be requested, which costs registers.
template <bool kCount> class RowsWriter {
public:
    // group: group_bytes of shared memory; stride: bytes between rows there.
    __device__ RowsWriter(const RowsOut& out, void* group, int64_t first_column, int columns, int stride)
        : out_(out), group_(static_cast<uint8_t*>(group)), first_column_(first_column), columns_(columns),
          stride_(stride), scale_(out.entry->scale) {
        if (blockIdx.x + blockIdx.y + threadIdx.x + threadIdx.y > 0) return;
        out.entry->scale_inv = 1.0f / scale_;
        if (kCount && out.counts) atomicAdd(&out.counts->elems, static_cast<unsigned long long>(out.N * out.C));
    }
    // Quantizes eight values of a row from `column` on, counted from first_column; y: index of the row in its group.
    __device__ void put(const uint4& x, int64_t row, int y, int column) {
        const uint32_t amax = amax_pair(x);
        amax_ = max_pair(amax_, amax);
        uint2 bytes;
        if (out_.e5m2) bytes = cast<Dtype::kE5m2>(x, amax);
        else bytes = cast<Dtype::kE4m3>(x, amax);
        if (out_.rowwise) {
            *reinterpret_cast<uint2*>(out_.rowwise + row * out_.C + first_column_ + column) = bytes;
        }
        if (out_.transposed) *reinterpret_cast<uint2*>(group_ + at(y, column)) = bytes;
    }
    // Stores the transposed bytes of the group that begins at first_row. Called by all threads; has barriers.
    __device__ void end_group(int64_t first_row) const {
        if (out_.transposed == nullptr) return;
        __syncthreads();
        // A lane stores 16 bytes of each of 4 columns, its neighbour the next 16; N is a multiple of 16.
        constexpr int kParts = kGroupRows / 16;
        const int threads = blockDim.x * blockDim.y, words = stride_ / 4;
        for (int u = threadIdx.y * blockDim.x + threadIdx.x; u < columns_ / 4 * kParts; u += threads) {
            const int half = u % kParts * 16, column = u / kParts * 4;
            if (first_row + half >= out_.N) continue;
            const uint32_t* from = reinterpret_cast<const uint32_t*>(group_ + at(half, column));
            uint32_t bytes[4][4];   // [four rows][column]
#pragma unroll
            for (int g = 0; g < 4; g++) {
                const uint32_t* rows = from + 4 * g * words;
                transpose_bytes({rows[0], rows[words], rows[2 * words], rows[3 * words]}, bytes[g]);
            }
            uint8_t* to = out_.transposed + (first_column_ + column) * out_.N + first_row + half;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                store_vec(to + c * out_.N, make_uint4(bytes[0][c], bytes[1][c], bytes[2][c], bytes[3][c]));
            }
        }
        __syncthreads();
    }
    // Records amax and counts. Called by all threads.
    __device__ void finish() {
        const AmaxOut amax{out_.entry, out_.first_nonfinite, out_.event};
        if (out_.record || out_.first_nonfinite) amax.add(amax_, out_.record ? amax.seen() : ~0u);
        if (kCount && out_.counts) tally_.flush_to(out_.counts);
    }

private:
    // The second 16 rows have an offset of 64 bytes, so that lanes that read both halves of a column use different
    // banks.
    __device__ int at(int row, int column) const {
        return row * stride_ + column + (row >= 16 ? 64 : 0);
    }
    template <Dtype kFormat> __device__ uint2 cast(const uint4& x, uint32_t amax) {
        const uint2 bytes = to_fp8x8<kFormat>(x, scale_);
        if (kCount && out_.counts) tally_.add_cast<kFormat>(x, amax, scale_, bytes);
        return bytes;
    }

    const RowsOut& out_;
    uint8_t* group_;
    int64_t first_column_;
    int columns_, stride_;
    float scale_;
    uint32_t amax_ = 0;
    CastTally tally_;
};

}  // namespace cuda
