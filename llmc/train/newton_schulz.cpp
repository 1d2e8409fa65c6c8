#include "llmc/train/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <iterator>
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
constexpr int kStepCount = std::size(kSteps);

// Two steps of a (k, r k) matrix take 8 r + 4 products of k^3 one by one and 4 r + 10 at once.
bool two_at_once(int64_t rows, int64_t cols) { return 2 * std::max(rows, cols) > 3 * std::min(rows, cols); }

// Matrices of `rows` and `cols`, the shorter of which is k. matrices: 0 is one, as in GemmArgs.
struct NewtonSchulz {
    Ctx& ctx;
    const NewtonSchulzBuffers& buffers;
    const int64_t matrices, rows, cols, k = std::min(rows, cols), count = std::max<int64_t>(1, matrices);
    Tensor x = buffers.x.slice(0, count * rows * cols), next = buffers.other.slice(0, count * rows * cols);
    const Tensor gram = squares_of(buffers.gram);

    bool wide() const { return rows <= cols; }
    Tensor squares_of(const Tensor& memory) const { return memory.slice(0, count * k * k); }
    // D = A B of symmetric (k, k) matrices that commute.
    void multiply(Tensor D, Tensor A, Tensor B) const {
        ops::gemm(ctx, {.D = D, .A = A, .B = B, .M = k, .N = k, .K = k, .symmetric = true, .matrices = matrices});
    }
    void make_gram() const {
        ops::gemm(ctx, {.D = gram, .A = x, .B = x, .M = k, .N = k, .K = std::max(rows, cols),
                        .layout = wide() ? GemmLayout::kForward : GemmLayout::kWgrad, .symmetric = true,
                        .matrices = matrices});
    }
    // p = a I + b G + c G^2
    void make_polynomial(Tensor p, int step) const {
        const auto& [a, b, c] = kSteps[step];
        multiply(p, gram, gram);
        ops::muon_polynomial(ctx, {.square = p, .gram = gram, .k = k, .a = a / kMargin, .b = b / std::pow(kMargin, 3),
                                   .c = c / std::pow(kMargin, 5), .matrices = count});
    }
    // X = P X, or X P
    void apply(Tensor p) {
        if (wide())
            ops::gemm(ctx, {.D = next, .A = p, .B = x, .M = rows, .N = cols, .K = k, .layout = GemmLayout::kDgrad,
                            .matrices = matrices});
        else ops::gemm(ctx, {.D = next, .A = x, .B = p, .M = rows, .N = cols, .K = k, .matrices = matrices});
        std::swap(x, next);
    }
    void one_step(int step) {
        const Tensor p = squares_of(buffers.square);
        make_gram();
        make_polynomial(p, step);
        apply(p);
    }
    // The next step's Gram matrix is P G P, so that X is multiplied once, by the product of both polynomials. What the
    // rounding of G to bf16 adds to its smallest eigenvalues grows with every such step: a third one makes singular
    // values of up to 1.39 where these steps end at 1.13.
    void two_steps(int step) {
        const Tensor p = squares_of(buffers.square), free = squares_of(next);
        make_gram();
        make_polynomial(p, step);
        multiply(free, p, gram);
        multiply(gram, free, p);
        make_polynomial(free, step + 1);
        multiply(gram, p, free);
        apply(gram);
    }
};

}  // namespace

NewtonSchulzBuffers::NewtonSchulzBuffers(Arena& arena, Purpose purpose, Dtype dtype, const Most& most)
    : x(arena.take(purpose, dtype, most.elems)), other(arena.take(purpose, dtype, most.elems)),
      gram(arena.take(purpose, dtype, most.squares)), square(arena.take(purpose, dtype, most.squares)),
      sum_squares(arena.take(purpose, Dtype::kFp64, most.matrices)),
      partial_sums(arena.take(purpose, Dtype::kFp64, most.matrices * kPartialSums)) {}

void normalize_matrices(Ctx& ctx, const NewtonSchulzBuffers& buffers, const Tensor& matrices, int64_t count,
                        double margin) {
    const Tensor sums = buffers.sum_squares.slice(0, count);
    device::fill_bytes(ctx, sums.data, 0, sums.bytes());
    double* const sum = static_cast<double*>(sums.data);
    ops::sum_squares(ctx, {.sum = sum, .in = matrices, .scratch = buffers.partial_sums, .matrices = count});
    ops::muon_normalize(ctx, {.matrix = matrices, .sum_squares = sum, .margin = margin, .matrices = count});
}

Tensor newton_schulz(Ctx& ctx, const NewtonSchulzBuffers& buffers, int64_t matrices, int64_t rows, int64_t cols) {
    NewtonSchulz steps{.ctx = ctx, .buffers = buffers, .matrices = matrices, .rows = rows, .cols = cols};
    normalize_matrices(ctx, buffers, steps.x, steps.count, kMargin);
    for (int step = 0; step < kStepCount; step++)
        if (step + 1 < kStepCount && two_at_once(rows, cols)) steps.two_steps(step++);
        else steps.one_step(step);
    return steps.x;
}
