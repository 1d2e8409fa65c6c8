// Cross entropy fused with its gradient, in place over the logits.
//
// A row of Llama-3 logits (128256 in bf16) is 250 KB, more than one multiprocessor's shared memory. One read
// and one write of the logits therefore take a cluster of blocks (4 for that row): each keeps its part of the
// row in registers, while its part of the next row is already on its way into shared memory. Two blocks of
// different clusters share a multiprocessor: one computes while the other waits for the rest of its cluster.
#include <cuda_pipeline_primitives.h>

#include "llmc/cuda/common.cuh"
#include "llmc/cuda/ptx.cuh"

namespace cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kManyThreads = 256;    // of a block that has a large part of a row
constexpr int kFewThreads = 64;      // of one that has a small part, so that many fit a multiprocessor
constexpr int kSlots = 16;           // vectors of a row that a thread holds
constexpr int kSmThreads = 512;      // threads of all blocks of a multiprocessor: 128 registers each
constexpr int kMaxCluster = 8;       // the portable limit

// Part of a softmax: sum = sum of e^(x - base) (fp32), or of 2^(x log2(e) - base) with a whole number as base
// (bf16): one multiply-add and one fast exponential an element, and changing the base is exact.
struct Extent {
    float base, sum;
};
template <typename T> struct Softmax {
    static constexpr bool kBase2 = std::is_same_v<T, bf16>;
    static constexpr float kLog2E = 1.4426950408889634f;
    static constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;   // 15 bits: exact products

    // Of the largest logit; finite for -infinity, so that what is empty needs no special case.
    static __device__ float base_of(float largest) {
        return fmaxf(kBase2 ? ceilf(largest * kLog2E) : largest, -1e30f);
    }
    static __device__ float term(float x, float base) {
        if constexpr (kBase2) return exp2_approx(fmaf(x, kLog2E, -base));
        else return expf(x - base);
    }
    static __device__ float rebase(const Extent& e, float base) {
        return e.sum * (kBase2 ? exp2_approx(e.base - base) : expf(e.base - base));
    }
    // -log of the probability of a logit.
    static __device__ float loss(const Extent& e, float logit) {
        const float gap = kBase2 ? fmaf(e.base, kLn2Low, fmaf(e.base, kLn2High, -logit)) : e.base - logit;
        return gap + logf(e.sum);
    }
    // Joins disjoint parts, one a lane; every lane gets the same bits.
    static __device__ Extent join_lanes(const Extent& e) {
        const float base = warp_max(e.base);
        return {base, warp_sum(rebase(e, base))};
    }
    // The same for `count` parts in shared memory, by every warp.
    static __device__ Extent join_all(const Extent* parts, int count) {
        Extent own = {-1e30f, 0.0f};
        for (int i = threadIdx.x % kLanes; i < count; i += kLanes) {
            const float base = fmaxf(own.base, parts[i].base);
            own = {base, rebase(own, base) + rebase(parts[i], base)};
        }
        return join_lanes(own);
    }
};

// The largest element of a vector; NaN is passed over (the sum finds it).
template <typename T> __device__ inline float largest_of(const uint4& raw) {
    if constexpr (std::is_same_v<T, bf16>) {
        __nv_bfloat162 pair[4];
        memcpy(pair, &raw, 16);
        const __nv_bfloat162 largest = __hmax2(__hmax2(pair[0], pair[1]), __hmax2(pair[2], pair[3]));
        return fmaxf(__low2float(largest), __high2float(largest));
    } else {
        return fmaxf(fmaxf(__uint_as_float(raw.x), __uint_as_float(raw.y)),
                     fmaxf(__uint_as_float(raw.z), __uint_as_float(raw.w)));
    }
}

// A vector whose elements from `count` on are -infinity: the padded columns take no part in the softmax.
template <typename T> __device__ inline uint4 mask_tail(const uint4& raw, int count) {
    float value[kVec<T>];
    unpack<T>(raw, value);
#pragma unroll
    for (int i = 0; i < kVec<T>; i++) {
        if (i >= count) value[i] = -INFINITY;
    }
    return pack<T>(value);
}

__device__ inline bool counted(int target, int64_t V) { return target >= 0 && target < V; }

__device__ inline void note_bad_target(int target, int64_t V, StepState* state) {
    if (!counted(target, V) && target != kIgnoreIndex) atomicAdd(&state->bad_tokens, 1);
}

