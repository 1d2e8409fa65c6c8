#include "llmc/train/trainer.h"

#include <algorithm>
#include <utility>

#include "llmc/fault/shutdown.h"

namespace {

// The slots of --zero 3.
std::optional<WeightSlots> make_weight_slots(const Config& config, const Buckets& buckets, const Fp8Plan& plan,
                                             Arena& arena) {
    if (!shards_weights(config, buckets.ranks())) return std::nullopt;
    return std::optional<WeightSlots>(std::in_place, buckets.layout(), static_cast<int>(config.shape.num_layers),
                                      config.dtype, plan.weight_format, config.zero_keep_layers, arena);
}

DecoderOptions decoder_options(const Config& config) {
    return {.max_batch = config.micro_batch_size, .max_seq = config.seq_length, .dtype = config.dtype,
            .recompute = config.recompute, .fuse_gelu = config.fuse_gelu,
            .fp8_attention = config.fp8_attention, .attention_fast = config.attention_fast,
            .loss_chunk = config.loss_chunk};
}

void enter(const StagedStep& staged, Phase phase) {
    post_phase(phase);
    if (staged.on_phase) staged.on_phase(phase);
}

StepState* take_state(Arena& arena) {
    const int64_t words = static_cast<int64_t>((sizeof(StepState) + 7) / 8);
    return static_cast<StepState*>(arena.take(Purpose::kInputs, Dtype::kFp64, words).data);
}

}  // namespace

Trainer::Trainer(const Config& config, const ParamTable& table, const Fp8Plan& fp8_plan, Arena& arena,
                 const Groups& groups)
    : config_(config), table_(table), groups_(groups), arena_(arena), plan_(executed_fp8_plan(fp8_plan, config.inject)),
      layout_(table, plan_, static_cast<int64_t>(config.bucket_mb * 1e6), Buckets::unit(groups.shard.world().ranks),
              shards_weights(config, groups.shard.world().ranks)),
      buckets_(layout_, groups.shard.world().ranks), weight_slots_(make_weight_slots(config, buckets_, plan_, arena)),
      fp8_(config, plan_, layout_, gathers_fp8(config, buckets_), arena, slots(), buckets_.ranks()),
      sharded_(config, table, buckets_, groups.shard.world().rank, arena, slots()),
      comm_stream_(config.overlap && groups.shard.world().ranks > 1),
      reducer_(config, sharded_, groups, comm_stream_, arena),
      gatherer_(config, table, sharded_, fp8_, slots(), groups, comm_stream_, arena),
      optimizers_(make_optimizers(config)), store_(sharded_, reducer_, gatherer_),
      decoder_(config.shape, table_, decoder_options(config), arena, store_, fp8_),
      inputs_(arena.take(Purpose::kInputs, Dtype::kInt32,
                         input_rows(config) * config.micro_batch_size * config.seq_length)),
      sampler_(config.shape, config.dtype, config.seq_length, decoder_, fp8_, arena) {
    state_ = take_state(arena);
    eval_state_ = take_state(arena);
}

void Trainer::initialise(Ctx& ctx) {
    sharded_.initialise(ctx, config_.seed);
    weights_from_masters(ctx, true);
}

void HostInputs::mark(int64_t B, int64_t T, int32_t separator, std::vector<int64_t>& scratch) const {
    if (documents) mark_documents(tokens, B, T, separator, documents);
    if (positions) restart_positions(tokens, B, T, separator, positions);
    if (position_order) sort_rows_by_token(positions, B * T, T, position_order, scratch);
}

// Copies the inputs that the configuration has; while rehearsing their memory is null.
DeviceBatch Trainer::upload(Ctx& ctx, const HostInputs& host, int64_t B, int64_t T, StepState* state) {
    const int64_t N = B * T, bytes = N * dtype_bytes(Dtype::kInt32);
    int32_t* next = static_cast<int32_t*>(inputs_.data);
    const auto copy = [&](const int32_t* from, bool exists, int64_t rows = 1) {
        CHECK(exists || !from, "an input for which no memory is planned");
        if (!exists) return static_cast<int32_t*>(nullptr);
        int32_t* to = std::exchange(next, next + rows * N);
        if (from) device::copy_to_device(ctx, to, from, rows * bytes);
        return from || ctx.rehearsal ? to : nullptr;
    };
    DeviceBatch batch{.bad_tokens = &state->bad_tokens, .B = B, .T = T};
    batch.tokens = copy(host.tokens, true);
    batch.targets = copy(host.targets, true);
    batch.token_order = copy(host.order, true);
    batch.documents = copy(host.documents, config_.reset_attention_mask, 2);
    batch.restarted = copy(host.positions, config_.reset_position_ids);
    batch.position_order = copy(host.position_order, sorts_positions(config_));
    return batch;
}

