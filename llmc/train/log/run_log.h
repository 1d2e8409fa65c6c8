// The log of a run: one line per step on standard output, and JSON lines at full precision.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "llmc/base/check.h"
#include "llmc/base/system/descriptor.h"
#include "llmc/train/log/step_record.h"

// Whether the log at `path` is of a run with this --save; true if there is no log or it does not say.
bool log_saves_in(const std::string& path, const std::string& save);

// Why there can be no log at `path`, or "". Causes: the path is a folder; a file there is not the log of a run; or its
// folder is missing, and is neither in the working folder nor under `save`, where the run would make it.
std::string log_place_error(const std::string& path, const std::string& save);

// One JSON object per line: {"type": "header" | "step" | "eval" | "hellaswag" | "fp8" | "grad_wire" | "plan" |
// "checkpoint" | "event" | "sample", "step": ..., further fields}, see docs/training.md. In evaluations the fields that
// end in "_bf16" are of the exported weights (--eval-bf16). Each record is written at once. Errors of the disk: exit 7.
// A path that the user gave may be a link to a file, which is followed; the run never follows a link at a name of its
// own. A log that another program truncates, removes or replaces begins again with the header and a warning.
class RunLog {
public:
    // path "": no file; missing directories are created. append (after a resume): removes records of steps after
    // `resume_step`, and those of that step whose type is among `again`, since the run writes them again. The old file
    // is kept under another name without append, and with `keep`, since removed records may belong to another run. Exit
    // 2 if the file is not a log, or another run writes it.
    RunLog(const std::string& path, bool append, int64_t resume_step, const std::vector<std::string>& again = {},
           bool keep = false);
    RunLog(const RunLog&) = delete;
    RunLog& operator=(const RunLog&) = delete;
    const std::string& earlier_log() const { return earlier_log_; }   // name under which the old file is kept, or ""
    void header(const nlohmann::ordered_json& fields);
    void step(const StepRecord& record, bool print);   // every step goes to the file; `print` also to stdout
    // A record of another type, which may follow records of later steps; `line` goes to stdout, if there is one. A
    // number that may not be finite is given as exact().
    void record(const std::string& type, int64_t step, const nlohmann::ordered_json& fields,
                const std::string& line = "");
    // Notes, warnings, and the end: "stop", "diverged" or "failed".
    void event(const std::string& kind, const std::string& text, bool print = true);
    // Logs that the run ends with this error, as the event "failed", unless an earlier event has said how the run ends
    // or the disk has failed.
    void failed(const Error& error);

private:
    void write(const std::string& line);   // one record, without the newline
    void follow_path();   // opens the log again if the path leads to another file, and begins again what was truncated
    // A line of standard output. If that is gone, the run goes on: says so once, on standard error and in the file.
    void print_line(const std::string& line);

    Descriptor file_;
    int64_t bytes_ = 0;   // the least that the file has unless it was truncated
    std::string path_, earlier_log_;
    std::string header_;   // the fields that header() got
    bool ended_ = false;   // the last event says how the run ended
    int64_t step_ = 0;                     // of the latest record; also that of header and events
};

// Makes generated text safe for a terminal: valid UTF-8, with control characters except newline and tab as dots.
std::string screen_text(const std::string& text);
