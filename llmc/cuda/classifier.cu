// Cross entropy fused with its gradient, in place over the logits.
//
// A row of Llama-3 logits (128256 in bf16) is 250 KB, more than the shared memory of one multiprocessor. To read and
// write the logits only once, a cluster of blocks (4 for that row) keeps the row in its shared memory. Blocks of
// several clusters share a multiprocessor: some load while others compute or store. Each cluster processes one row and
// exits: with resident clusters and equal numbers of rows, the first finished after 939 us and the last after 1166 us
// on an H200, since parts of the GPU get unequal shares of the bandwidth.
#include <cuda_pipeline_primitives.h>

#include "llmc/cuda/fp8.cuh"
#include "llmc/cuda/ptx.cuh"
#include "llmc/cuda/soft_cap.cuh"

namespace cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kManyThreads = 256;    // of a block with a large part of a row
constexpr int kFewThreads = 64;      // of a block with a small part, so that many fit on a multiprocessor
constexpr int kSlots = 16;           // vectors of a row per thread
constexpr int kSlotGroups = 4;       // groups of slots that are awaited one after the other
// Threads per multiprocessor, with 64 registers each (bf16) or 80 (fp32).
template <typename T> constexpr int kSmThreads = sizeof(T) == 2 ? 1024 : 768;
constexpr int kMaxCluster = 8;       // the portable limit
constexpr int kAhead = 4;            // vectors in flight per thread when only the losses are wanted
constexpr int kLossBlocksPerSm = 6;

// The largest element of a vector; ignores NaN (the sum propagates it).
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

// Partial softmax of logits y = x mul (or a soft cap's): sum = sum of e^(y - base) (fp32), or of 2^(y log2(e) - base)
// with an integer base (bf16). The latter costs one fma and one fast exponential per element, and changing the integer
// base is exact.
struct OnlineSoftmax {
    float base, sum;
};
template <typename T, bool kCap> struct Softmax {
    static constexpr bool kBase2 = std::is_same_v<T, bf16>;
    static constexpr float kLog2E = 1.4426950408889634f;
    static constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;   // 15 bits: exact products

    SoftCap<T, kCap> cap;
    float factor;   // cap.mul, or that times log2(e)
    __device__ Softmax(float mul, float softcap)
        : cap(mul, softcap), factor(kBase2 ? kLog2E * cap.mul : cap.mul) {}

    // t: what y is in units of cap.mul; -infinity stays, since it hides what lies beyond the row.
    __device__ float scaled(float x) const { return kCap && x == -INFINITY ? x : cap.of(x); }

    // The base of a part with this largest x; finite even for -infinity, so that empty parts need no special case.
    __device__ float base_of(float largest) const {
        return fmaxf(kBase2 ? ceilf(scaled(largest) * factor) : scaled(largest) * factor, -1e30f);
    }
    __device__ float term(float t, float base) const {
        const float power = fmaf(t, factor, -base);
        if constexpr (kBase2) return exp2_approx(power);
        else return expf(power);
    }
    static __device__ float rebase(const OnlineSoftmax& e, float base) {
        return e.sum * (kBase2 ? exp2_approx(e.base - base) : expf(e.base - base));
    }
    // Adds the elements of some vectors to e and raises its base if needed.
    template <int count> __device__ void add(OnlineSoftmax& e, const uint4 (&raw)[count]) const {
        float largest = -INFINITY;
#pragma unroll
        for (int k = 0; k < count; k++) largest = fmaxf(largest, largest_of<T>(raw[k]));
        const float base = fmaxf(e.base, base_of(largest));
        e = {base, rebase(e, base)};
#pragma unroll
        for (int k = 0; k < count; k++) {
            float value[kVec<T>];
            unpack<T>(raw[k], value);
#pragma unroll
            for (int i = 0; i < kVec<T>; i++) e.sum += term(scaled(value[i]), base);
        }
    }
    // -log of the probability of a logit y.
    static __device__ float loss(const OnlineSoftmax& e, float logit) {
        const float gap = kBase2 ? fmaf(e.base, kLn2Low, fmaf(e.base, kLn2High, -logit)) : e.base - logit;
        return gap + logf(e.sum);
    }
    // What the z-loss multiplies probabilities by in the gradient; square = that of the log-sum-exp.
    static __device__ float z_factor(const OnlineSoftmax& e, float z_loss, float& square) {
        const float lse = loss(e, 0.0f);
        square = lse * lse;
        return fmaf(2.0f * z_loss, lse, 1.0f);
    }
    // Joins disjoint parts, one per lane; every lane gets the same bits.
    static __device__ OnlineSoftmax join_lanes(const OnlineSoftmax& e) {
        const float base = warp_max(e.base);
        return {base, warp_sum(rebase(e, base))};
    }
    // As join_lanes for `count` parts in shared memory; every warp gets the result.
    static __device__ OnlineSoftmax join_all(const OnlineSoftmax* parts, int count) {
        OnlineSoftmax own = {-1e30f, 0.0f};
        for (int i = threadIdx.x % kLanes; i < count; i += kLanes) {
            const float base = fmaxf(own.base, parts[i].base);
            own = {base, rebase(own, base) + rebase(parts[i], base)};
        }
        return join_lanes(own);
    }
};

