// Sums in fp64 in an order that depends only on the number of terms. CPU.
#pragma once
#include "llmc/cpu/common.h"

namespace cpu {

// *sum += the sums of all chunks in order. chunk_sum(begin, count) returns the sum of the terms of a chunk of [0, n).
// partial: (kPartialSums) scratch.
template <typename ChunkSum> void add_in_chunks(double* sum, double* partial, int64_t n, ChunkSum&& chunk_sum) {
    const int64_t length = std::max<int64_t>(64, (n + kPartialSums - 1) / kPartialSums);
    const int64_t chunks = (n + length - 1) / length;
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
