// The polar factor U V^T of a matrix U S V^T, nearly: steps of X = (a I + b G + c G^2) X with G = X X^T, or of
// X = X (a I + b G + c G^2) with G = X^T X if that is smaller. Five steps with the coefficients of Polar Express (Amsel
// et al., arXiv 2505.16932) take singular values from 0.001 to 1 of the largest to 0.84 to 1.13. Of a matrix that is
// far from square, G of every second step comes from G of the step before.
#pragma once
#include "llmc/ops/arena.h"
#include "llmc/ops/ops.h"

// Each takes all of the memory it is given; the largest matrix decides.
struct NewtonSchulzBuffers {
    Tensor x, other;        // of the largest batch, T
    Tensor gram, square;    // of the largest square batch of shorter sides, T
    Tensor sum_squares;     // (matrices) fp64
    Tensor partial_sums;    // (matrices, kPartialSums) fp64

    // The most that any batch has: elements; elements of (k, k) matrices, k the shorter side; matrices. purpose: of the
    // arena's memory.
    struct Most {
        int64_t elems = 0, squares = 0, matrices = 0;
    };
    NewtonSchulzBuffers(Arena& arena, Purpose purpose, Dtype dtype, const Most& most);
};

// Each of `count` matrices *= 1 / (margin |matrix|), its Frobenius norm; a matrix of zeros stays one.
void normalize_matrices(Ctx& ctx, const NewtonSchulzBuffers& buffers, const Tensor& matrices, int64_t count,
                        double margin);
// Returns the polar factors of the (rows, cols) matrices in buffers.x, one after another, in one of the buffers. A
// matrix of zeros stays one. matrices: as in GemmArgs.
Tensor newton_schulz(Ctx& ctx, const NewtonSchulzBuffers& buffers, int64_t matrices, int64_t rows, int64_t cols);
