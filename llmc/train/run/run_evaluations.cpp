#include "llmc/train/run/run_evaluations.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "llmc/checkpoint/huggingface/model_extras.h"
#include "llmc/config/prompt.h"
#include "llmc/config/schedule.h"
#include "llmc/data/shard_meta.h"
#include "llmc/train/run/run_data.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

RunEvaluations::RunEvaluations(const Config& config, Comm& comm, const DataLoader& train, const DataLoader* valid)
    : config_(config), comm_(comm), valid_(valid) {
    if (config.sample_every > 0) {
        bytes_ = is_bytes(facts_of(train.shards()).vocabulary, config.shape.vocab_size);
        prompt_ = read_prompt(config, bytes_, config.seq_length, "--seq-length");
        if (prompt_.empty()) {
            const size_t T = static_cast<size_t>(config.seq_length);
            prompt_.resize(T);
            std::vector<int32_t> targets(T);
            (valid ? *valid : train).read(0, prompt_.data(), targets.data());
            prompt_.resize(std::clamp<size_t>(T / 2, 1, 32));
        }
        open_tokenizer();
    }
    if (config.hellaswag_data.empty()) return;
    hellaswag_.emplace(config.hellaswag_data, config.shape.vocab_size, config.seq_length);
    hellaswag_run_.emplace(*hellaswag_, config, comm);
    ShardInfo questions{};
    questions.path = config.hellaswag_data;
    questions.tokenizer = read_tokenizer(questions.path);
    require_same_tokenizer("--hellaswag-data and --train-data", train.shards(), {questions});
}

// Opens the tokenizer of --tokenizer, else that of the checkpoint or model that the run starts from.
void RunEvaluations::open_tokenizer() {
    tokenizer_files(config_.tokenizer);   // exit 2 if it does not exist
    const std::string path = tokenizer_json(config_.tokenizer.empty() ? start_directory(config_) : config_.tokenizer);
    if (bytes_ || path.empty()) return;
    try {
        tokenizer_.emplace(path);
        tokenizer_note_ = "samples: text of " + path;
    } catch (const Error& error) {   // samples are then ids; the file may still go into checkpoints
        tokenizer_note_ = std::string("samples: token ids, ") + error.what();
    }
}

std::string RunEvaluations::fingerprint() const {
    std::string text = hellaswag_ ? hellaswag_->fingerprint() : "";
    return text + "\n" + tokens_text(prompt_, false);
}

bool RunEvaluations::validation_due(int64_t step) const {
    return valid_ && (is_due(step, config_.eval_interval) || step == config_.train_iters);
}

bool RunEvaluations::hellaswag_due(int64_t step) const {
    return hellaswag_ && (is_due(step, config_.eval_interval) || step == config_.train_iters);
}

bool RunEvaluations::due(int64_t step) const {
    return validation_due(step) || hellaswag_due(step) || is_due(step, config_.sample_every);
}

void RunEvaluations::warm_up(const Place& place, bool resumed) {
    if (valid_ && resumed) data_error_ = place.evaluator.evaluate(place.ctx, valid_, 1, place.staging).error;
    if (valid_ && !resumed) validate(place);
    if (hellaswag_ && resumed) hellaswag_run_->warm_up(place.ctx, place.evaluator, place.staging);
    if (hellaswag_ && !resumed) hellaswag(place);
    if (config_.sample_every > 0) sample(place, !resumed);
}

std::vector<std::string> RunEvaluations::run(const Place& place) {
    std::vector<std::string> due;
    if (validation_due(place.step)) due.push_back("eval");
    if (hellaswag_due(place.step)) due.push_back("hellaswag");
    if (is_due(place.step, config_.sample_every)) due.push_back("sample");
    return make_up(place, due);
}

std::vector<std::string> RunEvaluations::possible(std::vector<std::string> types) const {
    std::erase_if(types, [this](const std::string& type) {
        return type == "eval" ? !valid_ : type == "hellaswag" ? !hellaswag_ : config_.sample_every == 0;
    });
    return types;
}

std::vector<std::string> RunEvaluations::make_up(const Place& place, const std::vector<std::string>& missed) {
    std::vector<std::string> again;
    for (const std::string& type : missed) {
        const bool done = type == "eval" ? validate(place) : type == "hellaswag" ? hellaswag(place)
                                                                                 : sample(place, true);
        if (!done) again.push_back(type);
    }
    return again;
}

bool RunEvaluations::validate(const Place& place) {
    const Clock::time_point start = Clock::now();
    post_phase(Phase::kEvaluation);
    const Evaluator::Result e = place.evaluator.evaluate(place.ctx, valid_, config_.eval_iters, place.staging);
    data_error_ = e.error;
    if (e.stopped) return false;
    REQUIRE(e.counted_tokens > 0, "--valid-data: no token of an evaluation counts as a target (loss masks)");
    const double loss = e.loss_sum / static_cast<double>(e.counted_tokens), seconds = seconds_since(start);
    place.log.record("eval", place.step,
                     {{"loss", exact(loss)}, {"counted_tokens", e.counted_tokens}, {"seconds", seconds}},
                     strf("eval step %lld | loss %s | perplexity %s | %s | %.3f s", ll(place.step),
                          figure(true, 6, "%.4f", loss).c_str(), figure(true, 5, "%.2f", std::exp(loss)).c_str(),
                          count_text(e.counted_tokens, "token").c_str(), seconds));
    return true;
}

bool RunEvaluations::hellaswag(const Place& place) {
    const Clock::time_point start = Clock::now();
    post_phase(Phase::kEvaluation);
    const auto losses = hellaswag_run_->evaluate(place.ctx, place.evaluator, place.staging);
    if (!losses) return false;
    const int64_t correct = hellaswag_->correct(*losses), examples = hellaswag_->examples();
    const double accuracy = static_cast<double>(correct) / static_cast<double>(examples);
    const double seconds = seconds_since(start);
    place.log.record("hellaswag", place.step,
                     {{"accuracy", accuracy}, {"correct", correct}, {"examples", examples},
                      {"seconds", seconds}},
                     strf("hellaswag step %lld | accuracy %.4f | %lld of %s | %.3f s", ll(place.step), accuracy,
                          ll(correct), count_text(examples, "example").c_str(), seconds));
    return true;
}

bool RunEvaluations::sample(const Place& place, bool logged) {
    post_phase(Phase::kSample);
    // Only rank 0 samples, with the ranks that share its forward passes.
    if (comm_.world().rank >= config_.context_parallel && !place.evaluator.passes_are_collective())
        return true;
    const Sampling sampling{.tokens = config_.sample_tokens, .temperature = config_.temperature,
                            .top_k = config_.top_k, .seed = config_.seed};
    std::vector<int32_t> tokens;
    try {
        tokens = place.evaluator.generate(place.ctx, prompt_, sampling, static_cast<uint64_t>(place.step),
                                          place.staging);
    } catch (const Error& error) {
        if (error.exit_code != kExitDiverged) throw;
        place.log.event("warning", strf("sample: %s", error.what()));
        return true;
    }
    if (tokens.size() < prompt_.size() + static_cast<size_t>(config_.sample_tokens)) return false;   // a stop
    if (!logged || !comm_.root()) return true;
    const std::string text = tokenizer_ ? tokenizer_->decode(tokens)
                                        : tokens_text(tokens, prints_bytes(config_, bytes_));
    place.log.record("sample", place.step, {{"text", text}},
                     strf("sample step %lld | ", ll(place.step)) + screen_text(text));
    return true;
}
