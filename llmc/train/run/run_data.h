// Opens the training and validation data of a run, and checks them against its options.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/data/dataloader.h"

// How a run with this configuration reads shards.
DataConfig data_config(const Config& config, const std::vector<std::string>& globs, bool shuffle);

// The folder of the model or checkpoint that the run starts from; "" if it starts from initial weights.
std::string start_directory(const Config& config);

struct RunData {
    std::optional<DataLoader> train, valid;

    // Exit 2 if the run cannot be trained on the data. Sets train_iters of a run with --epochs, and adds notes on
    // data.
    void open(Config& config, std::vector<std::string>& notes);
};
