// AdamW (Loshchilov and Hutter, arXiv 1711.05101) with the options of a run; the operation is ops::adamw.
#pragma once
#include "llmc/train/optimizer.h"

class AdamW : public Optimizer {
public:
    explicit AdamW(const Config& config) : config_(config) {}
    void update(Ctx& ctx, const ShardUpdate& shard, const StepState* state) const override;

private:
    const Config& config_;
};
