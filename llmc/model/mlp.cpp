#include "llmc/model/mlp.h"

#include "llmc/model/dense_mlp.h"
#include "llmc/model/moe_mlp.h"

std::unique_ptr<Mlp> make_mlp(ModelContext& model) {
    if (model.config.has_experts()) return std::make_unique<MoeMlp>(model);
    return std::make_unique<DenseMlp>(model);
}
