// HellaSwag accuracy of the model in training: the answer is the completion with the lowest mean loss of its tokens, as
// in llm.c (lm-eval's acc_norm divides by characters instead).
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "llmc/data/hellaswag.h"
#include "llmc/parallel/comm/comm.h"
#include "llmc/train/evaluator.h"

class HellaswagRun {
public:
    // Owns none of its arguments. comm: all ranks.
    HellaswagRun(const Hellaswag& data, const Config& config, Comm& comm);

    // Runs as many rows per pass as fit into a micro-batch, cut to the longest row of the file. The ranks, or groups of
    // ranks that share sequences, share the passes; the number of ranks does not change the bits. Blocking. Changes
    // nothing that training reads. Returns the mean loss of the counted tokens of each row, nothing if a rank was asked
    // to stop.
    std::optional<std::vector<double>> evaluate(Ctx& ctx, Evaluator& evaluator, const StagedStep& staging);
    // Runs one pass, so that kernels are loaded before training.
    void warm_up(Ctx& ctx, Evaluator& evaluator, const StagedStep& staging) { pass(ctx, evaluator, staging, 0); }

private:
    void pass(Ctx& ctx, Evaluator& evaluator, const StagedStep& staging, int64_t number);

    const Hellaswag& data_;
    Comm& comm_;
    const int64_t context_;         // ranks that share a sequence
    const int64_t T_, rows_;        // of a pass
    std::vector<int32_t> tokens_, targets_;   // (rows, T)
    std::vector<float> token_losses_;
    std::vector<double> losses_;
    std::vector<int64_t> bits_;     // the bits of losses_ and a stop flag, to sum over the ranks
};
