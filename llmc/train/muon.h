// Muon (Jordan et al., 2024) with the options of a run: Nesterov momentum, whose polar factor is the direction
// (Orthogonalizer), and decoupled weight decay. Of each matrix that a parameter stacks, Q, K and V for instance, alone.
#pragma once
#include "llmc/train/optimizer.h"

class Muon : public Optimizer {
public:
    explicit Muon(const Config& config) : config_(config) {}
    // Replaces shard.grad by the Nesterov update.
    void update(Ctx& ctx, const ShardUpdate& shard, const StepState* state) const override;
    bool finishes() const override { return true; }
    // shard.grad is the direction.
    void finish(Ctx& ctx, const ShardUpdate& shard, const StepState* state) const override;

private:
    const Config& config_;
};

// What the direction of a matrix is multiplied by, besides the learning rate. Sources: match-rms, Liu et al., arXiv
// 2502.16982; spectral, torch.optim.Muon's "original".
double muon_scale(MuonScale scale, int64_t rows, int64_t cols);
