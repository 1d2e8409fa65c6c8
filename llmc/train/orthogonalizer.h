// Muon's matrices between the momentum, which each rank has of its shards, and the weights: sends each matrix to its
// owner (MatrixOwners), which replaces it by its polar factor, and back. The matrices are in the memory of the reduced
// gradients, in the type of those; they are sent and computed in the working type.
#pragma once
#include "llmc/parallel/comm/comm_stream.h"
#include "llmc/parallel/groups.h"
#include "llmc/parallel/zero/gradients.h"
#include "llmc/parallel/zero/matrix_owners.h"
#include "llmc/parallel/zero/sharded_state.h"
#include "llmc/train/newton_schulz.h"

class Orthogonalizer {
public:
    // Owns none of its arguments. Takes buffers from the arena, whose contents matter only within run() and warm_up().
    Orthogonalizer(const Config& config, const ParamTable& table, const ShardedState& state, const Gradients& grads,
                   const Groups& groups, CommStream& stream, Arena& arena);

    // Collective. No host synchronisation.
    void run(Ctx& ctx);
    // Computes a matrix of each shape that this rank owns, so that matmul algorithms are chosen. Not collective.
    void warm_up(Ctx& ctx);

private:
    int rank() const { return world_.world().rank; }
    void run_round(Ctx& ctx, size_t round);
    Tensor held_update(const OwnedMatrix& matrix) const;
    // Calls use(matrix, part, rank, staging) for what this rank holds of each rank's matrix. `staging` is memory for
    // it, empty for this rank's own matrix.
    template <typename Use> void each_held(size_t round, Use&& use) const;
    void exchange(Ctx& ctx, const std::vector<Tensor>& out, const std::vector<Tensor>& in);
    std::vector<Tensor> none() const;

    const ShardedState& state_;
    const Gradients& grads_;
    Comm& world_;
    CommStream& stream_;
    const Dtype dtype_;
    const MatrixOwners owners_;
    const Tensor staging_;   // what this rank sends to owners, then what it gets from them
    const NewtonSchulzBuffers buffers_;
};
