// Model, optimizer and device inputs of one run: training steps, evaluations and samples. The same calls rehearse (null
// arena) and run.
#pragma once
#include <functional>
#include <optional>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/data/dataloader.h"
#include "llmc/fault/heartbeat.h"
#include "llmc/model/decoder.h"
#include "llmc/parallel/context_exchange.h"
#include "llmc/parallel/zero/zero_store.h"
#include "llmc/train/checkpoint_access.h"
#include "llmc/train/host_inputs.h"
#include "llmc/train/optimizer.h"
#include "llmc/train/sampler.h"
#include "llmc/train/sequence_reader.h"

// This rank's part of one global batch in pinned host memory, and the results of the step.
struct StagedStep : HostInputs {
    StepState* inputs = nullptr;   // host part of StepState, copied to the device at the start of the step
    StepState* result = nullptr;   // copied to the host at the end
    void* fp8_report = nullptr;    // Fp8State::report_bytes(), copied to the host at the end
    void* grad_comm_report = nullptr;   // Gradients::report_bytes(), copied if count_fp8
    CommTimer* comm_timer = nullptr;
    std::function<void(Phase)> on_phase = {};   // called when the host begins to enqueue a phase
    bool count_fp8 = false;        // the reports have counts, and the scales after the step
    int64_t micro_batches = 0;     // of this rank
    int64_t calibration_micro_batch = 0;   // the first one with a counted target in its whole sequences
    int64_t counted_tokens = 0;    // of all ranks
    double lr = 0;
};

class Trainer {
public:
    // Owns none of its arguments.
    Trainer(const Config& config, const ParamTable& table, const Fp8Plan& fp8_plan, Arena& arena,
            const Groups& groups);
    Trainer(const Trainer&) = delete;
    Trainer& operator=(const Trainer&) = delete;

    // Initialises masters and weights of a new run; zeroes the moments.
    void initialise(Ctx& ctx);
    // Computes the weights from loaded masters; see WeightGatherer.
    void weights_from_masters(Ctx& ctx, bool fresh) { gatherer_.from_masters(ctx, fresh); }
    StateAccess state_access(Ctx& ctx) { return checkpoint_access(ctx, sharded_, gatherer_); }

    // Enqueues one optimizer step of this rank: forward and backward of its micro-batches, gradient reduction, update,
    // all-gather of weights, copy of the results. No host synchronisation.
    void step(Ctx& ctx, const StagedStep& staged);

    // Sums losses and counted tokens of the first `iters` micro-batches of `loader`, split among the ranks. Blocking.
    // Changes nothing that training reads.
    struct EvalResult {
        double loss_sum = 0;
        int64_t counted_tokens = 0;
        bool stopped = false;   // a rank was asked to stop, or could not read: the result is incomplete
        std::string error;      // of the first rank that could not read the data, the same on all ranks
    };
    EvalResult evaluate(Ctx& ctx, const DataLoader* loader, int64_t iters, const StagedStep& staging);

    // Whether every pass gathers weights (--zero 3), so that all ranks must make the same calls of token_losses and
    // generate. Otherwise the ranks of a context group must.
    bool passes_are_collective() const { return gatherer_.gathers_in_passes(); }
    // Whether `mine` is true on one of the ranks that make the same calls. Blocking.
    bool on_any_rank(bool mine) const;

    // Runs forward on whole sequences (B, T), with B * T at most that of a micro-batch. losses (B, T) = the loss of
    // each token, 0 if its target is ignored. Overwrites tokens, targets and order of `staging`. Blocking.
    void token_losses(Ctx& ctx, int64_t B, int64_t T, const int32_t* tokens, const int32_t* targets, float* losses,
                      const StagedStep& staging);

    // See Sampler. Ranks that make the call together have the same arguments and get the same text.
    std::vector<int32_t> generate(Ctx& ctx, const std::vector<int32_t>& prompt, const Sampling& sampling,
                                  uint64_t stream, const StagedStep& staging);

    Decoder& decoder() { return decoder_; }
    Fp8State& fp8() { return fp8_; }
    ShardedState& sharded_state() { return sharded_; }
    Gradients& gradients() { return grads_; }
    WeightGatherer& gatherer() { return gatherer_; }
    const Buckets& buckets() const { return buckets_; }
    // Micro-batches that the latest step ran, including the one that calibrated delayed scaling.
    int64_t executed_micro_batches() const { return executed_micro_batches_; }
    int64_t timer_spans() const;   // of one step, at most; see CommTimer
    // The parts of the arena that the ranks of the shard group exchange while matmuls run, which copy engines can do.
    std::vector<Tensor> exchanged() const;
    StepState* state() { return state_; }

private:
    // Copies the inputs of a micro-batch of B sequences of T tokens to the device.
    DeviceBatch upload(Ctx& ctx, const HostInputs& host, int64_t B, int64_t T, StepState* state);
    bool read_evaluation(const DataLoader* loader, int64_t first, const HostInputs& to, EvalResult& result);

    // ---- the parts of a step
    void begin_step(Ctx& ctx, const StagedStep& staged);
    void forward_backward(Ctx& ctx, const StagedStep& staged);
    void reduce_gradients(Ctx& ctx, const StagedStep& staged);
    void clip_and_guard(Ctx& ctx);
    void optimizer_step(Ctx& ctx);
    void gather_weights(Ctx& ctx);
    void copy_results(Ctx& ctx, const StagedStep& staged);

    // Forward and backward of the `number`-th micro-batch of this rank.
    void micro_batch(Ctx& ctx, const StagedStep& staged, int64_t number, Fp8Phase phase);
    const LayerBuffers* layer_buffers() const { return layer_buffers_ ? &*layer_buffers_ : nullptr; }
    void calibrate(Ctx& ctx, const StagedStep& staged);
    void clear_gradients(Ctx& ctx);

    const Config& config_;
    const ParamTable& table_;
    const Groups& groups_;
    Arena& arena_;
    const Fp8Plan plan_;
    const FlatLayout layout_;
    const Buckets buckets_;
    const std::optional<LayerBuffers> layer_buffers_;   // --zero 3
    Fp8State fp8_;
    ShardedState sharded_;
    CommStream comm_stream_;
    Gradients grads_;
    WeightGatherer gatherer_;
    const std::vector<std::unique_ptr<Optimizer>> optimizers_;   // by OptimizerKind
    ZeroStore store_;
    ContextExchange exchange_;
    Decoder decoder_;
    Tensor inputs_;          // (input_elems of a micro-batch) int32
    SequenceReader reader_;  // of evaluations
    Sampler sampler_;
    StepState* state_;       // device
    StepState* eval_state_;  // device
    int64_t executed_micro_batches_ = 0;
    bool gradients_cleared_ = false;   // in this step
};
