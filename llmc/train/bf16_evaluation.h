// Evaluations of an FP8 run with the weights that it exports (--eval-bf16): masters rounded to BF16, in a decoder
// without FP8, whose activations are in the memory of those of the steps.
#pragma once
#include "llmc/parallel/zero/bf16_store.h"
#include "llmc/train/evaluator.h"

class Bf16Evaluation {
public:
    // Owns none of its arguments. arena: within Arena::Instead.
    Bf16Evaluation(const Config& config, const ParamTable& table, const Groups& groups, const DecoderOptions& options,
                   ShardedState& state, const Gradients& grads, WeightGatherer& gatherer, CommStream& stream,
                   DeviceInputs& inputs, Arena& arena)
        : fp8_(config, {}, state.buckets().layout(), false, arena),
          store_(config, state, grads, gatherer, groups, stream),
          decoder_(config.shape, table, options, arena, store_, fp8_),
          evaluator_(config, groups, store_.gathers_in_passes() || groups.expert.world().ranks > 1, decoder_, fp8_,
                     inputs, arena) {}

    // Rounds the current masters and returns the evaluator of these weights, valid until the next step. Collective.
    Evaluator& begin(Ctx& ctx) {
        store_.round_masters(ctx);
        return evaluator_;
    }

private:
    Fp8State fp8_;   // of no linears
    Bf16Store store_;
    Decoder decoder_;
    Evaluator evaluator_;
};
