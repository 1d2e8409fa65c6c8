// Helpers of the CPU operations: shape checks, dispatch over dtypes, gradient accumulation, row chunks, sums in fp64.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "llmc/base/check.h"
#include "llmc/cpu/simd.h"
#include "llmc/ops/ops.h"

namespace cpu {

// Operations on fewer elements run on one thread.
inline constexpr int64_t kParallelElems = 8192;

// Calls body(begin, count) for chunks of n independent elements, on all threads.
template <typename Body> inline void for_chunks(int64_t n, Body&& body) {
    constexpr int64_t kChunk = 4096;
#pragma omp parallel for schedule(static) if (n >= kParallelElems)
    for (int64_t begin = 0; begin < n; begin += kChunk) body(begin, std::min(kChunk, n - begin));
}

// Calls body(i) for i < n, on all threads.
template <typename Body> inline void for_elements(int64_t n, Body&& body) {
    for_chunks(n, [&](int64_t begin, int64_t count) {
        for (int64_t i = begin; i < begin + count; i++) body(i);
    });
}
// The same for rows, of `elems` elements in all, or other parts that take longer.
template <typename Body> inline void parallel_for(int64_t n, [[maybe_unused]] int64_t elems, Body&& body) {
#pragma omp parallel for schedule(static) if (elems >= kParallelElems)
    for (int64_t i = 0; i < n; i++) body(i);
}

template <typename T> struct Tag {
    using type = T;
};

// Calls f(Tag<T>{}) with the working type T of an operation.
template <typename F> inline void for_working_type(const char* op, Dtype dtype, F&& f) {
    switch (dtype) {
        case Dtype::kFp32: return f(Tag<float>{});
        case Dtype::kBf16: return f(Tag<bf16>{});
        case Dtype::kFp64: return f(Tag<double>{});
        default: FAIL(kExitBug, "%s: no CPU operation for %s", op, dtype_name(dtype));
    }
}

// The position of row n: positions[n], or n % T without positions.
inline int64_t row_position(const int32_t* positions, int64_t n, int64_t T) {
    return positions ? positions[n] : n % T;
}
// Rows that a table of positions needs.
inline int64_t positions_of(const int32_t* positions, int64_t N, int64_t T) {
    if (!positions) return std::min(T, N);
    const auto [least, most] = std::minmax_element(positions, positions + N);
    CHECK(*least >= 0, "position %d", *least);
    return *most + 1;
}

// A tensor that must be present.
inline void check_tensor(const char* op, const char* name, const Tensor& t, Dtype dtype, int64_t elems) {
    CHECK(t.dtype == dtype && t.elems == elems, "%s: %s is %s with %lld elements, expected %s with %lld", op,
          name, dtype_name(t.dtype), (long long)t.elems, dtype_name(dtype), (long long)elems);
}
inline void check_optional(const char* op, const char* name, const Tensor& t, Dtype dtype, int64_t elems) {
    if (t) check_tensor(op, name, t, dtype, elems);
}
// Scratch memory and tables may be longer than needed.
inline void check_at_least(const char* op, const char* name, const Tensor& t, Dtype dtype, int64_t elems) {
    CHECK(t.dtype == dtype && t.elems >= elems, "%s: %s is %s with %lld elements, expected %s with >= %lld",
          op, name, dtype_name(t.dtype), (long long)t.elems, dtype_name(dtype), (long long)elems);
}
template <typename T> inline constexpr Dtype stat_dtype = dtype_of<Acc<T>>;

// Gradients are fp32 or bf16 for working types fp32 and bf16, fp64 for fp64.
template <typename T>
inline void check_grad(const char* op, const char* name, const Tensor& t, int64_t elems) {
    bool ok = std::is_same_v<T, double> ? t.dtype == Dtype::kFp64 : t.dtype == Dtype::kFp32 || t.dtype == Dtype::kBf16;
    CHECK(ok && t.elems == elems, "%s: gradient %s is %s with %lld elements, expected %lld", op, name,
          dtype_name(t.dtype), (long long)t.elems, (long long)elems);
}

// sum[i] += row[i], rounded once to the type of sum.
template <typename To, typename From> inline void add_row(To* sum, const From* row, int64_t count) {
    for_lanes<Acc<To>>(count, [&](int64_t i, auto n) {
        store(sum + i, load(sum + i, n) + load(row + i, n), n);
    });
}
// grad[begin + i] += values[i], rounded once to the dtype of grad.
template <typename A> inline void add_to_grad(const Tensor& grad, int64_t begin, const A* values, int64_t count) {
    if constexpr (std::is_same_v<A, double>) add_row(grad.as<double>() + begin, values, count);
    else if (grad.dtype == Dtype::kBf16) add_row(grad.as<bf16>() + begin, values, count);
    else add_row(grad.as<float>() + begin, values, count);
}

// Column sums over N rows first sum chunks of rows of fixed size, so that their order does not depend on the number of
// threads: chunk i covers [i * rows, (i + 1) * rows).
struct RowChunks {
    int64_t rows, count;
    explicit RowChunks(int64_t N) {
        constexpr int64_t kMinRows = 16;
        rows = std::max(kMinRows, ceil_div(N, kPartialRows));
        count = ceil_div(N, rows);
    }
};

// grad[c] += sum over the chunks of partial[chunk * stride + c], in order.
template <typename A>
inline void add_partials_to_grad(const Tensor& grad, const A* partial, int64_t chunks, int64_t stride,
                                 int64_t columns) {
    constexpr int64_t kBlock = 64;
#pragma omp parallel for schedule(static) if (chunks * columns >= kParallelElems)
    for (int64_t begin = 0; begin < columns; begin += kBlock) {
        int64_t width = std::min(kBlock, columns - begin);
        A total[kBlock] = {};
        for (int64_t chunk = 0; chunk < chunks; chunk++) add_row(total, partial + chunk * stride + begin, width);
        add_to_grad(grad, begin, total, width);
    }
}

// Dot product; each lane accumulates separately.
template <typename A, typename T, typename U> inline A dot(const T* a, const U* b, int64_t count) {
    Vec<A> sum;
    for_lanes<A>(count, [&](int64_t i, auto n) { sum = fma(load(a + i, n), load(b + i, n), sum); });
    return sum_lanes(sum);
}

// The two functions below sum in fp64, in an order that depends only on the number of terms.

// *sum += the sums of all chunks in order. chunk_sum(begin, count) returns the sum of the terms of a chunk of [0, n).
// partial: (kPartialSums) scratch.
template <typename ChunkSum> void add_in_chunks(double* sum, double* partial, int64_t n, ChunkSum&& chunk_sum) {
    const int64_t length = std::max<int64_t>(64, ceil_div(n, kPartialSums));
    const int64_t chunks = ceil_div(n, length);
#pragma omp parallel for schedule(static) if (n >= kParallelElems)
    for (int64_t i = 0; i < chunks; i++) partial[i] = chunk_sum(i * length, std::min(length, n - i * length));
    double total = 0;
    for (int64_t i = 0; i < chunks; i++) total += partial[i];
    *sum += total;
}

// Sums term(i) for i < count, in four independent chains because an addition has a latency of about four cycles.
template <typename Term> double sum_terms(int64_t count, Term&& term) {
    double chain[4] = {};
    int64_t i = 0;
    for (; i + 4 <= count; i += 4)
        for (int c = 0; c < 4; c++) chain[c] += term(i + c);
    for (; i < count; i++) chain[0] += term(i);
    return (chain[0] + chain[1]) + (chain[2] + chain[3]);
}

}  // namespace cpu
