// Matmul kernel of the CPU, used by gemm and attention: packing into panels and a register-blocked kernel.
//
// An element of a product is defined as follows. Every kDepth consecutive k form one chain of fma, which starts at 0
// and ascends in k; the sums of the chains are added in ascending order. The result depends on no tile size or thread
// count.
// Source of the blocking: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "llmc/cpu/simd.h"

namespace cpu {

inline constexpr int64_t kDepth = 256;      // k per packed block: a panel of B then fills half the L1 cache
inline constexpr int64_t kMicroRows = 6;    // rows of the kernel: 6 x 2 accumulators leave 4 registers
template <typename A> inline constexpr int64_t kMicroColumns = 2 * Vec<A>::kWidth;

// Uninitialised scratch of one operation, aligned to cache lines so that no vector of a panel crosses one.
struct FreeAligned {
    void operator()(void* memory) const { ::operator delete(memory, std::align_val_t{64}); }
};
template <typename A> using Buffer = std::unique_ptr<A[], FreeAligned>;
template <typename A> inline Buffer<A> make_buffer(int64_t elems) {
    void* memory = ::operator new(static_cast<size_t>(elems) * sizeof(A), std::align_val_t{64});
    return Buffer<A>(static_cast<A*>(memory));
}

// An operand with elements (i, k), where i is the row of A or the column of B.
template <typename T> struct Operand {
    const T* data;
    int64_t stride;      // elements from one i to the next, or from one k to the next if k_outer
    bool k_outer;        // data[k * stride + i] instead of data[i * stride + k]
    int64_t count;       // range of i
    Operand from(int64_t i) const { return {data + (k_outer ? i : i * stride), stride, k_outer, count - i}; }
};

inline void transpose(Vec<double> (&r)[4]) {
    __m256d a = _mm256_unpacklo_pd(r[0].v, r[1].v), b = _mm256_unpackhi_pd(r[0].v, r[1].v);
    __m256d c = _mm256_unpacklo_pd(r[2].v, r[3].v), d = _mm256_unpackhi_pd(r[2].v, r[3].v);
    r[0] = _mm256_permute2f128_pd(a, c, 0x20);
    r[1] = _mm256_permute2f128_pd(b, d, 0x20);
    r[2] = _mm256_permute2f128_pd(a, c, 0x31);
    r[3] = _mm256_permute2f128_pd(b, d, 0x31);
}
inline void transpose(Vec<float> (&r)[8]) {
    __m256 pair[8], quad[8];
    for (int i = 0; i < 8; i += 2) {
        pair[i] = _mm256_unpacklo_ps(r[i].v, r[i + 1].v);
        pair[i + 1] = _mm256_unpackhi_ps(r[i].v, r[i + 1].v);
    }
    for (int i = 0; i < 8; i += 4) {
        quad[i] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0x44);
        quad[i + 1] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0xee);
        quad[i + 2] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0x44);
        quad[i + 3] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x31);
    }
}

// Packs i in [0, width), with 0 where i >= count, and k in [k_begin, k_begin + depth) as panel[k][width], converted to
// A. Writes up to one vector past the panel, so panels must be packed in ascending order and the last one needs
// kPanelSlack spare elements.
inline constexpr int64_t kPanelSlack = 8;
template <int64_t width, typename A, typename T>
inline void pack_panel(A* panel, const Operand<T>& in, int64_t k_begin, int64_t depth) {
    constexpr int kLanes = Vec<A>::kWidth;
    constexpr int kGroups = static_cast<int>((width + kLanes - 1) / kLanes);
    const int64_t valid = std::min(width, in.count);
    if (in.k_outer) {
        for (int64_t k = 0; k < depth; k++) {
            const T* from = in.data + (k_begin + k) * in.stride;
            for (int g = 0; g < kGroups; g++) {
                int64_t lanes = std::min<int64_t>(kLanes, in.count - g * kLanes);
                A* to = panel + k * width + g * kLanes;
                if (lanes == kLanes) store(to, load(from + g * kLanes));
                else if (lanes > 0) store(to, load(from + g * kLanes, static_cast<int>(lanes)));
                else store(to, Vec<A>());
            }
        }
        return;
    }
    for_lanes<A>(depth, [&](int64_t k, auto n) {
        Vec<A> rows[kGroups][kLanes];
        for (int g = 0; g < kGroups; g++) {
            for (int i = 0; i < kLanes; i++) {
                int64_t row = g * kLanes + i;
                rows[g][i] = row < valid ? load(in.data + row * in.stride + k_begin + k, n) : Vec<A>();
            }
            transpose(rows[g]);
        }
        for (int j = 0; j < n; j++)
            for (int g = 0; g < kGroups; g++) store(panel + (k + j) * width + g * kLanes, rows[g][j]);
    });
}

