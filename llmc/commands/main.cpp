#include "llmc/commands/main.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>

#include "llmc/commands/bench.h"
#include "llmc/commands/doctor.h"
#include "llmc/commands/generate.h"
#include "llmc/commands/train.h"
#include "llmc/fault/heartbeat.h"
#include "llmc/fault/shutdown.h"

namespace {

struct Command {
    const char* name;
    // The call and the communicator outlive the job.
    Job (*parse)(const Invocation& call, Comm& comm);
    bool takes_ranks;    // of mpirun or srun; else it is one process
    bool ends_by_step;   // where signals ask it to stop
};
constexpr Command kTrain = {"", parse_train, true, true};
constexpr Command kCommands[] = {{"plan", parse_plan, true, true}, {"bench", parse_bench, true, true},
                                 {"doctor", parse_doctor, true, false}, {"generate", parse_generate, false, false}};

const Command& command_of(int argc, const char* const* argv) {
    for (const Command& command : kCommands)
        if (argc > 1 && std::strcmp(argv[1], command.name) == 0) return command;
    return kTrain;
}

// The launch wrapper learns the exit code from the ranks' watchdogs, which look several times a second.
int leave(const Comm& comm, int exit_code) {
    constexpr int kHearMs = 700;
    write_outcome(exit_code);
    if (exit_code == kExitOk || comm.world().ranks == 1) return exit_code;
    post_end(exit_code);
    std::this_thread::sleep_for(std::chrono::milliseconds(kHearMs));
    return exit_code;
}

}  // namespace

int run_command(int argc, const char* const* argv, const std::string& family) {
    const Command& command = command_of(argc, argv);
    Invocation call{.family = family, .words = {argv, argv + argc}, .line = ""};
    for (int i = 0; i < argc; i++) call.line += (i ? " " : "") + std::string(argv[i]);
    if (*command.name) call.words.erase(call.words.begin() + 1);
    std::unique_ptr<Comm> comm;
    if (command.ends_by_step) catch_stop_signals();
    try {
        comm = command.takes_ranks ? open_comm() : open_single();
        if (!comm->root() && !std::freopen("/dev/null", "w", stdout)) FAIL(kExitBug, "/dev/null cannot be opened");
        const Job job = command.parse(call, *comm);
        if (!job) return kExitOk;
        try {
            return leave(*comm, job());
        } catch (const std::exception& error) {
            // On its way up the device would be closed, which waits for what other ranks do not finish any more.
            if (comm->world().ranks == 1) throw;
            return end_with_error(comm.get(), error);
        }
    } catch (const std::exception& error) {
        return end_with_error(comm.get(), error);
    }
}
