#include "llmc/parallel/comm/comm_benchmark.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <set>

#include "llmc/base/check.h"
#include "llmc/base/median.h"
#include "llmc/base/text.h"
#include "llmc/ops/owned.h"

namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr double kSlow = 0.7;
constexpr int kPasses = 5;
constexpr int kMatrixRanks = 16;   // a wider table does not fit a screen
constexpr Collective kCollectives[] = {Collective::kAllReduce, Collective::kReduceScatter, Collective::kAllGather,
                                       Collective::kAllToAll};
constexpr const char* kNames[] = {"all-reduce", "reduce-scatter", "all-gather", "all-to-all"};

class CommCheck {
public:
    CommCheck(Ctx& ctx, Comm& comm, bool tables)
        : ctx_(ctx), comm_(comm), ranks_(comm.world().ranks), tables_(tables) {
        const DeviceInfo info = device::device_info(ctx.index);
        char host[256] = "";
        gethostname(host, sizeof host - 1);
        hosts_ = comm.gather(host);
        labels_ = comm.gather(std::string(host) + (info.bus.empty() ? "" : " " + info.bus));
        const bool gpu = ctx.sm > 0;
        int64_t least_free = INT64_MAX;
        for (const std::string& text : comm.gather(std::to_string(device::device_free_bytes())))
            least_free = std::min(least_free, int64_t{std::stoll(text)});
        for (int64_t size = gpu ? kMiB : kMiB / 16; size <= (gpu ? 1024 : 4) * kMiB; size *= 4)
            if (size == kMiB / 16 || size <= least_free / 4) sizes_.push_back(size);
        in_.reset(device::device_alloc(sizes_.back()));
        out_.reset(device::device_alloc(sizes_.back()));
        device::fill_bytes(ctx_, in_.get(), 0, sizes_.back());
    }

    std::vector<std::string> run() {
        std::vector<std::string> notes = {collectives()};
        const std::vector<std::vector<double>> rates = pairs();
        if (tables_ && ranks_ <= kMatrixRanks) print_matrix(rates);
        std::vector<double> all;
        for (size_t a = 0; a < rates.size(); a++)
            for (size_t b = 0; b < a; b++) all.push_back(rates[a][b]);
        notes.push_back(strf("check-comm: %zu pairs of ranks: slowest %.2f, median %.2f, fastest %.2f GiB/s each way",
                             all.size(), *std::min_element(all.begin(), all.end()), median_of(all),
                             *std::max_element(all.begin(), all.end())));
        for (const std::string& line : slow_links(rates, hosts_, labels_)) notes.push_back("check-comm: " + line);
        return notes;
    }

private:
    void print(const std::string& text) const {
        if (!tables_) return;
        std::fputs(text.c_str(), stdout);
        std::fflush(stdout);
    }

    // The time of a call in seconds, on the slowest rank if `slowest`: the median over passes. A rank with empty `work`
    // only takes part in the synchronization.
    double seconds(int64_t bytes, const std::function<void()>& work, bool slowest) {
        const int64_t calls = std::clamp<int64_t>(256 * kMiB / bytes, 2, ctx_.sm > 0 ? 20 : 4);
        std::vector<double> passes;
        if (work) work();   // opens missing connections
        device::synchronize(ctx_);
        for (int pass = 0; pass < kPasses; pass++) {
            comm_.sum(std::vector<int64_t>{0});   // start together
            device::event_record(ctx_, begin_);
            for (int64_t i = 0; i < calls && work; i++) work();
            device::event_record(ctx_, end_);
            device::event_wait(end_);
            double mine = static_cast<double>(device::event_elapsed_ms(begin_, end_)) * 1e-3;
            if (slowest)
                for (const std::string& text : comm_.gather(strf("%.17g", mine)))
                    mine = std::max(mine, std::stod(text));
            passes.push_back(mine / static_cast<double>(calls));
        }
        return std::max(median_of(passes), 1e-9);
    }

    void call(Collective collective, const Tensor& in, const Tensor& out) {
        switch (collective) {
            case Collective::kAllReduce: return comm_.sum(ctx_, in);
            case Collective::kReduceScatter: return comm_.reduce_scatter(ctx_, in);
            case Collective::kAllGather: return comm_.all_gather(ctx_, in);
            case Collective::kAllToAll: return comm_.all_to_all(ctx_, out, in);
        }
    }

    std::string collectives() {
        print(strf("check-comm: %d ranks, GiB/s that a rank sends (bus bandwidth)\n%10s", ranks_, "size"));
        for (const char* name : kNames) print(strf(" %15s", name));
        print("\n");
        std::string largest;
        for (const int64_t size : sizes_) {
            const int64_t elems = size / 4 / ranks_ * ranks_;
            const Tensor in{in_.get(), Dtype::kFp32, elems}, out{out_.get(), Dtype::kFp32, elems};
            const std::string name = size < kMiB ? strf("%lld KiB", (long long)(size / 1024))
                                                 : strf("%lld MiB", (long long)(size / kMiB));
            print(strf("%10s", name.c_str()));
            largest = "check-comm: " + name + ":";
            for (const Collective collective : kCollectives) {
                const double rate = bus_factor(collective, ranks_) * gib(in.bytes())
                                    / seconds(size, [&] { call(collective, in, out); }, true);
                print(strf(" %15.2f", rate));
                largest += strf("%s %s %.2f", largest.back() == ':' ? "" : ",", kNames[static_cast<int>(collective)],
                                rate);
            }
            print("\n");
        }
        return largest + " GiB/s";
    }

