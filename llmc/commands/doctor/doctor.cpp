#include "llmc/commands/doctor/doctor.h"

#include <algorithm>
#include <cstdio>
#include <memory>

#include "llmc/base/check.h"
#include "llmc/base/nearest.h"
#include "llmc/base/system/host.h"
#include "llmc/base/system/side_process.h"
#include "llmc/commands/doctor/doctor_items.h"
#include "llmc/fault/watchdog.h"

namespace {

constexpr int kExitItemFailed = 1;
constexpr double kTimeoutSeconds = 20;   // without progress; ten times that until ranks are connected

const std::vector<Item> kItems = {
    {"build", "commit, device and libraries of this executable", look_at_build},
    {"GPU", "the device of each rank: model, compute capability, memory, and that it can be opened", look_at_gpu},
    {"driver", "whether the driver supports the CUDA version of the build", look_at_driver},
    {"cuBLASLt", "the matmul library's version and the recipes it enables", look_at_matmul_library},
    {"recipe", "whether GPU, driver and library can run each FP8 recipe", look_at_recipes},
    {"GPU state", "clocks, power, persistence, MIG and ECC, as NVML reports them", look_at_gpu_state},
    {"OpenMPI", "the MPI library, for distributed runs", look_at_mpi},
    {"NCCL", "the NCCL library, for distributed runs on GPUs", look_at_nccl},
    {"ranks", "number of ranks and hosts, and that all run this executable", look_at_ranks},
    {"FP8 matmuls", "a linear layer in FP8 with each recipe, forward and backward, against the CPU and double "
                    "precision",
     look_at_fp8_matmuls, true},
    {"attention", "attention, forward and backward, against double precision", look_at_attention, true},
    {"FP8 attention", "the forward of --fp8-attention, against the CPU and double precision",
     look_at_fp8_attention, true},
    {"collectives", "all-reduce, reduce-scatter, all-gather and all-to-all against sums on the host",
     look_at_collectives, true},
    {"links", "rates of collectives and of each pair of ranks", look_at_links},
    {"environment", "variables that the trainer, CUDA or NCCL reads, and those that guides recommend",
     look_at_environment},
    {"disk", "free space for --save", look_at_disk},
    {"shared memory", "size of /dev/shm", look_at_shared_memory},
    {"locked memory", "the limit of locked memory", look_at_locked_memory},
    {"open files", "the limit of open files", look_at_open_files},
    {"processors", "processors that this process may use", look_at_processors},
};

std::vector<std::string> names_to_corrupt() {
    std::vector<std::string> names;
    for (const Item& item : kItems)
        if (item.can_be_corrupted) names.push_back(item.name);
    return names;
}

std::string help_text() {
    std::string text =
        "Usage: train_llama doctor [--save DIR] [--json] [--html FILE]   train_gpt2 doctor is the same\n"
        "       mpirun -np N train_llama doctor                also checks communication between ranks\n\n"
        "  --save DIR     check the folder in which checkpoints will be saved\n"
        "  --json         print the report as JSON\n"
        "  --html FILE    write the report as a web page, too\n"
        "  --corrupt ITEM change one element of this item's result, to see that the item then fails:\n"
        "                 FP8 matmuls, attention, FP8 attention or collectives\n\n"
        "Exit codes: 0 nothing failed, 1 an item failed, 2 bad option, or --corrupt of an item that is not checked,\n"
        "6 a rank was lost.\n\nItems:\n";
    for (const Item& item : kItems) text += strf("  %-14s %s\n", item.name, item.checks);
    return text;
}

void check_corrupt(const std::string& name) {
    const std::vector<std::string> names = names_to_corrupt();
    for (const std::string& known : names)
        if (name == known) return;
    FAIL(kExitBadInput, "--corrupt %s: no such item; did you mean %s?", name.c_str(), nearest(name, names).c_str());
}

// Checks all items and prints each line as soon as all ranks have reported it.
int examine(Patient& patient) {
    Comm& comm = patient.comm;
    const std::vector<std::string> hosts = comm.gather(host_name());
    Report report;
    std::string intact;   // the report of --corrupt's item if it did not fail
    for (const Item& item : kItems) {
        std::vector<Findings> ranks;
        for (const std::string& text : comm.gather(findings_to_json(look_at(item, patient))))
            ranks.push_back(findings_from_json(text));
        const Findings findings = merged(ranks, hosts);
        report.add(item, findings);
        const auto fails = [](const Finding& finding) { return finding.status == Status::kFailed; };
        if (patient.corrupted(item.name) && std::none_of(findings.begin(), findings.end(), fails))
            intact = findings[0].text + (findings[0].advice.empty() ? "" : "; " + findings[0].advice);
        if (!patient.options.json)
            for (const Finding& finding : findings) std::fputs(Report::line(finding).c_str(), stdout);
        std::fflush(stdout);
    }
    std::fputs((patient.options.json ? report.json(patient) : report.last_line()).c_str(), stdout);
    std::fflush(stdout);
    if (comm.root() && !patient.options.html.empty()) {
        const std::string error =
            SideProcess::feed("report", {"-", "--out", patient.options.html}, report.json(patient));
        REQUIRE(error.empty(), "--html %s: %s", patient.options.html.c_str(), error.c_str());
    }
    // An item that was not checked must not look as if its corruption had gone unnoticed.
    REQUIRE(intact.empty(), "--corrupt %s has no effect: %s", patient.options.corrupt.c_str(), intact.c_str());
    return report.failed() ? kExitItemFailed : kExitOk;
}

}  // namespace

const std::vector<Item>& doctor_items() { return kItems; }

Patient::~Patient() {
    if (opened) device::device_close(ctx);
}

DoctorOptions doctor_options(std::vector<std::string> words) {
    for (std::string& word : words) {
        if (word != "--spoil" && !word.starts_with("--spoil=")) continue;
        std::fprintf(stderr, "note: --spoil is now --corrupt; the old name will go with the next release\n");
        word.replace(0, 7, "--corrupt");
    }
    DoctorOptions options;
    read_command_options(words, {"doctor",
                                 {{"--save", &options.save}, {"--html", &options.html},
                                  {"--corrupt", &options.corrupt}},
                                 {{"--json", &options.json}, {"--help", &options.help}}});
    if (!options.corrupt.empty()) check_corrupt(options.corrupt);
    return options;
}

Findings look_at(const Item& item, Patient& patient) {
    Findings findings;
    try {
        findings = item.look(patient);
    } catch (const std::exception& error) {
        findings = {failed(error.what(), "")};
    }
    for (Finding& finding : findings)
        if (finding.name.empty()) finding.name = item.name;
    return findings;
}

Job parse_doctor(const Invocation& call, Comm& comm) {
    const DoctorOptions options = doctor_options({call.words.begin() + 1, call.words.end()});
    if (options.help) {
        std::printf("%s", help_text().c_str());
        return {};
    }
    set_comm_timeout(kTimeoutSeconds);
    const auto patient = std::make_shared<Patient>(comm);
    patient->options = options;
    patient->info = device::device_info(-1);
    patient->cuda_build = !patient->info.toolkit.empty();
    return [patient] { return examine(*patient); };
}
