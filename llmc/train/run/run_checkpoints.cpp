#include "llmc/train/run/run_checkpoints.h"

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>

#include "llmc/base/fault_injection.h"
#include "llmc/base/text.h"
#include "llmc/base/version.h"
#include "llmc/checkpoint/fp8_state_json.h"
#include "llmc/checkpoint/load.h"
#include "llmc/data/shard_meta.h"
#include "llmc/train/run/save_folder.h"

using Json = nlohmann::json;

namespace {

// The number of new checkpoints that must fit on the disk before old ones are deleted. With --keep that is one more
// than are kept, less those that exist, and at most as many as the run writes. Without --keep only one must fit, since
// the user may delete some.
int64_t checkpoints_to_come(const Config& config) {
    const int64_t saves = config.save_interval > 0 ? config.train_iters / config.save_interval + 1 : 1;
    const int64_t there = static_cast<int64_t>(checkpoint_steps(config.save).size());
    return config.keep == 0 ? 1 : std::max<int64_t>(1, std::min(saves, config.keep + 1 - there));
}

// Numbers of a run's progress, by their names in state.json.
constexpr std::pair<const char*, int64_t Progress::*> kProgress[] = {
    {"step", &Progress::step}, {"samples", &Progress::samples}, {"adam_step", &Progress::adam_step},
    {"skips", &Progress::skips}, {"norm_skips", &Progress::norm_skips},
    {"consecutive_skips", &Progress::consecutive_skips}};

}  // namespace

RunCheckpoints::RunCheckpoints(const Config& config, const ParamTable& table, const DataLoader& data, Comm& comm,
                               Ctx& ctx, Trainer& trainer, const SaveLock* lock)
    : config_(config), table_(table), data_(data), comm_(comm), ctx_(ctx), trainer_(trainer) {
    if (config.save.empty()) return;
    const SaveOptions options{
        .root = config.save, .seq_length = config.seq_length, .keep = config.keep, .async = config.save_async,
        .lock = lock, .io_hook = [](const char* call, const std::string&) { return fault_at(call) ? ENOSPC : 0; }};
    saver_ = std::make_unique<CheckpointSaver>(options, config.shape, table, trainer.state_access(ctx), comm);
    saver_->require_room(checkpoints_to_come(config));
}

void RunCheckpoints::begin() {
    if (saver_) saver_->carry(config_.load, config_.tokenizer, facts_of(data_.shards()));
}

std::optional<Progress> RunCheckpoints::resume(bool fp8_given, std::vector<std::string>& notes,
                                               const std::function<void(int64_t)>& begin_at) {
    const FoundCheckpoint found = find_checkpoint(config_.resume, config_.save, comm_);
    for (const std::string& line : found.skipped) notes.push_back("skipped checkpoint: " + line);
    if (saver_)
        saver_->carry(found.path.empty() ? config_.load : found.path, config_.tokenizer, facts_of(data_.shards()));
    if (found.path.empty()) {
        notes.push_back("no checkpoint under " + config_.save + ": starting from the beginning");
        return {};
    }
    const Json state = Json::parse(found.state_json);
    const ConfigDiff diff = config_diff(state.at("config").dump(), config_);
    REQUIRE(diff.must_match.empty(), "%s was made by another run (%s): leave these options, --model and --load out to "
            "continue it, or start a new run from its weights with --load in the place of --resume", found.path.c_str(),
            list_text(diff.must_match, "; ").c_str());
    for (const std::string& line : diff.changed) notes.push_back("option changed since the checkpoint: " + line);
    const std::string changed = data_.check_fingerprint(state.at("train_data").dump());
    REQUIRE(changed.empty(), "training data changed since the checkpoint: %s", changed.c_str());

    const std::string reason = device::gemm_import_plans(ctx_, state.at("gemm_plans").dump());
    if (!reason.empty()) notes.push_back("matmul plans of the checkpoint not used, bits may differ: " + reason);
    begin_at(state.at("step").get<int64_t>());
    Config saved;
    const std::string wrong = read_saved_options(state.at("config").dump(), saved);
    CHECK(wrong.empty(), "%s", wrong.c_str());   // state_damage has read them
    const std::string zero = load_checkpoint(found.path, config_.shape, table_, trainer_.state_access(ctx_), comm_,
                                             kStagingBytes, saved.optimizer);
    if (!zero.empty()) notes.push_back("the checkpoint is of another optimizer: these start from 0: " + zero);
    if (config_.ema > 0 && !has_ema(found.path)) {
        trainer_.start_ema(ctx_);
        notes.push_back("the checkpoint has no EMA: it starts from the master weights");
    }
    Progress progress{.norms = state.at("norms").get<std::vector<float>>(),
                      .missed = state.at("missed").get<std::vector<std::string>>()};
    for (const auto& [name, number] : kProgress) progress.*number = state.at(name).get<int64_t>();
    progress.loss_watch.restore(state.at("loss_watch").dump());
    if (config_.optimizer == OptimizerKind::kAdamW)
        progress.moments_begin = saved.optimizer == OptimizerKind::kAdamW ? state.value("moments_begin", int64_t{0})
                                                                          : progress.adam_step;
    trainer_.set_state(ctx_, progress.adam_step, progress.norms, progress.moments_begin);
    trainer_.router_balance().set_load(ctx_, state.value("expert_load", std::vector<double>{}));
    restore_fp8(state, fp8_given, notes);
    // A checkpoint from another folder is saved under --save even if no step is left.
    if (lies_in(found.path, config_.save)) saved_step_ = progress.step;
    notes.push_back(strf("resumed %s at step %lld", found.path.c_str(), (long long)progress.step));
    return progress;
}

