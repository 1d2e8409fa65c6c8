#include "llmc/train/log/step_record.h"

StepRecord step_record(const Config& config, const Staging::Slot& slot) {
    const StepState& result = *slot.staged.result;
    StepRecord r;
    r.step = slot.step + 1;
    r.train_iters = config.train_iters;
    r.loss = result.loss_sum / static_cast<double>(slot.staged.counted_tokens);
    r.grad_norm = static_cast<double>(result.grad_norm);
    r.grad_mul = static_cast<double>(result.grad_mul);
    r.lr = slot.staged.lr;
    r.step_seconds = static_cast<double>(device::event_elapsed_ms(slot.begin, slot.done)) * 1e-3;
    r.forward_seconds = 1e-3 * slot.passes.forward_ms();
    r.backward_seconds = 1e-3 * slot.passes.backward_ms();
    if (slot.comm_timer) r.exposed_comm_seconds = slot.comm_timer->seconds();
    r.samples_per_second = static_cast<double>(slot.samples) / r.step_seconds;
    r.tokens_per_second = r.samples_per_second * static_cast<double>(config.seq_length);
    r.samples = slot.samples_after;
    r.tokens = r.samples * config.seq_length;
    r.counted_tokens = slot.staged.counted_tokens;
    r.skipped = result.skip != 0;
    r.synthetic = config.synthetic_data;
    return r;
}
