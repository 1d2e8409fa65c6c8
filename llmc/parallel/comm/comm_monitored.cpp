#include "llmc/parallel/comm/comm_monitored.h"

#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <sstream>

#include "llmc/base/check.h"
#include "llmc/fault/heartbeat.h"
#include "llmc/fault/rank_view.h"
#include "llmc/fault/watchdog.h"
#include "llmc/parallel/comm/device_progress.h"

namespace {

// Some of a run's ranks in hang reports, which have little room for them: "rank 2", "ranks 2,3", "ranks 0,8,...,56".
std::string group_text(const std::vector<int>& ranks) {
    const bool neighbours = ranks.back() - ranks.front() == static_cast<int>(ranks.size()) - 1;
    if (ranks.size() == 1) return strf("rank %d", ranks[0]);
    if (neighbours || ranks.size() < 4) return "ranks " + ranks_text(ranks);
    return strf("ranks %d,%d,...,%d", ranks[0], ranks[1], ranks.back());
}

class MonitoredComm : public Comm {
public:
    explicit MonitoredComm(std::unique_ptr<Comm> inner)
        : Comm(inner->world()), inner_(std::move(inner)), whole_(*this) {
        try {
            watchdog_ = make_watchdog();
            watch_device({});
            watchdog_->start();
        } catch (const std::exception& error) {
            end_with_error(inner_.get(), error);   // closing inner_ would wait for the other ranks
            throw;
        }
        run_ranks_.resize(static_cast<size_t>(world().ranks));
        std::iota(run_ranks_.begin(), run_ranks_.end(), 0);
    }
    // A subgroup. It posts in the row of the whole run, since all ranks make the same calls in the same order.
    MonitoredComm(std::unique_ptr<Comm> inner, MonitoredComm& whole, std::vector<int> run_ranks)
        : Comm(inner->world()), inner_(std::move(inner)), whole_(whole), run_ranks_(std::move(run_ranks)) {
        if (run_ranks_.size() < whole.run_ranks_.size()) among_ = " among " + group_text(run_ranks_);
        const std::lock_guard<std::mutex> lock(whole_.mutex_);
        whole_.monitored_.push_back(inner_.get());
    }
    ~MonitoredComm() override {
        if (&whole_ != this) {
            const std::lock_guard<std::mutex> lock(whole_.mutex_);
            std::erase(whole_.monitored_, inner_.get());
            return;
        }
        post_phase(Phase::kEnd);
        watchdog_->set_device({});
        try {
            const Posted posted(*this, "end of the run");
            inner_->gather("");
        } catch (const std::exception& error) {
            std::fprintf(stderr, "warning: %s\n", message_line(error.what()).c_str());
        }
        post_end(kExitOk);
        inner_.reset();   // waits for the launcher, too; if that is gone, the watchdog ends this process
        set_own_row(nullptr, 0);
    }

    std::unique_ptr<Comm> subgroup(const std::vector<int>& members) override {
        std::vector<int> run_ranks;
        for (int member : members) run_ranks.push_back(run_ranks_.at(static_cast<size_t>(member)));
        return std::make_unique<MonitoredComm>(inner_->subgroup(members), whole_, std::move(run_ranks));
    }

    std::string connect(Ctx& ctx, int seconds) override {
        const std::string line = inner_->connect(ctx, seconds);
        if (ctx.sm == 0 || &whole_ != this) return line;   // on the CPU a collective has finished when its call returns
        device_ = std::make_unique<DeviceProgress>(ctx);
        watch_device([this] { device_->post(); });
        return line;
    }

    void* shared_memory(Ctx& ctx, int64_t bytes, std::string& why) override {
        return inner_->shared_memory(ctx, bytes, why);
    }
    void share(Ctx& ctx, const std::vector<Tensor>& parts, int seconds) override {
        inner_->share(ctx, parts, seconds);
    }

    std::vector<std::string> gather(const std::string& mine) override {
        const Posted posted(*this, "exchange between hosts");
        return inner_->gather(mine);
    }
    void sum(Ctx& ctx, Tensor values) override {
        const Posted posted(*this, ctx, "sum", values);
        inner_->sum(ctx, values);
    }
    void max(Ctx& ctx, uint32_t* values, int64_t count) override {
        const Posted posted(*this, ctx, "max", {values, Dtype::kInt32, count});
        inner_->max(ctx, values, count);
    }
    void reduce_scatter(Ctx& ctx, Tensor shards) override {
        const Posted posted(*this, ctx, "reduce_scatter", shards);
        inner_->reduce_scatter(ctx, shards);
    }
    void all_gather(Ctx& ctx, Tensor shards) override {
        const Posted posted(*this, ctx, "all_gather", shards);
        inner_->all_gather(ctx, shards);
    }
    void all_to_all(Ctx& ctx, Tensor out, Tensor in) override {
        const Posted posted(*this, ctx, "all_to_all", in);
        inner_->all_to_all(ctx, out, in);
    }
    void exchange_shards(Ctx& ctx, Tensor out, Tensor in) override {
        const Posted posted(*this, ctx, "exchange_shards", in);
        inner_->exchange_shards(ctx, out, in);
    }
    // Not counted: it would make the numbers of these two ranks differ from those of the others.
    void exchange(Ctx& ctx, Tensor out, Tensor in, int peer) override {
        post_progress();
        inner_->exchange(ctx, out, in, peer);
    }

