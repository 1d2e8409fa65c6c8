#include "llmc/train/run/run_checkpoints.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "llmc/base/fault_injection.h"
#include "llmc/base/version.h"
#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/checkpoint/fp8_state_json.h"
#include "llmc/checkpoint/huggingface/model_extras.h"
#include "llmc/checkpoint/load.h"
#include "llmc/fault/heartbeat.h"

using Json = nlohmann::json;

namespace {

// Whether a checkpoint is directly in the folder. It may be given as "step-10/" or relative to the folder.
bool lies_in(std::filesystem::path checkpoint, const std::string& folder) {
    if (!checkpoint.has_filename()) checkpoint = checkpoint.parent_path();
    const std::filesystem::path parent = checkpoint.has_parent_path() ? checkpoint.parent_path() : ".";
    std::error_code ignored;
    return std::filesystem::equivalent(parent, folder, ignored);
}

// Resuming from an earlier step, before a spike for instance, leaves later checkpoints of the abandoned branch, from
// which a restart with --resume auto would continue. Returns the error, "" if there are none.
std::string left_behind(const Config& config, const std::vector<int64_t>& steps) {
    const int64_t step = step_of_checkpoint(config.resume);   // not from its name, which may be that of a link
    if (step < 0) return "";                                  // resume() reports the error
    for (auto later = steps.rbegin(); later != steps.rend() && *later > step; later++) {
        const std::string name = step_directory_name(*later);
        if (!checkpoint_damage(config.save + "/" + name, false).empty()) continue;   // --resume auto skips it
        return strf("--save %s holds later checkpoints than --resume %s, up to %s, from which the next --resume auto "
                    "would continue: move them away, or name another folder",
                    config.save.c_str(), config.resume.c_str(), name.c_str());
    }
    return "";
}

// Why --save cannot work, "" if it can.
std::string save_error(const Config& config) {
    try {
        tokenizer_files(config.tokenizer);
        model_files(config.load);
        if (!config.load.empty()) hf_origin(config.load);
    } catch (const Error& error) {
        return error.what();
    }
    if (is_regular_file(config.save)) return strf("--save %s: a file, not a folder", config.save.c_str());
    if (const std::string part = existing_part(config.save); !is_directory(part))
        return strf("--save %s: %s is not a folder", config.save.c_str(), part.c_str());
    const std::vector<int64_t> steps = checkpoint_steps(config.save);
    for (int64_t step : steps)
        if (const std::string name = step_directory_name(step); !is_directory(config.save + "/" + name))
            return strf("--save %s: %s is a file or a dangling link, and a checkpoint may need this name: move it away",
                        config.save.c_str(), name.c_str());
    if (steps.empty() || config.resume == "auto") return "";
    if (!config.resume.empty() && lies_in(config.resume, config.save)) return left_behind(config, steps);
    return strf("--save %s holds checkpoints of an earlier run, up to %s, which this one would overwrite: "
                "--resume auto continues it, or name another folder", config.save.c_str(),
                step_directory_name(steps.back()).c_str());
}

SaveOptions save_options(const Config& config) {
    return {.root = config.save, .seq_length = config.seq_length, .keep = config.keep, .async = config.save_async};
}

HeldByRank planned_held(const Config& config, const ParamTable& table, const Buckets& buckets, int ranks) {
    HeldByRank held = held_whole(table, ranks);
    for (int rank = 0; rank < ranks && shards_state(config, buckets.ranks()); rank++) {
        auto& mine = held[static_cast<size_t>(rank)];
        mine.assign(table.params.size(), {});
        for (const ShardRange& range : buckets.shard_ranges(rank % buckets.ranks()))
            mine[static_cast<size_t>(range.param)].push_back({range.begin, range.elems});
    }
    return held;
}

// The number of checkpoints that the run writes: one at the end, and one per --save-interval before.
int64_t written_checkpoints(const Config& config) {
    if (config.save_interval == 0 || config.train_iters == 0) return 1;
    return ceil_div(config.train_iters, config.save_interval);
}

// The number of new checkpoints that must fit on the disk before old ones are deleted. With --keep that is one more
// than are kept, less those that exist, and at most as many as the run writes. Without --keep only one must fit, since
// the user may delete some.
int64_t checkpoints_to_come(const Config& config) {
    const int64_t saves = config.save_interval > 0 ? config.train_iters / config.save_interval + 1 : 1;
    const int64_t there = static_cast<int64_t>(checkpoint_steps(config.save).size());
    return config.keep == 0 ? 1 : std::max<int64_t>(1, std::min(saves, config.keep + 1 - there));
}

}  // namespace

