#include "llmc/optimizer.h"

#include <algorithm>

#include "llmc/rng.h"

Optimizer::Optimizer(const Config& config, const ParamTable& table, Arena& arena, Fp8State& fp8)
    : config_(config), table_(table), arena_(arena), fp8_(fp8) {
    const bool fp64 = config.dtype == Dtype::kFp64;
    const int64_t n = table.flat_elems;
    // A head that is tied to the embedding keeps its bf16 form for the embedding.
    auto in_fp8_alone = [&](int index) { return fp8.linear_of_param(index) && index != table.wte; };
    int64_t weight_elems = 0;
    std::vector<int64_t> offsets;
    for (size_t i = 0; i < table.params.size(); i++) {
        const int64_t elems = (table.params[i].elems() + kParamAlign - 1) / kParamAlign * kParamAlign;
        offsets.push_back(weight_elems);
        if (!in_fp8_alone(static_cast<int>(i))) weight_elems += elems;
    }
    flat_weights_ = arena.take(Purpose::kWeights, config.dtype, weight_elems);
    for (size_t i = 0; i < table.params.size(); i++) {
        const bool absent = in_fp8_alone(static_cast<int>(i));
        weights_.push_back(absent ? Tensor{} : flat_weights_.slice(offsets[i], table.params[i].elems()));
    }
    grads_ = arena.take(Purpose::kGradients, fp64 ? Dtype::kFp64 : config.grad_dtype, n);
    master_ = arena.take(Purpose::kMaster, fp64 ? Dtype::kFp64 : Dtype::kFp32, n);
    m_ = arena.take(Purpose::kMoments, fp64 ? Dtype::kFp64 : config.moment_dtype, n);
    v_ = arena.take(Purpose::kMoments, fp64 ? Dtype::kFp64 : config.moment_dtype, n);
}

void Optimizer::initialise(Ctx& ctx) {
    device::fill_bytes(ctx, master_.data, 0, master_.bytes());
    for (const Param& p : table_.params) {
        // Rows that exist in the model; a padded vocabulary has more.
        const HfPart& last = p.hf.back();
        const Tensor true_rows = master_.slice(p.offset, (last.row_begin + last.rows) * p.cols);
        if (p.init == Param::Init::kNormal) {
            ops::fill_normal(ctx, {.out = true_rows, .key = rng_key(config_.seed, "init." + p.name),
                                   .element_offset = 0, .mean = 0.0f, .std = static_cast<float>(p.init_std)});
        } else if (p.init == Param::Init::kOnes) {
            ops::fill_constant(ctx, {.out = true_rows, .value = 1.0f});
        }
    }
    weights_from_masters(ctx, true);
    zero_moments(ctx);
}

void Optimizer::weights_from_masters(Ctx& ctx, bool fresh) {
    if (flat_weights_.elems == master_.elems) {
        ops::cast(ctx, {.out = flat_weights_, .in = master_});
    } else {
        device::fill_bytes(ctx, flat_weights_.data, 0, flat_weights_.bytes());   // the gaps
        for (size_t i = 0; i < weights_.size(); i++) {
            const Param& p = table_.params[i];
            if (weights_[i]) ops::cast(ctx, {.out = weights_[i], .in = master_.slice(p.offset, p.elems())});
        }
    }
    if (fresh) fp8_.initialise(ctx);
    fp8_.weights_from_masters(ctx, master_, table_, fresh);
}

void Optimizer::zero_moments(Ctx& ctx) {
    device::fill_bytes(ctx, m_.data, 0, m_.bytes());
    device::fill_bytes(ctx, v_.data, 0, v_.bytes());
}

void Optimizer::zero_grads(Ctx& ctx) { device::fill_bytes(ctx, grads_.data, 0, grads_.bytes()); }

void Optimizer::update(Ctx& ctx, StepState* state) {
    {
        Arena::Scope scope(ctx, arena_);
        Tensor scratch = arena_.scratch(Dtype::kFp64, kPartialSums);
        ops::sum_squares(ctx, {.sum = &state->sum_squares, .in = grads_, .scratch = scratch});
    }
    ops::step_guard(ctx, {.state = state, .clip = static_cast<float>(config_.clip_grad)});
    fp8_.clear_weight_amax(ctx, state);
    for (size_t i = 0; i < table_.params.size(); i++) {
        const Param& p = table_.params[i];
        auto of = [&](const Tensor& flat_buffer) { return flat_buffer.slice(p.offset, p.elems()); };
        ops::adamw(ctx, {.param = weights_[i], .master = of(master_), .m = of(m_), .v = of(v_), .grad = of(grads_),
                         .state = state,
                         .beta1 = static_cast<float>(config_.adam_beta1),
                         .beta2 = static_cast<float>(config_.adam_beta2),
                         .eps = static_cast<float>(config_.adam_eps),
                         .weight_decay = p.decay ? static_cast<float>(config_.weight_decay) : 0.0f,
                         .rng_key = rng_key(config_.seed, "moments." + p.name), .element_offset = 0,
                         .slot = fp8_.weight_slot(static_cast<int>(i))});
    }
    fp8_.update(ctx, state, master_, table_);
}

Tensor Optimizer::state_tensor(StateKind kind, int index) const {
    const Param& p = table_.params[static_cast<size_t>(index)];
    switch (kind) {
        case StateKind::kWeight: return weights_[static_cast<size_t>(index)];
        case StateKind::kMaster: return master_.slice(p.offset, p.elems());
        case StateKind::kMomentM: return m_.slice(p.offset, p.elems());
        case StateKind::kMomentV: return v_.slice(p.offset, p.elems());
    }
    return {};
}

// What the weight would be if there were one: of a parameter in FP8 alone.
void Optimizer::read_rounded_master(Ctx& ctx, int index, int64_t begin, int64_t count, void* host) {
    CHECK(flat_weights_.dtype == Dtype::kBf16, "an FP8 linear beside weights in %s", dtype_name(flat_weights_.dtype));
    const Tensor master = state_tensor(StateKind::kMaster, index).slice(begin, count);
    std::vector<float> values(static_cast<size_t>(count));
    device::copy_to_host(ctx, values.data(), master.data, master.bytes());
    device::synchronize(ctx);
    std::transform(values.begin(), values.end(), static_cast<bf16*>(host), [](float x) { return bf16(x); });
}

StateAccess Optimizer::access(Ctx& ctx) {
    StateAccess access;
    access.weight_dtype = flat_weights_.dtype;
    access.moment_dtype = m_.dtype;
    access.read = [&ctx, this](StateKind kind, int index, int64_t begin, int64_t count, void* host) {
        const Tensor whole = state_tensor(kind, index);
        if (!whole) return read_rounded_master(ctx, index, begin, count, host);
        const Tensor tensor = whole.slice(begin, count);
        device::copy_to_host(ctx, host, tensor.data, tensor.bytes());
        device::synchronize(ctx);
    };
    // Weights in FP8 alone are made from the masters once those are there.
    access.write = [&ctx, this](StateKind kind, int index, int64_t begin, int64_t count, const void* host) {
        const Tensor whole = state_tensor(kind, index);
        if (!whole) return;
        const Tensor tensor = whole.slice(begin, count);
        device::copy_to_device(ctx, tensor.data, host, tensor.bytes());
        device::synchronize(ctx);
    };
    return access;
}
