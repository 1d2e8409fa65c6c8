#include "llmc/commands/main.h"

#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "llmc/base/check.h"
#include "llmc/base/nearest.h"
#include "llmc/base/system/files.h"
#include "llmc/base/system/process_limits.h"
#include "llmc/base/system/standard_streams.h"
#include "llmc/base/text.h"
#include "llmc/base/version.h"
#include "llmc/commands/command.h"
#include "llmc/commands/doctor/doctor.h"
#include "llmc/fault/heartbeat.h"
#include "llmc/fault/shutdown.h"
#include "llmc/ops/device.h"
#include "llmc/parallel/comm/comm_mpi.h"
#include "llmc/parallel/comm/comm_nccl_api.h"

namespace {

struct Command {
    const char* name;
    // The call and the communicator outlive the job.
    Job (*parse)(const Invocation& call, Comm& comm);
    bool takes_ranks;   // can be distributed, by mpirun or srun
};
constexpr Command kTrain = {"", parse_train, true};
constexpr Command kCommands[] = {{"plan", parse_plan, true}, {"bench", parse_bench, true},
                                 {"doctor", parse_doctor, true}, {"generate", parse_generate, false}};

const Command& command_of(int argc, const char* const* argv) {
    for (const Command& command : kCommands)
        if (argc > 1 && std::strcmp(argv[1], command.name) == 0) return command;
    // A first word that begins with a letter is taken for a command; of others, the option parser says what is wrong.
    const std::string word = argc > 1 ? argv[1] : "";
    const bool like_one = !word.empty() && std::isalpha(static_cast<unsigned char>(word[0]));
    if (!like_one || word.find('=') != std::string::npos) return kTrain;
    std::vector<std::string> names;
    for (const Command& command : kCommands) names.push_back(command.name);
    const std::string near = nearest(word, names);
    REQUIRE(!is_regular_file(word), "no command %s: a file of options is named with --config %s", word.c_str(),
            word.c_str());
    REQUIRE(edit_distance(word, near) > 2, "no command %s: did you mean %s?", word.c_str(), near.c_str());
    FAIL(kExitBadInput, "no command %s: there are plan, bench, doctor and generate; training needs no command, "
         "only options", word.c_str());
}

// The text of --version: commit, compiler, device and libraries.
std::string version_text(const std::string& family) {
#ifdef __clang__
    const char* compiler = __VERSION__;   // "Clang 16.0.6"
#else
    const char* compiler = "g++ " __VERSION__;
#endif
    const DeviceInfo info = device::device_info(-1);
    const bool cuda = !info.toolkit.empty();
    std::string text = "llm.fp8 train_" + family + ", commit " + kBuildCommit + "\n" + "compiler   " + compiler + "\n";
    text += "device     " + (cuda ? "CUDA " + info.toolkit + (info.sm90a_code ? ", with code for sm_90a" : "")
                                 : std::string("CPU")) + "\n";
    const std::string mpi = mpi_library_text();
    text += "libraries  " + (cuda ? info.matmul_library + ", " : "") + (mpi.empty() ? "no OpenMPI" : mpi);
    nccl_api::Loaded nccl;
    const bool found = cuda && nccl_api::load(nccl_api::kLibrary, nccl).empty();
    if (cuda) text += found ? ", NCCL " + nccl_api::version_text(nccl.version) : ", no NCCL";
    return text + strf(", nlohmann/json %d.%d.%d\n", NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR,
                       NLOHMANN_JSON_VERSION_PATCH);
}

// Publishes the exit code and waits until the ranks' watchdogs, which poll several times per second, have seen it. What
// was printed is written first, since mpirun kills this rank as soon as another one has left with an error.
int leave(const Comm& comm, int exit_code) {
    constexpr int kWatchdogMs = 700;
    std::fflush(stdout);
    write_outcome(exit_code);
    if (exit_code == kExitOk || comm.world().ranks == 1) return exit_code;
    post_end(exit_code);
    std::this_thread::sleep_for(std::chrono::milliseconds(kWatchdogMs));
    return exit_code;
}

int run(int argc, const char* const* argv, const std::string& family, const std::vector<std::string>& notes) {
    for (int i = 1; i < argc; i++) {
        if (std::strcmp(argv[i], "--version") != 0) continue;
        std::printf("%s", version_text(family).c_str());
        return kExitOk;
    }
    Invocation call{.family = family, .words = {argv, argv + argc}, .line = shell_command({argv, argv + argc}),
                    .notes = notes};
    std::unique_ptr<Comm> comm;
    try {
        check_process_limits();
        const Command& command = command_of(argc, argv);
        if (*command.name) call.words.erase(call.words.begin() + 1);
        else catch_stop_signals();   // the other commands have nothing to save
        comm = command.takes_ranks ? open_comm() : open_single();
        if (!comm->root() && !std::freopen("/dev/null", "w", stdout)) FAIL(kExitBug, "/dev/null cannot be opened");
        const Job job = command.parse(call, *comm);
        if (!job) return kExitOk;
        try {
            return leave(*comm, job());
        } catch (const std::exception& error) {
            // Unwinding would close the device and wait for collectives that other ranks no longer finish.
            if (comm->world().ranks == 1) throw;
            return end_with_error(comm.get(), error);
        }
    } catch (const std::exception& error) {
        return end_with_error(comm.get(), error);
    }
}

}  // namespace

int run_command(int argc, const char* const* argv, const std::string& family) {
    start_with_passive_threads(argv);
    const int code = run(argc, argv, family, prepare_standard_streams());
    // A run has flushed everything before. For other commands a closed pipe (| head) is no failure.
    const int error = flush_stdout();
    if (error == 0 || error == EPIPE || code != kExitOk) return code;
    const std::string text = strf("standard output cannot be written: %s", std::strerror(error));
    return end_with_error(nullptr, text.c_str(), kExitDisk);
}
