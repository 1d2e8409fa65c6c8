#include "llmc/train/run/run_device.h"

#include <algorithm>
#include <utility>

#include "llmc/base/system/host.h"
#include "llmc/base/system/nvml.h"
#include "llmc/config/schedule.h"
#include "llmc/parallel/rank_place.h"

namespace {

constexpr int kConnectSeconds = 300;   // for the devices of all ranks to connect

// Pinned memory counts for the process's cgroup, which Slurm and Docker limit: the kernel ends who takes more.
int64_t host_memory_bytes() {
    const int64_t available = meminfo_bytes("MemAvailable"), limit = cgroup_memory_limit(own_cgroup());
    return limit < 0 ? available : std::min(available, limit);
}

}  // namespace

RunDevice::~RunDevice() {
    staging.reset();
    trainer.reset();
    arena = Arena();
    if (arena_memory_) device::device_free(arena_memory_);
    if (opened_) device::device_close(ctx);
}

void RunDevice::open(std::vector<std::string>& notes) {
    info = device::device_info(place_rank(comm_, notes));
    std::string error = fp8_device_error(fp8_plan_, info);
    if (error.empty() && config_.fp8_attention) error = fp8_attention_error(info);
    REQUIRE(error.empty(), "%s", error.c_str());
    if (info.sm > 0) used_before_ = gpu_memory_in_use(info.bus);
    device::device_open(ctx, info.index);
    opened_ = true;
    device::gemm_set_search(ctx, config_.gemm_search);
    const std::string connection = comm_.connect(ctx, kConnectSeconds);
    if (!connection.empty()) notes.push_back(connection);
    groups_.emplace(comm_, group_sizes(config_, comm_.world().ranks));
    groups_->connect(ctx, kConnectSeconds);
    bf16_config_ = in_bf16(config_);
    plan = plan_memory(config_, table_, fp8_plan_, comm_.world().ranks);
}

void RunDevice::prepare(std::vector<std::string>& notes) {
    const int64_t free_bytes = device::device_free_bytes();
    other_bytes_ = gpu_bytes_in_use(info, used_before_);
    std::string error = gpu_memory_error(config_, plan, free_bytes);
    if (error.empty()) error = host_memory_error(plan, comm_.world().local_ranks, host_memory_bytes());
    error = first_error(comm_, error);   // no rank allocates before all have checked
    REQUIRE(error.empty(), "%s", error.c_str());
    // Copy engines serve the collectives that run during the matmuls of every micro-batch, which saves 3 to 4 % of the
    // step. Collectives that run once a step are exposed: the lower rate of copy engines would cost more than it saves.
    std::string why;
    const bool shares = config_.zero >= 2 || config_.expert_parallel > 1;
    void* const shared = shares ? comm_.shared_memory(ctx, plan.arena_bytes, why) : nullptr;
    if (!why.empty()) notes.push_back("copy engines serve no collectives, which makes steps slower: " + why);
    if (!shared) arena_memory_ = device::device_alloc(plan.arena_bytes);
    arena = Arena(shared ? shared : arena_memory_, plan.arena_bytes);
    shared_ = shared != nullptr;
    if (switches_precision(config_)) make_trainer(true);   // first, since it takes more host memory
    make_trainer(false);
    staging = std::make_unique<Staging>(config_, *groups_, *trainer);   // the reports in FP8 are the longer ones
    // On a GPU this includes the library's workspace; on the CPU the arena's pages are not mapped yet.
    used_bytes = std::max(plan.arena_bytes, free_bytes - device::device_free_bytes());
}

