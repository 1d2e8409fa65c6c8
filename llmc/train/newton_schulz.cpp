#include "llmc/train/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace {

// Rounding could make a singular value exceed 1, where the polynomials grow fast: the matrix and the argument of each
// polynomial are smaller by this factor.
constexpr double kMargin = 1.01;

// The polynomials a x + b x^3 + c x^5 of the paper for singular values from 0.001 on.
constexpr double kSteps[][3] = {
    {8.28721201814563, -23.595886519098837, 17.300387312530933},
    {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
    {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
    {3.3184196573706015, -2.488488024314874, 0.51004894012372},
    {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
};

}  // namespace

NewtonSchulzBuffers::NewtonSchulzBuffers(Arena& arena, Purpose purpose, Dtype dtype, int64_t most_elems,
                                         int64_t most_side)
    : x(arena.take(purpose, dtype, most_elems)), other(arena.take(purpose, dtype, most_elems)),
      gram(arena.take(purpose, dtype, most_side * most_side)),
      square(arena.take(purpose, dtype, most_side * most_side)), sum_squares(arena.take(purpose, Dtype::kFp64, 1)),
      partial_sums(arena.take(purpose, Dtype::kFp64, kPartialSums)) {}

Tensor newton_schulz(Ctx& ctx, const NewtonSchulzBuffers& buffers, int64_t rows, int64_t cols) {
    const bool wide = rows <= cols;
    const int64_t k = std::min(rows, cols), longer = std::max(rows, cols);
    Tensor x = buffers.x.slice(0, rows * cols), next = buffers.other.slice(0, rows * cols);
    const Tensor gram = buffers.gram.slice(0, k * k), square = buffers.square.slice(0, k * k);
    device::fill_bytes(ctx, buffers.sum_squares.data, 0, buffers.sum_squares.bytes());
    double* const sum = static_cast<double*>(buffers.sum_squares.data);
    ops::sum_squares(ctx, {.sum = sum, .in = x, .scratch = buffers.partial_sums});
    ops::muon_normalize(ctx, {.matrix = x, .sum_squares = sum, .margin = kMargin});
    for (const auto& [a, b, c] : kSteps) {
        ops::gemm(ctx, {.D = gram, .A = x, .B = x, .M = k, .N = k, .K = longer,
                        .layout = wide ? GemmLayout::kForward : GemmLayout::kWgrad});
        ops::gemm(ctx, {.D = square, .A = gram, .B = gram, .M = k, .N = k, .K = k});   // symmetric
        ops::muon_polynomial(ctx, {.square = square, .gram = gram, .k = k, .a = a / kMargin,
                                   .b = b / std::pow(kMargin, 3), .c = c / std::pow(kMargin, 5)});
        if (wide)
            ops::gemm(ctx, {.D = next, .A = square, .B = x, .M = rows, .N = cols, .K = k,
                            .layout = GemmLayout::kDgrad});
        else ops::gemm(ctx, {.D = next, .A = x, .B = square, .M = rows, .N = cols, .K = k});
        std::swap(x, next);
    }
    return x;
}