    void exchange_all(Ctx& ctx, Tensor out, Tensor in, const Counts& received, const Counts& sent) override {
        const Posted posted(*this, ctx, "exchange_all", sent_to_others(in, sent));
        inner_->exchange_all(ctx, out, in, received, sent);
    }

    void mark_progress(Ctx& ctx) override {
        if (whole_.device_ && !ctx.rehearsal) whole_.device_->advance(ctx);
    }

    std::string async_error() override { return inner_->async_error(); }
    void abort_collectives() override { inner_->abort_collectives(); }
    [[noreturn]] void abort(int exit_code) override {
        inner_->abort(exit_code);
        std::abort();
    }

private:
    // Records one collective in the heartbeat table, until its call returns or the device has finished it.
    class Posted {
    public:
        Posted(MonitoredComm& comm, const char* name) : comm_(comm.whole_) {
            post_host_collective((name + comm.among_).c_str());
        }
        Posted(MonitoredComm& comm, Ctx& ctx, const char* name, const Tensor& values)
            : comm_(comm.whole_), ctx_(comm_.device_ ? &ctx : nullptr), posts_(!ctx.rehearsal) {
            if (!posts_) return;
            const std::string text = strf("%s of %lld %s", name, ll(values.elems), dtype_name(values.dtype));
            const std::string whole = (ctx.purpose ? ctx.purpose : text) + comm.among_;
            if (ctx_) comm_.device_->begin(ctx, number_ = post_device_collective(whole.c_str()));
            else post_host_collective(whole.c_str());
        }
        ~Posted() {
            if (!posts_ || std::uncaught_exceptions() > 0) return;   // the call has failed
            if (ctx_) comm_.device_->finish(*ctx_, number_);
            else post_host_collective_end();
            post_progress();
        }
        Posted(const Posted&) = delete;
        Posted& operator=(const Posted&) = delete;

    private:
        MonitoredComm& comm_;
        Ctx* const ctx_ = nullptr;   // null if the call blocks until the collective has finished
        const bool posts_ = true;
        int64_t number_ = 0;
    };

    void watch_device(std::function<void()> post) {
        watchdog_->set_device({.error = [this] { return first_async_error(); },
                               .abort_collectives = [this] { abort_all_collectives(); }, .post = std::move(post)});
    }
    // Asks the subgroups first: a lost rank is lost to them, too, and the call of inner_ may never return.
    std::string first_async_error() {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (Comm* group : monitored_)
            if (std::string error = group->async_error(); !error.empty()) return error;
        return inner_->async_error();
    }
    void abort_all_collectives() {
        std::vector<Comm*> groups;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            groups = monitored_;
        }
        for (Comm* group : groups) group->abort_collectives();
        inner_->abort_collectives();
    }

    // Creates or opens the heartbeat table of this host.
    std::unique_ptr<Watchdog> make_watchdog() {
        const RankProcess mine = own_process();
        std::vector<RankProcess> here;
        std::map<std::string, std::vector<int>> hosts;   // the others: names, ranks
        size_t own = 0;
        const std::vector<std::string> all =
            inner_->gather(strf("%lld %lld ", ll(mine.pid), ll(mine.started)) + mine.host + "\n" + mine.place);
        for (int rank = 0; rank < world().ranks; rank++) {
            RankProcess process;
            process.rank = rank;
            std::istringstream text(all[static_cast<size_t>(rank)]);
            text >> process.pid >> process.started >> process.host >> std::ws;
            std::getline(text, process.place);
            if (rank == world().rank) own = here.size();
            if (process.place == mine.place) here.push_back(process);
            else hosts[process.host].push_back(rank);
        }
        const bool first = own == 0;
        if (first) table_ = HeartbeatTable::create(here.size());
        const std::vector<std::string> paths = inner_->gather(first ? table_.path() : "");
        if (!first) table_ = HeartbeatTable::open(paths[static_cast<size_t>(here[0].rank)], here.size());
        set_own_row(&table_, own);   // before any rank has a watchdog, which must see how this rank ends
        inner_->gather("");   // all ranks must have opened the table before one may end
        std::string others, names = mine.host;
        for (const auto& [host, ranks] : hosts) {
            names += " " + host;
            if (hosts.size() <= 4) others += (others.empty() ? "" : "; ") + host + ": " + group_text(ranks);
        }
        if (hosts.size() > 4) others = strf("%d other ranks", world().ranks - static_cast<int>(here.size()));
        return std::make_unique<Watchdog>(std::move(here), own, table_, others, names);
    }

    std::unique_ptr<Comm> inner_;
    MonitoredComm& whole_;              // the communicator of the whole run
    std::vector<int> run_ranks_;        // numbers of this communicator's ranks in the whole run
    std::string among_;                 // " among ranks 2,3" in hang reports; "" for all ranks
    // The communicator of the whole run alone uses these.
    std::mutex mutex_;                  // protects monitored_
    std::vector<Comm*> monitored_;      // communicators that its subgroups wrap
    HeartbeatTable table_;
    std::unique_ptr<Watchdog> watchdog_;
    std::unique_ptr<DeviceProgress> device_;   // on GPUs
};

}  // namespace

std::unique_ptr<Comm> monitored(std::unique_ptr<Comm> comm) {
    if (comm->world().ranks == 1) return comm;
    return std::make_unique<MonitoredComm>(std::move(comm));
}
