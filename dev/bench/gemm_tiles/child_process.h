// Runs this program again as a child process that may hang or crash, for benches of kernels that have never run.
#pragma once
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "llmc/base/check.h"

// How a child ended: its exit status, 128 + a signal, or kSilent if it was killed because it printed nothing for too
// long.
inline constexpr int kSilent = -1;

// Waits for a killed child, but not for ever: the driver may hold it.
inline void reap(pid_t child) {
    for (int i = 0; i < 500; i++) {
        if (waitpid(child, nullptr, WNOHANG) != 0) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
}

// Calls line() with each line that the child prints to stdout or stderr. The child may be silent for first_s seconds at
// the start and silence_s later.
inline int run_child(std::vector<std::string> arguments, double first_s, double silence_s,
                     const std::function<void(const std::string&)>& line) {
    int ends[2];
    CHECK(pipe(ends) == 0, "no pipe");
    std::vector<char*> words;
    for (std::string& word : arguments) words.push_back(word.data());
    words.push_back(nullptr);
    const pid_t child = fork();
    CHECK(child >= 0, "no child process");
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(ends[1], STDOUT_FILENO);
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        execv("/proc/self/exe", words.data());
        _exit(127);
    }
    close(ends[1]);
    std::string text;
    double limit_s = first_s;
    while (true) {
        pollfd wait{ends[0], POLLIN, 0};
        if (poll(&wait, 1, static_cast<int>(1000 * limit_s)) <= 0) {
            kill(child, SIGKILL);
            reap(child);
            close(ends[0]);
            return kSilent;
        }
        char buffer[4096];
        const ssize_t bytes = read(ends[0], buffer, sizeof buffer);
        if (bytes <= 0) break;
        limit_s = silence_s;
        text.append(buffer, static_cast<size_t>(bytes));
        for (size_t end; (end = text.find('\n')) != std::string::npos; text.erase(0, end + 1))
            line(text.substr(0, end));
    }
    if (!text.empty()) line(text);
    close(ends[0]);
    int status = 0;
    // Its output is closed, so it is about to end.
    for (int i = 0; i < 500; i++) {
        if (waitpid(child, &status, WNOHANG) == child)
            return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    kill(child, SIGKILL);
    reap(child);
    return kSilent;
}
