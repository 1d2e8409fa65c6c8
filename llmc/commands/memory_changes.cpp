#include "llmc/commands/memory_changes.h"

#include <algorithm>
#include <functional>
#include <optional>

#include "llmc/base/check.h"
#include "llmc/base/text.h"
#include "llmc/parallel/zero/sharded_state.h"
#include "llmc/perf/fp8_speedup.h"
#include "llmc/train/plan.h"

namespace {

// Empty if the run is not possible. The global batch may have to be larger for more ranks.
std::optional<int64_t> arena_bytes_of(Config config, const ParamTable& table, int ranks) {
    config.global_batch_size = round_up(config.global_batch_size, config.micro_batch_size * config.data_ranks(ranks));
    try {
        return plan_memory(config, table, fp8_plan_of(config, table), ranks).arena_bytes;
    } catch (const Error&) {
        return std::nullopt;
    }
}

// The configuration with another level of --zero, without options that have no effect at that level.
Config at_level(Config config, int64_t level) {
    if (level < 2) config.grad_shard_dtype = Dtype::kFp32;
    config.zero = level;
    return config;
}

Config with_offload(Config config, const std::vector<std::string>& words) {
    for (const std::string& word : words)
        if (!offloads(config, word)) config.offload.push_back(word);
    return config;
}

// The --loss-chunk that is proposed, 0: none. Smaller chunks read and write the weight gradient more often than its
// matmul hides: at 8192 tokens of a vocabulary of 128,256 in FP32 that is about a tenth of the matmul's time.
int64_t proposed_loss_chunk(int64_t tokens) {
    int64_t chunk = 8192;
    while (chunk * 2 > tokens) chunk /= 2;
    return chunk >= 1024 ? chunk : 0;
}

struct Change {
    std::string option;
    std::function<void(Config&)> set;
    bool combines = true;   // with others, on as many ranks
    int ranks = 0;          // 0: as many
};
std::vector<Change> possible_changes(const MemoryLimit& run) {
    const Config& c = run.config;
    const int ranks = run.ranks;
    std::vector<Change> all;
    const auto offload = [&](bool saves, const Config& offloaded, const std::string& more, bool combines) {
        const std::string option = "--offload " + list_text(offloaded.offload, ",") + more;
        if (saves && offloaded.offload != c.offload)
            all.push_back({option, [offloaded](Config& o) {
                o.offload = offloaded.offload, o.offload_fraction = offloaded.offload_fraction;
            }, combines});
    };
    for (int64_t level = c.zero + 1; ranks > 1 && level <= 3; level++)
        all.push_back({strf("--zero %lld", ll(level)), [level](Config& o) { o = at_level(o, level); }, false});
    if (c.recompute == Recompute::kNone)
        all.push_back({"--recompute norm-act", [](Config& o) { o.recompute = Recompute::kNormAct; }, false});
    if (c.recompute != Recompute::kBlock)
        all.push_back({"--recompute block", [](Config& o) { o.recompute = Recompute::kBlock; }});
    if (c.grad_dtype == Dtype::kFp32 && c.dtype == Dtype::kBf16)
        all.push_back({"--grad-dtype bf16", [](Config& o) {
            o.grad_dtype = Dtype::kBf16;
            if (o.grad_comm_dtype == Dtype::kFp32) o.grad_comm_dtype = Dtype::kBf16;
        }});
    if (shards_grads(c, ranks) && c.grad_shard_dtype == Dtype::kFp32)
        all.push_back({"--grad-shard-dtype bf16", [](Config& o) { o.grad_shard_dtype = Dtype::kBf16; }});
    if (c.moment_dtype == Dtype::kFp32)
        all.push_back({"--moment-dtype bf16", [](Config& o) { o.moment_dtype = Dtype::kBf16; }});
    Config state = with_offload(c, {"moments", "masters"});
    offload(true, state, "", true);
    state.offload_fraction = least_offload_fraction({state, run.table, ranks, run.bytes});
    offload(state.offload_fraction > 0 && state.offload_fraction < 1, state,
            strf(" --offload-fraction %g", state.offload_fraction), false);
    offload(c.shape.num_layers > kResidentLayers, with_offload(c, {"activations"}), "", false);
    if (c.micro_batch_size > 1) all.push_back({"--micro-batch-size 1", [](Config& o) { o.micro_batch_size = 1; }});
    const int64_t chunk = proposed_loss_chunk(c.part_length());
    if (c.loss_chunk == 0 && chunk > 0)
        all.push_back({strf("--loss-chunk %lld", ll(chunk)), [chunk](Config& o) { o.loss_chunk = chunk; }});
    for (int more = 2; more <= 8; more *= 2)
        all.push_back({strf("--ranks %d", ranks * more), [](Config&) {}, false, ranks * more});
    constexpr int64_t kLong = 16384;
    const int64_t NH = c.shape.num_attention_heads, NKV = c.shape.num_query_groups;
    for (int parts = 2; parts <= 8 && c.seq_length >= kLong && c.context_parallel == 1; parts *= 2) {
        const int on = std::max(ranks, parts);
        if (c.seq_length % parts == 0 && NH % parts == 0 && (NKV % parts == 0 || parts % NKV == 0) && on % parts == 0)
            all.push_back({strf("--ranks %d --context-parallel %d", on, parts),
                           [parts](Config& o) { o.context_parallel = parts; }, false, on});
    }
    return all;
}

}  // namespace

std::vector<MemoryChange> memory_changes(const MemoryLimit& run) {
    std::vector<MemoryChange> changes;
    // Returns whether the run fits with this change.
    const auto add = [&](const std::string& options, const Config& config, int ranks) {
        const std::optional<int64_t> bytes = arena_bytes_of(config, run.table, ranks);
        const bool fits = bytes && *bytes <= run.bytes;
        if (bytes) changes.push_back({options, *bytes, fits});
        return fits;
    };
    Config together = run.config;
    std::string options;
    for (const Change& change : possible_changes(run)) {
        Config alone = run.config;
        change.set(alone);
        add(change.option, alone, change.ranks > 0 ? change.ranks : run.ranks);
        if (!change.combines) continue;
        change.set(together);
        options += (options.empty() ? "" : " ") + change.option;
    }
    if (options.empty() || add(options, together, run.ranks)) return changes;
    for (int more = 1; more <= 64; more *= 2) {
        const int ranks = run.ranks * more;
        const std::string on = options + (more > 1 ? strf(" --ranks %d", ranks) : "");
        if (more > 1 && add(on, together, ranks)) break;
        const int64_t level = ranks > 1 ? lowest_zero({together, run.table, ranks, run.bytes}) : 0;
        if (level <= together.zero) continue;   // already added
        add(on + strf(" --zero %lld", ll(level)), at_level(together, level), ranks);
        break;
    }
    return changes;
}

int64_t lowest_zero(const MemoryLimit& run) {
    for (int64_t level = 1; level <= 3; level++) {
        const std::optional<int64_t> bytes = arena_bytes_of(at_level(run.config, level), run.table, run.ranks);
        if (bytes && *bytes <= run.bytes) return level;
    }
    return 0;
}

double least_offload_fraction(const MemoryLimit& run) {
    constexpr int64_t kBeside = int64_t{2} << 30;
    Config config = run.config;
    for (int n = 1; n <= 20; n++) {
        config.offload_fraction = n / 20.0;
        const std::optional<int64_t> bytes = arena_bytes_of(config, run.table, run.ranks);
        if (bytes && *bytes + kBeside <= run.bytes) return config.offload_fraction;
    }
    return 0;
}
