// Model and optimizer of one run, and its training steps. The same calls rehearse (null arena) and run.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "llmc/checkpoint/state_access.h"
#include "llmc/config/config.h"
#include "llmc/model/decoder.h"
#include "llmc/parallel/groups.h"
#include "llmc/parallel/zero/zero_store.h"
#include "llmc/train/bf16_evaluation.h"
#include "llmc/train/optimizer.h"
#include "llmc/train/orthogonalizer.h"
#include "llmc/train/qk_clip.h"
#include "llmc/train/router_balance.h"

class Trainer {
public:
    // Owns none of its arguments. The load of experts and the optimizer states are first in the arena: a trainer that
    // is made after Arena::restart(), by a plan with the same layout (Fp8Plan::in_bf16), continues with those of the
    // one before.
    Trainer(const Config& config, const ParamTable& table, const Fp8Plan& fp8_plan, Arena& arena, const Groups& groups);
    Trainer(const Trainer&) = delete;
    Trainer& operator=(const Trainer&) = delete;

    // Initialises masters and weights of a new run; zeroes the moments.
    void initialise(Ctx& ctx);
    // With --ema: sets the EMA to the masters; initialise() does.
    void start_ema(Ctx& ctx);
    // Between steps: makes all weights from the EMA, for evaluations, or from the masters again, which gives the same
    // bits as before. Collective.
    void use_ema(Ctx& ctx, bool ema);
    // Sets the number of updates done and the latest norms (recent_norms), and the rest of *state() to 0. Blocking.
    // moments_begin: the number of updates at which AdamW's moments of the matrices of layers were 0.
    void set_state(Ctx& ctx, int64_t adam_step, const std::vector<float>& norms, int64_t moments_begin = 0);
    // Computes the weights from loaded masters; see WeightGatherer.
    void weights_from_masters(Ctx& ctx, bool fresh) { gatherer_.from_masters(ctx, fresh); }
    // Access of checkpoints to this rank's shard ranges, by blocking copies. A write skips elements of other ranks.
    StateAccess state_access(Ctx& ctx);

    // Enqueues one optimizer step of this rank: forward and backward of its micro-batches, gradient reduction, update,
    // all-gather of weights, copy of the results. No host synchronisation.
    void step(Ctx& ctx, const StagedStep& staged);

    // Runs one micro-batch of `staged` and drops its results, so that kernels are loaded and matmul algorithms chosen.
    void warm_up(Ctx& ctx, const StagedStep& staged);

    Evaluator& evaluator() { return evaluator_; }
    Bf16Evaluation* bf16_evaluation() { return bf16_evaluation_.get(); }   // null unless evaluates_in_bf16
    Decoder& decoder() { return decoder_; }
    Fp8State& fp8() { return fp8_; }
    ShardedState& sharded_state() { return sharded_; }
    Gradients& gradients() { return grads_; }
    WeightGatherer& gatherer() { return gatherer_; }
    const Buckets& buckets() const { return buckets_; }
    // Micro-batches that the latest step ran, including the one that calibrated delayed scaling.
    int64_t executed_micro_batches() const { return executed_micro_batches_; }
    // The parts of the arena that the ranks of the shard group exchange while matmuls run, which copy engines can do.
    std::vector<Tensor> exchanged() const;
    StepState* state() { return state_; }
    const QkClip& qk_clip() const { return qk_clip_; }
    const RouterBalance& router_balance() const { return router_balance_; }

private:
    // ---- the parts of a step
    void begin_step(Ctx& ctx, const StagedStep& staged);
    void forward_backward(Ctx& ctx, const StagedStep& staged);
    void reduce_gradients(Ctx& ctx, const StagedStep& staged);
    void clip_and_guard(Ctx& ctx);
    void optimizer_step(Ctx& ctx);
    ShardUpdate update_of(const ShardRange& range, OffloadAccess access) const;
    ShardUpdate unclipped(ShardUpdate update) const;
    void finish_range(Ctx& ctx, const ShardRange& range, OffloadAccess access);
    void gather_weights(Ctx& ctx);
    void copy_results(Ctx& ctx, const StagedStep& staged);

    // Forward and backward of the `number`-th micro-batch of this rank.
    void micro_batch(Ctx& ctx, const StagedStep& staged, int64_t number, Fp8Phase phase);
    const LayerBuffers* layer_buffers() const { return layer_buffers_ ? &*layer_buffers_ : nullptr; }
    void dropped_micro_batch(Ctx& ctx, const StagedStep& staged);
    void calibrate(Ctx& ctx, const StagedStep& staged);
    void clear_gradients(Ctx& ctx);
    std::unique_ptr<Bf16Evaluation> make_bf16_evaluation();
    std::vector<std::unique_ptr<Orthogonalizer>> make_orthogonalizers();

    const Config& config_;
    const ParamTable table_;   // of what this rank has
    const Groups& groups_;
    Arena& arena_;
    const Fp8Plan plan_;
    const FlatLayout layout_;
    const Buckets buckets_;
    const RouterBalance router_balance_;
    ShardedState sharded_;
    const std::optional<LayerBuffers> layer_buffers_;   // --zero 3
    Fp8State fp8_;
    CommStream comm_stream_;
    Gradients grads_;
    WeightGatherer gatherer_;
    const std::vector<std::unique_ptr<Optimizer>> optimizers_;   // by OptimizerKind
    ZeroStore store_;
    const HeadExchange exchange_;
    CommStream expert_stream_;   // beside comm_stream_, whose collectives would delay exchanges
    const ExpertExchange expert_exchange_;
    DeviceInputs inputs_;
    const QkClip qk_clip_;
    Decoder decoder_;
    const std::vector<std::unique_ptr<Orthogonalizer>> orthogonalizers_;   // none without --optimizer muon
    const std::unique_ptr<Bf16Evaluation> bf16_evaluation_;
    Evaluator evaluator_;
    StepState* const state_;   // device
    int64_t executed_micro_batches_ = 0;
    bool gradients_cleared_ = false;   // in this step
    int64_t moments_begin_ = 0;        // of set_state
};
