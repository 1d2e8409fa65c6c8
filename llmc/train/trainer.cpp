#include "llmc/train/trainer.h"

#include <algorithm>
#include <utility>

#include "llmc/base/fault_injection.h"

namespace {

// The buffers of --zero 3.
std::optional<LayerBuffers> make_layer_buffers(const Config& config, const Buckets& buckets, const Fp8Plan& plan,
                                               Arena& arena) {
    if (!shards_weights(config, buckets.ranks())) return std::nullopt;
    return std::optional<LayerBuffers>(std::in_place, buckets.layout(), static_cast<int>(config.shape.num_layers),
                                       config.dtype, plan.format(Fp8Role::kWeight, Fp8Layout::kRowwise),
                                       plan.weight_format, arena);
}

DecoderOptions decoder_options(const Config& config, const HeadExchange& exchange, const ExpertExchange& experts,
                               Tensor max_logits, const RouterBalance& balance) {
    DecoderOptions options{.max_batch = config.micro_batch_size, .max_seq = config.part_length(),
            .dtype = config.dtype, .recompute = config.recompute, .fp8_attention = config.fp8_attention,
            .offload_activations = offloads(config, "activations"),
            .exchange = exchange.ranks > 1 ? &exchange : nullptr, .loss_chunk = config.loss_chunk,
            .z_loss = config.z_loss, .max_logits = max_logits,
            .even_experts = config.synthetic_data, .experts = experts.ranks > 1 ? &experts : nullptr};
    balance.set_options(options);
    return options;
}

// The plan with the experts that this rank has, except that tests make one linear run in BF16.
Fp8Plan executed_plan(Fp8Plan plan, const ParamTable& table) {
    for (LinearPlan& linear : plan.linears) {
        linear.fp8 = linear.fp8 && !fault_at("bf16@" + linear.name);
        linear.experts = table.params[static_cast<size_t>(linear.weight)].experts;
    }
    return plan;
}

void enter(const StagedStep& staged, Phase phase) {
    post_phase(phase);
    if (staged.on_phase) staged.on_phase(phase);
}

}  // namespace

Trainer::Trainer(const Config& config, const ParamTable& whole_table, const Fp8Plan& fp8_plan, Arena& arena,
                 const Groups& groups)
    : config_(config), table_(expert_part(whole_table, groups.expert.world().ranks, groups.expert.world().rank)),
      groups_(groups), arena_(arena), plan_(executed_plan(fp8_plan, table_)),
      layout_(table_, plan_, bucket_bytes(config, groups.shard.world().ranks),
              Buckets::unit(groups.shard.world().ranks), shards_weights(config, groups.shard.world().ranks)),
      buckets_(layout_, groups.shard.world().ranks), router_balance_(config, arena),
      sharded_(config, table_, buckets_, groups.shard.world().rank, arena, layer_buffers_),
      layer_buffers_(make_layer_buffers(config, buckets_, plan_, arena)),
      fp8_(config, plan_, layout_, shards_state(config, buckets_.ranks()), arena, layer_buffers(), buckets_.ranks()),
      comm_stream_(config.overlap && groups.shard.world().ranks > 1),
      grads_(config, table_, buckets_, groups, comm_stream_, arena),
      gatherer_(config, table_, sharded_, fp8_, grads_, layer_buffers(), groups, comm_stream_, arena),
      optimizers_(make_optimizers(config, router_balance_.load())), store_(sharded_, grads_, gatherer_),
      exchange_(context_exchange(groups, comm_stream_)),
      expert_stream_(config.overlap && groups.expert.world().ranks > 1),
      expert_exchange_(make_expert_exchange(groups, expert_stream_)), inputs_(config, arena),
      qk_clip_(config, table_, arena),
      decoder_(config.shape, table_,
               decoder_options(config, exchange_, expert_exchange_, qk_clip_.max_logits(), router_balance_), arena,
               store_, fp8_),
      orthogonalizers_(make_orthogonalizers()), bf16_evaluation_(make_bf16_evaluation()),
      evaluator_(config, groups, gatherer_.gathers_in_passes() || groups.expert.world().ranks > 1, decoder_, fp8_,
                 inputs_, arena),
      state_(take_step_state(arena)) {
    CHECK(groups.context.world().ranks == config.context_parallel, "a context group of %d ranks",
          groups.context.world().ranks);
}

