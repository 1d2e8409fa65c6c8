// The training and validation data of a run, opened and held against its options.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/data/dataloader.h"

struct RunData {
    std::optional<DataLoader> train, valid;

    // Exit 2 if the data cannot be that of the run. Sets the length of a run with --epochs, and adds notes on the data.
    void open(Config& config, std::vector<std::string>& notes);
};