// Sets the elements from `count` on to -infinity, so that padded columns do not contribute to the softmax.
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

// Exchanges the partial softmax of a cluster's warps. A cluster barrier would also wait for unrelated memory accesses.
template <int kCluster, int kWarps> struct Exchange {
    OnlineSoftmax parts[kCluster * kWarps];
    uint64_t barrier;

    __device__ void open() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
        if constexpr (kCluster > 1) {
            if (threadIdx.x == 0) {
                ptx::barrier_init(ptx::shared_address(&barrier), 1);
                ptx::barrier_init_fence();
            }
            __cluster_barrier_arrive();   // the other blocks must run, with initialised barriers, before anything
            __cluster_barrier_wait();     // is sent to them
        }
#endif
    }
    // Passes this warp's part `own` to all warps of the cluster and returns all their parts.
    __device__ const OnlineSoftmax* swap(int block, const OnlineSoftmax& own) {
        const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
        OnlineSoftmax* const to = &parts[block * kWarps + warp];
        if constexpr (kCluster == 1) {
            if (lane == 0) *to = own;
            __syncthreads();
        } else {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
            if (threadIdx.x == 0) ptx::barrier_expect(ptx::shared_address(&barrier), sizeof parts);
            if (lane < kCluster) {
                ptx::send_to_block(ptx::address_in_block(to, lane), own.base, own.sum,
                                   ptx::address_in_block(&barrier, lane));
            }
            ptx::barrier_wait(&barrier, 0);
#endif
        }
        return parts;
    }
};

