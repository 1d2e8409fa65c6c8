#include "llmc/train/log/log_exporter.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <thread>
#include <utility>

#include "llmc/base/text.h"

namespace {

namespace fs = std::filesystem;

// scripts/export_log in a folder above the executable, as where it was built; "" if there is none.
std::string find_script() {
    std::error_code ignored;
    const fs::path executable = fs::read_symlink("/proc/self/exe", ignored);
    for (fs::path folder = executable.parent_path(); !folder.empty(); folder = folder.parent_path()) {
        const fs::path script = folder / "scripts/export_log";
        if (fs::is_regular_file(script, ignored)) return script.string();
        if (folder == folder.parent_path()) break;
    }
    return "";
}

std::string last_line(int file) {
    char text[4096];
    const off_t size = ::lseek(file, 0, SEEK_END);
    const ssize_t got = ::pread(file, text, sizeof text, size > off_t{sizeof text} ? size - off_t{sizeof text} : 0);
    std::string all(text, got > 0 ? static_cast<size_t>(got) : 0);
    while (!all.empty() && all.back() == '\n') all.pop_back();
    const size_t end = all.rfind('\n');
    return end == std::string::npos ? all : all.substr(end + 1);
}

}  // namespace

void LogExporter::start(const Config& config) {
    if (config.tensorboard_dir.empty() && config.wandb_project.empty()) return;
    script_ = find_script();
    const std::string folder = fs::path(config.log_file).parent_path().string();
    const std::vector<std::string> words = {"--follow", "--until-eof", config.log_file};
    auto with = [&](std::vector<std::string> more) {
        more.insert(more.begin(), words.begin(), words.end());
        return more;
    };
    if (!config.tensorboard_dir.empty())
        start_process("--tensorboard-dir " + config.tensorboard_dir,
                      with({"--to", "tensorboard", "--out", config.tensorboard_dir}));
    if (!config.wandb_project.empty())
        start_process("--wandb-project " + config.wandb_project,
                      with({"--to", "wandb", "--project", config.wandb_project, "--out",
                            folder.empty() ? "." : folder}));
}

void LogExporter::start_process(const std::string& option, std::vector<std::string> words) {
    auto failed = [&](const std::string& why) { warnings_.push_back(option + ": " + why); };
    if (script_.empty()) return failed("there is no scripts/export_log in a folder above the executable: call it with "
                                       "--follow");
    words.insert(words.begin(), script_);
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    int input[2];
    if (::pipe2(input, O_CLOEXEC) != 0) return failed(std::strerror(errno));
    const int output = ::memfd_create("export_log", MFD_CLOEXEC);
    if (output < 0) {
        failed(std::strerror(errno));
        ::close(input[0]), ::close(input[1]);
        return;
    }
    // A session of its own: Ctrl-C and the launcher's signals are for the ranks. It holds no other file, since mpirun
    // waits until the pipes of its ranks are closed.
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attributes;
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&attributes);
    posix_spawn_file_actions_adddup2(&files, input[0], 0);
    posix_spawn_file_actions_adddup2(&files, output, 1);
    posix_spawn_file_actions_adddup2(&files, output, 2);
    posix_spawn_file_actions_addclosefrom_np(&files, 3);
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setsigdefault(&attributes, &all);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    Side side{.option = option, .pid = 0, .input = input[1], .output = output};
    const int error = posix_spawn(&side.pid, argv[0], &files, &attributes, argv.data(), environ);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attributes);
    ::close(input[0]);
    if (error == 0) return sides_.push_back(side);
    release(side);
    failed(std::string("scripts/export_log does not start: ") + std::strerror(error));
}

void LogExporter::release(const Side& side) {
    if (side.input >= 0) ::close(side.input);
    ::close(side.output);
}

bool LogExporter::ended(const Side& side) {
    int status = 0;
    if (::waitpid(side.pid, &status, WNOHANG) != side.pid) return false;
    if (status != 0) {
        const std::string said = last_line(side.output);
        const std::string how = WIFEXITED(status) ? strf("exit code %d", WEXITSTATUS(status))
                                                  : strf("signal %d", WTERMSIG(status));
        warnings_.push_back(strf("%s: scripts/export_log has ended (%s)%s%s; the run goes on", side.option.c_str(),
                                 how.c_str(), said.empty() ? "" : ": ", said.c_str()));
    }
    release(side);
    return true;
}

std::vector<std::string> LogExporter::warnings() {
    std::erase_if(sides_, [this](const Side& side) { return ended(side); });
    return std::exchange(warnings_, {});
}

void LogExporter::finish(int seconds) {
    for (Side& side : sides_) ::close(std::exchange(side.input, -1));
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    auto say = [&] {
        for (const std::string& line : warnings()) std::fprintf(stderr, "warning: %s\n", line.c_str());
    };
    for (say(); !sides_.empty() && std::chrono::steady_clock::now() < deadline; say())
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    for (const Side& side : sides_) {
        if (seconds > 0)
            std::fprintf(stderr, "warning: %s: scripts/export_log is still writing and goes on alone (process %d)\n",
                         side.option.c_str(), static_cast<int>(side.pid));
        release(side);
    }
    sides_.clear();
}