void Trainer::micro_batch(Ctx& ctx, const StagedStep& staged, int64_t number, Fp8Phase phase) {
    const int64_t B = config_.micro_batch_size, T = config_.seq_length;
    const DeviceBatch batch = upload(ctx, staged.from(number * B * T), B, T, state_);
    fp8_.begin_micro_batch(ctx, number * groups_.world.world().ranks + groups_.world.world().rank, phase);
    enter(staged, Phase::kForward);
    device::range_push("forward");
    decoder_.forward(ctx, batch, true);
    device::range_pop();
    enter(staged, Phase::kBackward);
    device::range_push("backward");
    decoder_.loss_and_backward(ctx, batch, state_);
    device::range_pop();
    groups_.world.mark_progress(ctx);
    executed_micro_batches_++;
}

// ---- the step

void Trainer::step(Ctx& ctx, const StagedStep& staged) {
    begin_step(ctx, staged);
    forward_backward(ctx, staged);
    reduce_gradients(ctx, staged);
    enter(staged, Phase::kUpdate);
    device::range_push("update");
    clip_and_guard(ctx);
    optimizer_step(ctx);
    gather_weights(ctx);
    device::range_pop();
    copy_results(ctx, staged);
}

void Trainer::begin_step(Ctx& ctx, const StagedStep& staged) {
    executed_micro_batches_ = 0;
    if (staged.comm_timer) staged.comm_timer->restart();
    comm_stream_.set_timer(staged.comm_timer);
    device::copy_to_device(ctx, state_, staged.inputs, kStepInputBytes);
    zero_gradients(ctx);
    fp8_.begin_step(ctx, staged.count_fp8);
    if (fp8_.needs_calibration()) calibrate(ctx, staged);
}

void Trainer::zero_gradients(Ctx& ctx) {
    sharded_.zero_grads(ctx);
}

void Trainer::forward_backward(Ctx& ctx, const StagedStep& staged) {
    for (int64_t i = 0; i < staged.micro_batches; i++) {
        reducer_.begin(ctx, {.first = i == 0, .last = i + 1 == staged.micro_batches, .compare = staged.count_fp8,
                             .corrupt = staged.corrupt_gradient});
        gatherer_.set_pass_follows(i + 1 < staged.micro_batches);
        micro_batch(ctx, staged, i, Fp8Phase::kTraining);
    }
}

// Most buckets were reduced during the last backward, or (--zero 2) each.
void Trainer::reduce_gradients(Ctx& ctx, const StagedStep& staged) {
    enter(staged, Phase::kReduce);
    device::range_push("reduce");
    reducer_.finish(ctx);
    device::range_pop();
}

// Computes the gradient norm over all ranks, grad_mul, and whether the step is skipped, in *state_.
void Trainer::clip_and_guard(Ctx& ctx) {
    // Of the ranks that hold the same shard, one counts it.
    if (groups_.replicas.world().rank == 0) {
        Arena::Scope scope(ctx, arena_);
        Tensor scratch = arena_.scratch(Dtype::kFp64, kPartialSums);
        for (const Tensor& block : sharded_.norm_blocks())
            ops::sum_squares(ctx, {.sum = &state_->sum_squares, .in = block, .scratch = scratch});
    }
    reducer_.all_reduce_norm(ctx, state_);
    ops::step_guard(ctx, {.state = state_, .clip = static_cast<float>(config_.clip_grad)});
}

// Updates what this rank owns, and records the amaxes of the new weights.
void Trainer::optimizer_step(Ctx& ctx) {
    fp8_.clear_weight_amax(ctx, state_);
    for (const ShardRange& range : sharded_.ranges()) {
        const Param& param = table_.params[static_cast<size_t>(range.param)];
        ShardUpdate update{.param = param, .begin = range.begin, .weight = sharded_.weight(range),
                           .grad = sharded_.reduced_grad(range), .slots = {}, .amax = fp8_.weight_slot(range.param)};
        for (const StateSlot& row : kStateSlots)
            if (param.has(row.kind)) update.slots[static_cast<size_t>(row.kind)] = sharded_.slot(row.kind, range);
        optimizers_[static_cast<size_t>(param.optimizer)]->update(ctx, update, state_);
        fp8_.record_block_amaxes(ctx, range.param, range.begin, sharded_.master(range));
    }
}

void Trainer::gather_weights(Ctx& ctx) {
    gatherer_.all_reduce_amaxes(ctx);
    fp8_.update(ctx, state_);
    gatherer_.gather(ctx, state_);
}

void Trainer::copy_results(Ctx& ctx, const StagedStep& staged) {
    device::copy_to_host(ctx, staged.result, state_, sizeof(StepState));
    // The report includes casts of weights, which may still be running on the side stream.
    if (staged.count_fp8 || staged.check_fp8) gatherer_.wait(ctx);
    if (staged.fp8_report) fp8_.copy_report(ctx, staged.fp8_report);
    if (staged.grad_comm_report && staged.count_fp8) reducer_.copy_report(ctx, staged.grad_comm_report);
    comm_stream_.set_timer(nullptr);
}

