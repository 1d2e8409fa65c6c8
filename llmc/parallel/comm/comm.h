// The ranks of a run and their collectives. One process is one rank. open_single() is a communicator of one rank and
// needs no library; comm_mpi.h connects the ranks that mpirun or srun started; comm_nccl.h adds collectives on GPUs.
//
// Every rank makes the same calls in the same order. Sums have a fixed order, by rank on the CPU and NCCL's on GPUs, so
// all ranks get the same bits and a run is reproducible.
#pragma once
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "llmc/ops/device.h"

struct World {
    int rank = 0, ranks = 1;
    int local_rank = 0, local_ranks = 1;   // on the same host
    int run_rank = 0;                      // the rank in the whole run, even in a subgroup; for messages
};

using Counts = std::vector<int64_t>;   // of elements, by rank

// Names the purpose of the collectives on ctx in this scope, for hang reports: "reduce layers.3".
class CollectivePurpose {
public:
    CollectivePurpose(Ctx& ctx, std::string text) : ctx_(ctx), outer_(ctx.purpose), text_(std::move(text)) {
        ctx.purpose = text_.c_str();
    }
    ~CollectivePurpose() { ctx_.purpose = outer_; }
    CollectivePurpose(const CollectivePurpose&) = delete;
    CollectivePurpose& operator=(const CollectivePurpose&) = delete;

private:
    Ctx& ctx_;
    const char* const outer_;
    const std::string text_;
};

// The purpose of the exchanges of context parallelism, which plans list apart; the number of the layer follows.
inline constexpr const char* kExchangePurpose = "heads of layers.";

class Comm {
public:
    virtual ~Comm() = default;
    const World& world() const { return world_; }
    bool root() const { return world_.rank == 0; }

    // Host memory, blocking. gather: the texts of all ranks, by rank, on every rank.
    virtual std::vector<std::string> gather(const std::string& mine) = 0;
    // Elementwise sums over the ranks.
    std::vector<int64_t> sum(const std::vector<int64_t>& mine);

    // Returns a communicator of some ranks of this one: `members`, ascending, one of which is this rank. Every rank
    // makes the call, each with its own group. The result needs a connect() of its own, and must not outlive this
    // communicator.
    virtual std::unique_ptr<Comm> subgroup(const std::vector<int>& members) = 0;

    // Connects the devices of all ranks; called once the device is open, before the collectives below. Returns a line
    // for the log, "" if there is nothing to connect. Ends all ranks if it takes longer than `seconds`.
    virtual std::string connect(Ctx&, int /*seconds*/) { return ""; }

    // Collective, once the devices are connected. Returns device memory of the same size on all ranks, parts of which
    // can be shared. The communicator owns it. If the result is null, use device_alloc; `why` then says what a user can
    // change, if anything.
    virtual void* shared_memory(Ctx&, int64_t /*bytes*/, std::string& /*why*/) { return nullptr; }
    // Collective. Shares parts of such memory, which are at the same places on all ranks, instead of those of the call
    // before. There, all_gather, all_to_all, exchange_shards and exchange_all of this communicator between ranks of one
    // host use the GPU's copy engines instead of its multiprocessors. Ends all ranks if it takes longer than `seconds`.
    virtual void share(Ctx&, const std::vector<Tensor>& /*parts*/, int /*seconds*/) {}

    // The collectives below work on device memory and are ordered on ctx.stream; in a rehearsal they do nothing. They
    // work in place unless they take two tensors. A tensor `shards` has `ranks` equal shards; shard r is rank r's.
    // values (fp32, fp64, int32) = the sum over the ranks.
    virtual void sum(Ctx& ctx, Tensor values) = 0;
    // values (count) = the largest over the ranks.
    virtual void max(Ctx& ctx, uint32_t* values, int64_t count) = 0;
    // shards (fp32): own shard = the sum over the ranks; the others are left undefined.
    virtual void reduce_scatter(Ctx& ctx, Tensor shards) = 0;
    // shards (any dtype): shard r = rank r's own shard.
    virtual void all_gather(Ctx& ctx, Tensor shards) = 0;
    // Shard r of out (any dtype) = shard `rank` of rank r's in; the two do not overlap.
    virtual void all_to_all(Ctx& ctx, Tensor out, Tensor in) = 0;
    // The same, but this rank's own shard of out is left undefined: its reader takes it from in.
    virtual void exchange_shards(Ctx& ctx, Tensor out, Tensor in) { all_to_all(ctx, out, in); }
    // out (any dtype) = in of another rank, `peer`, which makes the same call with this rank as its peer.
    virtual void exchange(Ctx&, Tensor /*out*/, Tensor /*in*/, int peer) {
        FAIL(kExitBug, "no exchange with rank %d here", peer);
    }