// sums[6][2 vectors] (rows `stride` apart) = or += a panel of A times a panel of B.
template <typename A>
inline void micro_kernel(int64_t depth, const A* a, const A* b, A* sums, int64_t stride, bool add) {
    constexpr int kLanes = Vec<A>::kWidth;
    Vec<A> c00, c01, c10, c11, c20, c21, c30, c31, c40, c41, c50, c51;
    for (int64_t k = 0; k < depth; k++) {
        Vec<A> b0 = load(b), b1 = load(b + kLanes), x(a[0]);
        c00 = fma(x, b0, c00), c01 = fma(x, b1, c01), x = Vec<A>(a[1]);
        c10 = fma(x, b0, c10), c11 = fma(x, b1, c11), x = Vec<A>(a[2]);
        c20 = fma(x, b0, c20), c21 = fma(x, b1, c21), x = Vec<A>(a[3]);
        c30 = fma(x, b0, c30), c31 = fma(x, b1, c31), x = Vec<A>(a[4]);
        c40 = fma(x, b0, c40), c41 = fma(x, b1, c41), x = Vec<A>(a[5]);
        c50 = fma(x, b0, c50), c51 = fma(x, b1, c51);
        a += kMicroRows;
        b += 2 * kLanes;
    }
    auto put = [&](int row, Vec<A> left, Vec<A> right) {
        A* out = sums + row * stride;
        if (add) left = load(out) + left, right = load(out + kLanes) + right;
        store(out, left);
        store(out + kLanes, right);
    };
    put(0, c00, c01), put(1, c10, c11), put(2, c20, c21);
    put(3, c30, c31), put(4, c40, c41), put(5, c50, c51);
}

// sums (M rounded up to kMicroRows, N to kMicroColumns, rows `stride` apart) = or += packed A times packed B over
// `depth` k.
template <typename A>
inline void multiply_packed(int64_t M, int64_t N, int64_t depth, const A* a, const A* b, A* sums,
                            int64_t stride, bool add) {
    for (int64_t j = 0; j < N; j += kMicroColumns<A>)
        for (int64_t i = 0; i < M; i += kMicroRows)
            micro_kernel(depth, a + i * depth, b + j * depth, sums + i * stride + j, stride, add);
}

template <int64_t width, typename A, typename T>
inline void pack(A* panels, const Operand<T>& in, int64_t k_begin, int64_t depth) {
    for (int64_t i = 0; i < in.count; i += width)
        pack_panel<width>(panels + i * depth, in.from(i), k_begin, depth);
}

// Number of scratch elements that multiply needs.
template <typename A> constexpr int64_t multiply_scratch(int64_t M, int64_t N, int64_t K) {
    int64_t depth = std::min(K, kDepth);
    return (round_up(M, kMicroRows) + round_up(N, kMicroColumns<A>)) * depth + 2 * kPanelSlack;
}

// Computes a whole product on the calling thread, for attention. sums as in multiply_packed.
template <typename A, typename TA, typename TB>
inline void multiply(const Operand<TA>& a, const Operand<TB>& b, int64_t K, A* sums, int64_t stride, bool add,
                     A* scratch) {
    A* packed_a = scratch;
    A* packed_b = scratch + round_up(a.count, kMicroRows) * std::min(K, kDepth) + kPanelSlack;
    for (int64_t k = 0; k < K; k += kDepth) {
        int64_t depth = std::min(kDepth, K - k);
        pack<kMicroRows>(packed_a, a, k, depth);
        pack<kMicroColumns<A>>(packed_b, b, k, depth);
        multiply_packed(a.count, b.count, depth, packed_a, packed_b, sums, stride, add || k > 0);
    }
}

}  // namespace cpu
