#include "llmc/train/run/save_folder.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "llmc/base/system/files.h"
#include "llmc/base/text.h"
#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/checkpoint/huggingface/model_extras.h"

bool lies_in(std::filesystem::path checkpoint, const std::string& folder) {
    if (!checkpoint.has_filename()) checkpoint = checkpoint.parent_path();
    const std::filesystem::path parent = checkpoint.has_parent_path() ? checkpoint.parent_path() : ".";
    return is_same_path(parent, folder);
}

namespace {

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

}  // namespace

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
        std::filesystem::path folder = config.save;
        for (; !folder.empty() && !path_exists(folder); folder = folder.parent_path())
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
