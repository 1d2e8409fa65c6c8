#include "llmc/train/evaluator.h"

#include <cstring>

#include "llmc/fault/shutdown.h"

Evaluator::Evaluator(const Config& config, const Groups& groups, bool collective, Decoder& decoder, Fp8State& fp8,
                     DeviceInputs& inputs, Arena& arena)
    : config_(config), groups_(groups), collective_(collective), decoder_(decoder), fp8_(fp8), inputs_(inputs),
      reader_(config, groups.context.world()),
      sampler_(config.shape, config.dtype, config.seq_length, decoder, fp8, groups.context, arena),
      state_(take_step_state(arena)) {}

bool Evaluator::on_any_rank(bool mine) const {
    Comm& together = passes_are_collective() ? groups_.world : groups_.context;
    return together.sum(std::vector<int64_t>{mine})[0] > 0;
}

// Reads the micro-batch that begins at sample `first`, to be counted or not; false if this rank or another one must
// stop.
bool Evaluator::read(const DataLoader& loader, int64_t first, bool counted, const HostInputs& to, Result& result) {
    const bool stopped = stop_wanted();
    if (!stopped)
        result.error = reading_error([&] {
            if (counted) result.counted_tokens += reader_.read(loader, first, to).part;
            else reader_.read_ignored(loader, first, to);
        });
    return !on_any_rank(stopped || !result.error.empty());
}

Evaluator::Result Evaluator::evaluate(Ctx& ctx, const DataLoader* loader, int64_t iters, const StagedStep& staging) {
    Result result;
    HostInputs inputs = staging;
    inputs.order = inputs.position_order = nullptr;   // only backward needs these
    device::fill_bytes(ctx, state_, 0, sizeof(StepState));
    // If passes are collective, a rank without a micro-batch of its own runs another's, which counts nothing.
    const int64_t rank = groups_.data_rank, end = passes_are_collective() ? iters + rank : iters;
    for (int64_t i = rank; i < end; i += groups_.data_ranks) {
        post_progress();
        const int64_t first = i % iters * config_.micro_batch_size;
        if (!ctx.rehearsal && !read(*loader, first, i < iters, inputs, result)) break;
        const DeviceBatch batch = inputs_.upload(ctx, inputs, config_.micro_batch_size, config_.part_length(), state_);
        fp8_.begin_micro_batch(ctx, 0, Fp8Phase::kEvaluation);
        decoder_.forward(ctx, batch, false);
        decoder_.loss(ctx, batch, state_);
        device::synchronize(ctx);   // the next iteration overwrites the staging memory
    }
    groups_.world.sum(ctx, {&state_->loss_sum, Dtype::kFp64, 1});
    device::copy_to_host(ctx, staging.result, state_, sizeof(StepState));
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

void Evaluator::token_losses(Ctx& ctx, int64_t B, int64_t T, const int32_t* tokens, const int32_t* targets,
                           float* losses, const StagedStep& staging) {
    const World& context = groups_.context.world();
    const int64_t length = T / context.ranks;
    take_part(tokens, B, T, context, staging.tokens);
    take_part(targets, B, T, context, staging.targets);
    device::fill_bytes(ctx, state_, 0, sizeof(StepState));
    const DeviceBatch batch = inputs_.upload(ctx, {.tokens = staging.tokens, .targets = staging.targets}, B, length,
                                             state_);
    fp8_.begin_micro_batch(ctx, 0, Fp8Phase::kEvaluation);
    decoder_.forward(ctx, batch, false);
    static_assert(sizeof(float) == sizeof(*staging.order));
    decoder_.loss(ctx, batch, state_, staging.order);
    device::synchronize(ctx);
    const std::string mine(reinterpret_cast<const char*>(staging.order), static_cast<size_t>(4 * B * length));
    const std::vector<std::string> parts = groups_.context.gather(mine);
    for (size_t r = 0; r < parts.size(); r++)
        for (int64_t b = 0; b < B; b++)
            std::memcpy(losses + b * T + static_cast<int64_t>(r) * length, parts[r].data() + 4 * b * length,
                        static_cast<size_t>(4 * length));
}

std::vector<int32_t> Evaluator::generate(Ctx& ctx, const std::vector<int32_t>& prompt, const Sampling& sampling,
                                       uint64_t stream, const StagedStep& staging) {
    return sampler_.continue_text(ctx, prompt, sampling, stream,
                                  {.device_tokens = inputs_.tokens(),
                                   .bad_tokens = &state_->bad_tokens, .host_tokens = staging.tokens},
                                  [&] { return !ctx.rehearsal && on_any_rank(stop_wanted()); });
}
