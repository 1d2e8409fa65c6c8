#include "llmc/commands/doctor/check_result.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "llmc/base/check.h"

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CheckResult, status, text, advice, name, rank)

const char* status_name(Status status) {
    constexpr const char* kNames[] = {"ok", "not checked", "warning", "failed"};
    return kNames[static_cast<int>(status)];
}

std::string CheckResult::line() const {
    std::string line = strf("%-11s  %-17s  %s", status_name(status), name.c_str(), text.c_str());
    if (!advice.empty()) line += " -> " + advice;
    std::replace(line.begin(), line.end(), '\n', ' ');
    return line + "\n";
}

std::string results_to_json(const CheckResults& results) {
    return nlohmann::json(results).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

CheckResults merged(const std::vector<std::string>& ranks, const std::vector<std::string>& hosts) {
    struct Entry {
        CheckResult first;
        int last;                      // the last rank that has it
        size_t ranks = 1, equal = 1;   // with a result of this name and status, and with this text
    };
    std::vector<Entry> entries;
    for (size_t rank = 0; rank < ranks.size(); rank++)
        for (CheckResult& result : nlohmann::json::parse(ranks[rank]).get<CheckResults>()) {
            result.rank = static_cast<int>(rank);
            const auto find = [&](bool same_text) {
                return std::find_if(entries.begin(), entries.end(), [&](const Entry& e) {
                    return e.first.name == result.name && e.first.status == result.status && e.last < result.rank
                           && (!same_text || e.first.text == result.text);
                });
            };
            const auto same = find(true), like = same != entries.end() ? same : find(false);
            if (like == entries.end()) entries.push_back({result, result.rank});
            else like->last = result.rank, like->ranks++, like->equal += same != entries.end();
        }
    CheckResults all;
    for (auto& [result, last, likewise, equal] : entries) {
        if (equal == ranks.size()) result.rank = -1;
        else result.text = strf("rank %d (%s): ", result.rank, hosts[static_cast<size_t>(result.rank)].c_str())
                           + result.text;
        if (equal < ranks.size() && likewise > 1)
            result.text += strf("; %s on %zu of %zu ranks", status_name(result.status), likewise, ranks.size());
        all.push_back(result);
    }
    return all;
}
