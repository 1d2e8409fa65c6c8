#include "llmc/parallel/comm/rehearsal_comm.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "llmc/base/check.h"
#include "llmc/ops/op_cost.h"

void RehearsalComm::abort(int exit_code) { std::exit(exit_code); }

PlannedCollective& RehearsalComm::planned(const char* name, Dtype dtype, bool exchange, bool tokens) {
    std::vector<PlannedCollective>& calls = whole_->calls;
    auto known = std::find_if(calls.begin(), calls.end(), [&](const PlannedCollective& c) {
        return std::strcmp(c.name, name) == 0 && c.dtype == dtype && c.ranks == world().ranks
               && c.exchange == exchange && c.tokens == tokens;
    });
    if (known == calls.end())
        known = calls.insert(calls.end(), {.name = name, .dtype = dtype, .ranks = world().ranks,
                                           .exchange = exchange, .tokens = tokens});
    return *known;
}

void RehearsalComm::exchange_all(Ctx& ctx, Tensor /*out*/, Tensor in, const Counts& /*received*/, const Counts& sent) {
    if (!ctx.recorder) return;
    const Tensor all = sent_to_others(in, sent);
    PlannedCollective& known = planned("send", all.dtype, false);
    known.matrices = true;
    known.calls++;
    known.bytes += all.bytes();
    known.sent_bytes += all.bytes();
}

// In each pass a rank sends all shards but its own.
void RehearsalComm::note(const Ctx& ctx, const char* name, const Tensor& tensor, int passes, bool copies_own) {
    CHECK(ctx.rehearsal, "RehearsalComm is for rehearsals");
    if (!ctx.recorder || world().ranks == 1) return;
    const bool tokens = ctx.recorder->begun >= 0;
    const bool heads = ctx.purpose && std::string(ctx.purpose).starts_with(kExchangePurpose);
    PlannedCollective& known = planned(name, tensor.dtype, tokens || heads, tokens);
    const int64_t times = ctx.recorded_times, own = tensor.bytes() / world().ranks;
    const int64_t sent = times * passes * (tensor.bytes() - own);
    known.calls += times;
    known.bytes += times * tensor.bytes();
    known.sent_bytes += sent;
    if (tokens) ctx.recorder->exchanges[static_cast<size_t>(ctx.recorder->begun)].sent_bytes += sent;
    if (copies_own) known.copied_bytes += times * passes * own;
}

std::string communication_text(const Config& config, const std::vector<PlannedCollective>& calls, int ranks,
                               int64_t buckets) {
    if (ranks == 1) return "";
    std::string text = strf("communication     of each of %d ranks in a step, %s, %s\n", ranks,
                            count_text(buckets, "bucket").c_str(),
                            config.overlap ? "overlapped with compute (the log has the exposed time)" : "no overlap");
    text += strf("  %-14s %-5s %5s %8s %16s %16s\n", "collective", "of", "ranks", "calls", "bytes", "sent");
    int64_t bytes = 0, sent = 0;
    for (const PlannedCollective& c : calls) {
        text += strf("  %-14s %-5s %5d %8lld %16lld %16lld", c.name, dtype_name(c.dtype), c.ranks,
                     static_cast<long long>(c.calls), static_cast<long long>(c.bytes),
                     static_cast<long long>(c.sent_bytes));
        if (c.exchange) text += c.tokens ? "  of tokens of experts" : "  of heads, not hidden";
        if (c.matrices) text += "  of Muon's matrices";
        text += "\n";
        bytes += c.bytes;
        sent += c.sent_bytes;
    }
    return text + strf("  %-35s %16lld %16lld\n", "all", static_cast<long long>(bytes), static_cast<long long>(sent));
}
