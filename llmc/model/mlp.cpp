#include "llmc/model/mlp.h"

#include "llmc/model/dense_mlp.h"
#include "llmc/model/moe_mlp.h"

std::vector<std::unique_ptr<Mlp>> make_mlps(ModelContext& model) {
    std::vector<std::unique_ptr<Mlp>> mlps;
    if (model.config.moe_layers() < model.config.num_layers) mlps.push_back(std::make_unique<DenseMlp>(model));
    if (model.config.moe_layers() > 0) mlps.push_back(std::make_unique<MoeMlp>(model));
    return mlps;
}
