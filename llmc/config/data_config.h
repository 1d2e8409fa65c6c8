// How a run with this configuration reads shards.
#pragma once
#include "llmc/config/config.h"
#include "llmc/data/dataloader.h"

DataConfig data_config(const Config& config, const std::vector<std::string>& globs, bool shuffle);