    // For every other rank r: the first received[r] elements of shard r of out (any dtype) = the first ones of shard
    // `rank` of rank r's in, of which it sends as many (sent). The rest of out is left undefined. Own counts are 0.
    virtual void exchange_all(Ctx&, Tensor /*out*/, Tensor /*in*/, const Counts& /*received*/,
                              const Counts& /*sent*/) {
        FAIL(kExitBug, "no exchange with all ranks here");
    }

    // Reports progress to the watchdog when the stream reaches this point. For use between collectives that are far
    // apart.
    virtual void mark_progress(Ctx&) {}

    // Any thread may call these two.
    // The error of a collective that failed on the device after its call, "" if there is none.
    virtual std::string async_error() { return ""; }
    // Aborts the collectives on the device, which wait for lost ranks; no other collective may follow. May never
    // return if the device is lost.
    virtual void abort_collectives() {}

    // Ends all ranks at once with this exit code.
    [[noreturn]] virtual void abort(int exit_code) = 0;

protected:
    explicit Comm(const World& world) : world_(world) {}
    // Elements of one of `ranks` equal shards.
    int64_t shard_elems(const Tensor& shards) const;
    // The elements that exchange_all sends to other ranks, as a tensor without memory; those of shard r.
    Tensor sent_to_others(const Tensor& in, const Counts& sent) const;
    Tensor first_of_shard(const Tensor& shards, int r, const Counts& counts) const {
        return shards.slice(r * shard_elems(shards), counts[static_cast<size_t>(r)]);
    }
    void check_exchange(const Tensor& out, const Tensor& in, int peer) const;

private:
    const World world_;
};

// Comm::gather for values of a trivially copyable type: those of all ranks, by rank.
template <typename T> std::vector<std::vector<T>> gather_values(Comm& comm, const std::vector<T>& mine) {
    std::vector<std::vector<T>> all;
    const std::string own(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(T));
    for (const std::string& bytes : comm.gather(own)) {
        all.emplace_back(bytes.size() / sizeof(T));
        std::memcpy(all.back().data(), bytes.data(), bytes.size());
    }
    return all;
}

// A communicator of one rank: nothing is exchanged.
std::unique_ptr<Comm> open_single();

// Connects the ranks that mpirun or srun started, on this build's device; without them, open_single(). Exit 2 if this
// build or the launcher cannot connect them.
std::unique_ptr<Comm> open_comm();

// Names the first rank whose value is not that of rank 0, with both values where they differ; "" if there is none.
// `name` says what it is the value of. Collective.
std::string rank_difference(Comm& comm, const std::string& name, const std::string& mine);
// Exit 2 with rank_difference if an item, a name with this rank's value, is not the same on all ranks.
void require_same(Comm& comm, const std::vector<std::pair<std::string, std::string>>& items);

// The error of the first rank that has one, on all ranks the same; "" if none has. Collective.
std::string first_error(Comm& comm, const std::string& mine);

// Prints the error on standard error and, with several ranks, ends all of them with exit_code. All ranks may have the
// same error, so only one rank prints: rank 0, or another one that finds 2 s later that none has printed. comm is null
// until the ranks are connected. Returns exit_code if there is one rank.
int end_with_error(Comm* comm, const char* what, int exit_code);
// The same with the exit code of `error`: an Error's own code, 2 if the host has no memory or threads, else that of a
// bug.
int end_with_error(Comm* comm, const std::exception& error);
