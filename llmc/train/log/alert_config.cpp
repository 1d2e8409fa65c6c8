#include "llmc/train/log/alert_config.h"

#include <unistd.h>

#include <nlohmann/json.hpp>

#include "llmc/base/system/host.h"
#include "llmc/fault/alert_process.h"

std::string tell_alert_process(const Config& config, const std::string& command, const Comm& comm) {
    if (!comm.root() || (config.alert_command.empty() && config.alert_webhook.empty() && config.report.empty())) {
        dismiss_alert_process();
        return "";
    }
    const nlohmann::ordered_json options = {
        {"type", "options"}, {"command", config.alert_command}, {"webhook", config.alert_webhook},
        {"report", config.report}, {"log", config.log_file}, {"save", config.save}, {"run", command},
        {"host", host_name()}, {"pid", ::getpid()}, {"ranks", comm.world().ranks}};
    return configure_alert_process(options.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}
