// Live TensorBoard event files and W&B runs: processes of scripts/export_log that follow the log file of a run. The
// trainer only starts them. If one of them fails, there is a warning and the run goes on.
#pragma once
#include <string>
#include <vector>

#include "llmc/base/system/side_process.h"
#include "llmc/config/config.h"

class LogExporter {
public:
    static constexpr int kEndSeconds = 30;   // for the processes to write the end of the log

    LogExporter() = default;
    ~LogExporter() { finish(0); }
    LogExporter(const LogExporter&) = delete;
    LogExporter& operator=(const LogExporter&) = delete;

    // Starts a process for each of --tensorboard-dir and --wandb-project. The processes end by themselves when the log
    // has the end of the run or this process is gone, after they have written what the log has.
    void start(const Config& config);

    // What has failed since the last call, one line each.
    std::vector<std::string> warnings();
    // Waits at most `seconds` for the processes to end; those that take longer go on without this process. The log has
    // its last record already, so warnings go to standard error.
    void finish(int seconds);

private:
    struct Side {
        std::string option;   // "--tensorboard-dir out/board"
        SideProcess process;
    };
    void start_process(const std::string& option, std::vector<std::string> arguments);
    // Whether the process has ended; if it failed, adds how to warnings_.
    bool ended(Side& side);

    std::vector<Side> sides_;
    std::vector<std::string> warnings_;
};
