// Sums over whole tensors in fp64, and the guard of the step. CPU.
#include "llmc/adam_math.h"
#include "llmc/cpu/common.h"

namespace cpu {
namespace {

// *sum += the pieces' sums in order. Piece i is elements [i * length, (i + 1) * length) of n, and
// piece_sum(begin, count) adds it up: the order depends on n alone.
template <typename PieceSum>
void add_in_pieces(double* sum, double* partial, int64_t n, PieceSum&& piece_sum) {
    const int64_t length = std::max<int64_t>(64, (n + kPartialSums - 1) / kPartialSums);
    const int64_t pieces = (n + length - 1) / length;
#pragma omp parallel for schedule(static) if (n >= kParallelElems)
    for (int64_t i = 0; i < pieces; i++) partial[i] = piece_sum(i * length, std::min(length, n - i * length));
    double total = 0;
    for (int64_t i = 0; i < pieces; i++) total += partial[i];
    *sum += total;
}

// Four chains: an addition's latency is four cycles or so.
template <typename T, typename Term> double sum_terms(const T* in, int64_t count, Term&& term) {
    double chain[4] = {};
    int64_t i = 0;
    for (; i + 4 <= count; i += 4)
        for (int c = 0; c < 4; c++) chain[c] += term(static_cast<double>(widen(in[i + c])));
    for (; i < count; i++) chain[0] += term(static_cast<double>(widen(in[i])));
    return (chain[0] + chain[1]) + (chain[2] + chain[3]);
}

}  // namespace

void sum_losses(Ctx&, const SumLossesArgs& args) {
    check_at_least("sum_losses", "scratch", args.scratch, Dtype::kFp64, kPartialSums);
    check_tensor("sum_losses", "losses", args.losses, args.losses.dtype, args.N);
    for_working_type("sum_losses", args.losses.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        add_in_pieces(args.sum, args.scratch.as<double>(), args.N, [&](int64_t begin, int64_t count) {
            return sum_terms(args.losses.as<T>() + begin, count, [](double x) { return x; });
        });
    });
}

void sum_squares(Ctx&, const SumSquaresArgs& args) {
    check_at_least("sum_squares", "scratch", args.scratch, Dtype::kFp64, kPartialSums);
    for_working_type("sum_squares", args.in.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        add_in_pieces(args.sum, args.scratch.as<double>(), args.in.elems, [&](int64_t begin, int64_t count) {
            return sum_terms(args.in.as<T>() + begin, count, [](double x) { return x * x; });
        });
    });
}

void step_guard(Ctx&, const StepGuardArgs& args) { decide_step(*args.state, args.clip); }

}  // namespace cpu
