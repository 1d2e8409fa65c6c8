#include "llmc/train/run/memory_limits.h"

#include "llmc/base/system/nvml.h"

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
