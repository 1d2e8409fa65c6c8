#include "llmc/base/system/standard_streams.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>

std::vector<std::string> prepare_standard_streams() {
    std::signal(SIGPIPE, SIG_IGN);
    std::signal(SIGXFSZ, SIG_IGN);
    std::vector<std::string> closed;
    const char* const names[] = {"", "standard output", "standard error"};
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
        if (::fcntl(fd, F_GETFD) != -1 || ::open("/dev/null", O_RDWR) != fd) continue;
        if (fd != STDIN_FILENO)
            closed.push_back(std::string(names[fd]) + " was closed when the run started: its lines are dropped");
    }
    return closed;
}

int flush_stdout() {
    errno = 0;
    if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return 0;
    // The errno of an earlier call that failed is lost, so another write finds it again.
    const int error = errno || ::write(STDOUT_FILENO, "\n", 1) < 0 ? errno : EIO;
    if (!std::freopen("/dev/null", "w", stdout)) std::clearerr(stdout);   // drops what could not be written
    return error;
}
