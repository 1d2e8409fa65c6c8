#include "llmc/trainer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "llmc/board.h"
#include "llmc/rng.h"
#include "llmc/stop.h"

namespace {

DecoderOptions decoder_options(const Config& config) {
    return {.max_batch = config.micro_batch_size, .max_seq = config.seq_length, .dtype = config.dtype,
            .recompute = config.recompute, .fuse_gelu = config.fuse_gelu,
            .fp8_attention = config.fp8_attention};
}

StepState* take_state(Arena& arena) {
    const int64_t words = static_cast<int64_t>((sizeof(StepState) + 7) / 8);
    return static_cast<StepState*>(arena.take(Purpose::kInputs, Dtype::kFp64, words).data);
}

}  // namespace

Trainer::Trainer(const Config& config, const ParamTable& table, Arena& arena, Comm& comm)
    : config_(config), shape_(config.shape), comm_(comm), table_(table), plan_(running_fp8_plan(config, table)),
      buckets_(table_, plan_, comm.world().ranks, static_cast<int64_t>(config.bucket_mb * 1e6)),
      fp8_(config, plan_, buckets_, arena), optimizer_(config, table_, buckets_, comm, arena, fp8_),
      decoder_(config.shape, table_, decoder_options(config), arena, optimizer_.weights(), optimizer_.grads(), fp8_) {
    inputs_ = arena.take(Purpose::kInputs, Dtype::kInt32,
                         input_rows(config) * config.micro_batch_size * config.seq_length);
    logits_ = arena.take(Purpose::kInputs, config.dtype, config.shape.padded_vocab());
    state_ = take_state(arena);
    eval_state_ = take_state(arena);
    if (comm.world().ranks == 1) return;
    decoder_.hooks = {.before_layer = [this](int layer) { zero().before_layer(*compute_, layer); },
                      .grads_ready = [this](int layer) { zero().grads_ready(*compute_, layer); }};
}

DeviceBatch Trainer::upload(Ctx& ctx, const int32_t* tokens, const int32_t* targets, const int32_t* order,
                            const int32_t* documents, int64_t B, StepState* state) {
    const int64_t N = B * config_.seq_length, bytes = N * dtype_bytes(Dtype::kInt32);
    int32_t* device_tokens = static_cast<int32_t*>(inputs_.data);
    int32_t* device_targets = device_tokens + N;
    int32_t* device_order = device_targets + N;
    int32_t* device_documents = documents ? device_order + N : nullptr;
    CHECK(!documents || config_.reset_attention_mask, "documents without --reset-attention-mask: no memory is planned");
    device::copy_to_device(ctx, device_tokens, tokens, bytes);
    if (targets) device::copy_to_device(ctx, device_targets, targets, bytes);
    if (order) device::copy_to_device(ctx, device_order, order, bytes);
    if (documents) device::copy_to_device(ctx, device_documents, documents, 2 * bytes);
    return {.tokens = device_tokens, .targets = device_targets, .token_order = device_order,
            .bad_tokens = &state->bad_tokens, .documents = device_documents, .B = B, .T = config_.seq_length};
}

void Trainer::micro_batch(Ctx& ctx, const StagedStep& staged, int64_t number, Fp8Phase phase) {
    const int64_t B = config_.micro_batch_size, at = number * B * config_.seq_length;
    const DeviceBatch batch = upload(ctx, staged.tokens + at, staged.targets + at, staged.order + at,
                                     staged.documents ? staged.documents + 2 * at : nullptr, B, state_);
    fp8_.begin_micro_batch(ctx, number * comm_.world().ranks + comm_.world().rank, phase);
    post_phase(Phase::kForward);
    device::range_push("forward");
    decoder_.forward(ctx, batch, true);
    device::range_pop();
    post_phase(Phase::kBackward);
    device::range_push("backward");
    decoder_.loss_and_backward(ctx, batch, state_);
    device::range_pop();
    comm_.mark_progress(ctx);
    executed_micro_batches_++;
}

void Trainer::step(Ctx& ctx, const StagedStep& staged) {
    compute_ = &ctx;
    executed_micro_batches_ = 0;
    zero().begin_step(staged.comm_timer);
    device::copy_to_device(ctx, state_, staged.inputs, kStepInputBytes);
    optimizer_.zero_grads(ctx);
    fp8_.begin_step(ctx, staged.count_fp8);
    if (fp8_.needs_priming()) prime(ctx, staged);
    if (staged.spoil_gradient) device::fill_bytes(ctx, optimizer_.grads().data, 0xff, 4);   // NaN in any float type
    for (int64_t i = 0; i < staged.micro_batches; i++) {
        if (i + 1 == staged.micro_batches) zero().reduce_next_backward(ctx, staged.count_fp8);
        micro_batch(ctx, staged, i, Fp8Phase::kTraining);
    }
    post_phase(Phase::kReduce);
    device::range_push("reduce");
    zero().finish_reduce(ctx);
    device::range_pop();
    post_phase(Phase::kUpdate);
    device::range_push("update");
    optimizer_.update(ctx, state_);
    device::range_pop();
    device::copy_to_host(ctx, staged.result, state_, sizeof(StepState));
    // Casts of weights belong to the report, and may still be running beside.
    if (staged.count_fp8 || staged.check_fp8) zero().wait_for_weights(ctx);
    if (staged.fp8_report) fp8_.copy_report(ctx, staged.fp8_report);
    if (staged.wire_report && staged.count_fp8) zero().copy_report(ctx, staged.wire_report);
    zero().end_step();
}