void RunDevice::make_trainer(bool bf16) {
    if (trainer) trainer->gatherer().wait(ctx);
    device::synchronize(ctx);
    trainer.reset();
    peaks_[bf16_] = std::max(peaks_[bf16_], arena.peak_bytes());
    arena.restart();
    bf16_ = bf16;
    trainer.emplace(step_config(), table_, step_fp8_plan(), arena, *groups_);
    if (shared_ && config_.zero >= 2) groups_->shard.share(ctx, trainer->exchanged(), kConnectSeconds);
    // Tokens of experts travel in scratch. Kernels that send them would keep multiprocessors from the matmuls beside
    // them, whose blocks share all work among as many as there are multiprocessors and could not start together.
    if (shared_ && config_.expert_parallel > 1)
        groups_->expert.share(ctx, {arena.scratch_memory()}, kConnectSeconds);
    device::fill_bytes(ctx, trainer->state(), 0, sizeof(StepState));
    trainer->decoder().upload_constants(ctx);
}

void RunDevice::check_memory() {
    const int64_t planned = step_plan().peak_bytes, used = std::max(peaks_[bf16_], arena.peak_bytes());
    // Scales from a checkpoint need no calibration, whose pass may be the one that takes most.
    const bool less = used < planned && !config_.resume.empty() && trainer->fp8().on()
                      && trainer->fp8().plan().row().history;
    CHECK(std::exchange(checked_[bf16_], true) || used == planned || less,
          "the plan says %lld bytes, the arena used %lld", ll(planned), ll(used));
    if (!sealed()) {
        allocations_ = device::allocation_count();
    } else if (free_bytes_ < 0) {
        free_bytes_ = device::device_free_bytes();   // the second step has loaded rank 0's matmul algorithms
    }
    CHECK(device::allocation_count() == allocations_, "memory was allocated after the first step");
}

std::string RunDevice::growth_text() const {
    const int64_t grown = free_bytes_ - device::device_free_bytes();   // below 0 before the second step
    if (info.sm == 0 || grown <= (16 << 20)) return "";   // kernels that first run late take less
    return strf("free device memory fell by %lld bytes since the second step", ll(grown));
}

std::string RunDevice::memory_text() const {
    if (info.sm == 0) return "";
    const int64_t all = gpu_bytes_in_use(info, used_before_);
    return strf("GPU memory: %.2f GiB planned and %.2f GiB for the CUDA context and libraries at the start; %.2f GiB "
                "in use after the first step", gib(plan.arena_bytes), gib(other_bytes_), gib(all))
           + (!used_before_ ? " (without NVML: by all processes)" : "");
}

std::string gpu_memory_error(const Config& config, const MemoryPlan& plan, int64_t free_bytes) {
    if (plan.arena_bytes <= free_bytes) return "";
    const std::string help = strf("lower --micro-batch-size, or use --recompute norm-act|block-keep-attention|block, "
                                  "--grad-dtype bf16, --moment-dtype bf16|fp8, --offload moments,masters%s (see "
                                  "--dry-run)",
                                  config.shape.num_layers > kResidentLayers ? ",activations" : "");
    return strf("the run needs %.2f GiB of device memory and %.2f GiB are free: %s", gib(plan.arena_bytes),
                gib(free_bytes), help.c_str());
}

std::string host_memory_error(const MemoryPlan& plan, int local_ranks, int64_t available_bytes) {
    const int64_t all = plan.host_bytes() * local_ranks;
    if (available_bytes < 0 || all <= available_bytes) return "";
    return strf("the run pins %.2f GiB of host memory, %.2f GiB for each of %s on this host, and %.2f GiB are "
                "available (MemAvailable, or memory.max of the job's cgroup): offload less (--offload, "
                "--offload-fraction), or use --moment-dtype bf16|fp8 (see --dry-run)",
                gib(all), gib(plan.host_bytes()), count_text(local_ranks, "rank").c_str(), gib(available_bytes));
}

int64_t gpu_bytes_in_use(const DeviceInfo& device, const std::optional<int64_t>& before) {
    if (device.sm == 0) return 0;
    const std::optional<int64_t> now = gpu_memory_in_use(device.bus);
    return now && before ? *now - *before : device.memory_bytes - device::device_free_bytes();
}