// Math: x = logits mul (kCap: softcap tanh(that / softcap)); p = softmax(x[:V]); losses = lse - x[target]; logits =
// (p (1 + 2 z_loss lse) - onehot) dloss_mul mul (kCap: times 1 - (x / softcap)^2), 0 in rows that are not counted and
// in the padded columns; squares = lse^2 if z_loss > 0.
// Source: Milakov and Gimelshein, arXiv 1805.02867 (joining partial softmax sums).
// Traffic: logits read once and written once.
// Requires: Vp a multiple of 16 bytes of T, aligned; at most kCluster kSlots kThreads vectors per row; compute
// capability 9.0 for more than one block per row.
// Parallel: a cluster owns a row, block b of it part_vectors vectors, a thread every kThreads-th of those. A thread
// copies its vectors into its own slots of shared memory and reads them twice; in between, the warps of the cluster
// exchange one OnlineSoftmax each.
template <typename T, bool kCap, int kThreads, int kCluster>
__global__ void __launch_bounds__(kThreads, kSmThreads<T> / kThreads)
    classifier_kernel(T* logits, float* losses, const int32_t* targets, StepState* state, int V, int Vp,
                      int part_vectors, float mul, float z_loss, float* squares, float softcap) {
    extern __shared__ uint4 parts[];                   // part_vectors, in whole slots of kThreads
    constexpr int kWidth = kVec<T>, kWarps = kThreads / kLanes, kGroup = kSlots / kSlotGroups;
    __shared__ Exchange<kCluster, kWarps> exchange;
    using S = Softmax<T, kCap>;
    const S s(mul, softcap);
    const int thread = threadIdx.x;
    const int part = static_cast<int>(blockIdx.x) % kCluster;
    const int64_t row = blockIdx.x / kCluster;
    const int part_end = min((part + 1) * part_vectors, Vp / kWidth);
    const int begin = part * part_vectors + thread;    // vectors of this thread: begin, begin + kThreads, ...
    const int count = part_end - begin;
    const bool has_padding = part_end * kWidth > V;
    T* const at = logits + row * Vp + begin * kWidth;
    uint4* const slots = parts + thread;
#pragma unroll
    for (int slot = 0; slot < kSlots; slot++) {
        if (slot * kThreads < count) {
            __pipeline_memcpy_async(slots + slot * kThreads, at + slot * kThreads * kWidth, 16);
        } else if (slot * kThreads < part_vectors) {
            slots[slot * kThreads] = mask_tail<T>(uint4{}, 0);   // past the end of the part: -infinity
        }
        if ((slot + 1) % kGroup == 0) __pipeline_commit();
    }
    const int target = targets[row];
    const float dloss_mul = state->dloss_mul;
    const bool is_counted = counted(target, V);
    const int target_vector = target / kWidth - begin;
    const bool owns_target = is_counted && target_vector >= 0 && target_vector < count && target_vector % kThreads == 0;
    // No other thread writes this element.
    const float target_logit = owns_target ? s.scaled(to_float(logits[row * Vp + target])) : 0.0f;
    exchange.open();

    auto take = [&](int slot) {
        uint4 raw = slots[slot * kThreads];
        if (has_padding) raw = mask_tail<T>(raw, V - (begin + slot * kThreads) * kWidth);
        return raw;
    };
    OnlineSoftmax softmax = {-1e30f, 0.0f};
#pragma unroll
    for (int group = 0; group < kSlotGroups; group++) {
        __pipeline_wait_prior(kSlotGroups - 1 - group);
        uint4 raw[kGroup];
#pragma unroll
        for (int k = 0; k < kGroup; k++) {
            const int slot = group * kGroup + k;
            raw[k] = slot * kThreads < part_vectors ? take(slot) : mask_tail<T>(uint4{}, 0);
        }
        s.add(softmax, raw);
    }
    softmax = S::join_lanes(softmax);
    softmax = S::join_all(exchange.swap(part, softmax), kCluster * kWarps);

    float z_mul = 1.0f, square = 0.0f;
    if (z_loss > 0.0f) z_mul = S::z_factor(softmax, z_loss, square);
    if (owns_target) {
        losses[row] = S::loss(softmax, target_logit * s.cap.mul);
        if (z_loss > 0.0f) squares[row] = square;
    }
    if (!is_counted && part == 0 && thread == 0) {
        losses[row] = 0.0f;
        if (z_loss > 0.0f) squares[row] = 0.0f;
        note_bad_target(target, V, state);
    }
    const float row_mul = dloss_mul / softmax.sum * z_mul * mul;
#pragma unroll
    for (int slot = 0; slot < kSlots; slot++) {
        if (slot * kThreads >= part_vectors) continue;
        uint4 result = {};
        if (is_counted) {
            float value[kWidth];
            unpack<T>(take(slot), value);
#pragma unroll
            for (int i = 0; i < kWidth; i++) {
                const float t = s.scaled(value[i]);
                value[i] = s.term(t, softmax.base) * row_mul * s.cap.slope(t);
            }
            result = pack<T>(value);
        }
        if (slot * kThreads < count) store_vec(at + slot * kThreads * kWidth, result);
    }
    if (owns_target) {
        const float p = s.term(target_logit, softmax.base) / softmax.sum;
        logits[row * Vp + target] = from_float<T>((p * z_mul - 1.0f) * dloss_mul * mul * s.cap.slope(target_logit));
    }
}

