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

// After an evaluation: the time since `start`, and what the weights of `suffix` took of it.
void add_seconds(nlohmann::ordered_json& fields, Clock::time_point start, const std::string& suffix) {
    const double seconds = seconds_since(start);
    if (!suffix.empty()) fields["seconds" + suffix] = seconds - fields["seconds"].get<double>();
    fields["seconds"] = seconds;
}

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

bool RunEvaluations::bf16_due(const Place& place) const {
    return evaluates_in_bf16(config_) && (config_.eval_bf16 == EvalBf16::kOn || place.step == config_.train_iters);
}

std::vector<std::string> RunEvaluations::due(int64_t step) const {
    std::vector<std::string> types;
    if (is_due(step, config_.eval_interval) || step == config_.train_iters) types = {"eval", "hellaswag"};
    if (is_due(step, config_.sample_every)) types.push_back("sample");
    return possible(types);
}

void RunEvaluations::warm_up(const Place& place, bool resumed) {
    if (valid_ && resumed) data_error_ = place.evaluator.evaluate(place.ctx, valid_, 1, place.staging).error;
    if (valid_ && !resumed) validate(place);
    if (hellaswag_ && resumed) hellaswag_run_->warm_up(place.ctx, place.evaluator, place.staging);
    if (hellaswag_ && !resumed) hellaswag(place);
    if (config_.sample_every > 0) sample(place, !resumed);
    if (place.bf16) warm_up_bf16(place);
}

// The first evaluation in BF16 may be the last of the run.
void RunEvaluations::warm_up_bf16(const Place& place) {
    Evaluator& evaluator = place.bf16->begin(place.ctx);
    if (valid_ && data_error_.empty()) data_error_ = evaluator.evaluate(place.ctx, valid_, 1, place.staging).error;
    if (hellaswag_) hellaswag_run_->warm_up(place.ctx, evaluator, place.staging);
    if (config_.sample_every > 0 && generates(evaluator))
        evaluator.generate(place.ctx, prompt_, {.tokens = 1}, 0, place.staging);
}

std::vector<std::string> RunEvaluations::run(const Place& place) {
    return make_up(place, due(place.step));
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

// Calls use(evaluator, suffix, title) with the weights of the steps and, if due, with those in BF16, then so with those
// of the EMA: the suffix of their fields in the log and their title on the screen. Returns false once a call does.
template <typename Use> bool RunEvaluations::with_each(const Place& place, const Use& use) const {
    const auto of_weights = [&](const std::string& of, const char* title, const char* bf16_title) {
        return use(place.evaluator, of, title)
               && (!bf16_due(place) || !place.bf16 || use(place.bf16->begin(place.ctx), of + "_bf16", bf16_title));
    };
    if (!of_weights("", "", ", in BF16 ")) return false;
    if (config_.ema == 0 || place.step == 0) return true;
    place.use_ema(true);
    const bool done = of_weights("_ema", ", EMA ", ", EMA in BF16 ");
    place.use_ema(false);
    return done;
}

bool RunEvaluations::validate(const Place& place) {
    post_phase(Phase::kEvaluation);
    nlohmann::ordered_json fields;
    std::string losses, perplexity;
    const Clock::time_point start = Clock::now();
    const bool done = with_each(place, [&](Evaluator& evaluator, const std::string& suffix, const char* title) {
        const Evaluator::Result e = evaluator.evaluate(place.ctx, valid_, config_.eval_iters, place.staging);
        data_error_ = e.error;
        if (e.stopped) return false;
        REQUIRE(e.counted_tokens > 0, "--valid-data: no token of an evaluation counts as a target (loss masks)");
        const double loss = e.loss_sum / static_cast<double>(e.counted_tokens);
        fields["loss" + suffix] = exact(loss);
        fields["counted_tokens"] = e.counted_tokens;
        add_seconds(fields, start, suffix);
        losses += title + figure(true, 6, "%.4f", loss);
        if (suffix.empty()) perplexity = figure(true, 5, "%.2f", std::exp(loss));
        return true;
    });
    if (!done) return false;
    if (bf16_due(place) && !place.bf16) fields["loss_bf16"] = fields["loss"];   // the steps are in BF16
    place.log.record("eval", place.step, fields,
                     strf("eval step %lld | loss %s | perplexity %s | %s | %.3f s", ll(place.step), losses.c_str(),
                          perplexity.c_str(), count_text(fields["counted_tokens"].get<int64_t>(), "token").c_str(),
                          fields["seconds"].get<double>()));
    return true;
}

bool RunEvaluations::hellaswag(const Place& place) {
    post_phase(Phase::kEvaluation);
    const int64_t examples = hellaswag_->examples();
    nlohmann::ordered_json fields;
    std::string accuracies, counts;
    const Clock::time_point start = Clock::now();
    const bool done = with_each(place, [&](Evaluator& evaluator, const std::string& suffix, const char* title) {
        const auto losses = hellaswag_run_->evaluate(place.ctx, evaluator, place.staging);
        if (!losses) return false;
        const int64_t correct = hellaswag_->correct(*losses);
        const double accuracy = static_cast<double>(correct) / static_cast<double>(examples);
        fields["accuracy" + suffix] = accuracy;
        fields["correct" + suffix] = correct;
        fields["examples"] = examples;
        add_seconds(fields, start, suffix);
        accuracies += title + strf("%.4f", accuracy);
        counts += title + std::to_string(correct);
        return true;
    });
    if (!done) return false;
    if (bf16_due(place) && !place.bf16)
        for (const char* name : {"accuracy", "correct"}) fields[std::string(name) + "_bf16"] = fields[name];
    place.log.record("hellaswag", place.step, fields,
                     strf("hellaswag step %lld | accuracy %s | %s of %s | %.3f s", ll(place.step),
                          accuracies.c_str(), counts.c_str(), count_text(examples, "example").c_str(),
                          fields["seconds"].get<double>()));
    return true;
}

// Only rank 0 samples, with the ranks that share its forward passes.
bool RunEvaluations::generates(const Evaluator& evaluator) const {
    return comm_.world().rank < config_.context_parallel || evaluator.passes_are_collective();
}

bool RunEvaluations::sample(const Place& place, bool logged) {
    post_phase(Phase::kSample);
    Evaluator& evaluator = bf16_due(place) && place.bf16 ? place.bf16->begin(place.ctx) : place.evaluator;
    if (!generates(evaluator)) return true;
    const Sampling sampling{.tokens = config_.sample_tokens, .temperature = config_.temperature,
                            .top_k = config_.top_k, .seed = config_.seed};
    std::vector<int32_t> tokens;
    try {
        tokens = evaluator.generate(place.ctx, prompt_, sampling, static_cast<uint64_t>(place.step), place.staging);
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
