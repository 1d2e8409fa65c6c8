#include "llmc/train/optimizer.h"

#include "llmc/train/adamw.h"
#include "llmc/train/muon.h"
#include "llmc/train/router_bias.h"

namespace {

std::unique_ptr<Optimizer> make_optimizer(OptimizerKind kind, const Config& config, Tensor expert_load) {
    switch (kind) {
        case OptimizerKind::kAdamW: return std::make_unique<AdamW>(config);
        case OptimizerKind::kMuon: return std::make_unique<Muon>(config);
        case OptimizerKind::kRouterBias: return std::make_unique<RouterBias>(config, expert_load);
    }
    FAIL(kExitBug, "no optimizer %d", static_cast<int>(kind));
}

}  // namespace

std::vector<std::unique_ptr<Optimizer>> make_optimizers(const Config& config, Tensor expert_load) {
    std::vector<std::unique_ptr<Optimizer>> optimizers;
    for (const OptimizerRow& row : kOptimizers) optimizers.push_back(make_optimizer(row.kind, config, expert_load));
    return optimizers;
}
