#include "llmc/parallel/comm/comm_monitored.h"

#include <cstdlib>
#include <exception>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>

#include "llmc/base/check.h"
#include "llmc/fault/hang_report.h"
#include "llmc/fault/heartbeat.h"
#include "llmc/fault/heartbeat_link.h"
#include "llmc/fault/watchdog.h"
#include "llmc/parallel/device_marks.h"

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankCard, host, place, pid, started)

namespace {

using Json = nlohmann::json;
constexpr double kConnectS = 10;   // for the hosts to connect

std::string random_name() {
    std::string name;
    for (const char byte : random_bytes(16)) name += strf("%02x", static_cast<unsigned char>(byte));
    return name;
}

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
        marks_ = std::make_unique<DeviceMarks>(ctx);
        watch_device([this](Heartbeat& row) { marks_->post(row); });
        return line;
    }

    void* shared_memory(Ctx& ctx, int64_t bytes, std::string& why) override {
        return inner_->shared_memory(ctx, bytes, why);
    }
    void share(Ctx& ctx, Tensor part, int seconds) override { inner_->share(ctx, part, seconds); }

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
    void reduce_scatter(Ctx& ctx, Tensor blocks) override {
        const Posted posted(*this, ctx, "reduce_scatter", blocks);
        inner_->reduce_scatter(ctx, blocks);
    }
    void all_gather(Ctx& ctx, Tensor blocks) override {
        const Posted posted(*this, ctx, "all_gather", blocks);
        inner_->all_gather(ctx, blocks);
    }
    void all_to_all(Ctx& ctx, Tensor out, Tensor in) override {
        const Posted posted(*this, ctx, "all_to_all", in);
        inner_->all_to_all(ctx, out, in);
    }
    void exchange_blocks(Ctx& ctx, Tensor out, Tensor in) override {
        const Posted posted(*this, ctx, "exchange_blocks", in);
        inner_->exchange_blocks(ctx, out, in);
    }
    // Not counted: it would make the numbers of these two ranks differ from those of the others.
    void exchange(Ctx& ctx, Tensor out, Tensor in, int peer) override {
        post_progress();
        inner_->exchange(ctx, out, in, peer);
    }

    void mark_progress(Ctx& ctx) override {
        if (whole_.marks_ && !ctx.rehearsal) whole_.marks_->progress(ctx);
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
        Posted(MonitoredComm& comm, const char* name) : comm_(comm.whole_), lane_(kHostLane) {
            begin(name + comm.among_);
        }
        Posted(MonitoredComm& comm, Ctx& ctx, const char* name, const Tensor& values)
            : comm_(comm.whole_), lane_(kDeviceLane), ctx_(comm_.marks_ ? &ctx : nullptr) {
            if (ctx.rehearsal) return;
            const std::string text = strf("%s of %lld %s", name, (long long)values.elems, dtype_name(values.dtype));
            begin((ctx.purpose ? ctx.purpose : text) + comm.among_);
        }
        ~Posted() {
            if (number_ == 0 || std::uncaught_exceptions() > 0) return;   // the call has failed
            Heartbeat& row = comm_.watchdog_->own_row();
            if (ctx_) comm_.marks_->ends(*ctx_, number_);
            else row.set_finished(lane_, number_);
            row.add_progress();
        }
        Posted(const Posted&) = delete;
        Posted& operator=(const Posted&) = delete;

    private:
        void begin(const std::string& name) {
            Heartbeat& row = comm_.watchdog_->own_row();
            number_ = row.enqueue(lane_, name.c_str());
            if (ctx_) comm_.marks_->begins(*ctx_, number_);
            else row.set_begun(lane_, number_);
        }
        MonitoredComm& comm_;
        const Lane lane_;
        Ctx* const ctx_ = nullptr;   // null if the call blocks until the collective has finished
        int64_t number_ = 0;
    };

    void watch_device(std::function<void(Heartbeat&)> post) {
        watchdog_->set_device({.error = [this] { return first_async_error(); },
                               .abort_collectives = [this] { abort_all_collectives(); },
                               .post = std::move(post)});
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

    // Creates or opens the heartbeat table of this host, and connects it to those of the other hosts.
    std::unique_ptr<Watchdog> make_watchdog() {
        std::vector<RankCard> cards;
        for (const std::string& text : inner_->gather(Json(own_card()).dump()))
            cards.push_back(Json::parse(text).get<RankCard>());
        const std::vector<int> firsts = number_hosts(cards);
        const int rank = world().rank, host = cards[static_cast<size_t>(rank)].host_number;
        const int first = firsts[static_cast<size_t>(host)], hosts = static_cast<int>(firsts.size());

        const bool kept = rank == 0 && HeartbeatTable::is_empty_file(launcher_file());
        std::unique_ptr<HeartbeatLink> link;
        Json offer = Json::object();
        if (rank == first) {
            heartbeats_ = HeartbeatTable::create(kept ? launcher_file() : "", world().ranks);
            offer = {{"path", heartbeats_.path()}, {"kept", kept}};
        }
        if (rank == 0 && hosts > 1) {
            const std::string secret = random_name();
            offer["secret"] = secret;
            link = HeartbeatLink::listen(secret, hosts - 1, link_place_of_environment());
            offer["address"] = link->address();
        }
        const std::vector<std::string> offers = inner_->gather(offer.dump());
        const Json own = Json::parse(offers[static_cast<size_t>(first)]), root = Json::parse(offers[0]);
        if (rank != first) heartbeats_ = HeartbeatTable::open(own.at("path").get<std::string>(), world().ranks);
        set_own_row(&heartbeats_, rank);   // before any rank has a watchdog, which must see how this rank ends
        inner_->gather("");   // all ranks must have opened the table before one may end

        std::string error;
        if (rank == 0 && hosts > 1) link->accept_all(kConnectS);
        if (rank == first && rank != 0)
            link = HeartbeatLink::connect(root.at("address").get<std::string>(),
                                          root.at("secret").get<std::string>(), host, kConnectS, &error);
        auto watchdog = std::make_unique<Watchdog>(rank, cards, heartbeats_, std::move(link),
                                                   own.at("kept").get<bool>());
        if (hosts > 1) forget_unreachable(cards, firsts, error, *watchdog);
        return watchdog;
    }

    // A host that cannot reach rank 0 exchanges no heartbeats with the other hosts.
    void forget_unreachable(const std::vector<RankCard>& cards, const std::vector<int>& firsts,
                            const std::string& error, Watchdog& watchdog) {
        const std::vector<std::string> errors = inner_->gather(error);
        const int own = cards[static_cast<size_t>(world().rank)].host_number;
        const bool alone = !errors[static_cast<size_t>(firsts[static_cast<size_t>(own)])].empty();
        for (size_t host = 0; host < firsts.size(); host++) {
            const auto first = static_cast<size_t>(firsts[host]);
            const bool lost = !errors[first].empty();
            if (static_cast<int>(host) != own && (alone || lost)) watchdog.forget_host(static_cast<int>(host));
            if (lost && root())
                std::fprintf(stderr, "warning: host %s cannot reach rank 0 on %s (%s): hang reports will not name "
                             "ranks that wait for each other across these hosts\n", cards[first].host.c_str(),
                             cards[0].host.c_str(), errors[first].c_str());
        }
    }

    std::unique_ptr<Comm> inner_;
    MonitoredComm& whole_;              // the communicator of the whole run
    std::vector<int> run_ranks_;        // numbers of this communicator's ranks in the whole run
    std::string among_;                 // " among ranks 2,3" in hang reports; "" for all ranks
    // The communicator of the whole run alone uses these.
    std::mutex mutex_;                  // protects monitored_
    std::vector<Comm*> monitored_;      // communicators that its subgroups wrap
    HeartbeatTable heartbeats_;
    std::unique_ptr<Watchdog> watchdog_;
    std::unique_ptr<DeviceMarks> marks_;
};

}  // namespace

std::unique_ptr<Comm> monitored(std::unique_ptr<Comm> comm) {
    if (comm->world().ranks == 1) return comm;
    return std::make_unique<MonitoredComm>(std::move(comm));
}
