// What a run computes of its model besides training: losses of validation data and of single tokens, samples of text.
// It changes nothing that training reads, and uses memory of the steps.
#pragma once
#include <string>
#include <vector>

#include "llmc/data/dataloader.h"
#include "llmc/model/decoder.h"
#include "llmc/parallel/groups.h"
#include "llmc/train/device_inputs.h"
#include "llmc/train/sampler.h"
#include "llmc/train/sequence_reader.h"
#include "llmc/train/staged_step.h"

class Evaluator {
public:
    // Owns none of its arguments. collective: see passes_are_collective.
    Evaluator(const Config& config, const Groups& groups, bool collective, Decoder& decoder, Fp8State& fp8,
              DeviceInputs& inputs, Arena& arena);

    struct Result {
        double loss_sum = 0;
        int64_t counted_tokens = 0;
        bool stopped = false;   // a rank was asked to stop, or could not read: the result is incomplete
        std::string error;      // of the first rank that could not read the data, the same on all ranks
    };
    // Sums losses and counted tokens of the first `iters` micro-batches of `loader`, split among the ranks. Blocking.
    Result evaluate(Ctx& ctx, const DataLoader* loader, int64_t iters, const StagedStep& staging);

    // Whether every pass gathers weights (--zero 3), so that all ranks must make the same calls of token_losses and
    // generate. Otherwise the ranks of a context group must.
    bool passes_are_collective() const { return collective_; }
    // Whether `mine` is true on one of the ranks that make the same calls. Blocking.
    bool on_any_rank(bool mine) const;

    // Runs forward on whole sequences (B, T), with B * T at most that of a micro-batch. losses (B, T) = the loss of
    // each token, 0 if its target is ignored. Overwrites tokens, targets and order of `staging`. Blocking.
    void token_losses(Ctx& ctx, int64_t B, int64_t T, const int32_t* tokens, const int32_t* targets, float* losses,
                      const StagedStep& staging);

    // See Sampler. Ranks that make the call together have the same arguments and get the same text.
    std::vector<int32_t> generate(Ctx& ctx, const std::vector<int32_t>& prompt, const Sampling& sampling,
                                  uint64_t stream, const StagedStep& staging);

private:
    bool read(const DataLoader& loader, int64_t first, bool counted, const HostInputs& to, Result& result);

    const Config& config_;
    const Groups& groups_;
    const bool collective_;
    Decoder& decoder_;
    Fp8State& fp8_;
    DeviceInputs& inputs_;
    SequenceReader reader_;
    Sampler sampler_;
    StepState* const state_;   // device
};
