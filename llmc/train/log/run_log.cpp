#include "llmc/train/log/run_log.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "llmc/base/json_object.h"
#include "llmc/base/system/files.h"
#include "llmc/base/system/standard_streams.h"

namespace {

using OrderedJson = nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr int kLogFormat = 1;
constexpr size_t kMaxHeaderBytes = 1 << 20;

// ---- JSON lines ----

std::string to_line(const OrderedJson& record) {
    // Sampled text may be invalid UTF-8; invalid bytes become U+FFFD.
    return record.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

double unix_seconds() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Whether a resumed run keeps this line: a complete record that the run does not write again.
bool kept(const nlohmann::json& record, int64_t resume_step, const std::vector<std::string>& again) {
    if (!record.is_object() || !record.contains("type")) return false;   // a killed run wrote only part of the line
    auto step = record.find("step");
    if (step == record.end() || !step->is_number_integer() || step->get<int64_t>() < resume_step) return true;
    if (step->get<int64_t>() != resume_step) return false;
    const std::string type = text_of(record, "type");
    return std::find(again.begin(), again.end(), type) == again.end();
}

// The first record of a log, or null; `start`, unless null, gets the line's first bytes.
nlohmann::json first_record(const std::string& path, std::string* start = nullptr) {
    std::ifstream old(path, std::ios::binary);
    REQUIRE(old, "--log-file %s: cannot be read: %s", path.c_str(), std::strerror(errno));
    std::string line(kMaxHeaderBytes, '\0');   // a file that is not a log may have lines of any length
    old.getline(line.data(), static_cast<std::streamsize>(line.size()));
    line.resize(std::strlen(line.c_str()));
    if (start) *start = line.substr(0, 32);
    return parse_json_line(line);
}

// Returns the error if the file exists and is not a log, else "": a mistyped name may be that of a data file. The
// beginning of a header is enough to recognize a log, and so is a whole record, since a truncated log has lost its
// header.
std::string not_a_log(const std::string& path) {
    if (file_bytes(path) <= 0) return "";
    std::string start;
    const nlohmann::json first = first_record(path, &start);
    const std::string type = text_of(first, "type");
    if (type == "header" || start.rfind(R"({"type":"header",)", 0) == 0) return "";
    if (!type.empty() && first.contains("step") && first["step"].is_number_integer()) return "";
    return strf("--log-file %s: exists and is not a log of a run: choose another name", path.c_str());
}

// Whether a folder is `other` or lies in it, by their names.
bool is_under(const fs::path& folder, const std::string& other) {
    if (other.empty()) return false;
    const fs::path inner = absolute_path(folder.string());
    const std::string from = inner.lexically_relative(absolute_path(other)).string();
    return !from.empty() && from.rfind("..", 0) != 0;
}

// Renames a log to the first free of FILE.1, FILE.2, ..., and returns that name.
std::string set_aside(const std::string& path) {
    const std::string log = resolved_path(path);   // renames the target of a link, in the target's folder
    std::string aside;
    for (int number = 1; aside.empty() || path_exists(aside); number++) aside = log + "." + std::to_string(number);
    if (::rename(log.c_str(), aside.c_str()) != 0)
        FAIL(kExitDisk, "--log-file %s: the earlier log cannot be kept as %s: %s", path.c_str(), aside.c_str(),
             std::strerror(errno));
    return aside;
}

// Rewrites the log with the records that are kept. The old file is replaced once the new one is complete. With `keep`,
// if a complete record was removed, the old file is renamed instead; returns its new name, else "".
std::string cut_log(const std::string& path, int64_t resume_step, const std::vector<std::string>& again, bool keep) {
    std::ifstream old(path, std::ios::binary);
    REQUIRE(old, "--log-file %s: cannot be read: %s", path.c_str(), std::strerror(errno));
    ReplacementFile cut(resolved_path(path));   // a link remains a link
    std::string line, earlier;
    bool whole = true;
    while (std::getline(old, line)) {
        const nlohmann::json record = parse_json_line(line);
        if (kept(record, resume_step, again)) cut.write(line + '\n');
        else if (record.is_object()) whole = false;
    }
    if (keep && !whole) earlier = set_aside(path);
    cut.publish();
    return earlier;
}

// Opens a log at its end, and holds it by flock until it is closed: of two runs that write one log, each would lose
// records of the other. Returns -1, with errno, if the file cannot be opened. A file system may have no locks.
int open_log(const std::string& path, int more_flags) {
    // Without O_NONBLOCK, opening a pipe that nobody reads would keep the run waiting. Writing may wait for a reader.
    const int flags = O_WRONLY | O_APPEND | O_CLOEXEC | more_flags;
    Descriptor file(::open(path.c_str(), flags | O_NONBLOCK, 0666));
    struct stat info {};
    if (file.fd < 0 || ::fcntl(file.fd, F_SETFL, flags) != 0 || ::fstat(file.fd, &info) != 0) return -1;
    const bool held = S_ISREG(info.st_mode) && ::flock(file.fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    REQUIRE(!held, "--log-file %s: another run writes there: end it, or choose another name", path.c_str());
    return std::exchange(file.fd, -1);
}

}  // namespace

std::string screen_text(const std::string& text) {
    std::string shown = OrderedJson::parse(to_line(text)).get<std::string>();   // replaces invalid UTF-8
    for (size_t i = 0; i < shown.size(); i++) {
        const auto c = static_cast<unsigned char>(shown[i]);
        const bool low = (c < 0x20 && c != '\n' && c != '\t') || c == 0x7f;
        // U+0080 .. U+009F, two bytes each, are control characters too.
        const bool high = c == 0xc2 && i + 1 < shown.size() && static_cast<unsigned char>(shown[i + 1]) < 0xa0;
        if (low || high) shown[i] = '.';
        if (high) shown[++i] = '.';
    }
    return shown;
}

bool log_saves_in(const std::string& path, const std::string& save) {
    if (!is_regular_file(path)) return true;
    const nlohmann::json header = first_record(path);
    if (!header.is_object() || !header.contains("config") || !header["config"].is_object()) return true;
    return text_of(header["config"], "save") == save;
}

std::string log_place_error(const std::string& path, const std::string& save) {
    if (path.empty()) return "";
    const fs::path folder = fs::path(path).parent_path();
    if (is_under(folder.empty() ? "." : folder, save)) return not_a_log(path);   // SaveFolder checks the folder
    const std::string part = existing_part(folder.empty() ? "." : folder.string());
    if (!is_directory(part)) return strf("--log-file %s: %s is not a folder", path.c_str(), part.c_str());
    // A missing folder within the working folder is made, as the recipes' logs/; elsewhere its name is likely wrong.
    if (!folder.empty() && !is_directory(folder.string()) && !is_under(folder, "."))
        return strf("--log-file %s: there is no folder %s: mkdir -p %s", path.c_str(), folder.c_str(),
                    shell_quoted(folder.string()).c_str());
    if (is_directory(path))
        return strf("--log-file %s: a folder: name a file, %s", path.c_str(), (fs::path(path) / "log.jsonl").c_str());
    return not_a_log(path);
}

RunLog::RunLog(const std::string& path, bool append, int64_t resume_step, const std::vector<std::string>& again,
               bool keep)
    : path_(path), step_(resume_step) {
    if (path.empty()) return;
    std::string folder;   // why it cannot be made: fatal only if the file cannot be opened
    const fs::path directory = fs::path(path).parent_path();
    try {
        if (!directory.empty()) make_directories(directory.string());
    } catch (const Error& error) {
        folder = error.what();
    }
    const std::string wrong = not_a_log(path);
    REQUIRE(wrong.empty(), "%s", wrong.c_str());
    Descriptor earlier;   // holds the file that is replaced
    if (file_bytes(path) > 0) {
        earlier.fd = open_log(path, 0);
        earlier_log_ = append ? cut_log(path, resume_step, again, keep) : set_aside(path);
    }
    file_.fd = open_log(path, O_CREAT);
    // If the folder could not be created, "no such file or directory" would hide the reason.
    const std::string reason = !folder.empty() ? "its folder cannot be made: " + folder
                               : errno == ENXIO ? "nobody reads this pipe" : std::strerror(errno);
    REQUIRE(file_.fd >= 0, "--log-file %s: cannot be opened: %s", path.c_str(), reason.c_str());
    bytes_ = file_bytes(path);
}

void RunLog::write(const std::string& line) {
    if (file_.fd < 0) return;
    follow_path();
    const std::string text = line + '\n';
    for (size_t done = 0; done < text.size();) {
        const ssize_t count = ::write(file_.fd, text.data() + done, text.size() - done);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) FAIL(kExitDisk, "--log-file %s: cannot be written: %s", path_.c_str(), std::strerror(errno));
        done += static_cast<size_t>(count);
    }
    bytes_ += ll(text.size());
}

void RunLog::follow_path() {
    struct stat mine {}, there {};
    if (::fstat(file_.fd, &mine) != 0 || !S_ISREG(mine.st_mode)) return;
    const bool found = ::stat(path_.c_str(), &there) == 0;
    if (!found && errno != ENOENT && errno != ENOTDIR) return;   // a network file system that does not answer
    const bool same = found && there.st_ino == mine.st_ino && there.st_dev == mine.st_dev;
    if (same && mine.st_size >= bytes_) return;
    const char* const what = same ? "truncated" : found ? "replaced" : "removed";
    if (!same) {
        const std::string wrong = not_a_log(path_);
        Descriptor opened(wrong.empty() ? open_log(path_, O_CREAT) : -1);
        const std::string reason = wrong.empty() ? std::strerror(errno) : wrong;
        if (opened.fd < 0) FAIL(kExitDisk, "--log-file %s: was %s during the run, and cannot be opened again: %s",
                                path_.c_str(), what, reason.c_str());
        std::swap(file_.fd, opened.fd);
    }
    bytes_ = file_bytes(path_);
    if (!header_.empty()) header(OrderedJson::parse(std::string(header_)));
    event("warning", strf("--log-file %s: was %s by another program at step %lld: earlier records may be missing there",
                          path_.c_str(), what, ll(step_)));
}

void RunLog::print_line(const std::string& line) {
    std::printf("%s\n", line.c_str());
    const int error = flush_stdout();
    if (error == 0) return;
    const std::string kept = file_.fd >= 0 ? "its lines are in " + path_ : "without lines (--log-file keeps them)";
    const std::string text = strf("standard output is gone (%s): the run goes on, ", std::strerror(error)) + kept;
    std::fprintf(stderr, "warning: %s\n", text.c_str());
    write(to_line({{"type", "event"}, {"step", step_}, {"kind", "warning"}, {"text", text}}));
}

void RunLog::header(const OrderedJson& fields) {
    header_ = to_line(fields);
    OrderedJson all = {{"format", kLogFormat}, {"unix_time", unix_seconds()}};
    for (const auto& [name, value] : fields.items()) all[name] = value;
    record("header", step_, all);
}

void RunLog::step(const StepRecord& r, bool print) {
    step_ = r.step;
    write(to_line(step_json(r)));
    if (print) print_line(step_line(r));
}

void RunLog::record(const std::string& type, int64_t step, const OrderedJson& fields, const std::string& line) {
    step_ = std::max(step_, step);
    OrderedJson record = {{"type", type}, {"step", step}};
    record.update(fields);
    write(to_line(record));
    if (!line.empty()) print_line(line);
}

void RunLog::event(const std::string& kind, const std::string& text, bool print) {
    record("event", step_, {{"kind", kind}, {"text", text}}, print ? message_line(kind + ": " + text) : "");
    ended_ = kind == "stop" || kind == "diverged" || kind == "failed";
}

void RunLog::failed(const Error& error) {
    if (!ended_ && error.exit_code != kExitDisk) event("failed", error.what(), false);
}
