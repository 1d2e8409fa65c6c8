#include "llmc/train/device_inputs.h"

DeviceInputs::DeviceInputs(const Config& config, Arena& arena)
    : context_ranks_(config.context_parallel),
      places_(inputs_in(config, static_cast<int32_t*>(arena.take(Purpose::kInputs, Dtype::kInt32,
                                                                 input_elems(config, config.micro_batch_size)).data),
                        config.micro_batch_size)) {}

DeviceBatch DeviceInputs::upload(Ctx& ctx, const HostInputs& host, int64_t B, int64_t T, StepState* state) const {
    const auto copy = [&](int32_t* to, const int32_t* from, int64_t times = 1) {
        CHECK(to || !from, "an input for which no memory is planned");
        if (from) device::copy_to_device(ctx, to, from, times * B * T * dtype_bytes(Dtype::kInt32));
        return from || ctx.rehearsal ? to : nullptr;   // the host's inputs are null in the rehearsal
    };
    DeviceBatch batch{.bad_tokens = &state->bad_tokens, .B = B, .T = T};
    batch.tokens = copy(places_.tokens, host.tokens), batch.targets = copy(places_.targets, host.targets);
    batch.token_order = copy(places_.order, host.order);
    batch.documents = copy(places_.documents, host.documents, 2 * context_ranks_);
    batch.positions = copy(places_.positions, host.positions);
    batch.position_order = copy(places_.position_order, host.position_order);
    // FP8 attention alone reads them: the BF16 steps of a run that switches have no memory for them.
    if (places_.whole_positions)
        batch.whole_positions = copy(places_.whole_positions, host.whole_positions, context_ranks_);
    return batch;
}

StepState* take_step_state(Arena& arena) {
    const int64_t words = static_cast<int64_t>((sizeof(StepState) + 7) / 8);
    return static_cast<StepState*>(arena.take(Purpose::kInputs, Dtype::kFp64, words).data);
}
