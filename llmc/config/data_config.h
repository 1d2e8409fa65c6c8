#pragma once
#include "llmc/config/config.h"
#include "llmc/data/dataloader.h"

// How a run of this configuration reads shards.
DataConfig data_config(const Config& config, const std::vector<std::string>& globs, bool shuffle);
