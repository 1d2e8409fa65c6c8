// The process that tells somebody of a run (--alert-command, --alert-webhook) and makes its report (--report):
// scripts/alerts, started before MPI is initialised. Rank 0 writes the records of its log to a pipe and never waits:
// what does not fit is dropped and counted. When the pipe is closed without a word of the end, as after kill -9, the
// process says so by itself. There is at most one; without it these functions do nothing.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

// Options that need it, by their names in a file of options; on the command line they begin with --.
inline constexpr const char* kAlertOptions[] = {"alert-command", "alert-webhook", "report"};

// Starts the process if an option of the command line, or of a file of --config in it, needs one, and if the launcher's
// environment does not say that this is another rank than 0.
void start_alert_process(const std::vector<const char*>& words);
// Tells it what to do, as JSON; starts it if it is not there. Returns why it cannot be started, or "".
std::string configure_alert_process(const std::string& json);
// Lets it end without having done anything: this is not the rank that needs it.
void dismiss_alert_process();

// Hands over one record of the log, a line of JSON without its end. Any thread may call it.
void post_record(const std::string& line);
// The run ends with this exit code; `text` is its error. The first call counts and returns true if there is a process.
bool post_run_end(int exit_code, const std::string& text);

// Lines for the log: what it has said since the last call, that it has ended, and that records were dropped.
std::vector<std::string> alert_process_lines();
// Closes the pipe and waits until the process has ended, for at most so many seconds; it then goes on alone. Lines go
// to standard error.
void finish_alert_process(int seconds);
