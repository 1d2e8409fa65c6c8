#include "llmc/train/log/log_exporter.h"

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <thread>
#include <utility>

#include "llmc/base/check.h"

void LogExporter::start(const Config& config) {
    const std::string folder = std::filesystem::path(config.log_file).parent_path().string();
    if (!config.tensorboard_dir.empty())
        start_process("--tensorboard-dir " + config.tensorboard_dir,
                      {"--follow", "--until-eof", config.log_file, "--to", "tensorboard", "--out",
                       config.tensorboard_dir});
    if (!config.wandb_project.empty())
        start_process("--wandb-project " + config.wandb_project,
                      {"--follow", "--until-eof", config.log_file, "--to", "wandb", "--project", config.wandb_project,
                       "--out", folder.empty() ? "." : folder});
}

void LogExporter::start_process(const std::string& option, std::vector<std::string> arguments) {
    Side side{.option = option, .process = {}};
    const std::string error = side.process.start("export_log", arguments);
    if (error.empty()) sides_.push_back(std::move(side));
    else warnings_.push_back(option + ": " + error);
}

bool LogExporter::ended(Side& side) {
    std::string failure;
    const bool gone = side.process.ended(failure);
    if (!failure.empty())
        warnings_.push_back(strf("%s: %s; the run goes on", side.option.c_str(), failure.c_str()));
    return gone;
}

std::vector<std::string> LogExporter::warnings() {
    std::erase_if(sides_, [this](Side& side) { return ended(side); });
    return std::exchange(warnings_, {});
}

void LogExporter::finish(int seconds) {
    for (Side& side : sides_) side.process.close_input();
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    auto say = [&] {
        for (const std::string& line : warnings()) std::fprintf(stderr, "warning: %s\n", line.c_str());
    };
    for (say(); !sides_.empty() && std::chrono::steady_clock::now() < deadline; say())
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    for (const Side& side : sides_)
        if (seconds > 0)
            std::fprintf(stderr, "warning: %s: scripts/export_log is still writing and goes on alone (process %d)\n",
                         side.option.c_str(), static_cast<int>(side.process.pid()));
    sides_.clear();
}
