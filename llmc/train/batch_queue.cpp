#include "llmc/train/batch_queue.h"

#include <algorithm>
#include <utility>

PassEvents::PassEvents() {
    for (OwnedEvent& event : events_) event = OwnedEvent::create();
}

void PassEvents::enter(Ctx& ctx, Phase phase) {
    const bool begun = next_ > kForward || phase == Phase::kForward;
    if (begun && next_ <= kBackwardEnd) device::event_record(ctx, events_[next_++]);
    if (phase != Phase::kReduce) return;
    device::event_record(ctx, events_[kReduce]);
    next_ = kForward;   // the first event of the next step
}

double PassEvents::ms(int from, int to) const {
    return static_cast<double>(device::event_elapsed_ms(events_[from], events_[to]));
}

Staging::Staging(const Config& config, const Groups& groups, Trainer& trainer)
    : config_(config), groups_(groups), reader_(config, groups.context.world()) {
    const int64_t sequences = config.global_batch_size / groups.data_ranks, N = sequences * config.part_length();
    const int64_t ints_bytes = round_up(input_elems(config, sequences) * dtype_bytes(Dtype::kInt32), 256);
    const int64_t fp8_bytes = round_up(trainer.fp8().report_bytes(), 256);
    const int64_t comm_bytes = round_up(trainer.reducer().report_bytes(), 256);
    const int64_t slot_bytes = ints_bytes + 2 * 256 + fp8_bytes + comm_bytes;   // a StepState each way
    static_assert(sizeof(StepState) <= 256);
    memory_.reset(static_cast<char*>(device::pinned_alloc(2 * slot_bytes)));
    for (size_t i = 0; i < 2; i++) {
        char* base = memory_.get() + static_cast<int64_t>(i) * slot_bytes;
        StagedStep& s = slots_[i].staged;
        s.tokens = reinterpret_cast<int32_t*>(base);
        s.targets = s.tokens + N;
        s.order = s.targets + N;
        int32_t* next = s.order + N;
        if (config.reset_attention_mask) s.documents = std::exchange(next, next + 2 * sequences * config.seq_length);
        if (config.reset_position_ids) s.positions = std::exchange(next, next + N);
        if (sorts_positions(config)) s.position_order = std::exchange(next, next + N);
        if (needs_whole_positions(config)) s.whole_positions = next;
        s.inputs = new (base + ints_bytes) StepState{};
        s.result = new (base + ints_bytes + 256) StepState{};
        if (fp8_bytes > 0) s.fp8_report = base + ints_bytes + 512;
        if (comm_bytes > 0) s.grad_comm_report = base + ints_bytes + 512 + fp8_bytes;
        if (groups.world.world().ranks > 1) s.comm_timer = &slots_[i].comm_timer.emplace(trainer.timer_spans());
    }
}

Staging::Slot& Staging::read(const DataLoader& loader, int64_t step, int64_t first, int64_t count) {
    const int64_t T = config_.part_length(), B = config_.micro_batch_size;
    Slot& s = slot(step);
    s.step = step;
    s.samples = count;
    s.staged.counted_tokens = 0;
    s.staged.micro_batches = 0;
    s.staged.calibration_micro_batch = -1;
    for (int64_t m = groups_.data_rank; m < count / B; m += groups_.data_ranks) {
        const int64_t number = s.staged.micro_batches++, at = number * B * T;
        int32_t* documents = s.staged.documents ? s.staged.documents + number * 2 * B * config_.seq_length : nullptr;
        const SequenceReader::Counted counted =
            reader_.read(loader, first + m * B, {s.staged.tokens + at, s.staged.targets + at, documents});
        s.staged.counted_tokens += counted.part;
        if (s.staged.calibration_micro_batch < 0 && counted.whole > 0) s.staged.calibration_micro_batch = number;
        sort_rows_by_token(s.staged.tokens + at, B * T, config_.shape.vocab_size, s.staged.order + at, scratch_);
        s.staged.from(at, groups_.context.world().ranks)
            .restart(reader_.tokens(), B, config_.seq_length, groups_.context.world(), loader.separator(), scratch_);
    }
    s.staged.calibration_micro_batch = std::max<int64_t>(0, s.staged.calibration_micro_batch);
    auto due = [step](int64_t interval) { return interval > 0 && (step + 1) % interval == 0; };
    s.staged.count_fp8 = due(config_.fp8_stats_interval);
    s.staged.check_fp8 = due(config_.fp8_check_interval);
    loader.prefetch(first + count, count);
    return s;
}

void Staging::set_inputs(Slot& s, int64_t counted, double lr) const {
    CHECK(counted > 0, "step %lld has no target that counts", (long long)(s.step + 1));
    s.staged.counted_tokens = counted;
    s.staged.lr = lr;
    *s.staged.inputs = {};
    s.staged.inputs->lr = static_cast<float>(lr);
    s.staged.inputs->dloss_mul = static_cast<float>(1.0 / static_cast<double>(counted));
}
