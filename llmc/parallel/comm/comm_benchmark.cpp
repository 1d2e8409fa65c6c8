#include "llmc/parallel/comm/comm_benchmark.h"

#include <algorithm>
#include <bit>
#include <functional>

#include "llmc/base/check.h"
#include "llmc/base/median.h"
#include "llmc/base/system/host.h"
#include "llmc/ops/owned.h"

namespace {

constexpr int64_t kMiB = 1 << 20;
// Of messages, in bytes: the CPU sends the first two, GPUs all but the first.
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

class CommCheck {
public:
    CommCheck(Ctx& ctx, Comm& comm) : ctx_(ctx), comm_(comm), ranks_(comm.world().ranks) {
        int64_t least_free = device::device_free_bytes();
        for (const auto& free : gather_values<int64_t>(comm, {least_free})) least_free = std::min(least_free, free[0]);
        for (size_t i = ctx.sm > 0 ? 1 : 0; i < (ctx.sm > 0 ? 4 : 2); i++)
            if (sizes_.empty() || kSizes[i] <= least_free / 4) sizes_.push_back(kSizes[i]);
        in_.reset(device::device_alloc(sizes_.back()));
        out_.reset(device::device_alloc(sizes_.back()));
        device::fill_bytes(ctx_, in_.get(), 0, sizes_.back());
    }

    // A line for each size: what a rank sends (bus bandwidth).
    std::vector<std::string> collectives() {
        std::vector<std::string> lines;
        for (const int64_t size : sizes_) {
            std::string rates;
            const Tensor in = part(in_, size), out = part(out_, size);
            for (const Collective& collective : kCollectives) {
                const double sent = collective.passes * gib(in.bytes()) * (ranks_ - 1) / ranks_;
                const double rate = sent / seconds(size, [&] { collective.call(comm_, ctx_, in, out); }, true);
                rates += strf("%s%s %.2f", rates.empty() ? "" : ", ", collective.name, rate);
            }
            lines.push_back(strf("check-comm: %g MiB: %s GiB/s", static_cast<double>(size) / kMiB, rates.c_str()));
        }
        return lines;
    }

    // GiB/s each way between every two ranks. Each round measures disjoint pairs at the same time, since training loads
    // all links at the same time, too.
    std::vector<std::vector<double>> pairs() {
        const int64_t bytes = std::min<int64_t>(sizes_.back(), (ctx_.sm > 0 ? 256 : 1) * kMiB);
        std::vector<double> mine(static_cast<size_t>(ranks_), 0);
        const auto places = static_cast<int>(std::bit_ceil(static_cast<unsigned>(ranks_)));
        for (int round = 1; round < places; round++) {
            const int peer = comm_.world().rank ^ round;
            std::function<void()> work;
            if (peer < ranks_) work = [&] { comm_.exchange(ctx_, part(out_, bytes), part(in_, bytes), peer); };
            const double time = seconds(bytes, work, false);
            if (work) mine[static_cast<size_t>(peer)] = gib(part(in_, bytes).bytes()) / time;
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
                for (const auto& theirs : gather_values<double>(comm_, {mine})) mine = std::max(mine, theirs[0]);
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

std::string slow_links(const std::vector<std::vector<double>>& rates, const std::vector<std::string>& hosts,
                       const std::vector<std::string>& labels) {
    std::vector<double> kinds[2];   // between hosts, within a host
    for (size_t a = 0; a < rates.size(); a++)
        for (size_t b = 0; b < a; b++) kinds[hosts[a] == hosts[b]].push_back(rates[a][b]);
    const double usual[] = {median_of(kinds[0]), median_of(kinds[1])};
    std::vector<std::string> slow;
    std::vector<size_t> links(rates.size());   // slow ones, by rank
    for (size_t a = 0; a < rates.size(); a++)
        for (size_t b = a + 1; b < rates.size(); b++) {
            if (rates[a][b] >= kSlow * usual[hosts[a] == hosts[b]]) continue;
            slow.push_back(strf("%zu-%zu %.2f (usual %.2f)", a, b, rates[a][b], usual[hosts[a] == hosts[b]]));
            links[a]++, links[b]++;
        }
    if (slow.empty()) return "";
    const size_t most = static_cast<size_t>(std::max_element(links.begin(), links.end()) - links.begin());
    return strf("WARNING: slow links, in GiB/s: %s; rank %zu (%s) has %zu of them", list_text(slow, ", ").c_str(), most,
                labels[most].c_str(), links[most]);
}

std::vector<std::string> check_comm(Ctx& ctx, Comm& comm) {
    CommCheck check(ctx, comm);
    std::vector<std::string> lines = check.collectives();
    const std::vector<std::vector<double>> rates = check.pairs();
    std::vector<double> all;
    for (size_t a = 0; a < rates.size(); a++)
        for (size_t b = 0; b < a; b++) all.push_back(rates[a][b]);
    const auto [slowest, fastest] = std::minmax_element(all.begin(), all.end());
    lines.push_back(strf("check-comm: %zu pairs of ranks: slowest %.2f, median %.2f, fastest %.2f GiB/s each way",
                         all.size(), *slowest, median_of(all), *fastest));
    const std::string bus = device::device_info(ctx.index).bus;
    const std::vector<std::string> hosts = comm.gather(host_name());
    const std::vector<std::string> labels = comm.gather(host_name() + (bus.empty() ? "" : " " + bus));
    const std::string slow = slow_links(rates, hosts, labels);
    if (!slow.empty()) lines.push_back("check-comm: " + slow);
    return lines;
}
