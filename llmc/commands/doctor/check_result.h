// What a check of `doctor` found, on one rank or on all of them.
#pragma once
#include <string>
#include <vector>

enum class Status { kOk, kNotChecked, kWarning, kFailed };
const char* status_name(Status status);   // "ok", "not checked", "warning", "failed"

struct CheckResult {
    Status status = Status::kOk;
    std::string text = {};     // one line
    std::string advice = {};   // what to do about it, "" for nothing
    std::string name = {};     // "": that of the check
    int rank = -1;             // the rank it is about, -1: all ranks

    std::string line() const;
};
using CheckResults = std::vector<CheckResult>;

// Merges the results of all ranks (results_to_json) by name and status. A result that is not the same on all ranks
// names the first rank that has it, with its host, and how many ranks have one with this status.
CheckResults merged(const std::vector<std::string>& ranks, const std::vector<std::string>& hosts);
std::string results_to_json(const CheckResults& results);