// Math: losses of classifier_kernel.
// Source: as classifier_kernel.
// Traffic: logits of the counted rows read once.
// Requires: Vp a multiple of 16 bytes of T, aligned.
// Parallel: a block owns a row, a thread every 256th vector, kAhead of them in flight.
template <typename T, bool kCap>
__global__ void __launch_bounds__(kManyThreads, kLossBlocksPerSm)
    classifier_losses_kernel(const T* logits, float* losses, const int32_t* targets, StepState* state, int V,
                             int Vp, float mul, float softcap) {
    constexpr int kThreads = kManyThreads, kWidth = kVec<T>;
    __shared__ OnlineSoftmax softmaxes[kThreads / kLanes];
    using S = Softmax<T, kCap>;
    const S s(mul, softcap);
    const T* row = logits + int64_t{blockIdx.x} * Vp;
    const int target = targets[blockIdx.x];
    if (!counted(target, V)) {
        if (threadIdx.x == 0) {
            losses[blockIdx.x] = 0.0f;
            note_bad_target(target, V, state);
        }
        return;
    }
    const float target_logit = s.scaled(to_float(row[target]));
    const int vectors = (V + kWidth - 1) / kWidth;
    OnlineSoftmax softmax = {-1e30f, 0.0f};
    for (int first = threadIdx.x; first < vectors; first += kAhead * kThreads) {
        uint4 raw[kAhead];
#pragma unroll
        for (int k = 0; k < kAhead; k++) {
            const int v = first + k * kThreads;
            raw[k] = v < vectors ? load_vec(row + v * kWidth) : uint4{};
        }
#pragma unroll
        for (int k = 0; k < kAhead; k++) {
            const int left = V - (first + k * kThreads) * kWidth;
            if (left < kWidth) raw[k] = mask_tail<T>(raw[k], left);
        }
        s.add(softmax, raw);
    }
    softmax = S::join_lanes(softmax);
    if (threadIdx.x % kLanes == 0) softmaxes[threadIdx.x / kLanes] = softmax;
    __syncthreads();
    softmax = S::join_all(softmaxes, kThreads / kLanes);
    if (threadIdx.x == 0) losses[blockIdx.x] = S::loss(softmax, target_logit * s.cap.mul);
}

// Math: as classifier_kernel.
// Source: as classifier_kernel.
// Traffic: logits read three times (the later ones from L2 for short rows) and written once (kWrite).
// Requires: nothing of Vp, alignment or the GPU.
// Parallel: a block owns a row, thread i its elements i, i + 256, ...
template <typename T, bool kCap, bool kWrite>
__global__ void __launch_bounds__(kManyThreads)
    classifier_loop_kernel(T* logits, float* losses, const int32_t* targets, StepState* state, int64_t V,
                           int64_t Vp, float mul, float z_loss, float* squares, float softcap) {
    constexpr int kThreads = kManyThreads;
    __shared__ OnlineSoftmax softmaxes[kThreads / kLanes];
    T* row = logits + blockIdx.x * Vp;
    const int target = targets[blockIdx.x];
    if (!counted(target, V)) {
        if (threadIdx.x == 0) {
            losses[blockIdx.x] = 0.0f;
            if (z_loss > 0.0f) squares[blockIdx.x] = 0.0f;
            note_bad_target(target, V, state);
        }
        for (int64_t i = threadIdx.x; kWrite && i < Vp; i += kThreads) row[i] = from_float<T>(0.0f);
        return;
    }
    using S = Softmax<T, kCap>;
    const S s(mul, softcap);
    const float target_logit = s.scaled(to_float(row[target]));
    float largest = -INFINITY;
    for (int64_t i = threadIdx.x; i < V; i += kThreads) largest = fmaxf(largest, to_float(row[i]));
    OnlineSoftmax softmax = {s.base_of(largest), 0.0f};
    for (int64_t i = threadIdx.x; i < V; i += kThreads) softmax.sum += s.term(s.scaled(to_float(row[i])), softmax.base);
    softmax = S::join_lanes(softmax);
    if (threadIdx.x % kLanes == 0) softmaxes[threadIdx.x / kLanes] = softmax;
    __syncthreads();
    softmax = S::join_all(softmaxes, kThreads / kLanes);
    if (threadIdx.x == 0) losses[blockIdx.x] = S::loss(softmax, target_logit * s.cap.mul);
    if constexpr (kWrite) {
        float z_mul = 1.0f, square = 0.0f;
        if (z_loss > 0.0f) z_mul = S::z_factor(softmax, z_loss, square);
        if (z_loss > 0.0f && threadIdx.x == 0) squares[blockIdx.x] = square;
        const float dloss_mul = state->dloss_mul, inverse = 1.0f / softmax.sum;
        for (int64_t i = threadIdx.x; i < Vp; i += kThreads) {
            const float t = i < V ? s.scaled(to_float(row[i])) : 0.0f;
            float p = i < V ? s.term(t, softmax.base) * inverse * z_mul : 0.0f;
            if (i == target) p -= 1.0f;
            row[i] = from_float<T>(p * dloss_mul * mul * s.cap.slope(t));
        }
    }
}

