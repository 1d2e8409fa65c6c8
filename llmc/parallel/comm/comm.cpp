#include "llmc/parallel/comm/comm.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <thread>

#include "llmc/base/check.h"
#include "llmc/base/system/host.h"
#include "llmc/base/system/process_limits.h"
#include "llmc/fault/heartbeat.h"
#include "llmc/fault/rank_view.h"
#include "llmc/fault/watchdog.h"
#include "llmc/parallel/comm/comm_monitored.h"
#include "llmc/parallel/comm/comm_mpi.h"
#include "llmc/parallel/comm/comm_nccl.h"

namespace {

constexpr int kNoticeMs = 700;   // until the watchdogs of other hosts have seen that a rank ends

int number_of(const char* variable) {
    const char* text = std::getenv(variable);
    return text ? std::atoi(text) : 0;
}

// Launchers of PyTorch tell each process its rank in variables, and MPI nothing: each process would train alone.
void refuse_foreign_launchers() {
    struct Launcher {
        const char *size, *rank, *name;
    };
    for (const Launcher& launcher : {Launcher{"WORLD_SIZE", "RANK", "torchrun, accelerate or deepspeed"},
                                     Launcher{"HOROVOD_SIZE", "HOROVOD_RANK", "horovodrun"},
                                     Launcher{"MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MVAPICH"}})
        REQUIRE(number_of(launcher.size) <= 1 || !std::getenv(launcher.rank), "%s is %d: %s started this process, but "
                "ranks are started by MPI: scripts/launch/launch_mpi.sh -np %d ./train_... (to train on one rank: env "
                "-u %s)", launcher.size, number_of(launcher.size), launcher.name, number_of(launcher.size),
                launcher.size);
}

// The text around the first difference.
std::string excerpts(const std::string& theirs, const std::string& ours) {
    size_t at = 0;
    while (at < theirs.size() && at < ours.size() && theirs[at] == ours[at]) at++;
    const size_t begin = at > 30 ? at - 30 : 0;
    auto excerpt = [&](const std::string& text) {
        std::string part = text.substr(std::min(begin, text.size()), 60);
        for (char& c : part)
            if (c == '\n') c = ' ';
        return part;
    };
    return "\"" + excerpt(theirs) + "\" against \"" + excerpt(ours) + "\"";
}

class SingleComm : public Comm {
public:
    SingleComm() : Comm({}) {}
    std::vector<std::string> gather(const std::string& mine) override { return {mine}; }
    std::unique_ptr<Comm> subgroup(const std::vector<int>&) override { return open_single(); }
    void sum(Ctx&, Tensor) override {}
    void max(Ctx&, uint32_t*, int64_t) override {}
    void reduce_scatter(Ctx&, Tensor) override {}
    void all_gather(Ctx&, Tensor) override {}
    void all_to_all(Ctx& ctx, Tensor out, Tensor in) override {
        device::copy_on_device(ctx, out.data, in.data, in.bytes());
    }
    [[noreturn]] void abort(int exit_code) override { std::exit(exit_code); }
};

}  // namespace

std::unique_ptr<Comm> open_single() { return std::make_unique<SingleComm>(); }

