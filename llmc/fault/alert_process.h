// The process that tells somebody of a run (--alert-command, --alert-webhook) and makes its report (--report):
// scripts/alerts, started before MPI is initialised. Rank 0 writes the records of its log to a pipe and never waits:
// what does not fit is dropped and counted. If the pipe is closed before post_run_end, as after kill -9, the process
// reports this by itself. There is at most one such process; without it these functions do nothing.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

// Options that need the process, by their names in a --config file; on the command line they begin with --.
inline constexpr const char* kAlertOptions[] = {"alert-command", "alert-webhook", "report"};

// Starts the process if the command line, or a --config file that it names, has an option that needs it, unless the
// launcher's environment says that this is not rank 0.
void start_alert_process(const std::vector<const char*>& words);
// Sends the process its options, as JSON, after starting it if it does not run. Returns why that failed, or "".
std::string configure_alert_process(const std::string& json);
// Lets the process end without having done anything, because this rank does not need it.
void dismiss_alert_process();

// Hands over one record of the log, a line of JSON without its end. Any thread may call it.
void post_record(const std::string& line);
// Reports that the run ends with this exit code; `text` is its error. Only the first call has an effect, and returns
// true if there is a process.
bool post_run_end(int exit_code, const std::string& text);

// Lines for the log: what the process has printed since the last call, that it has ended, that records were dropped.
std::vector<std::string> alert_process_lines();
// Closes the pipe and waits at most `seconds` for the process to end; after that, the process goes on alone. Lines go
// to standard error.
void finish_alert_process(int seconds);
