// Sums of many terms in fp64, in an order that depends on their number alone. CPU.
#pragma once
#include "llmc/cpu/common.h"

namespace cpu {

// *sum += the pieces' sums in order. Piece i is terms [i * length, (i + 1) * length) of n, and
// piece_sum(begin, count) adds it up. partial: kPartialSums.
template <typename PieceSum> void add_in_pieces(double* sum, double* partial, int64_t n, PieceSum&& piece_sum) {
    const int64_t length = std::max<int64_t>(64, (n + kPartialSums - 1) / kPartialSums);
    const int64_t pieces = (n + length - 1) / length;
#pragma omp parallel for schedule(static) if (n >= kParallelElems)
    for (int64_t i = 0; i < pieces; i++) partial[i] = piece_sum(i * length, std::min(length, n - i * length));
    double total = 0;
    for (int64_t i = 0; i < pieces; i++) total += partial[i];
    *sum += total;
}

// The sum of term(i), i < count. Four chains: an addition's latency is four cycles or so.
template <typename Term> double sum_terms(int64_t count, Term&& term) {
    double chain[4] = {};
    int64_t i = 0;
    for (; i + 4 <= count; i += 4)
        for (int c = 0; c < 4; c++) chain[c] += term(i + c);
    for (; i < count; i++) chain[0] += term(i);
    return (chain[0] + chain[1]) + (chain[2] + chain[3]);
}

}  // namespace cpu
