// HellaSwag of the model in training: the completion with the lowest mean loss of its tokens is the answer, as in llm.c
// (lm-eval's acc_norm differs: it divides by characters).
#pragma once
#include <cstdint>
#include <vector>

#include "llmc/data/hellaswag.h"
#include "llmc/parallel/comm.h"
#include "llmc/train/trainer.h"

class HellaswagRun {
public:
    // Nothing is owned.
    HellaswagRun(const Hellaswag& data, const Config& config, Comm& comm);

    // Rows are cut to the longest of the file, and as many as a micro-batch has room for go through the model together;
    // the ranks share these passes, so that any number of them gives equal bits. Blocking. Changes nothing that
    // training reads.
    struct Result {
        int64_t correct = 0;
        bool stopped = false;   // a rank was asked to stop meanwhile: not a result
    };
    Result evaluate(Ctx& ctx, Trainer& trainer, const StagedStep& staging);
    // One pass, so that nothing has to be loaded later.
    void warm_up(Ctx& ctx, Trainer& trainer, const StagedStep& staging) { pass(ctx, trainer, staging, 0); }

    // Mean loss of the counted tokens, by row; after evaluate, those of all ranks.
    const std::vector<double>& losses() const { return losses_; }

private:
    void pass(Ctx& ctx, Trainer& trainer, const StagedStep& staging, int64_t number);

    const Hellaswag& data_;
    Comm& comm_;
    const int64_t T_, rows_;        // of a pass
    std::vector<double> losses_;
    std::vector<int64_t> bits_;     // the same, with whether this rank is to stop, on their way to the others
};
