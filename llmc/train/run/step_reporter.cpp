#include "llmc/train/run/step_reporter.h"

#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "llmc/base/gpu.h"
#include "llmc/config/schedule.h"
#include "llmc/ops/adam_math.h"
#include "llmc/train/run/rank_consistency.h"

namespace {

// Consecutive steps that may be skipped since they are not finite; one more ends with exit code 4.
constexpr int64_t kMostSkips = 10;

}  // namespace

StepReporter::StepReporter(const Config& config, const ParamTable& table, const Fp8Plan& fp8_plan, Comm& comm,
                           RunDevice& device, RunLog& log, RunCheckpoints& checkpoints, PredictedStep predicted,
                           Progress& progress)
    : config_(config), fp8_plan_(fp8_plan), comm_(comm), device_(device), log_(log), checkpoints_(checkpoints),
      progress_(progress), fp8_monitor_(config, fp8_plan), gpu_monitor_(comm), time_check_(std::move(predicted)),
      flops_per_token_(model_flops_per_token(config, table)) {
    gpu_monitor_.start(device.info.bus);
}

void StepReporter::begin(bool first) {
    if (!pending_) gpu_monitor_.restart();
    if (first && fp8_plan_.on()) fp8_monitor_.before_first_step(device_.ctx);
}

void StepReporter::enter_phase() {
    if (pending_ && device::event_reached(pending_->done)) gpu_monitor_.end_step();
}

void StepReporter::enqueued(const Staging::Buffer& step) {
    drain();
    pending_ = &step;
}

void StepReporter::drain() {
    if (pending_) report(*std::exchange(pending_, nullptr));
}

void StepReporter::check_fp8_matmuls() {
    if (!fp8_plan_.on()) return;
    log_.event("note", fp8_monitor_.after_first_step(device_.ctx, device_.step_fp8_plan(),
                                                     device_.trainer->executed_micro_batches()));
}

StepRecord StepReporter::record_of(const Staging::Buffer& step) {
    const StepState& result = *step.staged.result;
    StepRecord r;
    r.step = step.step + 1;
    r.train_iters = config_.train_iters;
    r.loss = result.loss_sum / static_cast<double>(step.staged.counted_tokens);
    if (config_.z_loss > 0)
        r.z_loss = config_.z_loss * result.z_sum / static_cast<double>(step.staged.counted_tokens);
    if (config_.qk_clip > 0) r.max_logit = static_cast<double>(result.max_logit);
    r.clipped_heads = result.clipped_heads;
    if (config_.shape.has_experts()) {
        r.router_loss = result.router_loss;
        r.router_entropy = static_cast<double>(result.router_entropy);
        r.expert_load = static_cast<double>(result.expert_load);
        r.dead_experts = result.dead_experts;
        const double balanced = static_cast<double>(config_.shape.experts_per_token * config_.micro_batch_size
                                                    * config_.part_length());
        if (config_.expert_parallel > 1) r.rank_load = result.expert_rows / balanced;
    }
    r.grad_norm = static_cast<double>(result.grad_norm);
    r.grad_mul = static_cast<double>(result.grad_mul);
    r.lr = step.staged.lr;
    r.step_seconds = 1e-3 * static_cast<double>(device::event_elapsed_ms(step.begin, step.done));
    r.forward_seconds = 1e-3 * step.passes.forward_ms();
    r.backward_seconds = 1e-3 * step.passes.backward_ms();
    if (step.comm_timer) r.exposed_comm_seconds = step.comm_timer->seconds();
    r.samples_per_second = static_cast<double>(step.samples) / r.step_seconds;
    r.tokens_per_second = r.samples_per_second * static_cast<double>(config_.seq_length);
    const double peak = peak_flops(device_.info.name, config_.dtype) * comm_.world().ranks;
    if (peak > 0) r.mfu = r.tokens_per_second * flops_per_token_ / peak;
    r.memory_gib = gib(device_.used_bytes);
    r.samples = step.samples_after;
    r.tokens = r.samples * config_.seq_length;
    r.counted_tokens = step.staged.counted_tokens;
    r.skipped = result.skip != 0;
    r.norm_skipped = result.skip == StepState::kLargeNorm;
    if (result.norm_limit > 0) r.norm_limit = static_cast<double>(result.norm_limit);
    r.synthetic = config_.synthetic_data;
    recent_seconds_.push_back(r.step_seconds);
    if (recent_seconds_.size() > 20) recent_seconds_.pop_front();
    const double sum = std::accumulate(recent_seconds_.begin(), recent_seconds_.end(), 0.0);
    r.eta_seconds = sum / static_cast<double>(recent_seconds_.size())
                    * static_cast<double>(config_.train_iters - r.step);
    return r;
}

