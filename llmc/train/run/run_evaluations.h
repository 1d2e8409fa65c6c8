// The evaluations between steps: validation loss, HellaSwag, text samples. They use the memory of the steps and change
// no training state. All run once before the first step, so that nothing is loaded or allocated later. Where
// --eval-bf16 applies, losses and accuracies are also of the exported weights, and samples of these alone. With --ema,
// losses and accuracies are also of the averaged weights, from the first step on.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/data/dataloader.h"
#include "llmc/data/token_text.h"
#include "llmc/parallel/comm/comm.h"
#include "llmc/train/log/run_log.h"
#include "llmc/train/run/hellaswag_run.h"
#include "llmc/train/trainer.h"

class RunEvaluations {
public:
    // Opens --hellaswag-data and reads the prompt; without one, the beginning of the data is the prompt. Owns none of
    // its arguments; valid: null without --valid-data.
    RunEvaluations(const Config& config, Comm& comm, const DataLoader& train, const DataLoader* valid);

    // The fingerprint of HellaSwag's file and the prompt, to compare between ranks.
    std::string fingerprint() const;

    // A note that says whether samples are text, and of which tokenizer; "" if there is nothing to say.
    const std::string& tokenizer_note() const { return tokenizer_note_; }

    struct Place {
        Ctx& ctx;
        Evaluator& evaluator;
        Bf16Evaluation* bf16;        // null unless evaluates_in_bf16, and in steps in BF16
        const StagedStep& staging;   // of a step that is not in flight
        RunLog& log;
        int64_t step;   // steps done
        std::function<void(bool)> use_ema = {};   // Trainer::use_ema
    };
    // Call it before the first step. Runs all evaluations; in a resumed run, runs only as much as loads their kernels,
    // and logs nothing.
    void warm_up(const Place& place, bool resumed);
    std::vector<std::string> due(int64_t step) const;   // types of log records
    // Why the validation data cannot be read any more, the same on all ranks; the run must then stop. "" while it can.
    const std::string& data_error() const { return data_error_; }
    // Runs the evaluations that are due. Returns those that a stop or a data_error() interrupted, as types of log
    // records; a resumed run repeats them with make_up.
    std::vector<std::string> run(const Place& place);
    std::vector<std::string> possible(std::vector<std::string> types) const;   // those that this run has data for
    std::vector<std::string> make_up(const Place& place, const std::vector<std::string>& missed);

private:
    // Whether the evaluations of this step are in BF16, too.
    bool bf16_due(const Place& place) const;
    template <typename Use> bool with_each(const Place& place, const Use& use) const;
    bool generates(const Evaluator& evaluator) const;
    void warm_up_bf16(const Place& place);
    bool validate(const Place& place);    // false: interrupted, and not logged
    bool hellaswag(const Place& place);
    bool sample(const Place& place, bool logged);

    void open_tokenizer();

    const Config& config_;
    Comm& comm_;
    const DataLoader* valid_;
    std::optional<Hellaswag> hellaswag_;
    std::optional<HellaswagRun> hellaswag_run_;
    std::optional<TokenText> tokenizer_;          // of samples, if they are text
    std::string tokenizer_note_;
    bool bytes_ = false;                          // the vocabulary is bytes
    std::vector<int32_t> prompt_;
    std::string data_error_;
};
