#include "llmc/train/run/hellaswag_run.h"

#include <algorithm>
#include <bit>

#include "llmc/fault/shutdown.h"

HellaswagRun::HellaswagRun(const Hellaswag& data, const Config& config, Comm& comm)
    : data_(data), comm_(comm), context_(config.context_parallel),
      T_(padded_length(data.longest(), config.seq_length, context_)),
      rows_(config.micro_batch_size * config.seq_length / T_), tokens_(static_cast<size_t>(rows_ * T_)),
      targets_(tokens_.size()), token_losses_(tokens_.size()), losses_(static_cast<size_t>(data.rows())),
      bits_(losses_.size() + 1) {}

// Runs the rows_ rows from number * rows_ on. Beyond the end of the file are rows again, without targets.
void HellaswagRun::pass(Ctx& ctx, Evaluator& evaluator, const StagedStep& staging, int64_t number) {
    const int64_t first = number * rows_, count = std::clamp<int64_t>(data_.rows() - first, 0, rows_);
    for (int64_t r = 0; r < rows_; r++)
        data_.read((first + r) % data_.rows(), T_, tokens_.data() + r * T_, targets_.data() + r * T_);
    std::fill(targets_.begin() + count * T_, targets_.end(), kIgnoreIndex);
    evaluator.token_losses(ctx, rows_, T_, tokens_.data(), targets_.data(), token_losses_.data(), staging);
    for (int64_t r = 0; r < count; r++) {
        double sum = 0;
        int64_t counted = 0;
        for (auto t = static_cast<size_t>(r * T_); t < static_cast<size_t>((r + 1) * T_); t++) {
            if (targets_[t] == kIgnoreIndex) continue;
            sum += static_cast<double>(token_losses_[t]);
            counted++;
        }
        losses_[static_cast<size_t>(first + r)] = sum / static_cast<double>(counted);
    }
}

std::optional<std::vector<double>> HellaswagRun::evaluate(Ctx& ctx, Evaluator& evaluator, const StagedStep& staging) {
    std::fill(losses_.begin(), losses_.end(), 0.0);
    const int64_t groups = comm_.world().ranks / context_, group = comm_.world().rank / context_;
    // If all ranks make the same passes, a rank without rows of its own runs a pass without targets.
    const int64_t behind = evaluator.passes_are_collective() ? group : 0;
    for (int64_t i = group; (i - behind) * rows_ < data_.rows() && !evaluator.on_any_rank(stop_wanted()); i += groups) {
        post_progress();
        pass(ctx, evaluator, staging, i);
    }
    // Every row is 0 on all ranks but one, so a sum of integers keeps its bits.
    if (comm_.world().rank % context_ != 0) std::fill(losses_.begin(), losses_.end(), 0.0);
    std::transform(losses_.begin(), losses_.end(), bits_.begin(), [](double x) { return std::bit_cast<int64_t>(x); });
    bits_.back() = stop_wanted();
    const std::vector<int64_t> all = comm_.sum(bits_);
    std::transform(all.begin(), all.end() - 1, losses_.begin(), [](int64_t x) { return std::bit_cast<double>(x); });
    return all.back() > 0 ? std::nullopt : std::optional(losses_);
}
