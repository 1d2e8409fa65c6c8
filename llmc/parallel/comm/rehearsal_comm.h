// A Comm that only counts: rehearsing a step with it gives the communication volume.
#pragma once
#include <string>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/parallel/comm/comm.h"

// All calls of one collective with one element type in groups of one size. Exchanges of heads and of tokens have
// rows of their own.
struct PlannedCollective {
    const char* name;
    Dtype dtype;
    int ranks = 1;                  // of the group
    bool exchange = false;          // of heads: on the compute stream, so nothing hides it; or of tokens
    bool tokens = false;            // those of experts, see StepRecorder::exchanges
    bool matrices = false;          // of Muon, to their owners and back
    int64_t calls = 0, bytes = 0;   // per rank, of whole tensors
    int64_t sent_bytes = 0;         // per rank, by an algorithm that sends as little as possible
    int64_t copied_bytes = 0;       // per rank, within its own memory
};

// Acts as rank 0 of `ranks`. Counts only calls whose Ctx has a recorder: those of a step.
class RehearsalComm : public Comm {
public:
    explicit RehearsalComm(int ranks) : RehearsalComm(ranks, nullptr) {}
    std::vector<PlannedCollective> calls;   // of its subgroups, too

    std::vector<std::string> gather(const std::string& mine) override {
        return std::vector<std::string>(static_cast<size_t>(world().ranks), mine);
    }
    std::unique_ptr<Comm> subgroup(const std::vector<int>& members) override {
        return std::unique_ptr<Comm>(new RehearsalComm(static_cast<int>(members.size()), whole_));
    }
    void sum(Ctx& ctx, Tensor values) override { note(ctx, "all-reduce sum", values, 2); }
    void max(Ctx& ctx, uint32_t* values, int64_t count) override {
        note(ctx, "all-reduce max", {values, Dtype::kInt32, count}, 2);
    }
    void reduce_scatter(Ctx& ctx, Tensor shards) override { note(ctx, "reduce-scatter", shards, 1); }
    void all_gather(Ctx& ctx, Tensor shards) override { note(ctx, "all-gather", shards, 1); }
    void all_to_all(Ctx& ctx, Tensor out, Tensor) override { note(ctx, "all-to-all", out, 1); }
    // As comm_nccl.cpp, which copies nothing within a rank if there are two.
    void exchange_shards(Ctx& ctx, Tensor out, Tensor) override {
        note(ctx, "all-to-all", out, 1, world().ranks > 2);
    }
    void exchange_all(Ctx& ctx, Tensor out, Tensor in, const Counts& received, const Counts& sent) override;
    [[noreturn]] void abort(int exit_code) override;

private:
    RehearsalComm(int ranks, RehearsalComm* whole)
        : Comm({.rank = 0, .ranks = ranks, .local_rank = 0, .local_ranks = ranks}), whole_(whole ? whole : this) {}
    void note(const Ctx& ctx, const char* name, const Tensor& tensor, int passes, bool copies_own = true);
    PlannedCollective& planned(const char* name, Dtype dtype, bool exchange, bool tokens = false);

    RehearsalComm* const whole_;
};

// The communication lines of the banner and of `plan`; "" for one rank.
std::string communication_text(const Config& config, const std::vector<PlannedCollective>& calls, int ranks,
                               int64_t buckets);
