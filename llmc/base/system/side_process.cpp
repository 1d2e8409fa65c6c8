#include "llmc/base/system/side_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "llmc/base/check.h"

namespace {

namespace fs = std::filesystem;

std::string last_line(int file) {
    char text[4096];
    struct stat status {};
    ::fstat(file, &status);
    const off_t from = status.st_size > off_t{sizeof text} ? status.st_size - off_t{sizeof text} : 0;
    const ssize_t got = ::pread(file, text, sizeof text, from);
    std::string all(text, got > 0 ? static_cast<size_t>(got) : 0);
    while (!all.empty() && all.back() == '\n') all.pop_back();
    const size_t end = all.rfind('\n');
    return end == std::string::npos ? all : all.substr(end + 1);
}

}  // namespace

std::string find_script(const std::string& name) {
    std::error_code ignored;
    const fs::path executable = fs::read_symlink("/proc/self/exe", ignored);
    for (fs::path folder = executable.parent_path(); !folder.empty(); folder = folder.parent_path()) {
        const fs::path script = folder / "scripts" / name;
        if (fs::is_regular_file(script, ignored)) return script.string();
        if (folder == folder.parent_path()) break;
    }
    return "";
}

SideProcess& SideProcess::operator=(SideProcess&& other) noexcept {
    if (this == &other) return *this;
    release();
    name_ = std::move(other.name_);
    pid_ = std::exchange(other.pid_, 0);
    input_ = std::exchange(other.input_, -1);
    output_ = std::exchange(other.output_, -1);
    seen_ = std::exchange(other.seen_, 0);
    return *this;
}

std::string SideProcess::start(const std::string& name, const std::vector<std::string>& arguments) {
    name_ = "scripts/" + name;
    const std::string script = find_script(name);
    if (script.empty()) return "there is no " + name_ + " in a folder above the executable";
    std::vector<std::string> words = {script};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    int input[2];
    if (::pipe2(input, O_CLOEXEC) != 0) return std::strerror(errno);
    const int output = ::memfd_create(name.c_str(), MFD_CLOEXEC);
    if (output < 0) {
        const int error = errno;
        ::close(input[0]), ::close(input[1]);
        return std::strerror(error);
    }
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
    const int error = posix_spawn(&pid_, argv[0], &files, &attributes, argv.data(), environ);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attributes);
    ::close(input[0]);
    input_ = input[1], output_ = output;
    if (error == 0) return "";
    pid_ = 0;
    release();
    return name_ + " does not start: " + std::strerror(error);
}

std::string SideProcess::feed(const std::string& name, const std::vector<std::string>& arguments,
                              const std::string& text) {
    SideProcess process;
    if (const std::string error = process.start(name, arguments); !error.empty()) return error;
    for (size_t done = 0; done < text.size();) {
        const ssize_t wrote = ::write(process.input(), text.data() + done, text.size() - done);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) break;   // the process has ended: its exit code says why
        done += static_cast<size_t>(wrote);
    }
    process.close_input();
    std::string failure;
    while (!process.ended(failure)) ::usleep(10000);
    return failure;
}

void SideProcess::close_input() {
    if (input_ >= 0) ::close(std::exchange(input_, -1));
}

void SideProcess::release() {
    close_input();
    if (output_ >= 0) ::close(std::exchange(output_, -1));
    pid_ = 0;
}

bool SideProcess::ended(std::string& failure) {
    failure.clear();
    int status = 0;
    if (pid_ <= 0 || ::waitpid(pid_, &status, WNOHANG) != pid_) return pid_ <= 0;
    if (status != 0) {
        const std::string said = last_line(output_);
        const std::string how = WIFEXITED(status) ? strf("exit code %d", WEXITSTATUS(status))
                                                  : strf("signal %d", WTERMSIG(status));
        failure = said.empty() ? strf("%s has ended (%s)", name_.c_str(), how.c_str())
                               : strf("%s has ended (%s): %s", name_.c_str(), how.c_str(), said.c_str());
    }
    close_input();
    pid_ = 0;
    return true;
}

std::vector<std::string> SideProcess::new_lines() {
    std::vector<std::string> lines;
    struct stat status {};
    if (output_ < 0 || ::fstat(output_, &status) != 0 || status.st_size <= seen_) return lines;
    std::string text(static_cast<size_t>(status.st_size - seen_), '\0');
    const ssize_t got = ::pread(output_, text.data(), text.size(), seen_);
    text.resize(got > 0 ? static_cast<size_t>(got) : 0);
    for (size_t end; (end = text.find('\n')) != std::string::npos; text.erase(0, end + 1)) {
        lines.push_back(text.substr(0, end));
        seen_ += static_cast<off_t>(end + 1);
    }
    return lines;
}
