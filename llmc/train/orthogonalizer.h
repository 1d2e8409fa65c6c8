// Muon's matrices between the momentum, which each rank has of its shards, and the weights: sends each matrix to its
// owner (MatrixOwners), which replaces it by its polar factor, with --muon-beta2 normalises the rows of that (NorMuon,
// Li et al., arXiv 2510.05491), and sends it back. The matrices are in the memory of the reduced
// gradients, in the type of those; they are sent and computed in the working type. With a side stream, ranks send
// matrices and results while they compute others.
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

    // Collective. Second moments of rows stay as they are if state->skip. No host synchronisation.
    void run(Ctx& ctx, const StepState* state);
    // Computes a matrix of each shape that this rank owns, so that matmul algorithms are chosen. Not collective.
    void warm_up(Ctx& ctx);

private:
    int rank() const { return world_.world().rank; }
    Tensor rows() const { return state_.row_state(StateKind::kRowExpAvgSq); }
    // Enqueued on `comm`. The matrices of a round, if there is one, arrive in next_. `result`, empty if this rank has
    // no matrix in the round, and those of the others replace what each rank held.
    void send_to_owners(Ctx& comm, size_t round);
    void send_back(Ctx& comm, size_t round, const Tensor& result);
    // mark() numbers all that `comm` was given so far; wait_for() makes ctx wait for the latest mark.
    int64_t mark(Ctx& ctx, Ctx& comm);
    void wait_for(Ctx& ctx, Ctx& comm, int64_t mark);
    // The result of the matrix in buffers_.x, which is there again.
    Tensor compute(Ctx& ctx, const OwnedMatrix& mine, const StepState* state);
    void normalize_rows(Ctx& ctx, const OwnedMatrix& matrix, const Tensor& result, const StepState* state);
    Tensor held_update(const OwnedMatrix& matrix) const;
    // Calls use(matrix, part, rank, staging) for what this rank holds of each rank's matrix. `staging` is memory for
    // it, empty for this rank's own matrix.
    template <typename Use> void each_held(size_t round, Use&& use) const;
    void exchange(Ctx& comm, const std::vector<Tensor>& out, const std::vector<Tensor>& in);
    std::vector<Tensor> none() const;

    const ShardedState& state_;
    const Gradients& grads_;
    Comm& world_;
    CommStream& stream_;
    const Dtype dtype_;
    const double beta2_;   // of the second moments of rows; 0: there are none
    const MatrixOwners owners_;
    const Tensor staging_;   // what this rank sends to owners, then what it gets from them
    NewtonSchulzBuffers buffers_;   // between rounds x has the result of the latest one, which leaves
    Tensor next_;   // where the matrix of the next round arrives; changes places with buffers_.x
    OwnedEvent done_;   // of the side stream; null without one
    const Tensor new_rows_;   // as the state by row: new values of this rank's matrices, else 0
};
