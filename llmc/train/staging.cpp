#include "llmc/train/staging.h"

#include <algorithm>
#include <cmath>

#include "llmc/base/fault_injection.h"
#include "llmc/config/schedule.h"

Staging::Staging(const Config& config, const Groups& groups, Trainer& trainer)
    : config_(config), groups_(groups), reader_(config, groups.context.world()) {
    const int64_t sequences = config.global_batch_size / groups.data_ranks;
    const int64_t ints_bytes = round_up(input_elems(config, sequences) * dtype_bytes(Dtype::kInt32), 256);
    const int64_t fp8_bytes = round_up(trainer.fp8().report_bytes(), 256);
    const int64_t comm_bytes = round_up(trainer.gradients().report_bytes(), 256);
    constexpr int64_t kStateBytes = round_up(sizeof(StepState), 256);
    const int64_t buffer_bytes = ints_bytes + 2 * kStateBytes + fp8_bytes + comm_bytes;   // a StepState each way
    memory_.reset(static_cast<char*>(device::pinned_alloc(2 * buffer_bytes)));
    char* base = memory_.get();
    for (Buffer& buffer : buffers_) {
        StagedStep& s = buffer.staged;
        static_cast<HostInputs&>(s) = inputs_in(config, reinterpret_cast<int32_t*>(base), sequences);
        s.inputs = new (base + ints_bytes) StepState{};
        s.result = new (base + ints_bytes + kStateBytes) StepState{};
        if (fp8_bytes > 0) s.fp8_report = base + ints_bytes + 2 * kStateBytes;
        if (comm_bytes > 0) s.grad_comm_report = base + ints_bytes + 2 * kStateBytes + fp8_bytes;
        if (groups.world.world().ranks > 1) s.comm_timer = &buffer.comm_timer.emplace();
        base += buffer_bytes;
    }
}

Staging::Buffer& Staging::read(const DataLoader& loader, int64_t step, int64_t first, int64_t count) {
    const int64_t B = config_.micro_batch_size, N = B * config_.part_length();
    Buffer& filled = buffer(step);
    filled.step = step;
    filled.samples = count;
    StagedStep& s = filled.staged;
    s.counted_tokens = 0;
    s.micro_batches = 0;
    s.calibration_micro_batch = -1;
    for (int64_t m = groups_.data_rank; m < count / B; m += groups_.data_ranks) {
        const int64_t number = s.micro_batches++;
        const SequenceReader::Counted counted =
            reader_.read(loader, first + m * B, s.after(number * N, groups_.context.world().ranks));
        s.counted_tokens += counted.part;
        if (s.calibration_micro_batch < 0 && counted.whole > 0) s.calibration_micro_batch = number;
    }
    s.calibration_micro_batch = std::max<int64_t>(0, s.calibration_micro_batch);
    s.count_fp8 = is_due(step + 1, config_.fp8_stats_interval);
    loader.prefetch(first + count, count);
    return filled;
}

void Staging::set_inputs(Buffer& buffer, int64_t counted, double lr) const {
    CHECK(counted > 0, "step %lld has no target that counts", ll(buffer.step + 1));
    buffer.staged.counted_tokens = counted;
    buffer.staged.lr = lr;
    *buffer.staged.inputs = {};
    buffer.staged.inputs->lr = static_cast<float>(lr);
    buffer.staged.inputs->dloss_mul = static_cast<float>(1.0 / static_cast<double>(counted));
    const auto tokens = static_cast<double>(buffer.samples * config_.seq_length);
    buffer.staged.inputs->token_mul = static_cast<float>(1.0 / tokens);
    if (fault_at("gradient")) buffer.staged.inputs->dloss_mul = NAN;
    if (fault_at("spike")) buffer.staged.inputs->dloss_mul *= 1000;
}
