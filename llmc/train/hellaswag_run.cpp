#include "llmc/train/hellaswag_run.h"

#include <algorithm>
#include <bit>

#include "llmc/fault/heartbeat.h"
#include "llmc/fault/shutdown.h"

HellaswagRun::HellaswagRun(const Hellaswag& data, const Config& config, Comm& comm)
    : data_(data), comm_(comm), T_(padded_length(data.longest(), config.seq_length)),
      rows_(config.micro_batch_size * config.seq_length / T_), losses_(static_cast<size_t>(data.rows())),
      bits_(losses_.size() + 1) {}

// Runs rows [number * rows_, + rows_), filled up with rows without targets at the end of the file and
// behind it.
void HellaswagRun::pass(Ctx& ctx, Trainer& trainer, const StagedStep& staging, int64_t number) {
    const int64_t first = number * rows_, count = std::clamp<int64_t>(data_.rows() - first, 0, rows_);
    for (int64_t r = 0; r < count; r++) data_.read(first + r, T_, staging.tokens + r * T_, staging.targets + r * T_);
    std::fill(staging.tokens + count * T_, staging.tokens + rows_ * T_, 0);
    std::fill(staging.targets + count * T_, staging.targets + rows_ * T_, kIgnoreIndex);
    const float* losses = trainer.token_losses(ctx, rows_, T_, staging);
    for (int64_t r = 0; r < count; r++) {
        double sum = 0;
        int64_t counted = 0;
        for (int64_t t = r * T_; t < (r + 1) * T_; t++) {
            if (staging.targets[t] == kIgnoreIndex) continue;
            sum += static_cast<double>(losses[t]);
            counted++;
        }
        losses_[static_cast<size_t>(first + r)] = sum / static_cast<double>(counted);
    }
}

HellaswagRun::Result HellaswagRun::evaluate(Ctx& ctx, Trainer& trainer, const StagedStep& staging) {
    std::fill(losses_.begin(), losses_.end(), 0.0);
    const int64_t rank = comm_.world().rank, ranks = comm_.world().ranks;
    const bool together = trainer.passes_are_collective();   // a rank without rows of its own runs a pass without targets
    const auto stopped = [&] {
        return together ? comm_.sum(std::vector<int64_t>{stop_wanted()})[0] > 0 : bool(stop_wanted());
    };
    for (int64_t i = rank; (together ? i - rank : i) * rows_ < data_.rows() && !stopped(); i += ranks) {
        post_progress();
        pass(ctx, trainer, staging, i);
    }
    // Every row is 0 on all ranks but one, so a sum of integers keeps its bits.
    std::transform(losses_.begin(), losses_.end(), bits_.begin(), [](double x) { return std::bit_cast<int64_t>(x); });
    bits_.back() = stop_wanted();
    const std::vector<int64_t> all = comm_.sum(bits_);
    std::transform(all.begin(), all.end() - 1, losses_.begin(), [](int64_t x) { return std::bit_cast<double>(x); });
    return {.correct = data_.correct(losses_), .stopped = all.back() > 0};
}
