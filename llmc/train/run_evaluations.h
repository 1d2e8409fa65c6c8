// What a run looks at between its steps, and leaves as it is: validation loss, HellaSwag, samples of text. All of it
// lies in the memory of the steps, and runs once before the first of them: nothing is loaded or allocated later.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "llmc/base/fault_injection.h"
#include "llmc/config/config.h"
#include "llmc/data/dataloader.h"
#include "llmc/parallel/comm.h"
#include "llmc/train/hellaswag_run.h"
#include "llmc/train/log.h"
#include "llmc/train/trainer.h"

class RunEvaluations {
public:
    // Opens --hellaswag-data and reads the prompts. Nothing is owned; valid: null without --valid-data.
    RunEvaluations(const Config& config, Comm& comm, const DataLoader& train, const DataLoader* valid, Faults& faults);

    // Of the file of HellaSwag and of the prompts, which must be the same on all ranks.
    std::string fingerprint() const;

    // Where it happens: of a step that is not in flight.
    struct Place {
        Ctx& ctx;
        Trainer& trainer;
        const StagedStep& staging;
        RunLog& log;
        int64_t step;   // steps done
    };
    // Before the first step; of a resumed run only as far as something has to be loaded.
    void warm_up(const Place& place, bool resumed);
    bool due(int64_t step) const;
    // What is due; returns what a stop cut short, by the types of the log's records. A resumed run makes it up: of the
    // last step there is no other evaluation.
    std::vector<std::string> run(const Place& place);
    std::vector<std::string> possible(std::vector<std::string> types) const;   // those that this run has data for
    std::vector<std::string> make_up(const Place& place, const std::vector<std::string>& missed);

private:
    bool validation_due(int64_t step) const;
    bool hellaswag_due(int64_t step) const;
    bool validate(const Place& place);    // false: cut short, and nothing is in the log
    bool hellaswag(const Place& place);
    void sample(const Place& place, bool told);   // told: to the log

    const Config& config_;
    Comm& comm_;
    const DataLoader& train_;
    const DataLoader* valid_;
    Faults& faults_;
    std::optional<Hellaswag> hellaswag_;
    std::optional<HellaswagRun> hellaswag_run_;
    std::vector<std::vector<int32_t>> prompts_;   // none: the beginning of the data
};
