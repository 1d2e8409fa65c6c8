#include "llmc/parallel/comm/comm_benchmark.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <set>

#include "llmc/base/check.h"
#include "llmc/base/median.h"
#include "llmc/base/system/host.h"
#include "llmc/ops/owned.h"

namespace {

constexpr int64_t kMiB = 1 << 20;
// Of messages, in bytes: the CPU sends the first two, GPUs the others, too, but not the first.
constexpr int64_t kSizes[] = {kMiB / 16, 4 * kMiB, 256 * kMiB, 1024 * kMiB};
constexpr double kSlow = 0.7;
constexpr int kPasses = 5;

// A rank sends `passes` times all shards of the message but its own.
struct Collective {
    const char* name;
    int passes;
    void (*call)(Comm& comm, Ctx& ctx, Tensor in, Tensor out);
};
const Collective kCollectives[] = {
    {"all-reduce", 2, [](Comm& comm, Ctx& ctx, Tensor in, Tensor) { comm.sum(ctx, in); }},
    {"reduce-scatter", 1, [](Comm& comm, Ctx& ctx, Tensor in, Tensor) { comm.reduce_scatter(ctx, in); }},
    {"all-gather", 1, [](Comm& comm, Ctx& ctx, Tensor in, Tensor) { comm.all_gather(ctx, in); }},
    {"all-to-all", 1, [](Comm& comm, Ctx& ctx, Tensor in, Tensor out) { comm.all_to_all(ctx, out, in); }},
};

// The values of all ranks, by rank.
std::vector<std::vector<double>> gather_values(Comm& comm, const std::vector<double>& mine) {
    std::vector<std::vector<double>> all;
    for (const std::string& bytes : comm.gather({reinterpret_cast<const char*>(mine.data()), 8 * mine.size()})) {
        all.emplace_back(mine.size());
        std::memcpy(all.back().data(), bytes.data(), 8 * mine.size());
    }
    return all;
}

class CommCheck {
public:
    CommCheck(Ctx& ctx, Comm& comm) : ctx_(ctx), comm_(comm), ranks_(comm.world().ranks) {
        double least_free = static_cast<double>(device::device_free_bytes());
        for (const std::vector<double>& free : gather_values(comm, {least_free}))
            least_free = std::min(least_free, free[0]);
        for (size_t i = ctx.sm > 0 ? 1 : 0; i < (ctx.sm > 0 ? 4 : 2); i++)
            if (sizes_.empty() || static_cast<double>(kSizes[i]) <= least_free / 4) sizes_.push_back(kSizes[i]);
        in_.reset(device::device_alloc(sizes_.back()));
        out_.reset(device::device_alloc(sizes_.back()));
        device::fill_bytes(ctx_, in_.get(), 0, sizes_.back());
    }

    // A table of a line for each size; the last line is also returned in words.
    std::string collectives(bool table) {
        std::string text = strf("check-comm: %d ranks, GiB/s that a rank sends (bus bandwidth)\n%10s", ranks_, "size");
        for (const Collective& collective : kCollectives) text += strf(" %15s", collective.name);
        std::string largest;
        for (const int64_t size : sizes_) {
            const std::string name = size < kMiB ? strf("%lld KiB", (long long)(size / 1024))
                                                 : strf("%lld MiB", (long long)(size / kMiB));
            text += strf("\n%10s", name.c_str());
            largest = "check-comm: " + name + ":";
            const Tensor in = part(in_, size), out = part(out_, size);
            for (const Collective& collective : kCollectives) {
                const double sent = collective.passes * gib(in.bytes()) * (ranks_ - 1) / ranks_;
                const double rate = sent / seconds(size, [&] { collective.call(comm_, ctx_, in, out); }, true);
                text += strf(" %15.2f", rate);
                largest += strf("%s %s %.2f", largest.back() == ':' ? "" : ",", collective.name, rate);
            }
        }
        if (table) std::printf("%s\n", text.c_str());
        return largest + " GiB/s";
    }

    // GiB/s each way between every two ranks. Measures disjoint pairs at the same time, since training loads all links
    // at the same time, too.
    std::vector<std::vector<double>> pairs() {
        const int64_t bytes = std::min<int64_t>(sizes_.back(), (ctx_.sm > 0 ? 256 : 1) * kMiB);
        std::vector<double> mine(static_cast<size_t>(ranks_), 0);
        for (int round = 0; round < pair_rounds(ranks_); round++) {
            const int peer = peer_in_round(comm_.world().rank, round, ranks_);
            std::function<void()> work;
            if (peer >= 0) work = [&] { comm_.exchange(ctx_, part(out_, bytes), part(in_, bytes), peer); };
            const double time = seconds(bytes, work, false);
            if (peer >= 0) mine[static_cast<size_t>(peer)] = gib(part(in_, bytes).bytes()) / time;
        }
        std::vector<std::vector<double>> rates = gather_values(comm_, mine);
        // The rate of a link is the lower of those that its two ends measured.
        for (size_t a = 0; a < rates.size(); a++)
            for (size_t b = 0; b < a; b++) rates[a][b] = rates[b][a] = std::min(rates[a][b], rates[b][a]);
        return rates;
    }

private:
    Tensor part(const DevicePtr<>& memory, int64_t bytes) const {
        return {memory.get(), Dtype::kFp32, bytes / 4 / ranks_ * ranks_};
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
                for (const std::vector<double>& theirs : gather_values(comm_, {mine})) mine = std::max(mine, theirs[0]);
            passes.push_back(mine / static_cast<double>(calls));
        }
        return std::max(median_of(passes), 1e-9);
    }

    Ctx& ctx_;
    Comm& comm_;
    const int ranks_;
    std::vector<int64_t> sizes_;   // bytes, ascending
    DevicePtr<> in_, out_;         // of the largest size
    const OwnedEvent begin_ = OwnedEvent::create(), end_ = OwnedEvent::create();
};

}  // namespace

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

std::vector<std::string> check_comm(Ctx& ctx, Comm& comm, bool table) {
    if (comm.world().ranks == 1) return {"check-comm: one rank, nothing to check"};
    CommCheck check(ctx, comm);
    std::vector<std::string> notes = {check.collectives(table && comm.root())};
    const std::vector<std::vector<double>> rates = check.pairs();
    std::vector<double> all;
    for (size_t a = 0; a < rates.size(); a++)
        for (size_t b = 0; b < a; b++) all.push_back(rates[a][b]);
    const auto [slowest, fastest] = std::minmax_element(all.begin(), all.end());
    notes.push_back(strf("check-comm: %zu pairs of ranks: slowest %.2f, median %.2f, fastest %.2f GiB/s each way",
                         all.size(), *slowest, median_of(all), *fastest));
    const std::string bus = device::device_info(ctx.index).bus;
    const std::vector<std::string> hosts = comm.gather(host_name());
    const std::vector<std::string> labels = comm.gather(host_name() + (bus.empty() ? "" : " " + bus));
    for (const std::string& line : slow_links(rates, hosts, labels)) notes.push_back("check-comm: " + line);
    return notes;
}
