// The matrices that Muon updates, and the rank that orthogonalises each of them. A matrix is computed whole and on one
// rank, so that its bits depend neither on the number of ranks nor on the level of ZeRO, and copies of it never differ.
#pragma once
#include <algorithm>
#include <vector>

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
    bool operator==(const OwnedMatrix&) const = default;
};

// The matrices of parameters of which each rank has one of `parts` parts. Costly ones first, each given to the rank
// that has least to do so far (Graham, 1969), the lower one if two have.
std::vector<OwnedMatrix> assign_owners(const ParamTable& table, int ranks, int64_t parts = 1);

class MatrixOwners {
public:
    // Ranks r, r + shards, r + 2 shards, ... hold shard r of the parameters; one shard: each rank holds them whole. The
    // ranks of a copy are neighbours. parts: see assign_owners; the ranks are those that have the same part.
    MatrixOwners(const ParamTable& table, const Buckets& buckets, int ranks, int shards, int parts = 1);

    int ranks() const { return ranks_; }
    int shards() const { return static_cast<int>(held_.size()); }
    // In a round each rank orthogonalises at most one matrix, costly ones first.
    size_t rounds() const { return rounds_; }
    const OwnedMatrix* matrix(size_t round, int rank) const;   // null: none

    // The elements of a matrix that are in a shard, counted from its first one; empty if none.
    MatrixPart held(const OwnedMatrix& matrix, int shard) const;
    int shard_of(int rank) const { return rank % shards(); }
    // The rank that holds a shard of the copy that `rank` holds a shard of.
    int holder(int shard, int rank) const { return rank / shards() * shards() + shard; }

    int64_t most_elems() const { return most_elems_; }   // of a matrix
    int64_t most_side() const { return most_side_; }     // the longest of all shorter sides
    // In an exchange the matrices of the round of its number go to their owners, and the results of two rounds before
    // go back. So the ranks compute the round between them meanwhile.
    struct Message {
        const OwnedMatrix *matrix = nullptr, *result = nullptr;   // null: no part of any
        MatrixPart part, result_part;
        int64_t result_at() const { return round_up(part.elems, kParamAlign); }   // behind the part
        int64_t elems() const { return result_at() + round_up(result_part.elems, kParamAlign); }
    };
    size_t exchanges() const { return rounds_ + 2; }
    // What a rank sends to another one; for from == to, what it takes from itself.
    Message message(size_t exchange, int from, int to) const;
    int64_t longest(size_t exchange) const { return longest_[exchange]; }   // elements of a message to another rank
    int64_t longest() const { return ranks_ > 1 ? *std::max_element(longest_.begin(), longest_.end()) : 0; }

private:
    const int ranks_;
    std::vector<OwnedMatrix> matrices_;
    std::vector<std::vector<int>> of_rank_;          // by rank: its matrices, numbers in matrices_
    std::vector<std::vector<MatrixPart>> held_;    // by shard and parameter
    std::vector<int64_t> longest_;                 // by exchange
    size_t rounds_ = 0;
    int64_t most_elems_ = 0, most_side_ = 0;
};