// What the warps of a cluster tell each other about a row. Two sets of slots in turn suffice: nobody can be
// sending for a row before all have read what was sent two rows ago. A barrier of the cluster would wait for
// the stores of the row before as well (a fifth of the time of this kernel on an H200).
template <int kCluster, int kWarps> struct Exchange {
    Extent parts[2][kCluster * kWarps];   // [row parity][warp of the cluster]
    uint64_t barrier[2];

    __device__ void open() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
        if constexpr (kCluster > 1) {
            if (threadIdx.x == 0) {
                ptx::barrier_init(&barrier[0], 1);
                ptx::barrier_init(&barrier[1], 1);
                ptx::barrier_init_fence();
            }
            __cluster_barrier_arrive();   // the other blocks exist, and their barriers too, before anything
            __cluster_barrier_wait();     // is sent to them
        }
#endif
    }
    // Row `round` of this cluster: gives every warp the parts of all, of which `own` is this warp's.
    __device__ const Extent* swap(int64_t round, int block, const Extent& own) {
        const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, set = round & 1;
        Extent* const to = &parts[set][block * kWarps + warp];
        if constexpr (kCluster == 1) {
            if (lane == 0) *to = own;
            __syncthreads();
        } else {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
            if (threadIdx.x == 0) ptx::barrier_arrive_expecting(&barrier[set], sizeof parts[0]);
            if (lane < kCluster) {
                ptx::send_to_block(ptx::address_in_block(to, lane), own.base, own.sum,
                                   ptx::address_in_block(&barrier[set], lane));
            }
            ptx::barrier_wait(&barrier[set], (round >> 1) & 1);
#endif
        }
        return parts[set];
    }
};