// Delayed scaling needs amaxes before its first cast: the first micro-batch in current scaling, of which only they are
// kept.
void Trainer::prime(Ctx& ctx, const StagedStep& staged) {
    StepRecorder* const recorder = std::exchange(ctx.recorder, nullptr);   // not part of an ordinary step
    device::range_push("priming");
    micro_batch(ctx, staged, 0, Fp8Phase::kPriming);
    device::range_pop();
    zero().agree_on_amaxes(ctx);
    ctx.recorder = recorder;
    fp8_.finish_priming(ctx);
    device::copy_to_device(ctx, state_, staged.inputs, kStepInputBytes);
    optimizer_.zero_grads(ctx);
}

Trainer::EvalResult Trainer::evaluate(Ctx& ctx, const DataLoader* loader, int64_t iters, const StagedStep& staging) {
    const int64_t B = config_.micro_batch_size, T = config_.seq_length;
    compute_ = &ctx;
    EvalResult result;
    device::fill_bytes(ctx, eval_state_, 0, sizeof(StepState));
    const auto stopped = [&] { return !ctx.rehearsal && stop_wanted(); };
    for (int64_t i = comm_.world().rank; i < iters && !stopped(); i += comm_.world().ranks) {
        post_progress();
        for (int64_t b = 0; b < B && !ctx.rehearsal; b++) {
            result.counted_tokens += loader->read(i * B + b, staging.tokens + b * T, staging.targets + b * T);
        }
        if (staging.documents) mark_documents(staging.tokens, B, T, loader->separator(), staging.documents);
        const DeviceBatch batch = upload(ctx, staging.tokens, staging.targets, nullptr, staging.documents, B,
                                         eval_state_);
        fp8_.begin_micro_batch(ctx, 0, Fp8Phase::kEvaluation);
        decoder_.forward(ctx, batch, false);
        decoder_.loss(ctx, batch, eval_state_);
        device::synchronize(ctx);   // the staging memory is read again by the next round
    }
    comm_.sum(ctx, {&eval_state_->loss_sum, Dtype::kFp64, 1});
    device::copy_to_host(ctx, staging.result, eval_state_, sizeof(StepState));
    device::synchronize(ctx);
    if (ctx.rehearsal) return result;
    const std::vector<int64_t> total = comm_.sum(std::vector<int64_t>{result.counted_tokens, stop_wanted()});
    result.counted_tokens = total[0];
    result.stopped = total[1] > 0;
    result.loss_sum = staging.result->loss_sum;
    return result;
}

std::vector<int32_t> Trainer::generate(Ctx& ctx, std::vector<int32_t> prompt, int64_t count, double temperature,
                                       uint64_t stream, const StagedStep& staging) {
    const int64_t T = config_.seq_length, V = shape_.vocab_size;
    compute_ = &ctx;
    const uint64_t key = rng_key(config_.seed, "sample");
    std::vector<char> raw(static_cast<size_t>(logits_.bytes()));
    std::vector<float> logits(static_cast<size_t>(V));
    std::vector<int32_t> text = std::move(prompt);
    for (int64_t i = 0; i < count && (ctx.rehearsal || !stop_wanted()); i++) {
        post_progress();
        // The last T - 1 tokens at most; what follows the last one cannot be seen through the causal mask.
        const int64_t length = std::min<int64_t>(static_cast<int64_t>(text.size()), T);
        if (!ctx.rehearsal) {
            std::fill(staging.tokens, staging.tokens + T, 0);
            std::copy(text.end() - length, text.end(), staging.tokens);
        }
        // One text, whatever separators it has: documents need the loader that knows them.
        const DeviceBatch batch = upload(ctx, staging.tokens, nullptr, nullptr, nullptr, 1, eval_state_);
        fp8_.begin_micro_batch(ctx, 0, Fp8Phase::kEvaluation);
        decoder_.forward(ctx, batch, false);
        decoder_.logits_row(ctx, batch, length - 1, logits_);
        device::copy_to_host(ctx, raw.data(), logits_.data, logits_.bytes());
        device::synchronize(ctx);
        for (int64_t v = 0; v < V; v++) {
            const size_t at = static_cast<size_t>(v);
            logits[at] = config_.dtype == Dtype::kBf16
                             ? static_cast<float>(reinterpret_cast<const bf16*>(raw.data())[at])
                             : reinterpret_cast<const float*>(raw.data())[at];
        }
        const double u = philox(key, stream, static_cast<uint64_t>(i)).word[0] * 0x1p-32;
        text.push_back(sample_token(logits, temperature, u));
    }
    return text;
}

int32_t sample_token(const std::vector<float>& logits, double temperature, double u) {
    const auto largest = std::max_element(logits.begin(), logits.end());
    if (temperature <= 0) return static_cast<int32_t>(largest - logits.begin());
    double total = 0;
    for (float x : logits) total += std::exp((static_cast<double>(x) - *largest) / temperature);
    double rest = u * total;
    for (size_t v = 0; v < logits.size(); v++) {
        rest -= std::exp((static_cast<double>(logits[v]) - *largest) / temperature);
        if (rest < 0) return static_cast<int32_t>(v);
    }
    return static_cast<int32_t>(largest - logits.begin());
}
