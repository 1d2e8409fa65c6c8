// Prints the findings of `doctor` as lines and as JSON.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "llmc/base/check.h"
#include "llmc/base/system/host.h"
#include "llmc/base/text.h"
#include "llmc/base/version.h"
#include "llmc/commands/doctor/doctor_items.h"

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Finding, status, text, advice, name, rank)

namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr Status kStatuses[] = {Status::kOk, Status::kWarning, Status::kFailed, Status::kNotChecked};

template <typename AnyJson> std::string dumped(const AnyJson& json) {
    return json.dump(-1, ' ', false, AnyJson::error_handler_t::replace);
}

// The finding of all ranks if they agree, else the worst with "rank 3 (node2): " and the number of ranks like it.
Finding worst_of(const std::vector<const Finding*>& by_rank, const std::vector<std::string>& hosts) {
    size_t worst = by_rank.size();
    int64_t likewise = 0, there = 0;
    for (size_t rank = 0; rank < by_rank.size(); rank++) {
        if (!by_rank[rank]) continue;
        there++;
        if (worst == by_rank.size() || by_rank[rank]->status > by_rank[worst]->status) worst = rank;
    }
    bool equal = there == static_cast<int64_t>(by_rank.size());
    for (const Finding* f : by_rank) {
        likewise += f && f->status == by_rank[worst]->status;
        equal = equal && f && f->text == by_rank[worst]->text;
    }
    Finding finding = *by_rank[worst];
    if (equal) return finding;
    finding.rank = static_cast<int>(worst);
    finding.text = strf("rank %zu (%s): ", worst, hosts[worst].c_str()) + finding.text;
    if (likewise > 1)
        finding.text += strf("; %s on %lld of %zu ranks", status_name(finding.status), ll(likewise), by_rank.size());
    return finding;
}

}  // namespace

const char* status_name(Status status) {
    switch (status) {
        case Status::kOk: return "ok";
        case Status::kNotChecked: return "not checked";
        case Status::kWarning: return "warning";
        case Status::kFailed: return "failed";
    }
    return "?";
}

Finding ok(const std::string& text) { return {.status = Status::kOk, .text = text, .advice = "", .name = ""}; }
Finding warning(const std::string& text, const std::string& advice) {
    return {.status = Status::kWarning, .text = text, .advice = advice, .name = ""};
}
Finding failed(const std::string& text, const std::string& advice) {
    return {.status = Status::kFailed, .text = text, .advice = advice, .name = ""};
}
Finding not_checked(const std::string& text, const std::string& advice) {
    return {.status = Status::kNotChecked, .text = text, .advice = advice, .name = ""};
}

std::string findings_to_json(const Findings& findings) { return dumped(nlohmann::json(findings)); }
Findings findings_from_json(const std::string& text) { return nlohmann::json::parse(text).get<Findings>(); }

Findings merged(const std::vector<Findings>& ranks, const std::vector<std::string>& hosts) {
    // An item may have several findings with the same name: the first of each rank are merged, then the second ones.
    using Key = std::pair<std::string, int>;
    std::vector<Key> order;
    std::map<Key, std::vector<const Finding*>> rows;
    for (size_t rank = 0; rank < ranks.size(); rank++) {
        std::map<std::string, int> seen;
        for (const Finding& finding : ranks[rank]) {
            const Key key{finding.name, seen[finding.name]++};
            std::vector<const Finding*>& row = rows[key];
            if (row.empty()) {
                order.push_back(key);
                row.resize(ranks.size());
            }
            row[rank] = &finding;
        }
    }
    Findings all;
    for (const Key& key : order) all.push_back(worst_of(rows[key], hosts));
    return all;
}

void Report::add(const Item& item, const Findings& findings) {
    for (const Finding& finding : findings) rows_.emplace_back(item.checks, finding);
}

int64_t Report::count(Status status) const {
    return std::count_if(rows_.begin(), rows_.end(), [&](const auto& row) { return row.second.status == status; });
}

std::string Report::line(const Finding& f) {
    std::string text = strf("%-11s  %-17s  %s", status_name(f.status), f.name.c_str(), f.text.c_str());
    if (!f.advice.empty()) text += " -> " + f.advice;
    std::replace(text.begin(), text.end(), '\n', ' ');
    return text + "\n";
}

std::string Report::last_line() const {
    const char* passed = count(Status::kWarning) > 0 ? "usable, with warnings" : "nothing failed";
    return strf("doctor: %s: %lld ok, %s, %lld failed, %lld not checked\n", failed() ? "failed" : passed,
                ll(count(Status::kOk)), count_text(count(Status::kWarning), "warning").c_str(),
                ll(count(Status::kFailed)), ll(count(Status::kNotChecked)));
}

std::string Report::json(const Patient& patient) const {
    OrderedJson counts, items = OrderedJson::array();
    for (const Status status : kStatuses) counts[status_name(status)] = count(status);
    for (const auto& [checks, f] : rows_) {
        OrderedJson item = {{"name", f.name}, {"checks", checks}, {"verdict", status_name(f.status)}, {"text", f.text},
                            {"advice", f.advice}};
        if (f.rank >= 0) item["rank"] = f.rank;
        items.push_back(item);
    }
    const OrderedJson report = {
        {"type", "doctor"}, {"commit", kBuildCommit}, {"device", patient.cuda_build ? "cuda" : "cpu"},
        {"host", host_name()}, {"ranks", patient.comm.world().ranks},
        {"verdict", failed() ? "failed" : "ok"}, {"counts", counts}, {"items", items}};
    return dumped(report) + "\n";
}