HostPlan plan_host(const Config& config, const ParamTable& table, const Buckets& buckets, int ranks) {
    const HeldByRank held = planned_held(config, table, buckets, ranks);
    const SaveLayout layout = make_save_layout(table, {config.dtype, config.moment_dtype}, held);
    SaveOptions sync = save_options(config), async = sync;
    sync.async = false;
    async.async = true;
    HostPlan plan{.load_bytes = load_staging_bytes(table), .checkpoint_bytes = layout.bytes()};
    for (int rank = 0; rank < ranks; rank++) {
        plan.save_bytes = std::max(plan.save_bytes, save_buffer_bytes(layout, sync, rank));
        plan.save_async_bytes = std::max(plan.save_async_bytes, save_buffer_bytes(layout, async, rank));
    }
    return plan;
}

int64_t planned_checkpoints(const Config& config) {
    if (config.save.empty()) return 0;
    const int64_t saves = written_checkpoints(config);
    return config.keep == 0 ? saves : std::min(saves, config.keep);
}

SaveFolder::SaveFolder(const Config& config, Comm& comm, std::vector<std::string>& notes) {
    if (config.save.empty()) return;
    using Clock = std::chrono::steady_clock;
    constexpr auto kWait = std::chrono::seconds(60), kSilent = std::chrono::seconds(2);
    constexpr const char* kWaiting = "waiting";
    const auto begin = Clock::now();
    for (bool told = false;;) {
        // Only rank 0 writes in the folder. It sends its status to the others at least once a second, since a silent
        // rank counts as lost.
        std::string said;
        if (comm.root()) {
            bool busy = false;
            said = take(config, &busy);
            const auto waited = Clock::now() - begin;
            if (busy && config.resume == "auto" && waited < kWait) {
                if (!told && waited > kSilent) std::fprintf(stderr, "note: %s; waiting for its end\n",
                                                         message_line(said).c_str());
                told = told || waited > kSilent;
                said = kWaiting;
                std::this_thread::sleep_for(std::chrono::milliseconds(told ? 1000 : 200));
            }
        }
        said = comm.gather(said)[0];
        REQUIRE(said.empty() || said == kWaiting, "%s", said.c_str());
        if (!said.empty()) continue;
        if (lock_ && !lock_->warning().empty()) notes.push_back(lock_->warning());
        return;
    }
}

std::string SaveFolder::take(const Config& config, bool* busy) {
    if (const std::string error = save_error(config); !error.empty()) return error;
    std::string holder;
    try {
        namespace fs = std::filesystem;
        for (fs::path folder = config.save; !folder.empty() && !fs::exists(folder); folder = folder.parent_path())
            if (folder.has_filename()) made_.push_back(folder);
        make_directories(config.save);
        lock_ = SaveLock::take(config.save, &holder);
    } catch (const Error& error) {
        FAIL(error.exit_code, "--save %s cannot be used: %s; choose another", config.save.c_str(), error.what());
    }
    *busy = !lock_;
    if (*busy) return strf("--save %s: another run writes there (%s): end it, or name another folder",
                           config.save.c_str(), holder.c_str());
    remove_leftovers(config.save);   // a save does that, too, but a run with nothing left to train makes none
    return save_error(config);   // again, since a run may have ended in between
}

SaveFolder::~SaveFolder() {
    lock_.reset();
    for (const std::string& folder : made_) ::rmdir(folder.c_str());   // only if it is empty
}

RunCheckpoints::RunCheckpoints(const Config& config, const ParamTable& table, const DataLoader& data, Comm& comm,
                               Ctx& ctx, Trainer& trainer, const SaveLock* lock)
    : config_(config), table_(table), data_(data), comm_(comm), ctx_(ctx), trainer_(trainer) {
    if (config.save.empty()) return;
    SaveOptions options = save_options(config);
    options.io_hook = [](const char* call, const std::string&) { return fault_at(call) ? ENOSPC : 0; };
    options.lock = lock;
    saver_ = std::make_unique<CheckpointSaver>(options, config.shape, table, trainer.state_access(ctx), comm);
    saver_->require_room(checkpoints_to_come(config));
}

void RunCheckpoints::begin() {
    if (saver_) saver_->carry(config_.load, config_.tokenizer);
}