#if !LLMC_MPI
std::unique_ptr<Comm> open_comm() {
    refuse_foreign_launchers();
    for (const char* size : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"})
        REQUIRE(number_of(size) <= 1, "%s is %d, and this executable was built without OpenMPI: install it (Debian's "
                "libopenmpi-dev) and run make again", size, number_of(size));
    return open_single();
}
#else
// If the launcher does not support OpenMPI, each process is the only rank of its own MPI_COMM_WORLD.
static void require_all_met(int ranks) {
    const bool openmpi = std::getenv("OMPI_COMM_WORLD_SIZE");
    for (const char* size : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
        if (openmpi && size[0] == 'S') continue;   // counts the daemons from which mpirun started the ranks
        REQUIRE(ranks > 1 || number_of(size) <= 1, "%s is %d, but each process finds itself alone: the launcher is not "
                "of the OpenMPI that this executable was built with; use its mpirun, or srun --mpi=pmix", size,
                number_of(size));
    }
}

std::unique_ptr<Comm> open_comm() {
    const bool launched = std::getenv("OMPI_COMM_WORLD_SIZE") || std::getenv("PMIX_RANK") || std::getenv("PMI_RANK");
    if (launched) {
        std::unique_ptr<Comm> mpi = open_mpi();
        require_all_met(mpi->world().ranks);
        return monitored(device::device_info(-1).toolkit.empty() ? std::move(mpi) : open_nccl(std::move(mpi)));
    }
    const int tasks = number_of("SLURM_STEP_NUM_TASKS");
    REQUIRE(tasks <= 1, "srun started %d tasks that do not know of each other: use srun --mpi=pmix", tasks);
    refuse_foreign_launchers();
    return open_single();
}
#endif

std::vector<int64_t> Comm::sum(const std::vector<int64_t>& mine) {
    std::vector<int64_t> total(mine.size());
    for (const std::vector<int64_t>& theirs : gather_values(*this, mine)) {
        CHECK(theirs.size() == mine.size(), "ranks sum different numbers of values");
        for (size_t i = 0; i < total.size(); i++) total[i] += theirs[i];
    }
    return total;
}

int64_t Comm::shard_elems(const Tensor& shards) const {
    CHECK(shards.elems % world_.ranks == 0, "%lld elements in %d shards", (long long)shards.elems, world_.ranks);
    return shards.elems / world_.ranks;
}

Tensor Comm::sent_to_others(const Tensor& in, const Counts& sent) const {
    CHECK(sent.size() == static_cast<size_t>(world_.ranks), "%zu counts for %d ranks", sent.size(), world_.ranks);
    return {nullptr, in.dtype, std::accumulate(sent.begin(), sent.end(), int64_t{0})};
}

void Comm::check_exchange(const Tensor& out, const Tensor& in, int peer) const {
    CHECK(out.dtype == in.dtype && out.elems == in.elems && peer != world_.rank, "exchange of %lld %s for %lld %s "
          "with rank %d", (long long)in.elems, dtype_name(in.dtype), (long long)out.elems, dtype_name(out.dtype), peer);
}

std::string rank_difference(Comm& comm, const std::string& name, const std::string& mine) {
    const std::vector<std::string> all = comm.gather(mine);
    const auto other = std::find_if(all.begin(), all.end(), [&](const auto& text) { return text != all[0]; });
    if (other == all.end()) return "";
    const auto rank = static_cast<size_t>(other - all.begin());
    const std::vector<std::string> hosts = comm.gather(host_name());
    return strf("rank %zu (host %s) has another %s than rank 0 (host %s): %s", rank, hosts[rank].c_str(), name.c_str(),
                hosts[0].c_str(), excerpts(*other, all[0]).c_str());
}

void require_same(Comm& comm, const std::vector<std::pair<std::string, std::string>>& items) {
    for (const auto& [name, mine] : items) {
        const std::string difference = rank_difference(comm, name, mine);
        REQUIRE(difference.empty(), "%s", difference.c_str());
    }
}

std::string first_error(Comm& comm, const std::string& mine) {
    const std::vector<std::string> all = comm.gather(mine);
    for (size_t rank = 0; rank < all.size(); rank++)
        if (!all[rank].empty()) return rank == 0 ? all[0] : strf("%s (on rank %zu)", all[rank].c_str(), rank);
    return "";
}

int end_with_error(Comm* comm, const char* what, int exit_code) {
    const bool several = comm && comm->world().ranks > 1;
    if (several) yield_to_watchdog(exit_code == kExitPeerLost);
    std::fflush(stdout);
    if (several && comm->world().run_rank != 0) std::this_thread::sleep_for(std::chrono::seconds(2));
    const std::string who = several ? strf("rank %d: ", comm->world().run_rank) : "";
    const std::string where = several && exit_code == kExitPeerLost ? "; it is in " + place_text(own_post()) : "";
    // If standard error is a pipe that nobody reads, the other stream gets the line.
    const std::string line = "error: " + who + message_line(what) + where + "\n";
    if (claim_last_line() && std::fputs(line.c_str(), stderr) < 0) {
        std::fputs(line.c_str(), stdout);
        std::fflush(stdout);
    }
    write_outcome(exit_code);
    if (several) {
        post_end(exit_code);
        std::this_thread::sleep_for(std::chrono::milliseconds(kNoticeMs));
        comm->abort(exit_code);
    }
    return exit_code;
}
int end_with_error(Comm* comm, const std::exception& error) {
    const Error said = as_error(error);
    return end_with_error(comm, said.what(), said.exit_code);
}
