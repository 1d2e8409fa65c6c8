// QK-clip (Kimi K2, arXiv 2507.20534): after the update of a step, W_q and W_k of heads whose largest attention logit
// in the step exceeded tau are scaled, as are their biases. Attention finds these logits; see QkClipFactorsArgs.
#pragma once
#include "llmc/ops/arena.h"
#include "llmc/parallel/comm/comm.h"
#include "llmc/parallel/comm/comm_stream.h"
#include "llmc/train/optimizer.h"

class QkClip {
public:
    // Owns none of its arguments. Takes memory from the arena with --qk-clip only.
    QkClip(const Config& config, const ParamTable& table, Arena& arena);

    // (layers, NH) fp32: what attention raises (AttentionForwardArgs::max_logits); empty without --qk-clip. NH: of all
    // ranks of a sequence.
    Tensor max_logits() const { return max_logits_; }
    // Before the micro-batches of a step.
    void clear(Ctx& ctx) const;
    // Once the step is known to be skipped or not: takes the largest logits of all ranks. Collective.
    void all_reduce(Ctx& ctx, CommStream& stream, Comm& world, StepState* state) const;
    // Whether apply() completes the update of this parameter.
    bool scales(const Param& param) const;
    // Scales the masters of a shard after its update, and writes what the update leaves out: weights and amax.
    void apply(Ctx& ctx, const ShardUpdate& shard, const StepState* state) const;

private:
    const Config& config_;
    const ParamTable& table_;
    const Tensor max_logits_, factors_;
};
