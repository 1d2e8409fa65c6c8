// Requests to stop a run before its last step: a signal, or its time limit. They are local to a rank; the training loop
// all-reduces them, so that all ranks stop after the same step.
#pragma once
#include <string>

// Makes SIGTERM, SIGINT and SIGUSR1 request a stop, even if this process was started with them blocked. The first one
// is answered at once on standard error, by one rank of a host. A second SIGTERM or SIGINT, 1 s or more after the
// first, ends the process at once. The launch wrapper requests a stop in its file, see launcher_stops, and answers
// itself.
void catch_stop_signals();
// Makes these signals end the process, as they do in a program that does not handle them.
void die_of_stop_signals();
// Sets the time limit of this process, 0: none, and whether a run that stops saves.
void stop_after(double minutes, bool saves);

bool stop_wanted();
// "SIGTERM", "a signal to the launch wrapper", "--exit-duration-in-mins 60"; "" while !stop_wanted().
std::string stop_reason();
