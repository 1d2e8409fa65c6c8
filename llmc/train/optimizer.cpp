#include "llmc/train/optimizer.h"

#include <algorithm>

#include "llmc/base/rng.h"

namespace {

FlatState take_state(const Config& config, const Buckets& buckets, Arena& arena) {
    const bool fp64 = config.dtype == Dtype::kFp64;
    const int64_t flat = buckets.shard_elems() * buckets.ranks(), own = config.zero == 1 ? buckets.shard_elems() : flat;
    auto or_fp64 = [&](Dtype dtype) { return fp64 ? Dtype::kFp64 : dtype; };
    FlatState state;
    state.weights = arena.take(Purpose::kWeights, config.dtype, buckets.weight_elems());
    state.grads = arena.take(Purpose::kGradients, or_fp64(config.grad_dtype), flat);
    if (buckets.ranks() > 1 && state.grads.dtype == Dtype::kBf16)
        state.reduced = arena.take(Purpose::kGradients, Dtype::kFp32, own);
    state.master = arena.take(Purpose::kMaster, or_fp64(Dtype::kFp32), own);
    state.m = arena.take(Purpose::kMoments, or_fp64(config.moment_dtype), own);
    state.v = arena.take(Purpose::kMoments, or_fp64(config.moment_dtype), own);
    return state;
}

std::vector<Tensor> weight_views(const ParamTable& table, const Buckets& buckets, const Tensor& flat) {
    std::vector<Tensor> views;
    for (size_t i = 0; i < table.params.size(); i++) {
        const int param = static_cast<int>(i);
        const bool in_fp8_alone = buckets.of_param(param).kind == BucketKind::kFp8Linears;
        views.push_back(in_fp8_alone ? Tensor{}
                                     : flat.slice(buckets.weight_offset(param), table.params[i].elems()));
    }
    return views;
}

}  // namespace

Optimizer::Optimizer(const Config& config, const ParamTable& table, const Buckets& buckets, Comm& comm, Arena& arena,
                     Fp8State& fp8)
    : config_(config), table_(table), arena_(arena), fp8_(fp8), state_(take_state(config, buckets, arena)),
      weights_(weight_views(table, buckets, state_.weights)),
      zero_(config, table, buckets, state_, comm, fp8, arena), piece_of_(table.params.size(), -1) {
    for (size_t i = 0; i < zero_.pieces().size(); i++)
        piece_of_[static_cast<size_t>(zero_.pieces()[i].param)] = static_cast<int>(i);
}

void Optimizer::initialise(Ctx& ctx) {
    device::fill_bytes(ctx, state_.master.data, 0, state_.master.bytes());
    for (const Piece& piece : zero_.pieces()) {
        const Param& p = param(piece.param);
        // Rows that exist in the model; a padded vocabulary has more.
        const HfPart& last = p.hf.back();
        const int64_t true_elems = (last.row_begin + last.rows) * p.cols;
        const int64_t count = std::clamp<int64_t>(true_elems - piece.begin, 0, piece.elems);
        if (count == 0) continue;
        const Tensor run = state_.master.slice(piece.shard, count);
        if (p.init == Param::Init::kNormal) {
            ops::fill_normal(ctx, {.out = run, .key = rng_key(config_.seed, "init." + p.name),
                                   .element_offset = piece.begin, .mean = 0.0f, .std = static_cast<float>(p.init_std)});
        } else if (p.init == Param::Init::kOnes) {
            ops::fill_constant(ctx, {.out = run, .value = 1.0f});
        }
    }
    weights_from_masters(ctx, true);
    zero_moments(ctx);
}

void Optimizer::weights_from_masters(Ctx& ctx, bool fresh) {
    zero_.wait_for_weights(ctx);
    zero_.forget_collected();
    if (fresh) fp8_.initialise(ctx);
    fp8_.clear_weight_amax(ctx, nullptr);
    device::fill_bytes(ctx, state_.weights.data, 0, state_.weights.bytes());   // the gaps
    for (const Piece& piece : zero_.pieces()) {
        const Tensor master = state_.master.slice(piece.shard, piece.elems);
        const Tensor& weight = weights_[static_cast<size_t>(piece.param)];
        if (weight) ops::cast(ctx, {.out = weight.slice(piece.begin, piece.elems), .in = master});
        fp8_.record_run(ctx, piece.param, master);
        fp8_.record_blocks(ctx, piece.param, piece.begin, master);
    }
    zero_.agree_on_amaxes(ctx);
    if (fresh) fp8_.start_weight_histories(ctx);
    zero_.publish(ctx, nullptr);
}

void Optimizer::zero_moments(Ctx& ctx) {
    device::fill_bytes(ctx, state_.m.data, 0, state_.m.bytes());
    device::fill_bytes(ctx, state_.v.data, 0, state_.v.bytes());
}

void Optimizer::zero_grads(Ctx& ctx) {
    zero_.forget_collected();
    device::fill_bytes(ctx, state_.grads.data, 0, state_.grads.bytes());
}

