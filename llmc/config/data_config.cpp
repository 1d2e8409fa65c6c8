#include "llmc/config/data_config.h"

DataConfig data_config(const Config& config, const std::vector<std::string>& globs, bool shuffle) {
    return {.globs = globs, .token_dtype = config.token_dtype, .seq_length = config.seq_length,
            .vocab_size = config.shape.vocab_size, .seed = config.seed, .shuffle = shuffle, .check_ids = true,
            .documents = config.reset_attention_mask || config.reset_position_ids, .synthetic = config.synthetic_data};
}