// Math: p = softmax(logits[:V]); losses = log sum exp - logit[target]; logits = (p - onehot) dloss_mul, 0 in
// rows that are not counted and in the padded columns.
// Source: Milakov and Gimelshein, arXiv 1805.02867 (joining partial softmax sums).
// Traffic: logits read once and written once (kWrite).
// Requires: Vp a multiple of 16 bytes of T, aligned; at most kCluster kSlots kThreads vectors a row; compute
// capability 9.0 for more than one block a row.
// Parallel: a cluster owns rows c, c + clusters, ...; block b of it part_vectors vectors; a thread every
// kThreads-th of those. A thread copies its vectors of the next row into its own slots of shared memory as
// soon as it has taken over those of this row; the warps of a cluster exchange one Extent each a row.
template <typename T, int kThreads, int kCluster, bool kWrite>
__global__ void __launch_bounds__(kThreads, kSmThreads / kThreads)
    classifier_kernel(T* logits, float* losses, const int32_t* targets, StepState* state, int64_t N, int V,
                      int Vp, int part_vectors) {
    extern __shared__ uint4 ring[];                    // (kSlots, kThreads)
    constexpr int kWidth = kVec<T>, kWarps = kThreads / kLanes;
    __shared__ Exchange<kCluster, kWarps> exchange;
    using S = Softmax<T>;
    const int thread = threadIdx.x, lane = thread % kLanes;
    const int part = static_cast<int>(blockIdx.x) % kCluster;
    const int part_end = min((part + 1) * part_vectors, Vp / kWidth);
    const int begin = part * part_vectors + thread;    // vectors of this thread: begin, begin + kThreads, ...
    const int count = part_end - begin;
    const int used_slots = (count + lane + kThreads - 1) / kThreads;   // by some lane of this warp
    const bool has_padding = part_end * kWidth > V;
    const float dloss_mul = state->dloss_mul;
    uint4* const slots = ring + thread;

    const int64_t clusters = gridDim.x / kCluster, row_step = clusters * Vp;
    int64_t row = blockIdx.x / kCluster;
    T* at = logits + row * Vp + begin * kWidth;
    auto prefetch = [&](int64_t row, const T* at, int slot) {
        if (row < N && slot * kThreads < count) {
            __pipeline_memcpy_async(slots + slot * kThreads, at + slot * kThreads * kWidth, 16);
        }
        __pipeline_commit();
    };
#pragma unroll
    for (int slot = 0; slot < kSlots; slot++) {
        // Slots past the end of the row hold -infinity for good.
        if (slot * kThreads >= count) slots[slot * kThreads] = mask_tail<T>(uint4{}, 0);
        prefetch(row, at, slot);
    }
    // Lane 0 holds the target of the next row: the compiler would move a value that all lanes load into a
    // uniform register, and wait for it, at once.
    int next_target = lane == 0 && row < N ? targets[row] : 0;
    exchange.open();

    for (int64_t round = 0; row < N; row += clusters, at += row_step, round++) {
        const int target = __shfl_sync(0xffffffffu, next_target, 0);
        next_target = lane == 0 && row + clusters < N ? targets[row + clusters] : 0;
        const bool is_counted = counted(target, V);
        const int target_vector = target / kWidth - begin;
        const bool owns_target = is_counted && target_vector >= 0 && target_vector < count &&
                                 target_vector % kThreads == 0;
        // No other thread writes this element.
        const float target_logit = owns_target ? to_float(logits[row * Vp + target]) : 0.0f;
        uint4 raw[kSlots];
        float largest = -INFINITY;
#pragma unroll
        for (int slot = 0; slot < kSlots; slot++) {
            __pipeline_wait_prior(kSlots - 1);
            if (slot < used_slots) {
                raw[slot] = slots[slot * kThreads];
                if (has_padding) raw[slot] = mask_tail<T>(raw[slot], V - (begin + slot * kThreads) * kWidth);
                largest = fmaxf(largest, largest_of<T>(raw[slot]));
            }
            prefetch(row + clusters, at + row_step, slot);
        }
        Extent extent = {S::base_of(largest), 0.0f};
#pragma unroll
        for (int slot = 0; slot < kSlots; slot++) {
            if (slot >= used_slots) continue;
            float value[kWidth];
            unpack<T>(raw[slot], value);
#pragma unroll
            for (int i = 0; i < kWidth; i++) extent.sum += S::term(value[i], extent.base);
        }
        extent = S::join_lanes(extent);
        extent = S::join_all(exchange.swap(round, part, extent), kCluster * kWarps);

        if (owns_target) losses[row] = S::loss(extent, target_logit);
        if (!is_counted && part == 0 && thread == 0) {
            losses[row] = 0.0f;
            note_bad_target(target, V, state);
        }
        if constexpr (!kWrite) continue;
        const float row_mul = dloss_mul / extent.sum;
#pragma unroll
        for (int slot = 0; slot < kSlots; slot++) {
            if (slot >= used_slots) continue;
            uint4 result = {};
            if (is_counted) {
                float value[kWidth];
                unpack<T>(raw[slot], value);
#pragma unroll
                for (int i = 0; i < kWidth; i++) value[i] = S::term(value[i], extent.base) * row_mul;
                result = pack<T>(value);
            }
            if (slot * kThreads < count) store_vec(at + slot * kThreads * kWidth, result);
        }
        if (owns_target) {
            const float p = S::term(target_logit, extent.base) / extent.sum;
            logits[row * Vp + target] = from_float<T>((p - 1.0f) * dloss_mul);
        }
    }
}

// Math: as classifier_kernel.
// Source: as classifier_kernel.
// Traffic: logits read three times (the later ones from L2 for short rows) and written once (kWrite).
// Requires: nothing of Vp, alignment or the GPU.
// Parallel: a block owns a row, thread i its elements i, i + 256, ...
template <typename T, bool kWrite>
__global__ void __launch_bounds__(kManyThreads)
    classifier_loop_kernel(T* logits, float* losses, const int32_t* targets, StepState* state, int64_t V,
                           int64_t Vp) {
    constexpr int kThreads = kManyThreads;
    __shared__ Extent extents[kThreads / kLanes];
    T* row = logits + blockIdx.x * Vp;
    const int target = targets[blockIdx.x];
    if (!counted(target, V)) {
        if (threadIdx.x == 0) {
            losses[blockIdx.x] = 0.0f;
            note_bad_target(target, V, state);
        }
        for (int64_t i = threadIdx.x; kWrite && i < Vp; i += kThreads) row[i] = from_float<T>(0.0f);
        return;
    }
    using S = Softmax<T>;
    const float target_logit = to_float(row[target]);
    float largest = -INFINITY;
    for (int64_t i = threadIdx.x; i < V; i += kThreads) largest = fmaxf(largest, to_float(row[i]));
    Extent extent = {S::base_of(largest), 0.0f};
    for (int64_t i = threadIdx.x; i < V; i += kThreads) extent.sum += S::term(to_float(row[i]), extent.base);
    extent = S::join_lanes(extent);
    if (threadIdx.x % kLanes == 0) extents[threadIdx.x / kLanes] = extent;
    __syncthreads();
    extent = S::join_all(extents, kThreads / kLanes);
    if (threadIdx.x == 0) losses[blockIdx.x] = S::loss(extent, target_logit);
    if constexpr (kWrite) {
        const float dloss_mul = state->dloss_mul, inverse = 1.0f / extent.sum;
        for (int64_t i = threadIdx.x; i < Vp; i += kThreads) {
            float p = i < V ? S::term(to_float(row[i]), extent.base) * inverse : 0.0f;
            if (i == target) p -= 1.0f;
            row[i] = from_float<T>(p * dloss_mul);
        }
    }
}

