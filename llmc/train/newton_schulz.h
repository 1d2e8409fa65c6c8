// The polar factor U V^T of a matrix U S V^T, nearly: steps of X = (a I + b G + c G^2) X with G = X X^T, or of
// X = X (a I + b G + c G^2) with G = X^T X if that is smaller. Five steps with the coefficients of Polar Express (Amsel
// et al., arXiv 2505.16932) take singular values from 0.001 to 1 of the largest to 0.84 to 1.13. Of a matrix that is
// far from square, G of every second step comes from G of the step before.
#pragma once
#include "llmc/ops/arena.h"
#include "llmc/ops/ops.h"

// Each takes all of the memory it is given; the largest matrix decides.
struct NewtonSchulzBuffers {
    Tensor x, other;        // of the largest matrix, T
    Tensor gram, square;    // of the longest of all shorter sides, squared, T
    Tensor sum_squares;     // (1) fp64
    Tensor partial_sums;    // (kPartialSums) fp64

    // purpose: of the arena's memory.
    NewtonSchulzBuffers(Arena& arena, Purpose purpose, Dtype dtype, int64_t most_elems, int64_t most_side);
};

// matrix *= 1 / (margin |matrix|), its Frobenius norm; a matrix of zeros stays one.
void normalize_matrix(Ctx& ctx, const NewtonSchulzBuffers& buffers, const Tensor& matrix, double margin);
// Returns the polar factor of the (rows, cols) matrix in buffers.x, in one of the buffers. A matrix of zeros stays one.
Tensor newton_schulz(Ctx& ctx, const NewtonSchulzBuffers& buffers, int64_t rows, int64_t cols);