// Math: DlogitsResidualArgs.
// Source: ops.h.
// Traffic: dlogits and codes read; a row of weight read, of dx read and written per token.
// Requires: C and Vp multiples of 16, aligned rows.
// Parallel: a block owns a row, a thread every 256th 16 columns of dlogits, then every 256th vector of dx.
template <Dtype kFormat>
__global__ void __launch_bounds__(kManyThreads)
    dlogits_residual_kernel(bf16* dx, const bf16* dlogits, const uint8_t* codes, const float* scale_inv, bool blocks,
                            const bf16* weight, const int32_t* targets, int64_t N, int64_t C, int64_t V, int64_t Vp) {
    __shared__ double shared[kLanes];
    const int64_t n = blockIdx.x;
    const int target = targets[n];
    if (!counted(target, V)) return;
    double sum = 0;
    for (int64_t v = int64_t{threadIdx.x} * 16; v < Vp; v += kManyThreads * 16) {
        const uint4 raw = load_vec(codes + n * Vp + v);
        const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
        const double scale = scale_inv[blocks ? v / kScaleBlock * N + n : 0];
        float x[16];
        load_floats<bf16, 16>(dlogits + n * Vp + v, x);
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
            const float2 number = from_fp8x2<kFormat>(word[i / 4] >> (i % 4 * 8) & 0xffffu);
            sum += static_cast<double>(x[i]) - static_cast<double>(number.x) * scale;
            sum += static_cast<double>(x[i + 1]) - static_cast<double>(number.y) * scale;
        }
    }
    const int thread = static_cast<int>(threadIdx.x);
    const auto residual =
        static_cast<float>(block_sum(sum, shared, thread / kLanes, thread % kLanes, kManyThreads / kLanes));
    for (int64_t c = int64_t{threadIdx.x} * 8; c < C; c += kManyThreads * 8) {
        float out[8], w[8];
        load_floats<bf16, 8>(dx + n * C + c, out);
        load_floats<bf16, 8>(weight + target * C + c, w);
#pragma unroll
        for (int i = 0; i < 8; i++) out[i] = __fmaf_rn(residual, w[i], out[i]);
        store_floats<bf16, 8>(dx + n * C + c, out);
    }
}

template <typename T, bool kCap, int kThreads, int kCluster>
void launch_classifier(Ctx& ctx, const ClassifierArgs& args, int64_t vectors) {
    auto kernel = classifier_kernel<T, kCap, kThreads, kCluster>;
    const int64_t part_vectors = ceil_div(vectors, kCluster);
    allow_shared_memory(kernel, size_t{16} * kSlots * kThreads);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension, attribute.val.clusterDim.x = kCluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    launch_with(ctx, kCluster > 1 ? &attribute : nullptr, kernel, grid_size(args.N * kCluster), kThreads,
                static_cast<size_t>(16 * kThreads * ceil_div(part_vectors, kThreads)), args.logits.as<T>(),
                args.losses.as<float>(), args.targets, args.state, args.V, args.Vp, part_vectors, args.logit_mul,
                args.z_loss, args.squares.as<float>(), args.softcap);
}