void StepReporter::report(const Staging::Buffer& step) {
    post_phase(Phase::kDevice);
    device::event_wait(step.done);
    const StepState& result = *step.staged.result;
    REQUIRE(result.bad_tokens == 0, "step %lld: %d token ids lie outside the vocabulary of %lld", ll(step.step + 1),
            result.bad_tokens, ll(config_.shape.vocab_size));
    const std::string overfull =
        device_.trainer->router_balance().capacity_error(result.expert_rows, result.fullest_layer);
    REQUIRE(overfull.empty(), "step %lld: %s", ll(step.step + 1), overfull.c_str());
    StepRecord r = record_of(step);
    progress_.adam_step = result.adam_step;
    progress_.norms.clear();
    for (int64_t i = result.norm_count - norms_held(result); i < result.norm_count; i++)
        progress_.norms.push_back(result.norms[i % kNormWindow]);
    progress_.consecutive_skips = r.skipped && !r.norm_skipped ? progress_.consecutive_skips + 1 : 0;
    progress_.skips += r.skipped;
    progress_.norm_skips += r.norm_skipped;
    r.skips = progress_.skips;
    r.norm_skips = progress_.norm_skips;
    const Fp8State& fp8 = device_.trainer->fp8();
    if (step.staged.count_fp8) check_scales(comm_, fp8, step.staged.fp8_report, r.step);
    if (step.staged.count_fp8 || r.skipped) fp8_monitor_.gather(comm_, fp8, step.staged);
    report_grad_comm(log_, comm_, step.staged, r.step);
    fp8_monitor_.report(log_, fp8, step.staged, r.step);
    r.gpu = gpu_monitor_.report(static_cast<double>(step.samples * config_.seq_length));
    if (const std::string note = gpu_monitor_.note(); !note.empty()) log_.event("note", note);
    log_.step(r, r.skipped || r.step == 1 || r.step == config_.train_iters || is_due(r.step, config_.log_interval));
    check_time(step, 1e3 * r.step_seconds);
    if (!r.skipped) watch_loss(r);
    if (progress_.consecutive_skips > kMostSkips)
        diverged(strf("step %lld: loss or gradient norm not finite for %lld steps in a row; lower --lr, or start from "
                      "an earlier checkpoint's weights (--load) with another --seed",
                      ll(r.step), ll(progress_.consecutive_skips)));
}

void StepReporter::watch_loss(const StepRecord& r) {
    const LossWatch::Verdict verdict = progress_.loss_watch.add(config_, r.loss);
    if (verdict == LossWatch::Verdict::kFine) return;
    const std::string text = progress_.loss_watch.text(config_, r.step, verdict);
    if (verdict == LossWatch::Verdict::kStop) diverged(text);
    log_.event("warning", text);
}

// Logs predicted and measured time and memory; ignores the smaller batches of a ramp-up.
void StepReporter::check_time(const Staging::Buffer& step, double ms) {
    if (step.samples != config_.global_batch_size || !time_check_->add(step.step + 1, ms)) return;
    const PredictedStep& predicted = time_check_->predicted();
    nlohmann::ordered_json parts = nlohmann::ordered_json::object();
    for (const auto& [name, part_ms] : predicted.parts_ms) parts[name] = part_ms;
    const int64_t planned = device_.plan.arena_bytes;
    log_.record("plan", step.step + 1,
                {{"predicted_ms", predicted.ms > 0 ? nlohmann::ordered_json(predicted.ms) : nullptr},
                 {"measured_ms", time_check_->measured_ms()}, {"predicted_parts_ms", parts}, {"planned_bytes", planned},
                 {"used_bytes", device_.used_bytes}},
                strf("plan: %s; memory planned %.3f GiB, used %.3f", time_check_->text().c_str(), gib(planned),
                     gib(device_.used_bytes)));
}

// Ends the run with exit code 4. The state is not saved, since --resume auto would go on with it; a checkpoint that is
// being written is completed.
void StepReporter::diverged(const std::string& text) {
    checkpoints_.finish();
    const std::string line = text + "; " + checkpoints_.newest_text();
    log_.event("diverged", line, false);
    FAIL(kExitDiverged, "%s", line.c_str());
}
