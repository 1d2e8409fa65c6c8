// The options of the process that sends alerts and makes the report of a run.
#pragma once
#include <string>

#include "llmc/config/config.h"
#include "llmc/parallel/comm/comm.h"

// Configures the alert process of rank 0 (llmc/fault/alert_process.h), or dismisses that of another rank or of a run
// that has no option for it. Returns why it cannot be started, or "".
std::string tell_alert_process(const Config& config, const std::string& command, const Comm& comm);
