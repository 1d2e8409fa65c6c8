// The ranks of a run and what they exchange. One process is one rank. comm_single.cpp is a group of one and needs no
// library; comm_mpi.cpp is one of several, started by mpirun or srun; comm_nccl.cpp adds to it what GPUs exchange.
//
// Every rank makes the same calls in the same order. Sums are taken in a fixed order, that of the ranks on the CPU and
// NCCL's own on GPUs, so that all ranks get the same bits and a run repeats itself.
#pragma once
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "llmc/ops/device.h"

struct World {
    int rank = 0, ranks = 1;
    int local_rank = 0, local_ranks = 1;   // among those of the same host
};

class Comm {
public:
    virtual ~Comm() = default;
    const World& world() const { return world_; }
    bool root() const { return world_.rank == 0; }

    // Host memory, blocking. gather: the texts of all ranks, by rank, on every rank.
    virtual std::vector<std::string> gather(const std::string& mine) = 0;
    // Sums over the ranks.
    std::vector<int64_t> sum(const std::vector<int64_t>& mine);

    // Once the device is open, before the first of what follows: connects the devices of all ranks. What by, a line for
    // the log, "" if nothing is needed. Ends all ranks if they have not met within the seconds.
    virtual std::string connect(Ctx&, int /*seconds*/) { return ""; }

    // Device memory, ordered on ctx.stream; nothing is done during a rehearsal.
    // values (fp32, bf16, fp64, int32): in this rank's, = the sum; bf16 is added in fp32 and rounded once.
    virtual void sum(Ctx& ctx, Tensor values) = 0;
    // values (count of them): in this rank's, = the largest.
    virtual void max(Ctx& ctx, uint32_t* values, int64_t count) = 0;
    // Of `ranks` equal blocks, block r is rank r's.
    // blocks (fp32): in this rank's contributions, own block = the sum over the ranks; the others are left undefined.
    virtual void reduce_scatter(Ctx& ctx, Tensor blocks) = 0;
    // blocks (any dtype): in the own one, = those of all ranks.
    virtual void all_gather(Ctx& ctx, Tensor blocks) = 0;
    // Block r of out (any dtype) = block `rank` of rank r's in; the two do not overlap.
    virtual void all_to_all(Ctx& ctx, Tensor out, Tensor in) = 0;
    // out (any dtype) = in of rank `peer`, another one, which makes the same call towards this one. Only they call it.
    virtual void exchange(Ctx&, Tensor /*out*/, Tensor /*in*/, int peer) {
        FAIL(kExitBug, "no exchange with rank %d here", peer);
    }

    // Tells the watchdog when the device comes past here: where it has long been without a collective.
    virtual void mark_progress(Ctx&) {}

    // Any thread may call these two.
    // What became known to have failed after it was started on the device, "" for nothing.
    virtual std::string late_error() { return ""; }
    // Ends what waits on the device for a rank that does not come; nothing may follow there. May not return if the
    // device is lost.
    virtual void cut() {}

    // Ends all ranks at once with this exit code.
    [[noreturn]] virtual void abort(int exit_code) = 0;

protected:
    explicit Comm(const World& world) : world_(world) {}

private:
    const World world_;
};

// One rank.
std::unique_ptr<Comm> open_single();

// The same ranks on GPUs: what lies in host memory still goes through `host`.
std::unique_ptr<Comm> open_nccl(std::unique_ptr<Comm> host);

// The same ranks, each with a row on the heartbeat table and a watchdog (watchdog.h); one rank as it is.
std::unique_ptr<Comm> watched(std::unique_ptr<Comm> comm);

// The ranks that mpirun or srun started, on this build's device; one rank where neither did. Exit 2 where several were
// started and this build or the launcher cannot connect them.
std::unique_ptr<Comm> open_comm();

// The MPI library that this executable runs with ("Open MPI v4.1.4"), "" if it was built without.
std::string mpi_library_text();

// Exit 2, naming the first rank that differs from rank 0 and in what: each item is what it is called and this rank's
// value, which must be the same on all.
void require_same(Comm& comm, const std::vector<std::pair<std::string, std::string>>& items);

// The last words of a rank: one line on standard error; with several ranks (comm may be null before they met), all end
// with this exit code. Every rank may have come to the same end, so rank 0 speaks first. Returns exit_code where there
// is one rank.
int end_with_error(Comm* comm, const char* what, int exit_code);
// With the exit code of an Error; any other exception is a bug.
int end_with_error(Comm* comm, const std::exception& error);