std::unique_ptr<Bf16Evaluation> Trainer::make_bf16_evaluation() {
    if (!evaluates_in_bf16(config_)) return nullptr;
    DecoderOptions options = decoder_options(config_, exchange_, expert_exchange_, {}, router_balance_);
    options.fp8_attention = options.offload_activations = false;
    options.forward_only = true;
    options.cos_sin = decoder_.cos_sin();
    const Arena::Instead instead(arena_, decoder_.activations_begin());   // of what the steps save
    return std::make_unique<Bf16Evaluation>(config_, table_, groups_, options, sharded_, grads_, gatherer_,
                                            comm_stream_, inputs_, arena_);
}

std::vector<std::unique_ptr<Orthogonalizer>> Trainer::make_orthogonalizers() {
    std::vector<std::unique_ptr<Orthogonalizer>> all;
    const auto add = [&](Comm& group, int parts) {
        if (config_.optimizer != OptimizerKind::kMuon || (parts == 1 && !all.empty())) return;
        const Arena::Instead instead(arena_, decoder_.activations_begin());   // updates need no activation any more
        all.push_back(std::make_unique<Orthogonalizer>(config_, table_, sharded_, grads_, group, parts, comm_stream_,
                                                       arena_));
    };
    add(groups_.world, 1);
    add(groups_.expert_data, groups_.expert.world().ranks);
    return all;
}

void Trainer::initialise(Ctx& ctx) {
    sharded_.initialise(ctx, config_.seed);
    router_balance_.start(ctx);
    weights_from_masters(ctx, true);
    start_ema(ctx);
}

void Trainer::start_ema(Ctx& ctx) {
    if (config_.ema == 0) return;
    sharded_.each_range(ctx, OffloadAccess::kUpdate, [&](const ShardRange& range) {
        ops::cast(ctx, {.out = sharded_.state(StateKind::kEma, range), .in = sharded_.master(range)});
    });
}

void Trainer::use_ema(Ctx& ctx, bool ema) {
    sharded_.set_source(ema ? StateKind::kEma : StateKind::kMaster);
    weights_from_masters(ctx, false);
}

void Trainer::set_state(Ctx& ctx, int64_t adam_step, const std::vector<float>& norms, int64_t moments_begin) {
    moments_begin_ = moments_begin;
    StepState state{};
    state.adam_step = adam_step;
    for (float norm : norms) state.norms[state.norm_count++ % kNormWindow] = norm;
    device::copy_to_device(ctx, state_, &state, sizeof(StepState));
    device::synchronize(ctx);
}

StateAccess Trainer::state_access(Ctx& ctx) {
    StateAccess access{.dtypes = sharded_.dtypes(), .read = {}, .write = {}};
    const auto own = [this](StateKind kind, int number, int64_t begin) {   // number of a value in this rank's part
        const Param& param = table_.params[static_cast<size_t>(number)];
        return begin - param.values(state_row(kind), param.first_elem());
    };
    access.read = [this, own, &ctx](StateKind kind, int param, int64_t begin, int64_t count, void* host) {
        sharded_.read(ctx, kind, param, own(kind, param, begin), count, host);
    };
    access.write = [this, own, &ctx](StateKind kind, int param, int64_t begin, int64_t count, const void* host) {
        gatherer_.wait(ctx);   // the gatherer's side stream reads masters
        sharded_.write(ctx, kind, param, own(kind, param, begin), count, host);
    };
    access.held = [this](int param) {
        const ShardRange* range = sharded_.range_of(param);
        const int64_t first = table_.params[static_cast<size_t>(param)].first_elem();
        return range ? std::vector<ElementRange>{{first + range->begin, range->elems}} : std::vector<ElementRange>{};
    };
    return access;
}

void Trainer::micro_batch(Ctx& ctx, const StagedStep& staged, int64_t number, Fp8Phase phase) {
    const int64_t B = config_.micro_batch_size, T = config_.part_length();
    const DeviceBatch batch = inputs_.upload(ctx, staged.after(number * B * T, exchange_.ranks), B, T, state_);
    fp8_.begin_micro_batch(ctx, number * groups_.data_ranks + groups_.data_rank, phase);
    enter(staged, Phase::kForward);
    device::range_push("forward");
    decoder_.forward(ctx, batch, true);
    device::range_pop();
    clear_gradients(ctx);
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
    for (CommStream* stream : {&comm_stream_, &expert_stream_}) stream->set_timer(staged.comm_timer);
    device::copy_to_device(ctx, state_, staged.inputs, kStepInputBytes);
    gradients_cleared_ = false;
    fp8_.begin_step(ctx, staged.count_fp8);
    if (fp8_.needs_calibration()) calibrate(ctx, staged);
    sharded_.prefetch(ctx);
    qk_clip_.clear(ctx);
    router_balance_.clear(ctx);
}