template <typename T, int kThreads, int kCluster, bool kWrite>
void launch_classifier(Ctx& ctx, const ClassifierArgs& args, int64_t vectors) {
    auto kernel = classifier_kernel<T, kThreads, kCluster, kWrite>;
    const int64_t part_vectors = ceil_div(vectors, kCluster);
    const size_t shared_bytes = size_t{16} * kSlots * kThreads;
    allow_shared_memory(kernel, shared_bytes);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = kCluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream_of(ctx);
    config.attrs = &attribute;
    config.numAttrs = kCluster > 1 ? 1 : 0;
    // As many clusters as fit the GPU together; each goes through its share of the rows.
    int resident = 0;
    if (kCluster > 1) {
        config.gridDim = dim3(kCluster);
        CUDA_CHECK(cudaOccupancyMaxActiveClusters(&resident, kernel, &config));
    } else {
        CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, shared_bytes));
        resident *= ctx.sm_count;
    }
    CHECK(resident > 0, "classifier_kernel does not fit this GPU (%d blocks a cluster)", kCluster);
    const int64_t clusters = std::min<int64_t>(args.N, resident);
    config.gridDim = dim3(grid_size(clusters * kCluster));
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args.logits.as<T>(), args.losses.as<float>(), args.targets,
                                  args.state, args.N, static_cast<int>(args.V), static_cast<int>(args.Vp),
                                  static_cast<int>(part_vectors)));
    CHECK_LAUNCH("classifier_kernel");
}

template <typename T, bool kWrite> void run_classifier(Ctx& ctx, const ClassifierArgs& args) {
    const int64_t vectors = args.Vp / static_cast<int64_t>(16 / sizeof(T));
    const bool vector = vectorizable<T>(args.Vp, {args.logits.data});
    const int64_t blocks = ceil_div(vectors, kSlots * kManyThreads);
    if (!vector || blocks > kMaxCluster || (blocks > 1 && ctx.sm < 90)) {
        classifier_loop_kernel<T, kWrite><<<grid_size(args.N), kManyThreads, 0, stream_of(ctx)>>>(
            args.logits.as<T>(), args.losses.as<float>(), args.targets, args.state, args.V, args.Vp);
        CHECK_LAUNCH("classifier_loop_kernel");
    } else if (vectors <= kSlots * kFewThreads) {
        launch_classifier<T, kFewThreads, 1, kWrite>(ctx, args, vectors);
    } else if (blocks == 1) {
        launch_classifier<T, kManyThreads, 1, kWrite>(ctx, args, vectors);
    } else if (blocks == 2) {
        launch_classifier<T, kManyThreads, 2, kWrite>(ctx, args, vectors);
    } else if (blocks <= 4) {
        launch_classifier<T, kManyThreads, 4, kWrite>(ctx, args, vectors);
    } else {
        launch_classifier<T, kManyThreads, kMaxCluster, kWrite>(ctx, args, vectors);
    }
}

}  // namespace

void classifier(Ctx& ctx, const ClassifierArgs& args) {
    expect(args.logits, args.logits.dtype, args.N * args.Vp, "classifier: logits");
    expect(args.losses, Dtype::kFp32, args.N, "classifier: losses");
    CHECK(args.V > 0 && args.V <= args.Vp && args.Vp < (int64_t{1} << 30), "classifier: %lld of %lld columns",
          (long long)args.V, (long long)args.Vp);
    CHECK(args.targets && args.state, "classifier without targets or state");
    dispatch(args.logits.dtype, "classifier", [&](auto type) {
        using T = decltype(type);
        if (args.write_dlogits) run_classifier<T, true>(ctx, args);
        else run_classifier<T, false>(ctx, args);
    });
}

}  // namespace cuda
