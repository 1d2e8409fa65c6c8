// A process beside this one that executes a script of this repository. The run only starts it and writes to its
// standard input; whatever becomes of it is a line of text and never the end of the run.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

// The script in scripts/ of a folder above the executable, as where it was built; "" if there is none.
std::string find_script(const std::string& name);

class SideProcess {
public:
    // Runs scripts/NAME with this text as its standard input and waits for its end. Returns how it failed, or "".
    static std::string feed(const std::string& name, const std::vector<std::string>& arguments,
                            const std::string& text);

    SideProcess() = default;
    SideProcess(SideProcess&& other) noexcept { *this = std::move(other); }
    SideProcess& operator=(SideProcess&& other) noexcept;
    ~SideProcess() { release(); }   // it goes on; its input is closed

    // Starts scripts/NAME with these arguments, in a session of its own and without another file of this process:
    // Ctrl-C and the launcher's signals are for the ranks, and mpirun waits until the pipes of its ranks are closed.
    // Returns why it cannot be started, or "".
    std::string start(const std::string& name, const std::vector<std::string>& arguments);

    bool started() const { return pid_ > 0; }
    pid_t pid() const { return pid_; }
    int input() const { return input_; }   // the write end of its standard input; -1: closed
    void close_input();

    // Whether it has ended. `failure` gets how and its last line, "" if it has ended well or still runs.
    bool ended(std::string& failure);
    // The whole lines that it has printed since the last call.
    std::vector<std::string> new_lines();

private:
    void release();

    std::string name_;
    pid_t pid_ = 0;
    int input_ = -1, output_ = -1;   // output_: a file in memory with what it prints
    off_t seen_ = 0;                 // bytes of it that new_lines() has returned
};