// Clears the gradients before the first backward of a step. With --offload masters their memory holds the new masters
// of the step before (keep_master), which the all-gather of weights must have read.
void Trainer::clear_gradients(Ctx& ctx) {
    if (std::exchange(gradients_cleared_, true) || !grads_.zeroes()) return;
    gatherer_.wait(ctx);
    grads_.zero(ctx);
}

// All micro-batches between the second and the last do the same: a rehearsal runs one of them and counts it for all.
void Trainer::forward_backward(Ctx& ctx, const StagedStep& staged) {
    for (int64_t i = 0; i < staged.micro_batches; i++) {
        const int64_t alike = ctx.rehearsal && i == 2 ? std::max<int64_t>(1, staged.micro_batches - 3) : 1;
        ctx.recorded_times = alike;
        grads_.begin(ctx, {.first = i == 0, .last = i + 1 == staged.micro_batches, .compare = staged.count_fp8});
        gatherer_.set_pass_follows(i + 1 < staged.micro_batches);
        micro_batch(ctx, staged, i, Fp8Phase::kTraining);
        ctx.recorded_times = 1;
        i += alike - 1;
    }
}

// Most buckets were reduced during the last backward or, with --zero 2 and 3, during each backward.
void Trainer::reduce_gradients(Ctx& ctx, const StagedStep& staged) {
    enter(staged, Phase::kReduce);
    device::range_push("reduce");
    grads_.finish(ctx);
    device::range_pop();
}

// Computes the gradient norm over all ranks, grad_mul, and whether the step is skipped, in *state_.
void Trainer::clip_and_guard(Ctx& ctx) {
    // One of the ranks that hold the same shard counts it.
    if (groups_.replicas.world().rank == 0) {
        Arena::Scope scope(ctx, arena_);
        Tensor scratch = arena_.scratch(Dtype::kFp64, kPartialSums);
        for (const Tensor& shard : grads_.norm_shards())
            ops::sum_squares(ctx, {.sum = &state_->sum_squares, .in = shard, .scratch = scratch});
    }
    grads_.all_reduce_norm(ctx, state_);
    router_balance_.guard(ctx, comm_stream_, groups_.world,
                          {.state = state_, .clip = static_cast<float>(config_.clip_grad),
                           .skip_norm = static_cast<float>(config_.skip_grad_norm)});
    qk_clip_.all_reduce(ctx, comm_stream_, groups_.world, state_);
    router_balance_.finish(ctx, comm_stream_, groups_.world, state_);
}

// Updates what this rank owns, and records the amaxes of the new weights.
void Trainer::optimizer_step(Ctx& ctx) {
    const auto optimizer = [&](const ShardRange& range) -> const Optimizer& {
        return *optimizers_[static_cast<size_t>(table_.params[static_cast<size_t>(range.param)].optimizer)];
    };
    fp8_.clear_weight_amax(ctx, state_);
    sharded_.each_range(ctx, OffloadAccess::kUpdate, [&](const ShardRange& range) {
        optimizer(range).update(ctx, unclipped(update_of(range, OffloadAccess::kUpdate)), state_);
        if (!optimizer(range).finishes()) finish_range(ctx, range, OffloadAccess::kUpdate);
    });
    if (orthogonalizers_.empty()) return;
    ctx.in_update = true;
    for (const auto& orthogonalizer : orthogonalizers_) orthogonalizer->run(ctx, state_);
    ctx.in_update = false;
    sharded_.each_range(ctx, OffloadAccess::kFinish, [&](const ShardRange& range) {
        if (!optimizer(range).finishes()) return;
        optimizer(range).finish(ctx, unclipped(update_of(range, OffloadAccess::kFinish)), state_);
        finish_range(ctx, range, OffloadAccess::kFinish);
    });
}

