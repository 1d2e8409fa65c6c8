// Why a run ends before its last step: a signal, or its time is up. Each rank knows of itself; that one of them is to
// stop is agreed on by the loop.
#pragma once
#include <string>

// From now on SIGTERM, SIGINT and SIGUSR1 ask for a stop, even if this process was started with them blocked; a second
// SIGTERM or SIGINT ends it at once. The launch wrapper asks through the heartbeat table.
void catch_stop_signals();
// The longest that this process is to run, 0: no limit.
void stop_after(double minutes);

bool stop_wanted();
// "SIGTERM", "a signal to the launch wrapper", "--exit-duration-in-mins 60"; "" while this rank does not want to stop.
std::string stop_reason();
