// A process beside this one that executes a script of this repository. The run only starts it and writes to its
// standard input. If the process fails, the run gets a line of text and goes on.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

// Returns the path of scripts/NAME in the nearest folder above the executable that has it; "" if there is none.
std::string find_script(const std::string& name);

class SideProcess {
public:
    // Runs scripts/NAME with this text as its standard input and waits for its end. Returns how it failed, or "".
    static std::string feed(const std::string& name, const std::vector<std::string>& arguments,
                            const std::string& text);

    SideProcess() = default;
    SideProcess(SideProcess&& other) noexcept { *this = std::move(other); }
    SideProcess& operator=(SideProcess&& other) noexcept;
    ~SideProcess() { release(); }   // closes the process's input; the process goes on

    // Starts scripts/NAME with these arguments. It gets a session of its own, because Ctrl-C and the launcher's signals
    // are for the ranks. It inherits no open file of this process, because mpirun waits until the pipes of its ranks
    // are closed. Returns why it cannot be started, or "".
    std::string start(const std::string& name, const std::vector<std::string>& arguments);

    bool started() const { return pid_ > 0; }
    pid_t pid() const { return pid_; }
    int input() const { return input_; }   // the write end of the process's standard input; -1: closed
    void close_input();

    // Whether the process has ended. `failure` = how it failed and its last line, or "" if it ended well or still runs.
    bool ended(std::string& failure);
    // The whole lines that the process has printed since the last call.
    std::vector<std::string> new_lines();

private:
    void release();

    std::string name_;
    pid_t pid_ = 0;
    int input_ = -1, output_ = -1;   // output_: a file in memory with what the process prints
    off_t seen_ = 0;                 // bytes of output_ that new_lines() has returned
};
