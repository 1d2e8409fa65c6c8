#include "llmc/commands/doctor/doctor.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>

#include "llmc/base/check.h"
#include "llmc/base/system/host.h"
#include "llmc/base/text.h"
#include "llmc/base/version.h"
#include "llmc/fault/watchdog.h"

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CheckResult, status, text, advice, name, rank)

namespace {

std::string help_text() {
    std::string text =
        "Usage: train_llama doctor [--save DIR] [--json]        train_gpt2 doctor is the same\n"
        "       mpirun -np N train_llama doctor                 also checks communication between ranks\n\n"
        "  --save DIR   check the folder in which checkpoints will be saved\n"
        "  --json       print the report as JSON\n\n"
        "Exit codes: 0 nothing failed, 1 a check failed, 2 bad option, 6 a rank was lost.\n\nChecks:\n";
    for (const Doctor::Check& check : Doctor::checks()) text += strf("  %-14s %s\n", check.name, check.what);
    return text;
}

const char* status_name(Status status) {
    constexpr const char* kNames[] = {"ok", "not checked", "warning", "failed"};
    return kNames[static_cast<int>(status)];
}

}  // namespace

std::string CheckResult::line(bool colour) const {
    constexpr const char* kColours[] = {"32", "2", "33", "31"};   // green, dim, yellow, red
    std::string line = strf("%-11s", status_name(status));
    if (colour) line = strf("\x1b[%sm%s\x1b[0m", kColours[static_cast<int>(status)], line.c_str());
    line += strf("  %-17s  %s", name.c_str(), text.c_str());
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
            Entry* like = nullptr;   // the first of this text or, without one, of another
            for (Entry& e : entries)
                if (e.first.name == result.name && e.first.status == result.status && e.last < result.rank
                    && (!like || (like->first.text != result.text && e.first.text == result.text)))
                    like = &e;
            if (!like) entries.push_back({result, result.rank});
            else like->last = result.rank, like->ranks++, like->equal += like->first.text == result.text;
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

const std::vector<Doctor::Check>& Doctor::checks() {
    static const std::vector<Check> rows = {
        {"build", "commit, device and libraries of this executable", &Doctor::check_build},
        {"GPU", "the device of each rank, and that it can be opened", &Doctor::check_gpu},
        {"driver", "whether the driver supports the CUDA version of the build", &Doctor::check_driver},
        {"GPU state", "clocks, power, persistence, MIG and ECC, as NVML reports them", &Doctor::check_gpu_state},
        {"NCCL", "the NCCL library, for distributed runs on GPUs", &Doctor::check_nccl},
        {"ranks", "number of ranks and hosts, and that all run this executable", &Doctor::check_ranks},
        {"FP8", "each FP8 recipe: what it needs, and casts and matmuls against the CPU", &Doctor::check_fp8},
        {"experts", "matmuls of experts in BF16 and FP8, against the CPU", &Doctor::check_experts},
        {"attention", "attention, forward and backward, against the CPU", &Doctor::check_attention},
        {"collectives", "collectives against sums on the host", &Doctor::check_collectives},
        {"links", "rates of collectives and of each pair of ranks", &Doctor::check_links},
        {"environment", "variables that change a run, or that guides recommend", &Doctor::check_environment},
        {"disk", "free space for --save", &Doctor::check_disk},
        {"shared memory", "size of /dev/shm", &Doctor::check_shared_memory},
    };
    return rows;
}

CheckResults Doctor::results_of(const Check& check) {
    CheckResults results;
    try {
        results = (this->*check.run)();
    } catch (const std::exception& error) {
        results = {{Status::kFailed, error.what()}};
    }
    for (CheckResult& result : results)
        if (result.name.empty()) result.name = check.name;
    return results;
}

int Doctor::run(bool json) {
    const std::vector<std::string> hosts = comm_.gather(host_name());
    const bool colour = ::isatty(STDOUT_FILENO) && !std::getenv("NO_COLOR");
    int64_t counts[4] = {};   // by Status
    nlohmann::ordered_json items = nlohmann::ordered_json::array();
    for (const Check& check : checks()) {
        for (const CheckResult& result : merged(comm_.gather(results_to_json(results_of(check))), hosts)) {
            counts[static_cast<int>(result.status)]++;
            items.push_back({{"name", result.name}, {"checks", check.what}, {"verdict", status_name(result.status)},
                             {"text", result.text}, {"advice", result.advice}});
            if (result.rank >= 0) items.back()["rank"] = result.rank;
            if (!json) std::fputs(result.line(colour).c_str(), stdout);
        }
        std::fflush(stdout);
    }
    const auto [ok, not_checked, warnings, failed] = counts;
    const char* verdict = failed > 0 ? "failed" : warnings > 0 ? "usable, with warnings"
                        : not_checked > 0 ? "nothing failed, not everything was checked" : "ok";
    if (json) {
        const nlohmann::ordered_json report = {
            {"type", "doctor"}, {"commit", kBuildCommit}, {"device", cuda_build_ ? "cuda" : "cpu"},
            {"host", host_name()}, {"ranks", comm_.world().ranks}, {"verdict", verdict},
            {"counts", {{"ok", ok}, {"warning", warnings}, {"failed", failed}, {"not checked", not_checked}}},
            {"items", items}};
        std::puts(report.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace).c_str());
    } else {
        std::printf("doctor: %s: %lld ok, %s, %lld failed, %lld not checked\n", verdict, ll(ok),
                    count_text(warnings, "warning").c_str(), ll(failed), ll(not_checked));
    }
    return failed > 0 ? 1 : kExitOk;
}

Job parse_doctor(const Invocation& call, Comm& comm) {
    std::string save;
    bool json = false, help = false;
    read_command_options({call.words.begin() + 1, call.words.end()},
                         {"doctor", {{"--save", &save}}, {{"--json", &json}, {"--help", &help}}});
    if (help) {
        std::printf("%s", help_text().c_str());
        return {};
    }
    set_comm_timeout(20);   // seconds without progress; ten times that until ranks are connected
    const auto doctor = std::make_shared<Doctor>(comm, save);
    return [doctor, json] { return doctor->run(json); };
}
