#include "llmc/train/run/run_data.h"

#include <algorithm>

#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/checkpoint/huggingface/model_extras.h"
#include "llmc/config/schedule.h"
#include "llmc/data/shard_meta.h"

namespace {

// Whether the data has shards without a header.
bool has_raw(const DataLoader& data) {
    return std::any_of(data.shards().begin(), data.shards().end(),
                       [](const ShardInfo& shard) { return shard.format == ShardFormat::kRaw; });
}

// Compares the tokenizer of the data with that of the model, or of --tokenizer, and with the vocabulary.
void check_tokenizer(const Config& config, const std::vector<ShardInfo>& shards, std::vector<std::string>& notes) {
    const TokenizerFacts facts = facts_of(shards);
    const std::string start = start_directory(config), &named = config.tokenizer.empty() ? start : config.tokenizer;
    const std::string theirs = tokenizer_vocabulary(named);
    if (facts.vocabulary.empty() && !theirs.empty() && !shards.empty())
        notes.push_back("the data's .meta.json does not name a vocabulary to compare with that of " + named);
    const auto known = [](const ShardInfo& shard) { return !shard.tokenizer.vocabulary.empty(); };
    const char* const option = config.tokenizer.empty() ? "" : "--tokenizer ";
    const char* const advice = config.tokenizer.empty() ? "if the model is to learn the other one, name that with "
                                                          "--tokenizer" : "name the tokenizer of the shards";
    if (!facts.vocabulary.empty() && !theirs.empty() && theirs != facts.vocabulary)
        FAIL(kExitBadInput, "%s%s has another tokenizer than data shard '%s', which was made with %s: make shards "
             "with data/prepare_text.py --tokenizer %s, or %s", option, named.c_str(),
             std::find_if(shards.begin(), shards.end(), known)->path.c_str(), printable(facts.name).c_str(),
             named.c_str(), advice);
    const int64_t vocab = config.shape.vocab_size, used = facts.vocab_size;
    if (used < 0 || !start.empty()) return;
    REQUIRE(used <= vocab, "--vocab-size %lld: the tokenizer of the data, %s, has more tokens: --vocab-size %lld",
            ll(vocab), printable(facts.name).c_str(), ll(used));
    if (vocab - used >= 1024)
        notes.push_back(strf("the tokenizer of the data, %s, has %lld tokens, the model's vocabulary %lld "
                             "(--vocab-size)", printable(facts.name).c_str(), ll(used), ll(vocab)));
}

}  // namespace

DataConfig data_config(const Config& config, const std::vector<std::string>& globs, bool shuffle) {
    return {.globs = globs, .token_dtype = config.token_dtype, .seq_length = config.seq_length,
            .vocab_size = config.shape.vocab_size, .seed = config.seed, .shuffle = shuffle, .check_ids = true,
            .documents = config.reset_attention_mask || config.reset_position_ids, .align = config.align_documents,
            .synthetic = config.synthetic_data};
}

std::string start_directory(const Config& config) {
    if (config.resume.empty()) return config.load;
    if (config.resume != "auto") return config.resume;
    const std::vector<int64_t> steps = checkpoint_steps(config.save);
    return steps.empty() ? config.load : config.save + "/" + step_directory_name(steps.back());
}

void RunData::open(Config& config, std::vector<std::string>& notes) {
    train.emplace(data_config(config, config.train_data, true));
    if (!config.valid_data.empty()) valid.emplace(data_config(config, config.valid_data, false));
    require_samples(*train, config.global_batch_size, "one step (--global-batch-size)");
    if (valid) {
        require_samples(*valid, config.eval_iters * config.micro_batch_size,
                        "one evaluation (--eval-iters x --micro-batch-size)");
    }
    const double samples = config.epochs * static_cast<double>(train->samples_per_epoch());
    if (config.train_iters == 0) {
        config.train_iters = steps_for_samples(config, static_cast<int64_t>(samples));
        REQUIRE(config.train_iters > 0, "--epochs %g of %s is less than one step of %lld; lower --global-batch-size",
                config.epochs, count_text(train->samples_per_epoch(), "sample").c_str(), ll(config.global_batch_size));
        const std::vector<std::string> errors = length_errors(config);
        REQUIRE(errors.empty(), "%s", errors.front().c_str());
    }
    const std::vector<ShardInfo>& shards = train->shards();
    const auto counts = [](const ShardInfo& shard) { return shard.counted > 0; };
    REQUIRE(config.synthetic_data || std::any_of(shards.begin(), shards.end(), counts),
            "--train-data: no token counts as a target (loss masks)");
    check_tokenizer(config, shards, notes);
    const bool raw = has_raw(*train) || (valid && has_raw(*valid));
    REQUIRE(config.token_dtype.empty() || raw, "--token-dtype %s has no effect: every shard has a header with the "
            "dtype of its tokens", config.token_dtype.c_str());
    for (const std::string& line : describe_data(*train, samples_after(config, config.train_iters)))
        notes.push_back("training data: " + line);
    if (config.shape.has_experts() && train->packed().padding > 0)
        notes.push_back("experts: the padding of samples goes to few of them and counts in their loads, which are "
                        "balanced with it");
    if (!valid) return;
    // A run of one step may evaluate on all that it trains on, to get the loss of a checkpoint.
    const std::string note = check_validation_shards(train->shards(), valid->shards(), config.train_iters == 1);
    if (!note.empty()) notes.push_back(note);
    for (const std::string& line : describe_data(*valid, config.eval_iters * config.micro_batch_size))
        notes.push_back("validation data: " + line);
}