void Optimizer::update(Ctx& ctx, StepState* state) {
    {
        Arena::Scope scope(ctx, arena_);
        Tensor scratch = arena_.scratch(Dtype::kFp64, kPartialSums);
        for (const Tensor& block : zero_.own_gradients())
            ops::sum_squares(ctx, {.sum = &state->sum_squares, .in = block, .scratch = scratch});
    }
    zero_.sum_over_ranks(ctx, state);
    ops::step_guard(ctx, {.state = state, .clip = static_cast<float>(config_.clip_grad)});
    fp8_.clear_weight_amax(ctx, state);
    for (const Piece& piece : zero_.pieces()) adamw(ctx, piece, state);
    zero_.agree_on_amaxes(ctx);
    fp8_.update(ctx, state);
    zero_.publish(ctx, state);
}

void Optimizer::adamw(Ctx& ctx, const Piece& piece, const StepState* state) {
    const Param& p = param(piece.param);
    const Tensor& weight = weights_[static_cast<size_t>(piece.param)];
    auto of = [&](const Tensor& shard) { return shard.slice(piece.shard, piece.elems); };
    ops::adamw(ctx, {.param = weight ? weight.slice(piece.begin, piece.elems) : Tensor{}, .master = of(state_.master),
                     .m = of(state_.m), .v = of(state_.v), .grad = zero_.reduced(piece), .state = state,
                     .beta1 = static_cast<float>(config_.adam_beta1),
                     .beta2 = static_cast<float>(config_.adam_beta2),
                     .eps = static_cast<float>(config_.adam_eps),
                     .weight_decay = p.decay ? static_cast<float>(config_.weight_decay) : 0.0f,
                     .rng_key = rng_key(config_.seed, "moments." + p.name), .element_offset = piece.begin,
                     .slot = fp8_.weight_slot(piece.param)});
    fp8_.record_blocks(ctx, piece.param, piece.begin, of(state_.master));
}

// ---- checkpoints

Optimizer::Held Optimizer::held(StateKind kind, int index) const {
    const int number = piece_of_[static_cast<size_t>(index)];
    if (kind == StateKind::kWeight) return {0, weights_[static_cast<size_t>(index)]};
    if (number < 0) return {};
    const Piece& piece = zero_.pieces()[static_cast<size_t>(number)];
    const Tensor& moments = kind == StateKind::kMomentM ? state_.m : state_.v;
    const Tensor& shard = kind == StateKind::kMaster ? state_.master : moments;
    return {piece.begin, shard.slice(piece.shard, piece.elems)};
}

// What the weight would be if there were one: of a parameter in FP8 alone.
void Optimizer::read_rounded_master(Ctx& ctx, int index, int64_t begin, int64_t count, void* host) {
    CHECK(state_.weights.dtype == Dtype::kBf16, "an FP8 linear beside weights in %s", dtype_name(state_.weights.dtype));
    if (zero_.sharded()) {
        const Tensor collected = zero_.collected_weight(index).slice(begin, count);
        device::copy_to_host(ctx, host, collected.data, collected.bytes());
        device::synchronize(ctx);
        return;
    }
    std::vector<float> values(static_cast<size_t>(count));
    read(ctx, StateKind::kMaster, index, begin, count, values.data());
    std::transform(values.begin(), values.end(), static_cast<bf16*>(host), [](float x) { return bf16(x); });
}

void Optimizer::read(Ctx& ctx, StateKind kind, int index, int64_t begin, int64_t count, void* host) {
    const Held held = this->held(kind, index);
    if (kind == StateKind::kWeight && !held.elems) return read_rounded_master(ctx, index, begin, count, host);
    CHECK(begin >= held.begin && begin + count <= held.begin + held.elems.elems,
          "elements [%lld, +%lld) of parameter %d are read, this rank holds [%lld, +%lld)", (long long)begin,
          (long long)count, index, (long long)held.begin, (long long)held.elems.elems);
    const Tensor tensor = held.elems.slice(begin - held.begin, count);
    device::copy_to_host(ctx, host, tensor.data, tensor.bytes());
    device::synchronize(ctx);
}

// Weights in FP8 alone are made from the masters once those are there.
void Optimizer::write(Ctx& ctx, StateKind kind, int index, int64_t begin, int64_t count, const void* host) {
    const Held held = this->held(kind, index);
    const int64_t first = std::max(begin, held.begin);
    const int64_t last = std::min(begin + count, held.begin + held.elems.elems);
    if (first >= last) return;
    const Tensor tensor = held.elems.slice(first - held.begin, last - first);
    const char* from = static_cast<const char*>(host) + (first - begin) * dtype_bytes(tensor.dtype);
    device::copy_to_device(ctx, tensor.data, from, tensor.bytes());
    device::synchronize(ctx);
}

StateAccess Optimizer::access(Ctx& ctx) {
    StateAccess access;
    access.weight_dtype = state_.weights.dtype;
    access.moment_dtype = state_.m.dtype;
    access.read = [&ctx, this](StateKind kind, int index, int64_t begin, int64_t count, void* host) {
        zero_.wait_for_weights(ctx);
        read(ctx, kind, index, begin, count, host);
    };
    access.write = [&ctx, this](StateKind kind, int index, int64_t begin, int64_t count, const void* host) {
        zero_.wait_for_weights(ctx);
        write(ctx, kind, index, begin, count, host);
    };
    if (!zero_.sharded()) return access;
    access.held = [this](int index) -> std::vector<ElementRange> {
        const Held held = this->held(StateKind::kMaster, index);
        if (!held.elems) return {};
        return {{held.begin, held.elems.elems}};
    };
    access.collect_weight = [&ctx, this](int index) { zero_.collect_weight(ctx, index); };
    return access;
}
