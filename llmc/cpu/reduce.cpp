// Sums over whole tensors in fp64, and step_guard. CPU.
#include "llmc/cpu/common.h"
#include "llmc/ops/adam_math.h"

namespace cpu {

void sum_losses(Ctx&, const SumLossesArgs& args) {
    check_at_least("sum_losses", "scratch", args.scratch, Dtype::kFp64, kPartialSums);
    check_tensor("sum_losses", "losses", args.losses, args.losses.dtype, args.N);
    for_working_type("sum_losses", args.losses.dtype, [&]<typename T>(Tag<T>) {
        add_in_chunks(args.sum, args.scratch.as<double>(), args.N, [&](int64_t begin, int64_t count) {
            const T* losses = args.losses.as<T>() + begin;
            return sum_terms(count, [&](int64_t i) { return static_cast<double>(widen(losses[i])); });
        });
    });
}

void sum_squares(Ctx&, const SumSquaresArgs& args) {
    check_at_least("sum_squares", "scratch", args.scratch, Dtype::kFp64, args.matrices * kPartialSums);
    const int64_t n = args.in.elems / args.matrices;
    check_tensor("sum_squares", "in", args.in, args.in.dtype, args.matrices * n);
    for_working_type("sum_squares", args.in.dtype, [&]<typename T>(Tag<T>) {
        for (int64_t m = 0; m < args.matrices; m++)
            add_in_chunks(args.sum + m, args.scratch.as<double>() + m * kPartialSums, n,
                          [&](int64_t begin, int64_t count) {
                              const T* in = args.in.as<T>() + m * n + begin;
                              return sum_terms(count, [&](int64_t i) {
                                  const double x = static_cast<double>(widen(in[i]));
                                  return x * x;
                              });
                          });
    });
}

void step_guard(Ctx&, const StepGuardArgs& args) {
    const StepState& state = *args.state;
    float median = 0;
    for (int64_t i = 0; i < norms_held(state); i++)
        if (is_median_norm(state, i)) median = state.norms[i];
    decide_step(args, median);
}

}  // namespace cpu
