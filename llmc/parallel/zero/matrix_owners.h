// The matrices that Muon updates, and the rank that orthogonalises each of them. A matrix is computed whole and on one
// rank, so that its bits depend neither on the number of ranks nor on the level of ZeRO, and copies of it never differ.
#pragma once
#include <algorithm>
#include <vector>

#include "llmc/ops/ops_gemm.h"
#include "llmc/parallel/zero/buckets.h"

// Consecutive elements of a matrix or parameter.
struct MatrixPart {
    int64_t begin = 0, elems = 0;
};

struct OwnedMatrix {
    int param = 0;
    int64_t begin = 0, rows = 0, cols = 0;   // begin: its first element in the parameter
    int owner = 0;                           // rank
    int64_t elems() const { return rows * cols; }
    double flops() const;   // of the matmuls of newton_schulz
    // Whether matrices of this shape are computed in batches, since one does not fill a GPU. The sides are those that
    // matmuls of several matrices have kernels for.
    bool in_batches() const {
        return std::min(rows, cols) < GemmArgs::kLeastSymmetric && rows % 8 == 0 && cols % 8 == 0;
    }
    bool operator==(const OwnedMatrix&) const = default;
};

// The matrices of parameters of which each rank has one of `parts` parts. Costly ones first, each given to the rank
// that has least to do so far (Graham, 1969), the lower one if two have.
std::vector<OwnedMatrix> assign_owners(const ParamTable& table, int ranks, int64_t parts = 1);

class MatrixOwners {
public:
    // The most elements of a batch of several matrices, divided by the number of copies of the parameters, since
    // results are sent to each; and its most matrices.
    static constexpr int64_t kBatchElems = 32 << 20, kBatchMatrices = 1024;

    // Ranks r, r + shards, r + 2 shards, ... hold shard r of the parameters; one shard: each rank holds them whole. The
    // ranks of a copy are neighbours. parts: see assign_owners; the ranks are those that have the same part.
    MatrixOwners(const ParamTable& table, const Buckets& buckets, int ranks, int shards, int parts = 1);

    int ranks() const { return ranks_; }
    int shards() const { return static_cast<int>(held_.size()); }
    // In a round each rank orthogonalises at most one batch of matrices of one shape, costly ones first. The bits of a
    // matrix do not depend on the others of its batch.
    using Batch = std::vector<OwnedMatrix>;
    size_t rounds() const { return rounds_; }
    const Batch& batch(size_t round, int rank) const;   // empty: none

    // The elements of a matrix that are in a shard, counted from its first one; empty if none.
    MatrixPart held(const OwnedMatrix& matrix, int shard) const;
    int shard_of(int rank) const { return rank % shards(); }
    // The rank that holds a shard of the copy that `rank` holds a shard of.
    int holder(int shard, int rank) const { return rank / shards() * shards() + shard; }

    // The most that any batch has: elements; elements of squares of the shorter sides; matrices.
    int64_t most_elems() const { return most_elems_; }
    int64_t most_squares() const { return most_squares_; }
    int64_t most_matrices() const { return most_matrices_; }
    // In an exchange the matrices of the round of its number go to their owners, and the results of two rounds before
    // go back. So the ranks compute the round between them meanwhile.
    struct Piece {
        const OwnedMatrix* matrix;
        int64_t number;    // of the matrix in its batch
        MatrixPart part;   // of the matrix
        int64_t at;        // of the part in the message
        int64_t in_batch() const { return number * matrix->elems() + part.begin; }
    };
    struct Message {
        std::vector<Piece> matrices, results;
        int64_t elems = 0;
    };
    size_t exchanges() const { return rounds_ + 2; }
    // What a rank sends to another one; for from == to, what it takes from itself.
    Message message(size_t exchange, int from, int to) const;
    int64_t longest(size_t exchange) const { return longest_[exchange]; }   // elements of a message to another rank
    int64_t longest() const { return ranks_ > 1 ? *std::max_element(longest_.begin(), longest_.end()) : 0; }

private:
    void add_batches(const std::vector<OwnedMatrix>& alike);
    void add_pieces(const Batch& batch, int shard, std::vector<Piece>& pieces, int64_t& elems) const;

    const int ranks_;
    std::vector<std::vector<Batch>> of_rank_;      // by rank and round
    std::vector<std::vector<MatrixPart>> held_;    // by shard and parameter
    std::vector<int64_t> longest_;                 // by exchange
    size_t rounds_ = 0;
    int64_t most_elems_ = 0, most_squares_ = 0, most_matrices_ = 0;
};