std::optional<Progress> RunCheckpoints::resume(bool fp8_given, std::vector<std::string>& notes) {
    const FoundCheckpoint found = find_checkpoint(config_.resume, config_.save, comm_);
    for (const std::string& line : found.skipped) notes.push_back("skipped checkpoint: " + line);
    if (saver_) saver_->carry(found.path.empty() ? config_.load : found.path, config_.tokenizer);
    if (found.path.empty()) {
        notes.push_back("no checkpoint under " + config_.save + ": starting from the beginning");
        return {};
    }
    const Json state = Json::parse(found.state_json);
    const ConfigDiff diff = config_diff(state.at("config").dump(), config_);
    REQUIRE(diff.must_match.empty(), "%s was made by another run (%s): --load starts a new one from its weights",
            found.path.c_str(), diff.must_match.front().c_str());
    for (const std::string& line : diff.changed) notes.push_back("option changed since the checkpoint: " + line);
    const std::string changed = data_.check_fingerprint(state.at("train_data").dump());
    REQUIRE(changed.empty(), "training data changed since the checkpoint: %s", changed.c_str());

    load_checkpoint(found.path, config_.shape, table_, trainer_.state_access(ctx_), comm_);
    Progress progress{.step = state.at("step").get<int64_t>(), .samples = state.at("samples").get<int64_t>(),
                      .adam_step = state.at("adam_step").get<int64_t>(),
                      .skips = state.at("skips").get<int64_t>(),
                      .consecutive_skips = state.at("consecutive_skips").get<int64_t>(),
                      .missed = state.at("missed").get<std::vector<std::string>>()};
    progress.loss_watch.restore(state.at("loss_watch").dump());
    StepState device_state{};
    device_state.adam_step = progress.adam_step;
    device::copy_to_device(ctx_, trainer_.state(), &device_state, sizeof(StepState));
    device::synchronize(ctx_);
    restore_fp8(state.at("fp8"), fp8_given, notes);
    const std::string reason = device::gemm_import_plans(ctx_, state.at("gemm_plans").dump());
    if (!reason.empty()) notes.push_back("matmul plans of the checkpoint not used, bits may differ: " + reason);
    // A checkpoint from another folder is saved under --save even if no step is left.
    if (lies_in(found.path, config_.save)) saved_step_ = progress.step;
    notes.push_back(strf("resumed %s at step %lld", found.path.c_str(), (long long)progress.step));
    return progress;
}

// Computes FP8 weights from the masters. FP8 state of another recipe is not used, and `notes` says so.
void RunCheckpoints::restore_fp8(const Json& saved, bool fp8_given, std::vector<std::string>& notes) {
    const std::string recipe = saved.at("recipe").get<std::string>();
    REQUIRE(recipe == "none" || trainer_.fp8().plan().on() || fp8_given,
            "the checkpoint is of a run with --fp8-recipe %s and this run does not set it: repeat the option, or give "
            "--fp8-recipe none to continue in BF16", recipe.c_str());
    trainer_.fp8().initialise(ctx_);
    const std::string changed = restore_fp8_state(ctx_, trainer_.fp8(), saved);
    if (!changed.empty()) notes.push_back("FP8 state of the checkpoint not used: " + changed);
    trainer_.weights_from_masters(ctx_, !changed.empty());
}

std::string RunCheckpoints::state_json(const Progress& progress) {
    const Json state = {
        {"format", 1},
        {"step", progress.step},
        {"samples", progress.samples},
        {"adam_step", progress.adam_step},
        {"skips", progress.skips},
        {"consecutive_skips", progress.consecutive_skips},
        {"missed", progress.missed},
        {"config", Json::parse(config_to_json(config_))},
        {"train_data", Json::parse(data_.fingerprint_json())},
        {"fp8", Json::parse(fp8_state_json(ctx_, trainer_.fp8()))},
        {"gemm_plans", Json::parse(device::gemm_export_plans(ctx_))},
        {"commit", kBuildCommit},
        {"loss_watch", Json::parse(progress.loss_watch.state_json())},
    };
    return state.dump(1);
}

void RunCheckpoints::save(const Progress& progress, RunLog& log) {
    if (!saver_ || saved_step_ == progress.step) return;
    saved_step_ = progress.step;
    finish();
    post_phase(Phase::kSave);
    saver_->on_saved([&log](const SavedCheckpoint& saved) {
        log.checkpoint(saved.step, saved.path, saved.seconds, saved.stall_seconds);
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
