#include "llmc/fault/alert_process.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "llmc/base/check.h"
#include "llmc/base/system/files.h"
#include "llmc/base/system/side_process.h"

namespace {

constexpr const char* kScript = "alerts";
constexpr int kPipeBytes = 1 << 20;         // for the records of about 1500 steps while the process is busy
constexpr size_t kTextBytes = 600;          // of an error text: its record fits into PIPE_BUF, however it is escaped

constexpr int kEndMs = 500;                 // to wait for room in the pipe for the last record

SideProcess process;                        // used by the main thread only
std::atomic<int> pipe_end{-1};              // its input, for all threads
std::mutex pipe_mutex;                      // held to write to the pipe or close it: another file may get its number
std::atomic<int64_t> dropped{0};
std::atomic<bool> end_posted{false};
bool drop_said = false;
std::string last_said;                      // the last line that the process has printed

// Whether the text of a file of options, or a word of the command line, has the name of an alert option after `before`.
bool names_option(const std::string& text, const char* before) {
    return std::any_of(std::begin(kAlertOptions), std::end(kAlertOptions), [&](const char* name) {
        return text.find(std::string(before) + name) != std::string::npos;
    });
}

bool file_names_option(const std::string& path) {
    if (!is_regular_file(path)) return false;
    std::ifstream file(path, std::ios::binary);
    std::string text(1 << 20, '\0');
    file.read(text.data(), static_cast<std::streamsize>(text.size()));
    text.resize(static_cast<size_t>(std::max<std::streamsize>(0, file.gcount())));
    return names_option(text, "\"");
}

bool is_other_rank() {
    for (const char* variable : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"})
        if (const char* rank = std::getenv(variable)) return std::string(rank) != "0";
    return false;
}

std::string start() {
    const std::string error = process.start(kScript, {});
    if (!error.empty()) return error;
    ::fcntl(process.input(), F_SETFL, O_NONBLOCK);
    ::fcntl(process.input(), F_SETPIPE_SZ, kPipeBytes);   // has no effect if the user's limit is used up
    pipe_end = process.input();
    return "";
}

// Writes the whole line, or nothing. A line of up to PIPE_BUF bytes is never mixed with that of another thread.
bool offer(const std::string& line) {
    const std::lock_guard<std::mutex> lock(pipe_mutex);
    const int fd = pipe_end;
    if (fd < 0) return true;
    const std::string whole = line + "\n";
    return whole.size() <= PIPE_BUF && ::write(fd, whole.data(), whole.size()) == static_cast<ssize_t>(whole.size());
}

void close_pipe() {
    const std::lock_guard<std::mutex> lock(pipe_mutex);
    pipe_end = -1;
    process.close_input();
}

// Returns what the process has printed since the last call and, if it failed, how.
std::vector<std::string> news(bool& running) {
    std::string failure;
    {
        const std::lock_guard<std::mutex> lock(pipe_mutex);
        running = !process.ended(failure);   // closes the pipe, too
        if (!running) pipe_end = -1;
    }
    std::vector<std::string> lines = process.new_lines();
    if (!lines.empty()) last_said = lines.back();
    if (failure.empty()) return lines;
    const std::string again = ": " + last_said;
    if (!last_said.empty() && failure.ends_with(again)) failure.resize(failure.size() - again.size());
    lines.push_back(failure);
    return lines;
}

}  // namespace

void start_alert_process(const std::vector<const char*>& words) {
    bool wanted = false;
    for (size_t i = 1; i < words.size(); i++) {
        const std::string word = words[i], config = "--config";
        wanted = wanted || (word.rfind("--", 0) == 0 && names_option(word, "--"));
        if (word == config && i + 1 < words.size()) wanted = wanted || file_names_option(words[i + 1]);
        if (word.rfind(config + "=", 0) == 0) wanted = wanted || file_names_option(word.substr(config.size() + 1));
    }
    if (wanted && !is_other_rank()) start();   // configure_alert_process tries again and says why it fails
}

std::string configure_alert_process(const std::string& json) {
    if (!process.started())
        if (const std::string error = start(); !error.empty()) return error;
    // The line may be longer than PIPE_BUF, since the pipe is empty and no other thread writes yet.
    const std::string line = json + "\n";
    const bool whole = ::write(pipe_end, line.data(), line.size()) == static_cast<ssize_t>(line.size());
    return whole ? "" : strf("scripts/%s does not read its options", kScript);
}

void dismiss_alert_process() {
    close_pipe();
    process = SideProcess();
}

void post_record(const std::string& line) {
    if (pipe_end >= 0 && !offer(line)) dropped++;
}

bool post_run_end(int exit_code, const std::string& text) {
    if (pipe_end < 0 || end_posted.exchange(true)) return false;
    pollfd full = {pipe_end, POLLOUT, 0};
    ::poll(&full, 1, kEndMs);
    const nlohmann::ordered_json record = {{"type", "end"}, {"exit_code", exit_code},
                                           {"text", text.substr(0, kTextBytes)}};
    post_record(record.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
    return true;
}

std::vector<std::string> alert_process_lines() {
    if (!process.started()) return {};
    bool running = true;
    std::vector<std::string> lines = news(running);
    if (!running) {
        dismiss_alert_process();
        lines.push_back("there are no more alerts; the run goes on");
    } else if (dropped > 0 && !drop_said) {
        drop_said = true;
        lines.push_back(strf("scripts/%s does not read the records of the run: they are dropped", kScript));
    }
    return lines;
}

void finish_alert_process(int seconds) {
    if (!process.started()) return;
    close_pipe();
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    const auto say = [](const std::string& line) { std::fprintf(stderr, "warning: alerts: %s\n", line.c_str()); };
    if (dropped > 0) say(strf("%lld records were dropped, since scripts/%s did not read them", ll(dropped), kScript));
    bool running = true;
    for (;;) {
        for (const std::string& line : news(running)) say(line);
        if (!running || std::chrono::steady_clock::now() >= deadline) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    if (running && seconds > 0)
        say(strf("scripts/%s goes on alone (process %d)", kScript, static_cast<int>(process.pid())));
    process = SideProcess();
}