template <typename T, bool kCap, bool kWrite> void run_classifier(Ctx& ctx, const ClassifierArgs& args) {
    const int64_t vectors = args.Vp / static_cast<int64_t>(16 / sizeof(T));
    const bool vector = vectorizable<T>(args.Vp, {args.logits.data});
    const int64_t blocks = ceil_div(vectors, kSlots * kManyThreads);
    if (!vector || (kWrite && (blocks > kMaxCluster || (blocks > 1 && ctx.sm < 90)))) {
        launch_kernel(ctx, classifier_loop_kernel<T, kCap, kWrite>, grid_size(args.N), kManyThreads,
                      args.logits.as<T>(), args.losses.as<float>(), args.targets, args.state, args.V, args.Vp,
                      args.logit_mul, args.z_loss, args.squares.as<float>(), args.softcap);
    } else if constexpr (!kWrite) {
        launch_kernel(ctx, classifier_losses_kernel<T, kCap>, grid_size(args.N), kManyThreads, args.logits.as<T>(),
                      args.losses.as<float>(), args.targets, args.state, args.V, args.Vp, args.logit_mul, args.softcap);
    } else if (vectors <= kSlots * kFewThreads) {
        launch_classifier<T, kCap, kFewThreads, 1>(ctx, args, vectors);
    } else if (blocks == 1) {
        launch_classifier<T, kCap, kManyThreads, 1>(ctx, args, vectors);
    } else if (blocks == 2) {
        launch_classifier<T, kCap, kManyThreads, 2>(ctx, args, vectors);
    } else if (blocks <= 4) {
        launch_classifier<T, kCap, kManyThreads, 4>(ctx, args, vectors);
    } else {
        launch_classifier<T, kCap, kManyThreads, kMaxCluster>(ctx, args, vectors);
    }
}

}  // namespace

void classifier(Ctx& ctx, const ClassifierArgs& args) {
    expect(args.logits, args.logits.dtype, args.N * args.Vp, "classifier: logits");
    expect(args.losses, Dtype::kFp32, args.N, "classifier: losses");
    CHECK(args.V > 0 && args.V <= args.Vp && args.Vp < (int64_t{1} << 30), "classifier: %lld of %lld columns",
          (long long)args.V, (long long)args.Vp);
    CHECK(args.targets && args.state, "classifier without targets or state");
    if (args.z_loss > 0) expect(args.squares, Dtype::kFp32, args.N, "classifier: squares");
    CHECK(args.write_dlogits || args.z_loss == 0, "classifier: a z-loss without gradients");
    dispatch(args.logits.dtype, "classifier", [&](auto type) {
        using T = decltype(type);
        const auto run = [&](auto cap) {
            if (args.write_dlogits) run_classifier<T, cap.value, true>(ctx, args);
            else run_classifier<T, cap.value, false>(ctx, args);
        };
        if (args.softcap > 0) run(std::true_type{});
        else run(std::false_type{});
    });
}

void dlogits_residual(Ctx& ctx, const DlogitsResidualArgs& args) {
    const int64_t N = args.N, C = args.C, Vp = args.Vp;
    expect(args.dx, Dtype::kBf16, N * C, "dlogits_residual: dx");
    expect(args.dlogits, Dtype::kBf16, N * Vp, "dlogits_residual: dlogits");
    expect(args.codes, args.codes.dtype, N * Vp, "dlogits_residual: codes");
    expect(args.scale_inv, Dtype::kFp32, scale_inv_elems(args.granularity, N, Vp), "dlogits_residual: scale_inv");
    expect(args.weight, Dtype::kBf16, Vp * C, "dlogits_residual: weight");
    for (const Tensor* t : {&args.dx, &args.dlogits, &args.codes, &args.weight}) expect_aligned(*t, "dlogits_residual");
    CHECK(C % 16 == 0 && Vp % 16 == 0, "dlogits_residual: %lld x %lld columns", ll(C), ll(Vp));
    with_format(args.codes.dtype, "dlogits_residual", [&](auto format) {
        launch_kernel(ctx, dlogits_residual_kernel<decltype(format)::value>, grid_size(N), kManyThreads,
                      args.dx.as<bf16>(), args.dlogits.as<bf16>(), static_cast<const uint8_t*>(args.codes.data),
                      args.scale_inv.as<float>(), args.granularity != Granularity::kTensor, args.weight.as<bf16>(),
                      args.targets, N, C, args.V, Vp);
    });
}

}  // namespace cuda
