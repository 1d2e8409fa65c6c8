// Muon's matrices between the momentum, which each rank has of its shards, and the weights: sends each matrix to its
// owner (MatrixOwners), which replaces it by its polar factor, with --muon-beta2 normalises the rows of that (NorMuon,
// Li et al., arXiv 2510.05491), and sends it back. The matrices are in the memory of the reduced
// gradients, in the type of those; they are sent and computed in the working type. With a side stream, ranks exchange
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
    // For the matrices of parameters of which each rank has one of `parts` parts; `group` are the ranks that have the
    // same one. Owns none of its arguments. Takes buffers from the arena, whose contents matter only within run() and
    // warm_up().
    Orthogonalizer(const Config& config, const ParamTable& table, const ShardedState& state, const Gradients& grads,
                   Comm& group, int parts, CommStream& stream, Arena& arena);

    // Collective. Second moments of rows stay as they are if state->skip. No host synchronisation.
    void run(Ctx& ctx, const StepState* state);
    // Computes matrices of each shape that this rank owns, so that matmul algorithms are chosen. Not collective.
    void warm_up(Ctx& ctx);
    // The memory that is sent and received during matmuls.
    std::vector<Tensor> exchanged() const;

private:
    int rank() const { return group_.world().rank; }
    Tensor rows() const { return state_.row_state(StateKind::kRowExpAvgSq); }
    using Batch = MatrixOwners::Batch;
    using Message = MatrixOwners::Message;
    using Piece = MatrixOwners::Piece;
    // Copies what this rank sends in an exchange to send_; its own part of a result replaces what it held. `result`: of
    // two rounds before.
    void pack(Ctx& ctx, size_t exchange, const Tensor& result);
    // Copies what this rank has received to buffers_.x and to where it held results, and its own part of a matrix.
    void unpack(Ctx& ctx, size_t exchange);
    // After what ctx was given so far, starts to exchange send_ for receive_; wait() makes ctx wait for that.
    void start(Ctx& ctx, Ctx& comm, size_t exchange);
    void wait(Ctx& ctx, Ctx& comm);
    // The results of the batch in buffers_.x, which are there again.
    Tensor compute(Ctx& ctx, const Batch& mine, const StepState* state);
    Tensor polar_factors(Ctx& ctx, const Batch& mine) const;
    void normalize_rows(Ctx& ctx, const Batch& batch, const Tensor& results, const StepState* state);
    Tensor held_update(const OwnedMatrix& matrix) const;
    // A shard of send_ or receive_ in an exchange.
    Tensor shard(const Tensor& memory, size_t exchange, int r) const {
        return memory.slice(r * owners_.longest(exchange), owners_.longest(exchange));
    }

    const ShardedState& state_;
    const Gradients& grads_;
    Comm& group_;
    CommStream& stream_;
    const Dtype dtype_;
    const double beta2_;   // of the second moments of rows; 0: there are none
    const MatrixOwners owners_;
    const Tensor send_, receive_;   // (ranks, the longest message) T
    NewtonSchulzBuffers buffers_;   // between rounds x has the results of the latest one
    OwnedEvent done_;      // the latest exchange, on the side stream; null without one
    int64_t number_ = 0;   // of that event
    const Tensor new_rows_;   // as the state by row: new values of this rank's matrices, else 0
};