    // Measures disjoint pairs at the same time, since training loads all links at the same time, too.
    std::vector<std::vector<double>> pairs() {
        const int64_t bytes = std::min<int64_t>(sizes_.back(), (ctx_.sm > 0 ? 256 : 1) * kMiB);
        std::vector<double> mine(static_cast<size_t>(ranks_), 0);
        for (int round = 0; round < pair_rounds(ranks_); round++) {
            const int peer = peer_in_round(comm_.world().rank, round, ranks_);
            const Tensor in{in_.get(), Dtype::kFp32, bytes / 4}, out{out_.get(), Dtype::kFp32, bytes / 4};
            std::function<void()> work;
            if (peer >= 0) work = [&] { comm_.exchange(ctx_, out, in, peer); };
            const double time = seconds(bytes, work, false);
            if (peer >= 0) mine[static_cast<size_t>(peer)] = gib(bytes) / time;
        }
        std::string text;
        for (const double rate : mine) text += strf("%.17g ", rate);
        std::vector<std::vector<double>> rates;
        for (const std::string& row : comm_.gather(text)) {
            std::vector<double>& values = rates.emplace_back();
            const char* at = row.c_str();
            char* next = nullptr;
            for (int r = 0; r < ranks_; r++, at = next) values.push_back(std::strtod(at, &next));
        }
        // The rate of a link is the lower of those that its two ends measured.
        for (size_t a = 0; a < rates.size(); a++)
            for (size_t b = 0; b < a; b++) rates[a][b] = rates[b][a] = std::min(rates[a][b], rates[b][a]);
        print(strf("check-comm: pairs of ranks, %lld MiB both ways at once, GiB/s each way\n",
                   (long long)(bytes / kMiB)));
        return rates;
    }

    void print_matrix(const std::vector<std::vector<double>>& rates) {
        std::printf("%6s", "");
        for (size_t b = 0; b < rates.size(); b++) std::printf(" %7zu", b);
        std::printf("\n");
        for (size_t a = 0; a < rates.size(); a++) {
            std::printf("%6zu", a);
            for (size_t b = 0; b < rates.size(); b++) {
                if (a == b) std::printf(" %7s", "-");
                else std::printf(" %7.2f", rates[a][b]);
            }
            std::printf("  %s\n", labels_[a].c_str());
        }
    }

    Ctx& ctx_;
    Comm& comm_;
    const int ranks_;
    const bool tables_;
    std::vector<std::string> hosts_, labels_;   // by rank
    std::vector<int64_t> sizes_;                // bytes, ascending
    DevicePtr<> in_, out_;                      // of the largest size
    const OwnedEvent begin_ = OwnedEvent::create(), end_ = OwnedEvent::create();
};

}  // namespace

double bus_factor(Collective collective, int ranks) {
    const double share = static_cast<double>(ranks - 1) / ranks;
    return collective == Collective::kAllReduce ? 2 * share : share;
}

int pair_rounds(int ranks) { return (ranks + 1) / 2 * 2 - 1; }

// Round-robin by the circle method: the last place is fixed, and empty if the number of ranks is odd.
int peer_in_round(int rank, int round, int ranks) {
    const int circle = pair_rounds(ranks);
    int peer;
    if (rank == circle) peer = round;
    else if (rank == round) peer = circle;
    else peer = (2 * round - rank + 2 * circle) % circle;
    return peer < ranks ? peer : -1;
}

std::vector<std::string> slow_links(const std::vector<std::vector<double>>& rates,
                                    const std::vector<std::string>& hosts, const std::vector<std::string>& labels) {
    const size_t ranks = rates.size();
    std::vector<double> kinds[2];
    for (size_t a = 0; a < ranks; a++)
        for (size_t b = 0; b < a; b++) kinds[hosts[a] == hosts[b]].push_back(rates[a][b]);
    const double medians[2] = {median_of(kinds[0]), median_of(kinds[1])};
    auto usual = [&](size_t a, size_t b) { return medians[hosts[a] == hosts[b]]; };
    auto slow = [&](size_t a, size_t b) { return a != b && rates[a][b] < kSlow * usual(a, b); };

    std::vector<std::string> lines;
    std::set<size_t> named;
    for (size_t a = 0; a < ranks; a++) {
        size_t count = 0;
        double best = 0;
        for (size_t b = 0; b < ranks; b++) {
            count += slow(a, b);
            if (slow(a, b)) best = std::max(best, rates[a][b]);
        }
        if (count < 2 || 2 * count < ranks) continue;
        named.insert(a);
        lines.push_back(strf("WARNING: slow rank %zu (%s): %zu of its %zu links give at most %.2f GiB/s, and %.2f is "
                             "usual", a, labels[a].c_str(), count, ranks - 1, best, medians[!kinds[1].empty()]));
    }
    for (size_t a = 0; a < ranks; a++)
        for (size_t b = a + 1; b < ranks; b++)
            if (slow(a, b) && !named.count(a) && !named.count(b))
                lines.push_back(strf("WARNING: slow link between rank %zu (%s) and rank %zu (%s): %.2f GiB/s, and %.2f "
                                     "is usual", a, labels[a].c_str(), b, labels[b].c_str(), rates[a][b], usual(a, b)));
    return lines;
}

std::vector<std::string> check_comm(Ctx& ctx, Comm& comm, bool tables) {
    if (comm.world().ranks == 1) return {"check-comm: one rank, nothing to check"};
    return CommCheck(ctx, comm, tables).run();
}
