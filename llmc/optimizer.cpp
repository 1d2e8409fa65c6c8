#include "llmc/optimizer.h"

#include "llmc/rng.h"

Optimizer::Optimizer(const Config& config, const ParamTable& table, Arena& arena)
    : config_(config), table_(table), arena_(arena) {
    const bool fp64 = config.dtype == Dtype::kFp64;
    const int64_t n = table.flat_elems;
    weights_ = arena.take(Purpose::kWeights, config.dtype, n);
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
    weights_from_masters(ctx);
    zero_moments(ctx);
}

void Optimizer::weights_from_masters(Ctx& ctx) { ops::cast(ctx, {.out = weights_, .in = master_}); }

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
    for (const Param& p : table_.params) {
        auto of = [&](const Tensor& flat_buffer) { return flat_buffer.slice(p.offset, p.elems()); };
        ops::adamw(ctx, {.param = of(weights_), .master = of(master_), .m = of(m_), .v = of(v_), .grad = of(grads_),
                         .state = state,
                         .beta1 = static_cast<float>(config_.adam_beta1),
                         .beta2 = static_cast<float>(config_.adam_beta2),
                         .eps = static_cast<float>(config_.adam_eps),
                         .weight_decay = p.decay ? static_cast<float>(config_.weight_decay) : 0.0f,
                         .rng_key = rng_key(config_.seed, "moments." + p.name), .element_offset = 0});
    }
}

Tensor Optimizer::flat(StateKind kind) const {
    switch (kind) {
        case StateKind::kWeight: return weights_;
        case StateKind::kMaster: return master_;
        case StateKind::kMomentM: return m_;
        case StateKind::kMomentV: return v_;
    }
    return {};
}

StateAccess Optimizer::access(Ctx& ctx) {
    auto range = [this](StateKind kind, int index, int64_t begin, int64_t count) {
        const Param& p = table_.params[static_cast<size_t>(index)];
        return flat(kind).slice(p.offset, p.elems()).slice(begin, count);
    };
    StateAccess access;
    access.weight_dtype = weights_.dtype;
    access.moment_dtype = m_.dtype;
    access.read = [&ctx, range](StateKind kind, int index, int64_t begin, int64_t count, void* host) {
        const Tensor tensor = range(kind, index, begin, count);
        device::copy_to_host(ctx, host, tensor.data, tensor.bytes());
        device::synchronize(ctx);
    };
    access.write = [&ctx, range](StateKind kind, int index, int64_t begin, int64_t count, const void* host) {
        const Tensor tensor = range(kind, index, begin, count);
        device::copy_to_device(ctx, tensor.data, host, tensor.bytes());
        device::synchronize(ctx);
    };
    return access;
}