ShardUpdate Trainer::update_of(const ShardRange& range, OffloadAccess access) const {
    const Param& param = table_.params[static_cast<size_t>(range.param)];
    ShardUpdate update{.param = param, .begin = range.begin, .weight = sharded_.weight(range),
                       .grad = grads_.reduced(range), .states = {}, .amax = fp8_.weight_entry(range.param),
                       .moments_begin = param.optimizer_by_option ? moments_begin_ : 0};
    for (const OptimizerState& row : kOptimizerStates)
        if (param.has(row.kind) && copies(access, row.kind) && !row.by_row)
            update.states[static_cast<size_t>(row.kind)] = sharded_.state(row.kind, range);
    return update;
}

// The update of masters alone if QK-clip completes it.
ShardUpdate Trainer::unclipped(ShardUpdate update) const {
    if (qk_clip_.scales(update.param)) update.weight = {}, update.amax = nullptr;
    return update;
}

void Trainer::finish_range(Ctx& ctx, const ShardRange& range, OffloadAccess access) {
    if (const ShardUpdate update = update_of(range, access); qk_clip_.scales(update.param))
        qk_clip_.apply(ctx, update, state_);
    const Tensor master = sharded_.master(range);
    if (config_.ema > 0)
        ops::ema(ctx, {.ema = sharded_.state(StateKind::kEma, range), .master = master, .state = state_,
                       .decay = config_.ema});
    fp8_.record_block_amaxes(ctx, range.param, range.begin, master);
    gatherer_.keep_master(ctx, range);
}

void Trainer::gather_weights(Ctx& ctx) {
    gatherer_.all_reduce_amaxes(ctx);
    fp8_.update(ctx, state_);
    gatherer_.gather(ctx, state_);
}

void Trainer::copy_results(Ctx& ctx, const StagedStep& staged) {
    device::copy_to_host(ctx, staged.result, state_, sizeof(StepState));
    // The report includes casts of weights, which may still be running on the side stream.
    if (staged.count_fp8) gatherer_.wait(ctx);
    if (staged.fp8_report) fp8_.copy_report(ctx, staged.fp8_report);
    if (staged.grad_comm_report && staged.count_fp8) grads_.copy_report(ctx, staged.grad_comm_report);
    for (CommStream* stream : {&comm_stream_, &expert_stream_}) stream->set_timer(nullptr);
}

// Delayed scaling needs amaxes before its first cast: runs one micro-batch in current scaling and keeps only the
// amaxes. The micro-batch has a counted target: if loss masks ignored all of its targets, the amaxes of gradients would
// be 0 and their scales stay 1, with which later gradients would flush to zero.
void Trainer::calibrate(Ctx& ctx, const StagedStep& staged) {
    StepRecorder* const recorder = std::exchange(ctx.recorder, nullptr);   // not part of an ordinary step
    dropped_micro_batch(ctx, staged);
    gatherer_.all_reduce_amaxes(ctx);
    fp8_.finish_calibration(ctx);
    ctx.recorder = recorder;
    device::copy_to_device(ctx, state_, staged.inputs, kStepInputBytes);
    gradients_cleared_ = false;
}

void Trainer::dropped_micro_batch(Ctx& ctx, const StagedStep& staged) {
    device::range_push("calibration");
    gatherer_.set_pass_follows(true);
    micro_batch(ctx, staged, staged.calibration_micro_batch, Fp8Phase::kCalibration);
    device::range_pop();
}

void Trainer::warm_up(Ctx& ctx, const StagedStep& staged) {
    device::copy_to_device(ctx, state_, staged.inputs, kStepInputBytes);
    gradients_cleared_ = false;
    fp8_.begin_step(ctx, false);
    dropped_micro_batch(ctx, staged);
    for (const auto& orthogonalizer : orthogonalizers_) orthogonalizer->warm_up(ctx);
    gatherer_.wait(ctx);
    device::synchronize(ctx);
}

std::vector<Tensor> Trainer::exchanged() const {
    std::vector<Tensor> all = grads_.exchanged();
    if (!orthogonalizers_.empty())   // the first is of all ranks
        for (const Tensor& memory : orthogonalizers_[0]->exchanged()) all.push_back(memory);
    if (layer_buffers_)
        for (const Tensor& memory : layer_buffers_->gathered()) all.push_back(memory);
    return all;
}