// Computes FP8 weights from the masters. FP8 state of another recipe is not used, and `notes` says so.
void RunCheckpoints::restore_fp8(const Json& state, bool fp8_given, std::vector<std::string>& notes) {
    const Json& saved = state.at("fp8");   // of the latest step, which may have been in BF16
    const std::string recipe = state.at("config").value("fp8-recipe", saved.at("recipe").get<std::string>());
    REQUIRE(recipe == "none" || config_.fp8_recipe != Fp8Recipe::kNone || fp8_given,
            "the checkpoint is of a run with --fp8-recipe %s and this run does not set it: repeat the option, or give "
            "--fp8-recipe none to continue in BF16", recipe.c_str());
    trainer_.fp8().initialise(ctx_);
    const std::string changed = restore_fp8_state(ctx_, trainer_.fp8(), saved);
    if (!changed.empty()) notes.push_back("FP8 state of the checkpoint not used: " + changed);
    trainer_.weights_from_masters(ctx_, !changed.empty());
}

std::string RunCheckpoints::state_json(const Progress& progress) {
    Json state = {
        {"format", 1},
        {"norms", progress.norms},
        {"missed", progress.missed},
        {"config", Json::parse(config_to_json(config_))},
        {"train_data", Json::parse(data_.fingerprint_json())},
        {"fp8", Json::parse(fp8_state_json(ctx_, trainer_.fp8()))},
        {"gemm_plans", Json::parse(device::gemm_export_plans(ctx_))},
        {"commit", kBuildCommit},
        {"loss_watch", Json::parse(progress.loss_watch.state_json())},
    };
    for (const auto& [name, number] : kProgress) state[name] = progress.*number;
    if (progress.moments_begin > 0) state["moments_begin"] = progress.moments_begin;
    if (config_.shape.has_experts()) state["expert_load"] = trainer_.router_balance().read_load(ctx_);
    return state.dump(1);
}

void RunCheckpoints::save(const Progress& progress, RunLog& log) {
    if (!saver_ || saved_step_ == progress.step) return;
    saved_step_ = progress.step;
    finish();
    post_phase(Phase::kSave);
    saver_->on_saved([&log](const SavedCheckpoint& saved) {
        log.record("checkpoint", saved.step,
                   {{"path", saved.path}, {"seconds", saved.seconds}, {"stall_seconds", saved.stall_seconds}},
                   message_line(strf("checkpoint step %lld | %s | %.1f s, training stalled for %.2f s", ll(saved.step),
                                     saved.path.c_str(), saved.seconds, saved.stall_seconds)));
    });
    saver_->save(progress.step, comm_.root() ? state_json(progress) : "{}");   // rank 0 writes it
}

void RunCheckpoints::poll() {
    if (saver_) saver_->poll();
}

void RunCheckpoints::finish() {
    if (!saver_) return;
    post_phase(Phase::kSaveEnd);
    saver_->finish();
}

std::string RunCheckpoints::newest_text() const {
    if (config_.save.empty()) return "nothing was saved (--save)";
    const std::vector<int64_t> steps = checkpoint_steps(config_.save);
    if (steps.empty()) return "there is no checkpoint under " + config_.save;
    return "the newest checkpoint is " + config_.save + "/" + step_directory_name(steps.back());
}