// The first micro-batch of this rank with a counted target. If loss masks ignored all targets, the amaxes of gradients
// would be 0 and their scales stay 1, with which later gradients would flush to zero.
int64_t Trainer::calibration_micro_batch(const Ctx& ctx, const StagedStep& staged) const {
    const int64_t N = config_.micro_batch_size * config_.seq_length;
    for (int64_t i = 0; i < staged.micro_batches && !ctx.rehearsal; i++) {
        const int32_t* targets = staged.targets + i * N;
        if (std::any_of(targets, targets + N, [](int32_t target) { return target != kIgnoreIndex; })) return i;
    }
    return 0;
}

// Delayed scaling needs amaxes before its first cast: runs one micro-batch in current scaling and keeps only these.
void Trainer::calibrate(Ctx& ctx, const StagedStep& staged) {
    StepRecorder* const recorder = std::exchange(ctx.recorder, nullptr);   // not part of an ordinary step
    device::range_push("calibration");
    gatherer_.set_pass_follows(true);
    micro_batch(ctx, staged, calibration_micro_batch(ctx, staged), Fp8Phase::kCalibration);
    device::range_pop();
    gatherer_.all_reduce_amaxes(ctx);
    fp8_.finish_calibration(ctx);
    ctx.recorder = recorder;
    device::copy_to_device(ctx, state_, staged.inputs, kStepInputBytes);
    zero_gradients(ctx);
}

Trainer::EvalResult Trainer::evaluate(Ctx& ctx, const DataLoader* loader, int64_t iters, const StagedStep& staging) {
    const int64_t B = config_.micro_batch_size, T = config_.seq_length;
    EvalResult result;
    device::fill_bytes(ctx, eval_state_, 0, sizeof(StepState));
    const int64_t rank = groups_.world.world().rank, ranks = groups_.world.world().ranks;
    // If passes are collective, a rank without a micro-batch of its own runs one that counts nothing.
    for (int64_t i = rank; i < iters || (passes_are_collective() && i - rank < iters); i += ranks) {
        post_progress();
        if (!ctx.rehearsal) {
            result.error = reading_error([&] {
                for (int64_t b = 0; b < B && i < iters; b++)
                    result.counted_tokens += loader->read(i * B + b, staging.tokens + b * T, staging.targets + b * T);
            });
            if (i >= iters) {
                std::fill_n(staging.tokens, B * T, 0);
                std::fill_n(staging.targets, B * T, kIgnoreIndex);
            }
            if (on_any_rank(stop_wanted() || !result.error.empty())) break;
        }
        HostInputs inputs = staging.from(0);
        inputs.order = nullptr;   // which only backward needs
        if (!ctx.rehearsal) inputs.mark(B, T, loader->separator(), scratch_);
        const DeviceBatch batch = upload(ctx, inputs, B, T, eval_state_);
        fp8_.begin_micro_batch(ctx, 0, Fp8Phase::kEvaluation);
        decoder_.forward(ctx, batch, false);
        decoder_.loss(ctx, batch, eval_state_);
        device::synchronize(ctx);   // the next iteration overwrites the staging memory
    }
    groups_.world.sum(ctx, {&eval_state_->loss_sum, Dtype::kFp64, 1});
    device::copy_to_host(ctx, staging.result, eval_state_, sizeof(StepState));
    device::synchronize(ctx);
    if (ctx.rehearsal) return result;
    const std::vector<int64_t> total = groups_.world.sum(
        std::vector<int64_t>{result.counted_tokens, stop_wanted() || !result.error.empty(), !result.error.empty()});
    result.counted_tokens = total[0];
    result.stopped = total[1] > 0;
    if (total[2] > 0) result.error = first_error(groups_.world, result.error);
    result.loss_sum = staging.result->loss_sum;
    return result;
}

bool Trainer::on_any_rank(bool mine) const {
    return passes_are_collective() ? groups_.world.sum(std::vector<int64_t>{mine})[0] > 0 : mine;
}

const float* Trainer::token_losses(Ctx& ctx, int64_t B, int64_t T, const StagedStep& staging) {
    device::fill_bytes(ctx, eval_state_, 0, sizeof(StepState));
    const DeviceBatch batch = upload(ctx, {.tokens = staging.tokens, .targets = staging.targets}, B, T, eval_state_);
    fp8_.begin_micro_batch(ctx, 0, Fp8Phase::kEvaluation);
    decoder_.forward(ctx, batch, false);
    static_assert(sizeof(float) == sizeof(*staging.order));
    decoder_.loss(ctx, batch, eval_state_, staging.order);
    device::synchronize(ctx);
    return reinterpret_cast<const float*>(staging.order);
}

std::vector<int32_t> Trainer::generate(Ctx& ctx, const std::vector<int32_t>& prompt, const Sampling& sampling,
                                       uint64_t stream, const StagedStep& staging) {
    return sampler_.continue_text(ctx, prompt, sampling, stream,
                                  {.device_tokens = static_cast<int32_t*>(inputs_.data),
                                   .bad_tokens = &eval_state_->bad_tokens, .host_tokens = staging.tokens},
                                  [&] { return !ctx.rehearsal && on_any_rank(stop_wanted()); });
}
