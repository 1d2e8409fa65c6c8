#include "llmc/commands/memory_changes.h"

#include <algorithm>
#include <optional>

#include "llmc/base/check.h"
#include "llmc/config/config_table.h"
#include "llmc/perf/fp8_speedup.h"

namespace {

// An option, left out where the run would break a rule or take no less memory.
struct Change {
    const char* option;
    void (*set)(Config&);
    bool combines = true;   // with others
};
constexpr Change kChanges[] = {
    {"--zero 1", [](Config& c) { c.zero = 1; }, false},
    {"--zero 2", [](Config& c) { c.zero = 2; }, false},
    {"--zero 3", [](Config& c) { c.zero = 3; }, false},
    {"--recompute norm-act", [](Config& c) { c.recompute = Recompute::kNormAct; }, false},
    {"--recompute block", [](Config& c) { c.recompute = Recompute::kBlock; }},
    {"--grad-dtype bf16", [](Config& c) {
        c.grad_dtype = Dtype::kBf16;
        if (c.grad_comm_dtype == Dtype::kFp32) c.grad_comm_dtype = Dtype::kBf16;
    }},
    {"--grad-shard-dtype bf16", [](Config& c) { c.grad_shard_dtype = Dtype::kBf16; }},
    {"--moment-dtype bf16", [](Config& c) { c.moment_dtype = Dtype::kBf16; }},
    {"--moment-dtype fp8", [](Config& c) { c.moment_dtype = Dtype::kE4m3; }, false},
    {"--offload moments,masters --offload-fraction 0.5",
     [](Config& c) { c.offload = {"moments", "masters"}, c.offload_fraction = 0.5; }, false},
    {"--offload moments,masters", [](Config& c) { c.offload = {"moments", "masters"}, c.offload_fraction = 1; }},
    {"--offload activations", [](Config& c) { c.offload = {"activations"}; }, false},
    {"--micro-batch-size 1", [](Config& c) { c.micro_batch_size = 1; }},
    // Smaller chunks would read and write the weight gradient more often than its matmul hides.
    {"--loss-chunk 2048", [](Config& c) { c.loss_chunk = 2048; }},
};

// Empty if the run is not possible. The global batch may have to be larger for more ranks.
std::optional<int64_t> bytes_of(Config config, int ranks) {
    config.ranks = ranks;
    if (config.zero < 2) config.grad_shard_dtype = Dtype::kFp32;   // has no effect
    if (ranks % config.context_parallel != 0) return std::nullopt;
    config.global_batch_size = round_up(config.global_batch_size, config.micro_batch_size * config.data_ranks(ranks));
    if (!config_errors(config, ranks).empty()) return std::nullopt;
    const ParamTable table = make_param_table(config);
    try {
        return plan_memory(config, table, fp8_plan_of(config, table), ranks).arena_bytes;
    } catch (const Error&) {
        return std::nullopt;
    }
}

struct Changes {
    const PlannedRun& run;
    const int64_t gpu_bytes;
    std::vector<MemoryChange> all = {};

    // Adds a change if the run takes less than `limit` bytes with it; returns whether it fits.
    bool add(std::string options, const Config& config, int ranks, int64_t limit) {
        const std::optional<int64_t> bytes = bytes_of(config, ranks);
        if (!bytes || *bytes >= limit) return false;
        if (ranks != run.plan.ranks) options = strf(" --ranks %d", ranks) + options;
        all.push_back({options.substr(1), *bytes, *bytes <= gpu_bytes});
        return all.back().fits;
    }
    // Adds the lowest level of --zero that fits, up to `highest`; returns whether one does.
    bool add_zero(const std::string& options, Config config, int ranks, int64_t highest) {
        for (config.zero = 1; ranks > 1 && config.zero <= highest; config.zero++)
            if (add(options + strf(" --zero %lld", ll(config.zero)), config, ranks, gpu_bytes + 1)) return true;
        return false;
    }
    // Adds what saves memory on its own.
    void add_each() {
        for (const Change& change : kChanges) {
            Config config = run.config;
            change.set(config);
            add(std::string(" ") + change.option, config, run.plan.ranks, run.plan.arena_bytes);
        }
        for (int times = 2; times <= 8; times *= 2) {
            Config config = run.config;
            add("", config, run.plan.ranks * times, run.plan.arena_bytes);
            if (config.seq_length < 16384 || config.context_parallel > 1) continue;
            config.context_parallel = times;
            add(strf(" --context-parallel %d", times), config, std::max(run.plan.ranks, times), run.plan.arena_bytes);
        }
    }
    // Adds all changes that combine and save memory together, if need be with --zero and on more ranks.
    void add_together() {
        Config config = run.config;
        std::string options;
        int64_t least = run.plan.arena_bytes;
        for (const Change& change : kChanges) {
            Config next = config;
            change.set(next);
            const std::optional<int64_t> bytes = bytes_of(next, run.plan.ranks);
            if (!change.combines || !bytes || *bytes >= least) continue;
            least = *bytes;
            config = next;
            options += std::string(" ") + change.option;
        }
        if (!options.empty() && add(options, config, run.plan.ranks, run.plan.arena_bytes)) return;
        for (int ranks = run.plan.ranks; ranks <= 64 * run.plan.ranks; ranks *= 2)
            if (add_zero(options, config, ranks, 3)) return;
    }
};

}  // namespace

std::vector<MemoryChange> memory_changes(const PlannedRun& run, int64_t gpu_bytes) {
    Changes changes{run, gpu_bytes};
    if (run.plan.arena_bytes > gpu_bytes) {
        changes.add_each();
        changes.add_together();
        return changes.all;
    }
    constexpr int64_t kBeside = int64_t{2} << 30;   // of the CUDA context and libraries
    Config config = run.config;
    changes.add_zero("", config, run.plan.ranks, config.zero - 1);
    for (int n = 1; offloads_state(config) && n / 20.0 < run.config.offload_fraction; n++) {
        config.offload_fraction = n / 20.0;
        const std::string option = strf(" --offload-fraction %g", config.offload_fraction);
        if (changes.add(option, config, run.plan.ranks, gpu_bytes - kBeside)) break;
    }
    return changes.all;
}
